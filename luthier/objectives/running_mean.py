"""The running mean of rewards that BCO compares with; it is part of a run's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
        """The way back. Raises KeyError where a number is missing."""
        return RunningMean(total=float(state["total"]), count=float(state["count"]))
