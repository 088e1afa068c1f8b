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
MOST_EXACT, SWAPS = 12, 4000
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


def drawn_sums(sums_GS: Sums) -> Sums:
    """The sums of G rows drawn with replacement, float64[R, S]; the same rows for the same G."""
    generator, size = np.random.Generator(np.random.PCG64(SEED)), len(sums_GS)
    found: list[Sums] = []
    at_once = max(1, AT_ONCE // size)
    for start in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - start)
        drawn_RG = generator.integers(size, size=(count, size))
        cells = (drawn_RG + size * np.arange(count)[:, None]).ravel()
        times_RG = np.bincount(cells, minlength=count * size).reshape(count, size)
        found.append(times_RG.astype(np.float64) @ sums_GS)
    return np.concatenate(found)


def middle(scores_R: Sums) -> tuple[float, float] | None:
    """The ends of the middle `LEVEL` of scores; those that are no number (nothing was counted) are left out."""
    numbers = scores_R[np.isfinite(scores_R)]
    if not len(numbers):
        return None
    low, high = np.quantile(numbers, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def interval(parts_NS: Sums, rows: Sequence[str], score_of: ScoreOf) -> tuple[float, float] | None:
    """The 95 % interval of ``score_of(sums)`` over rows; None for a single row, of which nothing can be said."""
    sums_GS = sums_by_row(parts_NS, rows)
    if len(sums_GS) < 2:
        return None
    return middle(np.array([score_of(sums) for sums in drawn_sums(sums_GS)]))


def paired(sums_a_GS: Sums, sums_b_GS: Sums, score_of: ScoreOf) -> tuple[tuple[float, float] | None, float]:
    """Of two models' sums over the same rows: the 95 % interval of B's score minus A's, and the chance of a difference
    at least as large if the two were alike.

    The chance is that of a permutation test (approximate randomisation, Noreen 1989): for each row the two models'
    answers change places or do not. Of up to `MOST_EXACT` rows all ways are tried, of more `SWAPS`.
    """
    size, drawn = sums_a_GS.shape[1], drawn_sums(np.concatenate([sums_a_GS, sums_b_GS], axis=1))
    differences = np.array([score_of(sums[size:]) - score_of(sums[:size]) for sums in drawn])
    whole_a, whole_b = sums_a_GS.sum(axis=0), sums_b_GS.sum(axis=0)
    seen = abs(score_of(whole_b) - score_of(whole_a)) * (1 - 1e-9)  # rounding makes no difference
    moved_RS = _moved(sums_b_GS - sums_a_GS)
    as_large = sum(abs(score_of(whole_b - moved) - score_of(whole_a + moved)) >= seen for moved in moved_RS)
    is_exact = len(sums_a_GS) <= MOST_EXACT
    chance = as_large / len(moved_RS) if is_exact else (as_large + 1) / (len(moved_RS) + 1)
    return middle(differences) if len(sums_a_GS) > 1 else None, float(chance)


def _moved(differences_GS: Sums) -> Sums:
    """What changes places in all when some rows do, float64[R, S]."""
    rows = len(differences_GS)
    if rows <= MOST_EXACT:
        ways_RG = (np.arange(2**rows)[:, None] >> np.arange(rows)) & 1
        return ways_RG.astype(np.float64) @ differences_GS
    generator, found = np.random.Generator(np.random.PCG64(SEED)), list[Sums]()
    at_once = max(1, AT_ONCE // rows)
    for start in range(0, SWAPS, at_once):
        ways_RG = generator.integers(2, size=(min(at_once, SWAPS - start), rows))
        found.append(ways_RG.astype(np.float64) @ differences_GS)
    return np.concatenate(found)


def mean_of(sums_S: Sums) -> float:
    """``(sum, count) -> sum / count``; no number where nothing was counted."""
    return float(sums_S[0] / sums_S[1]) if sums_S[1] else float("nan")
