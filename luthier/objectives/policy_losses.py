"""Losses of policies that learn from answers of their own. G prompts, n answers of each, S answers, K targets.

p   how many times likelier the model finds a token now than when it was drawn; at the first update 1, up to rounding
P   the same of a whole answer, per token: the geometric mean of its p
A   the advantage of a target: how much better its answer is than others of its prompt, or than was expected

A loss is a number for each target. What their sum is divided by is the loss's own choice (`Divisor`): how much a long
answer counts depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from luthier.config.rollout import CorrectionConfig, CorrectionKind, CorrectionLevel
from luthier.objectives.pair_formulas import sequence_scores

Numbers = Mapping[str, float]


class Advantage(StrEnum):
    """How rewards r of one prompt's n answers become advantages; m their mean, s their standard deviation (n - 1)."""

    STANDARD = "standard"  # (r - m) / (s + 1e-4)
    CENTRED = "centred"  # r - m
    LEAVE_ONE_OUT = "leave_one_out"  # r - the mean of the others
    RELATIVE = "relative"  # (r - m) / m
    REWARD = "reward"  # r itself: answers to one prompt are not compared
    TEACHER = "teacher"  # of each target how much likelier it is to a teacher than when it was drawn: r is not asked


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
    advantages_K  float32
    segments_K    int64: the answer of each target
    num_answers   S

    Where a value head learns what to expect of answers, float32:

    values_K      V, differentiable: what it expects at each target
    expected_K    the same when the answers were drawn
    returns_K     R: what came of them
    """

    logps_K: torch.Tensor
    behaviour_K: torch.Tensor
    advantages_K: torch.Tensor
    segments_K: torch.Tensor
    num_answers: int
    values_K: torch.Tensor | None = None
    expected_K: torch.Tensor | None = None
    returns_K: torch.Tensor | None = None

    @property
    def ratios_K(self) -> torch.Tensor:
        """p."""
        return (self.logps_K - self.behaviour_K).exp()

    @property
    def answer_ratios_S(self) -> torch.Tensor:
        """The ratios of whole answers: the products of their p."""
        return self.sums_S(self.logps_K - self.behaviour_K).exp()

    @property
    def mean_ratios_S(self) -> torch.Tensor:
        """P."""
        return (self.sums_S(self.logps_K - self.behaviour_K) / self.lengths_S.clamp(min=1)).exp()

    @property
    def advantages_S(self) -> torch.Tensor:
        """Of answers all of whose targets have the same."""
        return self.advantages_K.new_zeros(self.num_answers).scatter(0, self.segments_K, self.advantages_K)

    @property
    def lengths_S(self) -> torch.Tensor:
        """float: targets of each answer."""
        return self.sums_S(torch.ones_like(self.behaviour_K))

    def sums_S(self, values_K: torch.Tensor) -> torch.Tensor:
        """Of each answer."""
        return sequence_scores(values_K, self.segments_K, self.num_answers).logps_S


def clipped(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-min(p A, clip(p) A), clip to [1 - clip_low, 1 + clip_high]: what GRPO, DAPO and Dr. GRPO take from PPO."""
    return _clipped(scores.ratios_K, scores.advantages_K, numbers)


def gspo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """-min(P A, clip(P) A): the ratio of whole answers."""
    return _clipped(scores.mean_ratios_S, scores.advantages_S, numbers)[scores.segments_K]


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
    return (_clipped(scores.answer_ratios_S, scores.advantages_S, numbers) / scores.lengths_S.clamp(min=1))[
        scores.segments_K
    ]


def ppo(scores: PolicyScores, numbers: Numbers) -> torch.Tensor:
    """`clipped`, and value_weight max((V - R)^2, (clip(V) - R)^2) / 2, clip to value_clip around what V was."""
    values_K, expected_K, returns_K = scores.values_K, scores.expected_K, scores.returns_K
    assert values_K is not None and expected_K is not None and returns_K is not None, "a value head"
    near_K = expected_K + (values_K - expected_K).clamp(-numbers["value_clip"], numbers["value_clip"])
    errors_K = torch.maximum((values_K - returns_K).square(), (near_K - returns_K).square())
    return clipped(scores, numbers) + numbers["value_weight"] * errors_K / 2


def kl_losses(scores: PolicyScores, reference_K: torch.Tensor) -> torch.Tensor:
    """sg(p) (log p' - log q)^2 / 2, p' the policy's probability of a target and q the reference's.

    Its expected gradient is that of the KL divergence from the reference at each target, given what stands before it:
    on a drawn token it is log(p' / q) times that of log p', and sg(p) counts the token as often as it is drawn now. The
    gradient of p (q/p' - 1 - log(q/p')), the corrected k3 of arXiv:2512.02556, is the same on every token; that of k3
    without the factor p is the one of KL(q, p').
    """
    return scores.ratios_K.detach() * (scores.logps_K - reference_K).square() / 2


def k3(logps_K: torch.Tensor, reference_K: torch.Tensor) -> torch.Tensor:
    """q/p' - 1 - log(q/p'): an estimate of the KL divergence that is never negative; of k1, log(p' / q), the mean is
    the same (http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(reference_K - logps_K) - (reference_K - logps_K)


def opd(scores: PolicyScores, _: Numbers) -> torch.Tensor:
    """-A p, A of each target: how much likelier it is to the teacher than it was when it was drawn."""
    return -scores.advantages_K * scores.ratios_K


def _clipped(ratios: torch.Tensor, advantages: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    near = ratios.clamp(1 - numbers["clip_low"], 1 + numbers["clip_high"])
    return -torch.minimum(ratios * advantages, near * advantages)


def outside_of_clip(scores: PolicyScores, numbers: Numbers, ratio_of: str = "target") -> torch.Tensor:
    """bool[K]: targets that have no gradient for being further than the clip, where the loss has one on both sides.
    ``ratio_of``: which ratio the loss clips (`Loss.ratio_of`)."""
    match ratio_of:
        case "target":
            ratios_K = scores.ratios_K.detach()
        case "answer":
            ratios_K = scores.answer_ratios_S.detach()[scores.segments_K]
        case "mean":
            ratios_K = scores.mean_ratios_S.detach()[scores.segments_K]
        case _:
            raise AssertionError(ratio_of)
    advantages_K = scores.advantages_K
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
    if kind is Advantage.REWARD:
        return rewards_N.copy()
    if kind is Advantage.TEACHER or len(rewards_N) < 2 or (rewards_N == rewards_N[0]).all():
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


def without_kl(
    advantages_S: torch.Tensor, kl_K: torch.Tensor, kind: Advantage, segments_K: torch.Tensor, groups_S: torch.Tensor
) -> torch.Tensor:
    """Advantages of targets, [K], where ``kl_K``, an estimate of the KL divergence times its weight, is taken off the
    rewards. ``groups_S``: the prompt of each answer, int64. Targets are in the order in which they were drawn.

    An answer that is compared with others loses the sum of its KL, as they do. Where none are compared a target loses
    what comes from its place on, as what stands before it is not its doing.
    """
    match kind:
        case Advantage.LEAVE_ONE_OUT:
            kl_S = torch.zeros_like(advantages_S).index_add(0, segments_K, kl_K)
            counts_G = torch.bincount(groups_S)
            sums_G = torch.zeros(len(counts_G), dtype=kl_S.dtype, device=kl_S.device).index_add(0, groups_S, kl_S)
            others_S = counts_G[groups_S] - 1
            of_others_S = (sums_G[groups_S] - kl_S) / others_S.clamp(min=1)
            return (advantages_S - torch.where(others_S > 0, kl_S - of_others_S, 0.0))[segments_K]
        case Advantage.REWARD:
            rewards_K = with_final(-kl_K, advantages_S, segments_K)
            return generalised_advantages(rewards_K, torch.zeros_like(kl_K), segments_K, discount=1.0, decay=1.0)
        case _:
            raise AssertionError(f"KL in the reward is not defined for {kind} advantages")


def with_final(rewards_K: torch.Tensor, final_S: torch.Tensor, segments_K: torch.Tensor) -> torch.Tensor:
    """Rewards of targets, to the last of which that of the whole answer is added."""
    is_last_K = segments_K != torch.cat([segments_K[1:], segments_K.new_full((1,), -1)])
    return rewards_K + torch.where(is_last_K, final_S[segments_K], 0.0)


def generalised_advantages(
    rewards_K: torch.Tensor, values_K: torch.Tensor, segments_K: torch.Tensor, *, discount: float, decay: float
) -> torch.Tensor:
    """Generalised advantage estimation (arXiv:1506.02438), [K]: A[t] = d[t] + discount decay A[t+1], where d[t] =
    r[t] + discount V[t+1] - V[t]. Behind the last target of an answer V and A are 0."""
    if not len(rewards_K):
        return rewards_K
    lengths = torch.unique_consecutive(segments_K, return_counts=True)[1].tolist()
    rewards_TS, values_TS = (
        nn.utils.rnn.pad_sequence(of_K.split(lengths))
        for of_K in (rewards_K, values_K)  # behind an answer's end 0
    )
    found: list[torch.Tensor] = []
    next_S = value_S = torch.zeros_like(rewards_TS[0])
    for reward_S, now_S in zip(rewards_TS.flip(0), values_TS.flip(0), strict=True):
        next_S = reward_S + discount * value_S - now_S + discount * decay * next_S
        value_S = now_S
        found.append(next_S)
    advantages_TS = torch.stack(found[::-1])
    return torch.cat([advantages_TS[:length, answer] for answer, length in enumerate(lengths)])


def correction_weights(scores: PolicyScores, sampler_K: torch.Tensor, correction: CorrectionConfig) -> torch.Tensor:
    """What targets count where the sampler gave them other log-probabilities than training did under the same weights,
    [K]: exp of the difference, or of its mean over an answer, never of its sum, which grows with the answer's length.
    """
    gaps_K = scores.behaviour_K - sampler_K
    if correction.level is CorrectionLevel.ANSWER:
        gaps_K = (scores.sums_S(gaps_K) / scores.lengths_S.clamp(min=1))[scores.segments_K]
    weights_K = gaps_K.exp()
    assert correction.is_on, "nothing is to be corrected"
    if correction.how is CorrectionKind.TRUNCATE:
        return weights_K.clamp(correction.low, correction.high)
    return torch.where((weights_K >= correction.low) & (weights_K <= correction.high), weights_K, 0.0)


def led_weight(weight: float, kl: float, answers: float, numbers: Numbers) -> float:
    """The weight of KL after a step whose answers had ``kl`` nats each on the mean (arXiv:1909.08593, 2.2): a fifth
    more or less in ``kl_horizon`` answers at most."""
    if not numbers["kl_target"]:
        return weight
    error = min(max(kl / numbers["kl_target"] - 1, -0.2), 0.2)
    return weight * (1 + error * answers / numbers["kl_horizon"])


def whitened(
    advantages: Sequence[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Advantages of a step's targets, of mean 0 and standard deviation 1 over all its micro-batches and ranks.

    ``reduce`` adds up a tensor over all ranks, which have to ask together.
    """
    zero = torch.zeros(2, dtype=torch.float64, device=device)
    sums = [torch.stack([one.double().sum(), one.new_tensor(len(one), dtype=torch.float64)]) for one in advantages]
    total, count = reduce(sum(sums, zero)).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce(sum(((one.double() - mean).square().sum() for one in advantages), zero[:1]))
    deviation = (squares / count.clamp(min=1)).sqrt()
    return [((one.double() - mean) / (deviation + 1e-8)).to(one.dtype) for one in advantages]


# ---------------- How far the probabilities of training are from those that answers were drawn by. K targets, S answers


_PER_DECADE, _SMALLEST, _DECADES = 40, 1e-9, 12  # bins of |gap| from 1e-9 to 1e3 nats
_NUM_BINS = _PER_DECADE * _DECADES
_FURTHEST = 50.0  # nats of a whole answer: e^100 is still a number


@dataclass(frozen=True, kw_only=True, slots=True)
class GapNumbers:
    """What is told of the gaps of a step.

    mean, p99, largest  of |gap|, in nats a token
    k1, k3              estimates of KL(sampler || training): the mean of -gap, and of e^gap - 1 - gap
    ratio               the mean of e^gap, 1 where both are the same
    sample_size         the effective sample size of the answers as a share of them, weighted by the ratio of whole
                        answers: 1 where both are the same
    """

    mean: float
    p99: float
    largest: float
    k1: float
    k3: float
    ratio: float
    sample_size: float


class GapSums:
    """The gaps of a step, added up: a float64 vector."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(8 + _NUM_BINS, dtype=torch.float64, device=device)

    def add(self, gaps_K: torch.Tensor, segments_K: torch.Tensor, num_answers: int) -> None:
        """Those of some answers; ``segments_K`` says which answer a target is of."""
        gaps_K = gaps_K.detach().double().clamp(-_FURTHEST, _FURTHEST)
        of_answers_S = gaps_K.new_zeros(num_answers).index_add(0, segments_K, gaps_K)
        ratios_S = of_answers_S.clamp(-_FURTHEST, _FURTHEST).exp()
        ratios_K, sizes_K = gaps_K.exp(), gaps_K.abs()
        parts = (
            sizes_K.sum(), sizes_K.new_tensor(len(sizes_K)), -gaps_K.sum(), (ratios_K - 1 - gaps_K).sum(),
            ratios_K.sum(), ratios_S.sum(), ratios_S.square().sum(), sizes_K.new_tensor(num_answers),
        )  # fmt: skip
        bins_K = (sizes_K.clamp(min=_SMALLEST) / _SMALLEST).log10() * _PER_DECADE
        bins_K = bins_K.long().clamp(0, _NUM_BINS - 1)
        self.sums[:8] += torch.stack(parts)
        self.sums[8:] += torch.bincount(bins_K, minlength=_NUM_BINS).double()

    @staticmethod
    def numbers(sums: torch.Tensor) -> GapNumbers | None:
        """Of the sums over all ranks; None where nothing was drawn."""
        size, targets, k1, k3, ratio, weights, squares, answers = sums[:8].tolist()
        if not targets:
            return None
        behind = sums[8:].cumsum(0)
        places = [int((behind < share * targets).sum()) for share in (0.99, 1.0)]
        p99, largest = (_SMALLEST * 10 ** ((place + 0.5) / _PER_DECADE) if place else 0.0 for place in places)
        return GapNumbers(
            mean=size / targets,
            p99=p99,
            largest=largest,
            k1=k1 / targets,
            k3=k3 / targets,
            ratio=ratio / targets,
            sample_size=weights**2 / squares / answers,
        )
