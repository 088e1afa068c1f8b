"""A row as the blueprint of its shape and the texts for its gaps: what rendering hands to encoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from luthier.records import NOWHERE, Address, TextPiece
from luthier.rendering.blueprint import Blueprint

CONTROL_STRING = "control string in text: "  # before each one, in notes
UNASKED = "answer before any question, not learned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A row as the blueprint of its shape and the texts for its gaps: all that encoding needs.

    ``control_strings`` counts what looks like a control token in the row's own strings; those in ``allowed`` are meant
    as control tokens, the others are text. ``counted`` are the notes that the row brought with it. ``comparison`` is
    there where continuations are compared: the row itself is then the prompt with the first of them.
    """

    blueprint: Blueprint
    values: list[str]
    control_strings: Counter[str]
    allowed: frozenset[str] = frozenset()
    address: Address = NOWHERE
    counted: tuple[tuple[str, int], ...] = ()
    comparison: Comparison | None = None

    @property
    def notes(self) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of the row, and how often."""
        unlearned = ((UNASKED, 1),) if self.blueprint.has_unasked else ()
        found = ((f"{CONTROL_STRING}{token}", count) for token, count in self.control_strings.items())
        return (*self.counted, *found, *unlearned)

    @property
    def prompt_text(self) -> str:
        """What stands before the first completion of the first path, as text."""
        pieces = self.blueprint.paths[0]
        end = next((number for number, piece in enumerate(pieces) if piece.by_model), len(pieces))  # type: ignore[union-attr]
        texts = {ord(char): value for char, value in zip(self.blueprint.references, self.values, strict=True)}
        return "".join(
            piece.text.translate(texts) if isinstance(piece, TextPiece) else piece.token  # type: ignore[union-attr]
            for piece in pieces[:end]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a comparing objective needs of a row besides its first continuation.

    verdict   as in `records.Sample`
    users     which messages of the prompt, by number, are the user's
    rejected  the same prompt with the other continuation, of a pair
    """

    verdict: float
    users: frozenset[int]
    rejected: Filled | None = None
