"""Losses of policies that learn from answers of their own. G prompts, n answers of each, S answers, K targets.

p   how many times likelier the model finds a token now than when it was drawn; at the first update 1, up to rounding
P   the same of a whole answer, per token: the geometric mean of its p
A   the advantage of an answer: how much better it is than the others of its prompt

A loss is a number for each target. What their sum is divided by is the loss's own choice (`Divisor`): how much a long
answer counts depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.objectives.pair_scores import sequence_scores

Numbers = Mapping[str, float]


class Advantage(StrEnum):
    """How rewards r of one prompt's n answers become advantages; m their mean, s their standard deviation (n - 1)."""

    STANDARD = "standard"  # (r - m) / (s + 1e-4)
    CENTRED = "centred"  # r - m
    LEAVE_ONE_OUT = "leave_one_out"  # r - the mean of the others
    RELATIVE = "relative"  # (r - m) / m


class Divisor(StrEnum):
    """What the sum of a step's losses is divided by."""

    TOKENS = "tokens"  # all targets of the step
    ANSWERS = "answers"  # the answers of the step; each counts by the mean of its targets
    CONSTANT = "constant"  # the answers times the longest answer that may be drawn
    ANSWER_SUMS = "answer_sums"  # the answers; each counts by the sum of its targets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyScores:
    """Answers and what the model gives them.

    logps_K       float32, differentiable
    behaviour_K   float32: the same when they were drawn, by the weights that drew them
    advantages_S  float32
    segments_K    int64: the answer of each target
    """

    logps_K: torch.Tensor
    behaviour_K: torch.Tensor
    advantages_S: torch.Tensor
    segments_K: torch.Tensor

    @property
    def ratios_K(self) -> torch.Tensor:
        """p."""
        return (self.logps_K - self.behaviour_K).exp()

    @property
    def advantages_K(self) -> torch.Tensor:
        """A, for each target."""
        return self.advantages_S[self.segments_K]

    @property
    def lengths_S(self) -> torch.Tensor:
        """float: targets of each answer."""
        ones_K = torch.ones_like(self.behaviour_K)
        return torch.zeros_like(self.advantages_S, dtype=ones_K.dtype).index_add(0, self.segments_K, ones_K)

    def sums_S(self, values_K: torch.Tensor) -> torch.Tensor:
        """Of each answer."""
        return sequence_scores(values_K, self.segments_K, len(self.advantages_S)).logps_S


def clipped(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-min(p A, clip(p) A), clip to [1 - clip_low, 1 + clip_high]: what GRPO, DAPO and Dr. GRPO take from PPO."""
    return _clipped(scores.ratios_K, scores.advantages_K, numbers)


def gspo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-min(P A, clip(P) A): the ratio of whole answers."""
    means_S = scores.sums_S(scores.logps_K - scores.behaviour_K) / scores.lengths_S.clamp(min=1)
    return _clipped(means_S.exp(), scores.advantages_S, numbers)[scores.segments_K]


def cispo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-sg(min(p, 1 + clip_high)) A log p: the ratio is a weight, and no target loses its gradient."""
    weights_K = scores.ratios_K.detach().clamp(max=1 + numbers["clip_high"])
    return -weights_K * scores.advantages_K * scores.logps_K


def sapo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-A s(t (p - 1)) 4 / t: a soft gate in the place of the clip, with a t of its own for either sign of A."""
    advantages_K = scores.advantages_K
    positive, negative = (advantages_K.new_tensor(numbers[key]) for key in ("sapo_positive", "sapo_negative"))
    t_K = torch.where(advantages_K > 0, positive, negative)
    return -advantages_K * torch.sigmoid(t_K * (scores.ratios_K - 1)) * 4 / t_K


def rloo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-A times the ratio of the whole answer's probability, which is clipped as `clipped`; each target has a share."""
    ratios_S = scores.sums_S(scores.logps_K - scores.behaviour_K).exp()
    return (_clipped(ratios_S, scores.advantages_S, numbers) / scores.lengths_S.clamp(min=1))[scores.segments_K]


def _clipped(ratios: torch.Tensor, advantages: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    near = ratios.clamp(1 - numbers["clip_low"], 1 + numbers["clip_high"])
    return -torch.minimum(ratios * advantages, near * advantages)


def outside_of_clip(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """bool[K]: targets that have no gradient for being further than the clip, where the loss has one on both sides."""
    ratios_K, advantages_K = scores.ratios_K.detach(), scores.advantages_K
    if "clip_low" not in numbers:
        return torch.zeros_like(ratios_K, dtype=torch.bool)
    high_K = (ratios_K > 1 + numbers["clip_high"]) & (advantages_K > 0)
    return high_K | ((ratios_K < 1 - numbers["clip_low"]) & (advantages_K < 0))


def divided(losses_K: torch.Tensor, scores: PolicyScores, divisor: Divisor, longest: int) -> torch.Tensor:
    """Losses whose sum over the step is to be divided by `units`."""
    match divisor:
        case Divisor.TOKENS | Divisor.ANSWER_SUMS:
            return losses_K
        case Divisor.ANSWERS:
            return losses_K / scores.lengths_S[scores.segments_K]
        case Divisor.CONSTANT:
            return losses_K / longest


def units(divisor: Divisor, *, num_targets: int, num_answers: int) -> int:
    """What targets and answers add to the number that a step's loss is divided by."""
    return num_targets if divisor is Divisor.TOKENS else num_answers


def advantages(rewards_N: NDArray[np.float64], kind: Advantage) -> NDArray[np.float64]:
    """Of the answers to one prompt; 0 where all rewards are equal, or where an answer is alone. float64[n]."""
    if len(rewards_N) < 2 or (rewards_N == rewards_N[0]).all():
        return np.zeros_like(rewards_N)
    mean = float(rewards_N.mean())
    centred_N: NDArray[np.float64] = rewards_N - mean
    match kind:
        case Advantage.STANDARD:
            return centred_N / (float(rewards_N.std(ddof=1)) + 1e-4)
        case Advantage.CENTRED:
            return centred_N
        case Advantage.LEAVE_ONE_OUT:
            return centred_N * (len(rewards_N) / (len(rewards_N) - 1))
        case Advantage.RELATIVE:
            return centred_N / mean if mean > 0 else np.zeros_like(rewards_N)
