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

# --------------------------------------------------------------------------------------------------------------------
# Scores of whole answers from scores of their targets. K targets, S segments, P pairs.
#
# Log-probabilities are summed over the targets of a segment; the number of its targets is its length.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceScores:
    """Of S segments: ``logps_S`` float32, the sum over a segment's targets; ``lengths_S`` int64, how many it has."""

    logps_S: torch.Tensor
    lengths_S: torch.Tensor


def sequence_scores(
    logps_K: torch.Tensor, segments_K: torch.Tensor, num_segments: int, *, counts_K: torch.Tensor | None = None
) -> SequenceScores:
    """Sum over each segment's targets; ``segments_K`` int64 says whose each target is.

    ``counts_K`` is what each target counts in the sum, see `tail_discount`; lengths count them all the same.
    """
    counted_K = logps_K if counts_K is None else logps_K * counts_K
    logps_S = logps_K.new_zeros(num_segments).index_add(0, segments_K, counted_K)
    return SequenceScores(logps_S=logps_S, lengths_S=torch.bincount(segments_K, minlength=num_segments))


def tail_discount(
    segments_K: torch.Tensor, num_segments: int, pairs_P2: torch.Tensor, *, ld_alpha: float
) -> torch.Tensor:
    """What each target counts under LD-DPO (arXiv:2409.06411), float32[K].

    Of both answers of a pair as many targets as the shorter one has count 1, the rest ``ld_alpha``. ``segments_K`` is
    ascending, as in `records.Targets`; ``pairs_P2`` int64 names the two segments of each pair.

        lengths 2 and 4, ld_alpha 0.5 -> [1, 1 | 1, 1, 0.5, 0.5]
    """
    lengths_S = torch.bincount(segments_K, minlength=num_segments)
    shared_S = lengths_S.clone()
    shared_P1 = lengths_S[pairs_P2].amin(dim=1, keepdim=True)
    shared_S[pairs_P2] = shared_P1.expand_as(pairs_P2)
    starts_S = lengths_S.cumsum(0) - lengths_S
    place_K = torch.arange(len(segments_K), device=segments_K.device) - starts_S[segments_K]
    return torch.where(place_K < shared_S[segments_K], 1.0, ld_alpha)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PairScores:
    """Log-probabilities of the two answers of P pairs, each the sum over the answer's targets.

    chosen_P, rejected_P                   float32, of the policy, differentiable
    ref_chosen_P, ref_rejected_P           float32, of the reference, constant; None: compared with nothing
    chosen_lengths_P, rejected_lengths_P   int64, numbers of targets
    weights_P                              float32, what each pair counts in the loss, or None: 1.0
    whole_chosen_P                         float32, ``chosen_P`` with every target counted, differentiable; None: they
                                           are (`tail_discount` makes the difference)
    alignment_P                            float32, constant: how much both answers look like the policy's own writing,
                                           where a loss asks (`Loss.needs_alignment`); None: 1.0
    """

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    ref_chosen_P: torch.Tensor | None = None
    ref_rejected_P: torch.Tensor | None = None
    chosen_lengths_P: torch.Tensor
    rejected_lengths_P: torch.Tensor
    weights_P: torch.Tensor | None = None
    whole_chosen_P: torch.Tensor | None = None
    alignment_P: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.chosen_P)

    @property
    def ref_chosen_or_zero_P(self) -> torch.Tensor:
        """The reference's, or zeros where there is none."""
        return torch.zeros_like(self.chosen_P) if self.ref_chosen_P is None else self.ref_chosen_P

    @property
    def ref_rejected_or_zero_P(self) -> torch.Tensor:
        """The reference's, or zeros where there is none."""
        return torch.zeros_like(self.rejected_P) if self.ref_rejected_P is None else self.ref_rejected_P

    @property
    def chosen_ratios_P(self) -> torch.Tensor:
        """log policy - log reference of the chosen answer."""
        return self.chosen_P - self.ref_chosen_or_zero_P

    @property
    def rejected_ratios_P(self) -> torch.Tensor:
        """log policy - log reference of the rejected answer."""
        return self.rejected_P - self.ref_rejected_or_zero_P

    @property
    def ratio_gap_P(self) -> torch.Tensor:
        """How much more the policy prefers the chosen answer than the reference does, in nats."""
        return self.chosen_ratios_P - self.rejected_ratios_P

    @property
    def mean_ratio_gap_P(self) -> torch.Tensor:
        """The same, each answer's log-ratio divided by its length."""
        return _per_token(self.chosen_ratios_P, self.chosen_lengths_P) - _per_token(
            self.rejected_ratios_P, self.rejected_lengths_P
        )

    @property
    def chosen_mean_P(self) -> torch.Tensor:
        """Log-probability per target of the chosen answer."""
        return _per_token(self.chosen_P, self.chosen_lengths_P)

    @property
    def rejected_mean_P(self) -> torch.Tensor:
        """Log-probability per target of the rejected answer."""
        return _per_token(self.rejected_P, self.rejected_lengths_P)

    @property
    def chosen_nll_P(self) -> torch.Tensor:
        """Cross-entropy of the chosen answer, of all its targets alike: their sum."""
        return -(self.chosen_P if self.whole_chosen_P is None else self.whole_chosen_P)

    @property
    def mean_chosen_nll_P(self) -> torch.Tensor:
        """The same per target."""
        return _per_token(self.chosen_nll_P, self.chosen_lengths_P)


def pair_scores(
    policy: SequenceScores,
    pairs_P2: torch.Tensor,
    *,
    ref_logps_S: torch.Tensor | None = None,
    weights_P: torch.Tensor | None = None,
    whole: SequenceScores | None = None,
    aligned: SequenceScores | None = None,
) -> PairScores:
    """The pairs that ``pairs_P2`` names, int64[P, 2]: segment of the chosen answer, segment of the rejected one.

    ``ref_logps_S``: what the reference gives the same segments, summed in the same way (`tail_discount` too).
    ``whole``: ``policy`` without the discount, where it has one. ``aligned``: sums of ``log p - log sum q^2`` over
    targets (`log_square_sums`), for WPO's weights: the product of both answers' geometric means.
    """
    chosen_P, rejected_P = pairs_P2.unbind(dim=1)
    alignment_P = None
    if aligned is not None:
        mean_S = _per_token(aligned.logps_S.detach(), aligned.lengths_S)
        alignment_P = (mean_S[chosen_P] + mean_S[rejected_P]).exp()
    return PairScores(
        chosen_P=policy.logps_S[chosen_P],
        rejected_P=policy.logps_S[rejected_P],
        ref_chosen_P=None if ref_logps_S is None else ref_logps_S.detach()[chosen_P],
        ref_rejected_P=None if ref_logps_S is None else ref_logps_S.detach()[rejected_P],
        chosen_lengths_P=policy.lengths_S[chosen_P],
        rejected_lengths_P=policy.lengths_S[rejected_P],
        weights_P=weights_P,
        whole_chosen_P=None if whole is None else whole.logps_S[chosen_P],
        alignment_P=alignment_P,
    )


def _per_token(logps: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    # an answer without targets has a sum of 0, and 0 / 1 is its mean
    return logps / lengths.clamp(min=1)


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
    own               all numbers of a plugin's loss, by their keys
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
    # unlike the estimate of `loss_sums` this one is differentiated, as in TRL 0.8
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
