"""Whether answers are trained on with the probabilities that they were drawn by, watched at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from luthier.config.rollout import GapAction, RolloutConfig
from luthier.errors import TrainingError
from luthier.models.passes import ModelPass
from luthier.objectives.measures import Measures, measure
from luthier.objectives.policy_losses import GapNumbers, GapSums
from luthier.records import Batch
from luthier.training.losses.step_losses import Reduce, Tell
from luthier.writing import JsonObject

GAP = "gap"
NUMBERS = {  # names of measures, and which of `GapNumbers` they are
    GAP: "mean",
    "gap_p99": "p99",
    "gap_max": "largest",
    "gap_k1": "k1",
    "gap_k3": "k3",
    "gap_ratio": "ratio",
    "gap_ess": "sample_size",
}
TIMES_THE_FIRST = 4.0  # times the gap of canaries is still expected
CANARIES = 8  # answers on each rank

_HINT = "rollout.max_gap raises the bound, rollout.on_gap: warn goes on"


@dataclass(kw_only=True, slots=True, eq=False)
class GapWatch:
    """The gap of each step and its bound.

    floor     a gap that rounding alone may make
    explain   looks for the cause of a gap with the answers of the step; set by who draws them
    canaries  answers that are to be compared before the next update, with the log-probabilities that the engine gave
              them while its weights were those of training
    """

    config: RolloutConfig
    floor: float
    forward: ModelPass
    tell: Tell
    explain: Callable[[], str] | None = None
    canaries: Batch | None = None
    needs_canaries: bool = True
    smallest: float | None = None  # of the mean gaps so far that were expected
    _expected: float | None = None  # the gap of the first canaries
    _sums: GapSums | None = None
    _is_explained: bool = False  # looking for a cause takes many passes: once is enough where the run goes on

    @property
    def bound(self) -> float:
        """The largest mean gap that is gone on with."""
        if self.config.max_gap is not None:
            return self.config.max_gap
        return max(self.floor, TIMES_THE_FIRST * min(self._expected or 0.0, self.floor))

    def delivered(self) -> None:
        """To be called by an engine that was given the weights of training: answers of the next step are scored by
        both, and the run stops where they differ."""
        self.needs_canaries = True

    def begin_step(self, model: nn.Module, reduce: Reduce) -> None:
        """Compare engine and training on canaries, where that is due, on all ranks. Raises `TrainingError`."""
        self._sums = GapSums(self.forward.device)
        if not self.needs_canaries:
            return
        self.needs_canaries, sums = False, GapSums(self.forward.device)
        if self.canaries is not None:
            with torch.no_grad():
                scored, _ = self.forward.token_scores(model, self.canaries)
            assert self.canaries.policy is not None, "canaries are answers"
            told, device = self.canaries.policy, self.forward.device
            gaps_K = scored.scores.logps_K - told.behaviour_K.to(device)
            sums.add(gaps_K, told.answers_K.to(device), len(told.advantages_S))
        self.canaries = None
        found = GapSums.numbers(reduce(sums.sums))
        if found is None:
            return
        if self._expected is None:
            self._expected = found.mean
        self._check(found, "what the engine says of some answers, under the same weights,")

    def add(self, logps_K: torch.Tensor, behaviour_K: torch.Tensor, segments_K: torch.Tensor, answers: int) -> None:
        """Targets of the step, at their first update."""
        if self._sums is not None:
            self._sums.add(logps_K.detach() - behaviour_K, segments_K, answers)

    def end_step(self, reduce: Reduce) -> Measures:
        """Compare the step's gap with its bound. Raises `TrainingError` where it is larger."""
        assert self._sums is not None, "a step ends that has not begun"
        found, self._sums = GapSums.numbers(reduce(self._sums.sums)), None
        if found is None:
            return {}
        if not self.config.staleness:  # else weights that are behind are expected to differ
            self._check(found, "what was drawn in this step")
        self.smallest = found.mean if self.smallest is None else min(found.mean, self.smallest)
        values = {name: torch.tensor([getattr(found, field)]) for name, field in NUMBERS.items()}
        return {name: measure(value.to(self.forward.device)) for name, value in values.items()}

    def state(self) -> JsonObject:
        """The gap of the first canaries."""
        return {} if self._expected is None else {"first_gap": self._expected}

    def load_state(self, state: Any) -> None:
        """The way back."""
        self._expected = state.get("first_gap")

    def _check(self, found: GapNumbers, what: str) -> None:
        if found.mean <= self.bound:
            return
        is_first = not self._is_explained
        cause = "" if self.explain is None or not is_first else self.explain()
        self._is_explained = True
        message = (
            f"{what} has other probabilities in training: they differ by {found.mean:.2g} nats a token on the mean, "
            f"and at most {self.bound:.2g} were expected (99 % are below {found.p99:.2g}, the largest is "
            f"{found.largest:.2g}, the answers count like {found.sample_size:.0%} of their number)"
        )
        if cause:
            message = f"{message}. {cause}"
        if self.config.on_gap is GapAction.STOP and not self.config.correction.is_on:
            raise TrainingError(message, hint=_HINT)
        if not self.config.correction.is_on or is_first:
            self.tell(message)
