"""What planning needs to know of a sample's leaves, without laying out their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.records import Sample


def measure_leaves(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens from root to leaf, and targets that the leaf's segment counts, leaf by leaf: `Sample.segments` in numbers.

    A leaf's first token is never counted, for nothing predicts it.
    """
    target, branches = sample.target, sample.branches
    if len(branches) == 1:
        return (len(target),), (int(np.count_nonzero(target[1:])),)
    if not all(branch.length for branch in branches):
        segments = sample.segments()
        return tuple(map(len, segments)), tuple(int(np.count_nonzero(segment.target[1:])) for segment in segments)
    lengths: list[int] = []  # from the root to the branch's end
    counts: list[int] = []
    is_leaf = [True] * len(branches)
    start = 0
    for branch in branches:
        stop = start + branch.length
        if branch.parent < 0:
            lengths.append(branch.length)
            counts.append(int(np.count_nonzero(target[start + 1 : stop])))
        else:
            lengths.append(lengths[branch.parent] + branch.length)
            counts.append(int(np.count_nonzero(target[start:stop])))
            is_leaf[branch.parent] = False
        start = stop
    leaf_targets = []
    for leaf in [number for number, is_one in enumerate(is_leaf) if is_one]:
        total, node = 0, leaf
        while node >= 0:  # the first leaf of a branch takes its targets, and those of all before it
            total += counts[node]
            counts[node] = 0
            node = branches[node].parent
        leaf_targets.append(total)
    return tuple(length for length, is_one in zip(lengths, is_leaf, strict=True) if is_one), tuple(leaf_targets)


def measure_encoders(sample: Sample) -> tuple[int, ...]:
    """What encoders run through for the media of each leaf, those that leaves share counted in each; () of text."""
    if not sample.media:
        return ()
    return tuple(sum(item.encoder_length for item in segment.media) for segment in sample.segments())


def numbers_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[2, 0, 3] -> [0, 1, 0, 1, 2]``"""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    """Numbers one behind the other, also if there are none."""
    return np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64) for part in parts)])
