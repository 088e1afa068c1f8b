"""Signs that a run learns nothing, or the wrong thing, told once each with the way out; and whether answers
are trained on with the probabilities that they were drawn by. N answers of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from luthier.config.rollout import GapAction, RolloutConfig
from luthier.errors import TrainingError
from luthier.models.passes import ModelPass
from luthier.objectives import Measures, measure
from luthier.objectives.policy_losses import GapNumbers, GapSums
from luthier.records import Batch
from luthier.rewards.judging import DrawnAnswer, Judged
from luthier.training.losses import Reduce, Tell
from luthier.writing import JsonObject

FIRST_ANSWERS = 32  # so many answers of one reward are suspicious
TRIED = 8  # answers that rewards are tried on before the first update
DEAD_SHARE, DEAD_STEPS = 0.95, 20
WINDOW = 10  # steps that are compared with the first as many
LENGTH_TIMES = 2.0
THOUGHT_ENDS = "</think>"  # as most templates write it; thoughts between other tags are not tried alone
ENTROPY_LEFT = 0.1  # which share of its first value is a collapse


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepAnswers:
    """The answers of one step.

    texts      what rewards were given
    groups_N   which prompt each answers
    lengths_N  tokens
    logps_N    the sum of their log-probabilities when they were drawn
    """

    texts: Sequence[DrawnAnswer]
    groups_N: NDArray[np.int64]
    lengths_N: NDArray[np.int64]
    logps_N: NDArray[np.float64]
    judged: Judged


@dataclass(kw_only=True, slots=True, eq=False)
class EarlyWarnings:
    """Looks at the answers of each step, those of this process alone. Of a resumed run it begins anew. ``num_tokens``
    counts those of a text."""

    judge: Callable[[Sequence[DrawnAnswer]], Judged]
    tell: Callable[[str], None]
    num_tokens: Callable[[str], int]
    _told: set[str] = field(default_factory=set)
    _steps: int = 0
    _dead: int = 0  # steps in a row
    _first_rewards: list[float] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)  # means of steps
    _lengths: list[float] = field(default_factory=list)
    _entropies: list[float] = field(default_factory=list)

    def step(self, found: StepAnswers) -> None:
        """Look at the answers of the next step."""
        if not len(found.texts):
            return
        if self._steps == 0:
            self._try_rewards(found)
        self._steps += 1
        if not any(text.finished for text in found.texts):
            self._tell(
                "cut",
                "no answer of this step is finished: rewards of cut answers teach little; raise "
                "rollout.max_new_tokens, or begin with a model that ends its answers",
            )
        self._look_at_rewards(found)
        self._look_at_dead_groups(found)
        self._look_at_trends(found)

    def _try_rewards(self, found: StepAnswers) -> None:
        """What rewards say of an empty answer, of the rows' own, and of the same answers in another order."""
        _, first = np.unique(found.groups_N, return_index=True)
        asked = [found.texts[place] for place in first[:TRIED]]
        typical = _mean(found.judged.total_N)
        best = float(np.nanmax(found.judged.total_N, initial=-np.inf))
        empty_N = self.judge([self._saying(text, "") for text in asked]).total_N
        if _mean(empty_N) > max(typical, 0.0):
            self._tell(
                "empty",
                f"an empty answer is rewarded: {_mean(empty_N):.3g}, where the answers drawn have {typical:.3g} on the "
                f"mean; the run will learn to say nothing. Let rewards give an empty answer no more than a wrong one",
            )
        thoughts = [
            self._saying(text, f"{thought}{THOUGHT_ENDS}")
            for text in asked
            if (thought := text.generated.rpartition(THOUGHT_ENDS)[0]) and not text.generated.endswith(THOUGHT_ENDS)
        ]
        if thoughts and (bare := _mean(self.judge(thoughts).total_N)) > max(typical, 0.0):
            self._tell(
                "thought",
                f"thoughts without an answer behind them are rewarded: {bare:.3g}, where the answers drawn have "
                f"{typical:.3g} on the mean; the run will learn to think and to say nothing. Let rewards look at what "
                f"stands behind {THOUGHT_ENDS}",
            )
        own = [self._saying(text, text.expected) for text in asked if text.expected]
        own_N = self.judge(own).total_N if own else np.zeros(0)
        missed_N = (own_N <= typical) & ~((own_N > 0) & (own_N >= best))
        if len(own) and missed_N.mean() > 0.5:
            self._tell(
                "own",
                f"the rows' own answers are not rewarded: {int(missed_N.sum())} of {len(own)} get no more than the "
                f"answers drawn do on the mean ({typical:.3g}); the first is {own[int(missed_N.argmax())].expected!r}. "
                "Compare the rewards with the form of the rows' answers",
            )
        self._try_order(found)

    def _saying(self, asked: DrawnAnswer, text: str) -> DrawnAnswer:
        return asked.saying(text, 1 + self.num_tokens(text))  # and its stop token

    def _try_order(self, found: StepAnswers) -> None:
        """Rewards that meet the wrong answers, shifted by one for example, are others in another order."""
        asked = list(found.texts[:TRIED])
        before_N, turned_N = self.judge(asked).total_N, self.judge(asked[::-1]).total_N[::-1]
        if _same(turned_N, before_N):
            return
        if _same(self.judge(asked).total_N, before_N):  # else they are never the same twice
            self._tell(
                "order",
                "rewards depend on the order in which answers are judged, so they may be those of other answers; look "
                "for a reward that is shifted by one, or that remembers what it was asked before",
            )

    def _look_at_rewards(self, found: StepAnswers) -> None:
        if len(self._first_rewards) >= FIRST_ANSWERS:
            return
        rewards_N = found.judged.total_N
        self._first_rewards += rewards_N[~np.isnan(rewards_N)].tolist()
        if len(self._first_rewards) >= FIRST_ANSWERS and len(set(self._first_rewards)) == 1:
            self._tell(
                "constant",
                f"all of the first {len(self._first_rewards)} answers have the reward {self._first_rewards[0]:.3g}, so "
                "nothing is learned from them: the task is too hard or too easy for the model, or the rewards do not "
                "fit",
            )

    def _look_at_dead_groups(self, found: StepAnswers) -> None:
        groups = [found.judged.total_N[found.groups_N == group] for group in np.unique(found.groups_N)]
        dead = sum(len(set(rewards_G[~np.isnan(rewards_G)].tolist())) < 2 for rewards_G in groups)
        self._dead = self._dead + 1 if dead > DEAD_SHARE * len(groups) else 0
        if self._dead == DEAD_STEPS:
            self._tell(
                "dead",
                f"for {DEAD_STEPS} steps more than {DEAD_SHARE:.0%} of the prompts had answers of one reward each, "
                "which teach nothing: take rows that the model answers right at times, more rollout.answers, or "
                "rewards that tell good answers from better ones",
            )

    def _look_at_trends(self, found: StepAnswers) -> None:
        self._rewards.append(_mean(found.judged.total_N))
        self._lengths.append(float(found.lengths_N.mean()))
        self._entropies.append(float(-found.logps_N.sum() / max(int(found.lengths_N.sum()), 1)))
        if len(self._rewards) < 2 * WINDOW:
            return
        then, now = slice(None, WINDOW), slice(-WINDOW, None)
        before, entropy = (float(np.mean(self._entropies[part])) for part in (then, now))
        if entropy < ENTROPY_LEFT * before:
            self._tell(
                "entropy",
                f"the entropy of the answers has fallen from {before:.3g} to {entropy:.3g} nats a token: the model "
                "draws nearly the same answer each time and finds nothing new; lower train.learning_rate, hold it near "
                "a reference (objective.kl_weight), or end the run here",
            )
        shorter, longer = (float(np.mean(self._lengths[part])) for part in (then, now))
        lower, higher = (float(np.nanmean(self._rewards[part])) for part in (then, now))
        if longer > LENGTH_TIMES * shorter and higher > lower:
            self._tell(
                "length",
                f"answers have grown from {shorter:.0f} to {longer:.0f} tokens while the reward went from {lower:.3g} "
                f"to {higher:.3g}: look whether length itself is rewarded (luthier rollouts RUN); the loss "
                "dr_grpo does not prefer long answers, and a reward may count their tokens",
            )

    def _tell(self, which: str, text: str) -> None:
        if which not in self._told:
            self._told.add(which)
            self.tell(text)


def _mean(values_N: NDArray[np.float64]) -> float:
    known_N = values_N[~np.isnan(values_N)]
    return float(known_N.mean()) if len(known_N) else 0.0


def _same(first_N: NDArray[np.float64], second_N: NDArray[np.float64]) -> bool:
    return bool(np.allclose(first_N, second_N, rtol=0, atol=1e-9, equal_nan=True))


# ---- Whether answers are trained on with the probabilities that they were drawn by, watched at every step.

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
    canaries  answers that are to be compared before the next update (``compares_canaries``, on all ranks), with the
              log-probabilities that the engine gave them while its weights were those of training
    """

    config: RolloutConfig
    floor: float
    forward: ModelPass
    tell: Tell
    explain: Callable[[], str] | None = None
    canaries: Batch | None = None
    needs_canaries: bool = True
    compares_canaries: bool = False
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
        """To be called by an engine that was given the weights of training: answers that it draws next are scored by
        both, and the run stops where they differ."""
        self.needs_canaries = True

    def begin_step(self, model: nn.Module, reduce: Reduce) -> None:
        """Compare engine and training on canaries, where that is due, on all ranks. Raises `TrainingError`."""
        self._sums = GapSums(self.forward.device)
        if not self.compares_canaries:
            return
        self.needs_canaries = self.compares_canaries = False
        sums = GapSums(self.forward.device)
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
        """Take over the gap of the first canaries, if `state` gave one."""
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
