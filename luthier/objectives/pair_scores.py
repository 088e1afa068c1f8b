"""The scores of preference pairs, from the scores of their segments. S segments, P pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
                                           where a loss asks (`PairLoss.needs_alignment`); None: 1.0
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
