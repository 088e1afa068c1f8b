"""What the losses of AOT compare: two sets of values, the smallest of one with the smallest of the other. P pairs.

The comparison spans a whole step, of which a micro-batch holds a part. So each value is told beforehand which value of
the other set, of whichever micro-batch and rank, stands at its place in the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from luthier.objectives.pair_scores import PairScores

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
