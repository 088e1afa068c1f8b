"""Which kind of row an objective learns from. A row of another kind has nothing that it could learn."""

from __future__ import annotations

from enum import StrEnum


class RowKind(StrEnum):
    """What a row must be: answers to imitate, pairs of continuations to compare, or continuations with a verdict."""

    ANSWER = "answer"
    PAIR = "pair"
    VERDICT = "verdict"

    @property
    def unit(self) -> str:
        """What a step's loss is divided by the number of, over all its micro-batches and ranks."""
        return {RowKind.ANSWER: "target", RowKind.PAIR: "pair", RowKind.VERDICT: "row"}[self]


def kind_of(objective: str) -> RowKind:
    """The rows that the objective of this name learns from.

    Raises AssertionError for a name that no run description can have.
    """
    match objective:
        case "sft" | "pt":
            return RowKind.ANSWER
        case "rm" | "dpo":
            return RowKind.PAIR
        case "kto":
            return RowKind.VERDICT
        case _:
            raise AssertionError(f"unknown objective {objective!r}")
