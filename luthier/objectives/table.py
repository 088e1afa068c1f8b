"""The objectives by name. A new one is a row here and a function beside `token_loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from luthier.errors import UserError
from luthier.objectives.token_loss import TokenLoss, token_loss_sum


class Normaliser(StrEnum):
    """What a step's loss is divided by, counted over all ranks and micro-batches of the step."""

    TARGETS = "targets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """``loss(logits_NV, labels_N, weights_N, label_smoothing=…)`` gives sums, normalised once a step."""

    name: str
    loss: Callable[..., TokenLoss]
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
    )
}


def objective_named(name: str) -> Objective:
    """The objective, or `UserError` with the names there are."""
    if name not in OBJECTIVES:
        raise UserError(f"there is no objective {name!r}", hint=f"choose one of: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
