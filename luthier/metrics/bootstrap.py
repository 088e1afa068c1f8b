"""Intervals of scores by drawing rows again: the percentile bootstrap (Efron 1979). G rows, S sums, R draws.

A score of many answers is a function of sums over rows: a mean is that of (sum of values, their number), BLEU that of
its counts of n-grams. Drawing G rows with replacement gives other sums, and so another score; the middle 95 % of such
scores are the interval. The same seed draws the same rows, so that two models' scores can be subtracted draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

DRAWS, LEVEL, SEED = 1000, 0.95, 0
AT_ONCE = 2**22  # counts of drawn rows in memory at once, 32 MiB
Sums = NDArray[np.float64]
ScoreOf = Callable[[Sums], float]


def sums_by_row(parts_NS: Sums, rows: Sequence[str]) -> Sums:
    """Sums over the answers of each row, float64[G, S], since answers to one row are not independent of each other.

    ``[[1, 1], [0, 1], [1, 1]], ["a", "a", "b"] -> [[1, 2], [1, 1]]``
    """
    number_of = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    sums_GS = np.zeros((len(number_of), parts_NS.shape[1]))
    np.add.at(sums_GS, [number_of[row] for row in rows], parts_NS)
    return sums_GS


def drawn_sums(sums_GS: Sums, *, draws: int = DRAWS, seed: int = SEED) -> Sums:
    """The sums of G rows drawn with replacement, float64[R, S]; the same rows for the same G and seed."""
    generator, size = np.random.Generator(np.random.PCG64(seed)), len(sums_GS)
    found: list[Sums] = []
    at_once = max(1, AT_ONCE // size)
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        drawn_RG = generator.integers(size, size=(count, size))
        cells = (drawn_RG + size * np.arange(count)[:, None]).ravel()
        times_RG = np.bincount(cells, minlength=count * size).reshape(count, size)
        found.append(times_RG.astype(np.float64) @ sums_GS)
    return np.concatenate(found)


def middle(scores_R: Sums, level: float = LEVEL) -> tuple[float, float] | None:
    """The ends of the middle ``level`` of scores; those that are no number (nothing was counted) are left out."""
    numbers = scores_R[np.isfinite(scores_R)]
    if not len(numbers):
        return None
    low, high = np.quantile(numbers, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval(parts_NS: Sums, rows: Sequence[str], score_of: ScoreOf) -> tuple[float, float] | None:
    """The 95 % interval of ``score_of(sums)`` over rows; None for a single row, of which nothing can be said."""
    sums_GS = sums_by_row(parts_NS, rows)
    if len(sums_GS) < 2:
        return None
    return middle(np.array([score_of(sums) for sums in drawn_sums(sums_GS)]))


def mean_of(sums_S: Sums) -> float:
    """``(sum, count) -> sum / count``; no number where nothing was counted."""
    return float(sums_S[0] / sums_S[1]) if sums_S[1] else float("nan")
