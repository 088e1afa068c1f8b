"""How far the probabilities of training are from those that answers were drawn by. K targets, S answers.

The gap of a target is log p(training) - log p(sampler). Everything here is a sum over targets or answers, so that
micro-batches and ranks add up; the largest gaps are told by a histogram, to 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
