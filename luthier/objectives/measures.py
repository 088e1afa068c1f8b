"""What is reported beside the loss, as sums with their counts, so that a mean can be that of a whole step."""

from __future__ import annotations

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
