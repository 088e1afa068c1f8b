"""The losses of preference pairs, each a function of the log-probabilities of whole answers. P pairs.

Each gives the loss of every pair, [P]. With r the log-ratio ``log policy - log reference`` of an answer, c the chosen
and d the rejected one, most are functions of ``beta (r_c - r_d)``. Their formulas and papers are in `config.loss_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from luthier.objectives.pair_scores import PairScores

# --------------------------------------------------------------------------------------------------------------------
# What the losses of AOT compare: two sets of values, the smallest of one with the smallest of the other. P pairs.
#
# The comparison spans a whole step, of which a micro-batch holds a part. So each value is told beforehand which value
# of the other set, of whichever micro-batch and rank, stands at its place in the order.


SortedSides = Callable[[PairScores], tuple[torch.Tensor, torch.Tensor]]
"""The two sets, [P] each: one value of every pair in either."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counterparts:
    """What each pair's left value, and what its right value is compared with: [P], constants."""

    left_P: torch.Tensor
    right_P: torch.Tensor

    def __getitem__(self, pairs: slice) -> Counterparts:
        return Counterparts(left_P=self.left_P[pairs], right_P=self.right_P[pairs])


def counterparts(left_P: torch.Tensor, right_P: torch.Tensor) -> Counterparts:
    """For each value that of the other set at the same place in ascending order.

    left [5, 1, 3], right [20, 30, 10]  ->  of left [30, 10, 20], of right [3, 5, 1]
    """
    left_order, right_order = left_P.detach().argsort(stable=True), right_P.detach().argsort(stable=True)
    of_left_P, of_right_P = torch.empty_like(left_P), torch.empty_like(right_P)
    of_left_P[left_order] = right_P.detach()[right_order].to(of_left_P.dtype)
    of_right_P[right_order] = left_P.detach()[left_order].to(of_right_P.dtype)
    return Counterparts(left_P=of_left_P, right_P=of_right_P)


def gaps(scores: PairScores) -> tuple[torch.Tensor, torch.Tensor]:
    """AOT on pairs: how much likelier the chosen answer is than the other, by the policy and by the reference."""
    return scores.chosen_P - scores.rejected_P, scores.ref_chosen_or_zero_P - scores.ref_rejected_or_zero_P


def ratios(scores: PairScores) -> tuple[torch.Tensor, torch.Tensor]:
    """AOT on two sets: the log-ratios of all chosen answers, and of all rejected ones."""
    return scores.chosen_ratios_P, scores.rejected_ratios_P


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """The numbers of a pair loss; each loss reads its own (`config.loss_rows`, ``objective`` of the run description).

    label_smoothing   how likely a pair has its answers swapped
    gamma             SimPO's target margin
    divergence_alpha  of the alpha divergence: 0 the forward KL, 1 the reverse one, which is DPO's
    alphapo_alpha     how AlphaPO bends log-probabilities; 0 leaves them
    bco_share         of MPO: how much of the loss is BCO's, the rest is DPO's
    sft_weight        what the chosen answer's cross-entropy per token counts beside the loss
    own               numbers of a plugin's loss, by their keys
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    discopop_tau: float = 0.05
    divergence_alpha: float = 0.5
    alphapo_alpha: float = 0.25
    bco_share: float = 0.2
    sft_weight: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBaselines:
    """What a loss compares rewards with, estimated outside of the pairs at hand; a micro-batch must not decide it.

    delta                    ``bco_pair``, ``mpo``: the running mean of rewards, see `RunningMean`; 0 without one
    chosen_kl, rejected_kl   ``kto_pair``: mean log-ratios of the chosen and of the rejected answers of the whole step,
                             at least 0. None: estimated from the pairs at hand
    counterparts             ``aot``: what the pairs at hand are compared with in the sorted step. None: they are all
    """

    delta: float = 0.0
    chosen_kl: float | None = None
    rejected_kl: float | None = None
    counterparts: Counterparts | None = None


NO_BASELINES = PairBaselines()


def sigmoid(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * scores.ratio_gap_P, settings.label_smoothing)


def sigmoid_norm(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * scores.mean_ratio_gap_P, 0.0)


def hinge(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return torch.relu(1 - settings.beta * scores.ratio_gap_P)


def ipo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return (scores.mean_ratio_gap_P - 1 / (2 * settings.beta)).square()


def robust(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P, smoothing = settings.beta * scores.ratio_gap_P, settings.label_smoothing
    clean_P, swapped_P = -F.logsigmoid(logits_P), -F.logsigmoid(-logits_P)
    return ((1 - smoothing) * clean_P - smoothing * swapped_P) / (1 - 2 * smoothing)


def exo_pair(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    # KL of the model's preference (p, 1-p) to the smoothed label (1-e, e)
    logits_P, e = settings.beta * scores.ratio_gap_P, settings.label_smoothing
    log_p_P, log_other_P = F.logsigmoid(logits_P), F.logsigmoid(-logits_P)
    return log_p_P.exp() * (log_p_P - math.log1p(-e)) + log_other_P.exp() * (log_other_P - math.log(e))


def nca_pair(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = settings.beta * scores.chosen_ratios_P, settings.beta * scores.rejected_ratios_P
    return -F.logsigmoid(chosen_P) - 0.5 * F.logsigmoid(-chosen_P) - 0.5 * F.logsigmoid(-rejected_P)


def bco_pair(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P = settings.beta * scores.chosen_ratios_P - baselines.delta
    rejected_P = settings.beta * scores.rejected_ratios_P - baselines.delta
    return -F.logsigmoid(chosen_P) - F.logsigmoid(-rejected_P)


def mpo(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    share, binary_P = settings.bco_share, bco_pair(scores, settings, baselines)
    return (1 - share) * _logistic(settings.beta * scores.ratio_gap_P, 0.0) + share * binary_P


def wpo(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    losses_P = sigmoid(scores, settings, baselines)
    return losses_P if scores.alignment_P is None else scores.alignment_P * losses_P


def sppo_hard(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    half = 0.5 / settings.beta
    return (scores.chosen_ratios_P - half).square() + (scores.rejected_ratios_P + half).square()


def aot(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    gap_P, reference_P = gaps(scores)
    other = baselines.counterparts or counterparts(gap_P, reference_P)
    return _logistic(settings.beta * (gap_P - other.left_P), settings.label_smoothing)


def aot_unpaired(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = ratios(scores)
    other = baselines.counterparts or counterparts(chosen_P, rejected_P)
    from_chosen_P = _logistic(settings.beta * (chosen_P - other.left_P), settings.label_smoothing)
    from_rejected_P = _logistic(settings.beta * (other.right_P - rejected_P), settings.label_smoothing)
    # either side of a comparison counts it, with the other side constant: half of both values, all of both slopes
    both_P = from_chosen_P + from_rejected_P
    return both_P - 0.5 * both_P.detach()


def discopop(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P = settings.beta * scores.ratio_gap_P
    tempered_P = logits_P / settings.discopop_tau
    # m exp(-x) as one exponential: where x is far below 0, m is 0 and exp(-x) infinite, and their product no number
    exponential_P = torch.exp(F.logsigmoid(tempered_P) - logits_P)
    return torch.sigmoid(-tempered_P) * -F.logsigmoid(logits_P) + exponential_P


def apo_zero(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    beta = settings.beta
    return torch.sigmoid(-beta * scores.chosen_ratios_P) + torch.sigmoid(beta * scores.rejected_ratios_P)


def apo_down(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    beta = settings.beta
    return torch.sigmoid(beta * scores.chosen_ratios_P) + torch.sigmoid(-beta * scores.ratio_gap_P)


def forward_kl(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _divergence(scores, settings, lambda ratios_P: -_bounded_expm1(-ratios_P))


def js_divergence(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    # f'(t) = log(2 t / (1 + t)); log 2 is the same on both sides
    return _divergence(scores, settings, F.logsigmoid)


def alpha_divergence(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    power = settings.divergence_alpha - 1
    if not power:
        return sigmoid(scores, settings, _)
    return _divergence(scores, settings, lambda ratios_P: _bounded_expm1(power * ratios_P) / power)


def kto_pair(scores: PairScores, settings: PairSettings, baselines: PairBaselines) -> torch.Tensor:
    chosen_P, rejected_P = scores.chosen_ratios_P, scores.rejected_ratios_P
    chosen_kl = _kl_or_mean(baselines.chosen_kl, chosen_P)
    rejected_kl = _kl_or_mean(baselines.rejected_kl, rejected_P)
    # each half is measured against the other half's; the halves' mean, as a pair is two rows
    good_P = torch.sigmoid(-settings.beta * (chosen_P - rejected_kl))
    bad_P = torch.sigmoid(-settings.beta * (chosen_kl - rejected_P))
    return 0.5 * (good_P + bad_P)


def simpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    logits_P = settings.beta * (scores.chosen_mean_P - scores.rejected_mean_P) - settings.gamma
    return _logistic(logits_P, settings.label_smoothing)


def alphapo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    alpha = settings.alphapo_alpha
    if not alpha:
        return simpo(scores, settings, _)
    # (1 - p^-a) / a of each answer, p its probability per target
    gap_P = (_bounded_expm1(-alpha * scores.rejected_mean_P) - _bounded_expm1(-alpha * scores.chosen_mean_P)) / alpha
    return _logistic(settings.beta * gap_P - settings.gamma, settings.label_smoothing)


def orpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    log_odds_P = _log_odds(scores.chosen_mean_P) - _log_odds(scores.rejected_mean_P)
    return -settings.beta * F.logsigmoid(log_odds_P)


def cpo(scores: PairScores, settings: PairSettings, _: PairBaselines) -> torch.Tensor:
    return _logistic(settings.beta * (scores.chosen_P - scores.rejected_P), settings.label_smoothing)


def _logistic(logits_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    losses_P = -F.logsigmoid(logits_P)
    return losses_P if not smoothing else (1 - smoothing) * losses_P - smoothing * F.logsigmoid(-logits_P)


def _divergence(
    scores: PairScores, settings: PairSettings, slope: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """DPO's loss with ``f'(policy / reference)`` of a divergence in place of the log-ratio; ``slope`` takes the log."""
    gap_P = slope(scores.chosen_ratios_P) - slope(scores.rejected_ratios_P)
    return _logistic(settings.beta * gap_P, settings.label_smoothing)


def _bounded_expm1(exponents: torch.Tensor) -> torch.Tensor:
    # exp(x) - 1 that keeps the digits of a small x, which an alpha near its limit makes of every x. float32 ends at
    # exp(88); beyond, a loss would be infinite and its slope no number
    return exponents.clamp(max=80.0).expm1()


def _kl_or_mean(known: float | None, ratios_P: torch.Tensor) -> torch.Tensor:
    if known is not None:
        return ratios_P.new_tensor(known)
    # unlike the estimate of `feedback_losses` this one is differentiated, as in TRL 0.8
    return ratios_P.mean().clamp(min=0) if len(ratios_P) else ratios_P.new_zeros(())


def _log_odds(logps: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) from log p < 0, exact at both ends: log1p(-p) where p is small, log(-expm1) where it is near 1.

    At log p = 0, which float32 reaches, the smallest number below takes its place: the odds would be infinite.
    """
    logps = logps.clamp(max=-torch.finfo(logps.dtype).tiny)
    is_small = logps < -0.6931  # p = 1/2
    # the branch that is not taken gets a harmless argument, else its infinite slope makes 0 x inf
    small = torch.log1p(-torch.where(is_small, logps, -1.0).exp())
    large = torch.log(-torch.expm1(torch.where(is_small, -1.0, logps)))
    return logps - torch.where(is_small, small, large)
