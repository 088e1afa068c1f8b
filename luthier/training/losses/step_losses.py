"""What a step minimises, micro-batch by micro-batch: sums that add up over ranks before anything is divided.

Each objective is a file beside this one (`tokens`, `rewards`, `pairs`, `verdicts`). What a whole step has to know
before any of its losses (KTO's KL estimate, BCO's running mean of rewards) is settled before, so that a micro-batch's
loss does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from luthier.models.passes import ModelPass
from luthier.objectives import Measures
from luthier.records import Batch

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a tensor over all ranks, which have to ask together."""

ACCURACY = "token_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroLoss:
    """What a micro-batch adds to its step.

    loss_sum   float32 scalar, differentiable: over targets, pairs or rows
    num_units  how many
    measures   by the names that papers and trackers use; sums with their counts
    by_source  where the caller told S sources apart, float64[2, S]: sums of losses and numbers of units
    """

    loss_sum: torch.Tensor
    num_units: int
    measures: Measures
    by_source: torch.Tensor | None = None


class StepLosses(Protocol):
    """The losses of one objective."""

    @property
    def forward(self) -> ModelPass:
        """How batches go through the model."""
        ...

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of all measures, in the order in which ranks add them up."""
        ...

    def num_units(self, batch: Batch) -> int:
        """What a batch adds to the number that a step's loss is divided by."""
        ...

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Called on all ranks before the losses of a step's micro-batches, which are this rank's; in evaluation before
        those of all held-out rows."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """The loss of one micro-batch; ``model`` may be wrapped (DDP, compiled)."""
        ...

    def end_step(self, reduce: Reduce) -> Measures:
        """Called on all ranks after the losses of a step; what is measured of the whole step, the same on all."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold for the next step's losses to be the same; {} where nothing."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The way back."""
        ...


def counts_of(losses: StepLosses, batch: Batch) -> tuple[int, int, int]:
    """Of a micro-batch: what its loss is divided by, its targets, and its tokens without padding."""
    return losses.num_units(batch), batch.num_targets, sum(part.length for row in batch.branches for part in row)


def learned_from(batches: Sequence[Batch], counts_T2: torch.Tensor) -> list[Batch]:
    """Of a step's micro-batches on this rank those that are worth a pass over the model, in their order.

    A turn in which no rank has anything to learn is passed over, on all ranks alike, since they wait for each other.
    ``counts_T2``: units and targets of each turn, over all ranks. Where none has any, the last turn stays: gradients
    are added up over ranks after it.
    """
    has_any = counts_T2.any(dim=1).tolist()
    return [batch for batch, is_learned in zip(batches, has_any, strict=True) if is_learned] or [batches[-1]]


class Stateless:
    """Objectives whose losses depend on nothing but the micro-batch."""

    def begin_step(self, model: nn.Module, batches: Iterable[Batch], reduce: Reduce) -> None:
        """Nothing is to be known beforehand."""

    def end_step(self, reduce: Reduce) -> Measures:
        """Nothing is remembered."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


Tell = Callable[[str], None]
BothLosses = tuple[StepLosses, StepLosses]
"""What training minimises, and what is measured on held-out rows."""
