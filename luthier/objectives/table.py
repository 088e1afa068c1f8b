"""The objectives by name: what each is normalised by, and the sum that it minimises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from luthier.errors import UserError
from luthier.objectives.comparison import pair_loss_sum
from luthier.objectives.feedback_losses import feedback_loss_sum
from luthier.objectives.reward import reward_loss_sum
from luthier.objectives.token_loss import token_loss_sum


class Normaliser(StrEnum):
    """What a step's loss is divided by, counted over all ranks and micro-batches of the step."""

    TARGETS = "targets"
    PAIRS = "pairs"
    ROWS = "rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """``loss`` gives sums, normalised once a step: a `TokenLoss` of targets, or a `SequenceLoss` of pairs or rows."""

    name: str
    loss: Callable[..., Any]
    normaliser: Normaliser
    says: str


OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective(
            name="sft",
            loss=token_loss_sum,
            normaliser=Normaliser.TARGETS,
            says="cross-entropy on what the model must answer",
        ),
        Objective(
            name="pt",
            loss=token_loss_sum,
            normaliser=Normaliser.TARGETS,
            says="cross-entropy on every token of plain text",
        ),
        Objective(
            name="rm",
            loss=reward_loss_sum,
            normaliser=Normaliser.PAIRS,
            says="a reward for each answer, higher for the chosen one",
        ),
        Objective(
            name="dpo",
            loss=pair_loss_sum,
            normaliser=Normaliser.PAIRS,
            says="the chosen answer likelier than the rejected one",
        ),
        Objective(
            name="kto",
            loss=feedback_loss_sum,
            normaliser=Normaliser.ROWS,
            says="good answers likelier and bad ones less likely than before",
        ),
    )
}


def objective_named(name: str) -> Objective:
    """The objective, or `UserError` with the names there are."""
    if name not in OBJECTIVES:
        raise UserError(f"there is no objective {name!r}", hint=f"choose one of: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
