"""Scores of whole answers from scores of their targets. K targets, S segments, P pairs.

Log-probabilities are summed over the targets of a segment; the number of its targets is its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
