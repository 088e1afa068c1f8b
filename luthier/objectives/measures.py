"""What is reported beside the loss, as sums with their counts (a mean is that of a step), and running means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measure:
    """A sum and how many values it is of: scalar tensors in float64, detached, to be added up (``+``) over a step."""

    total: torch.Tensor
    count: torch.Tensor

    def __add__(self, other: Measure) -> Measure:
        return Measure(total=self.total + other.total, count=self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean; not a number where nothing was counted."""
        return (self.total / self.count).item()


Measures = dict[str, Measure]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceLoss:
    """What a loss over whole answers gives for one micro-batch.

    loss_sum   float32 scalar, differentiable: over pairs or rows, to be divided by their number in the whole step
    losses_U   float32, what it is the sum of, for reports: not differentiable
    measures   by the names that papers and trackers use
    """

    loss_sum: torch.Tensor
    losses_U: torch.Tensor
    measures: Measures

    @property
    def num_units(self) -> int:
        """How many pairs or rows this is of."""
        return len(self.losses_U)


def measure(values: torch.Tensor, where: torch.Tensor | None = None) -> Measure:
    """Sum and count of ``values``, [N]; with ``where``, bool[N], only of those."""
    values = values.detach().double()
    if where is None:
        return Measure(total=values.sum(), count=values.new_tensor(len(values)))
    return Measure(total=torch.where(where, values, 0.0).sum(), count=where.double().sum())


# --------------------------------------------------------------------------------------------------------------------
# The running mean of rewards that BCO compares with; it is part of a run's state.


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMean:
    """The mean of all rewards of the steps so far; a step takes the mean as it stands when the step begins.

    So no micro-batch's rewards move another's baseline, and the loss does not depend on how a step is divided. (TRL
    0.24 and LLaMA-Factory count a micro-batch before they compare with it, and each micro-batch as one reward.)
    """

    total: float = 0.0
    count: float = 0.0

    @property
    def mean(self) -> float:
        """0 before the first step."""
        return self.total / self.count if self.count else 0.0

    def after(self, total: float, count: float) -> RunningMean:
        """With the rewards of a step: their sum and number over all micro-batches and ranks."""
        return RunningMean(total=self.total + total, count=self.count + count)

    def to_state(self) -> dict[str, float]:
        """What a checkpoint holds, as JSON numbers."""
        return {"total": self.total, "count": self.count}

    @staticmethod
    def from_state(state: Mapping[str, float]) -> RunningMean:
        """Read what `to_state` gave. Raises KeyError where a number is missing."""
        return RunningMean(total=float(state["total"]), count=float(state["count"]))
