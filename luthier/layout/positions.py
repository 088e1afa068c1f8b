"""Positions of segments that stand one behind the other in a row. T is the sum of their n lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[int] | NDArray[np.integer]


def position_ids(lengths: Lengths) -> NDArray[np.int64]:
    """int64[T], counted anew in each segment: ``[3, 2] -> [0, 1, 2, 0, 1]``."""
    counts = _counts(lengths)
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(segment_starts(counts), counts)


def segment_ids(lengths: Lengths) -> NDArray[np.int64]:
    """int64[T], the number of the segment each token is in: ``[3, 2] -> [0, 0, 0, 1, 1]``."""
    counts = _counts(lengths)
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def segment_starts(lengths: Lengths) -> NDArray[np.int64]:
    """int64[n], where each segment begins: ``[3, 2] -> [0, 3]``."""
    counts = _counts(lengths)
    return np.cumsum(counts) - counts


def cu_seqlens(lengths: Lengths) -> NDArray[np.int32]:
    """int32[n + 1], the boundaries as FlashAttention's varlen kernels take them: ``[3, 2] -> [0, 3, 5]``."""
    boundaries = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(_counts(lengths), out=boundaries[1:])
    assert boundaries[-1] <= np.iinfo(np.int32).max, f"{boundaries[-1]} tokens do not fit int32 boundaries"
    return boundaries.astype(np.int32)


def _counts(lengths: Lengths) -> NDArray[np.int64]:
    counts = np.asarray(lengths, dtype=np.int64)
    assert counts.ndim == 1 and (counts >= 0).all(), f"lengths must be a flat list of counts, got {lengths!r}"
    return counts
