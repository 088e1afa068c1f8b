"""Reading one leaf of a sample's token tree without building the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.records import Branch, Sample, Segment, media_within


def leaves(branches: Sequence[Branch]) -> list[int]:
    """The branches that no other continues, in order; `Sample.segments` has one segment for each."""
    parents = {branch.parent for branch in branches}
    return [node for node in range(len(branches)) if node not in parents]


def leaf_segment(sample: Sample, leaf: int) -> Segment:
    """The root-to-leaf run of the ``leaf``-th leaf: equal to ``sample.segments()[leaf]``, in the time of one path."""
    if len(sample.branches) == 1:
        return Segment(
            input_ids=sample.input_ids,
            target=sample.target,
            weight=sample.weight,
            media=sample.media,
            address=sample.address,
        )
    node = leaves(sample.branches)[leaf]
    owner = first_leaf_below(sample.branches)
    ends = np.cumsum([branch.length for branch in sample.branches])
    path = [node]
    while (parent := sample.branches[path[-1]].parent) >= 0:
        path.append(parent)
    path.reverse()
    spans = [slice(int(ends[n]) - sample.branches[n].length, int(ends[n])) for n in path]
    return Segment(
        input_ids=np.concatenate([sample.input_ids[span] for span in spans]),
        # a target on a shared branch counts in the first leaf below it and is context in the others
        target=np.concatenate([sample.target[s] & (owner[n] == node) for n, s in zip(path, spans, strict=True)]),
        weight=None if sample.weight is None else np.concatenate([sample.weight[span] for span in spans]),
        media=media_within(sample.media, spans),
        address=sample.address,
    )


def held_of_leaves(
    parents: NDArray[np.integer], lengths: NDArray[np.integer], bounds: NDArray[np.integer]
) -> NDArray[np.int64]:
    """int64[L], for each leaf of n trees, in order: how many of its first tokens are those of the leaf before it.

    ``parents``, ``lengths`` are of the trees' branches, stored depth first, tree after tree; ``bounds``, int64[n + 1],
    say which are whose. The first leaf of a tree has 0.

    [q 2, a 1, b 1, c 1 of q] with leaves b, c -> 0, 2
    """
    nodes = np.arange(len(parents), dtype=np.int64)
    first = np.repeat(bounds[:-1], np.diff(bounds))
    above = np.where(parents >= 0, parents + first, -1)
    starts = np.zeros(len(nodes), dtype=np.int64)
    while True:  # one round for each level of the deepest tree
        found = np.where(above >= 0, (starts + lengths)[above], 0)
        if np.array_equal(found, starts):
            break
        starts = found
    is_leaf = np.ones(len(nodes), dtype=np.bool_)
    is_leaf[above[above >= 0]] = False
    leaf = np.flatnonzero(is_leaf)
    held = np.zeros(len(leaf), dtype=np.int64)
    # depth first, the branch behind a leaf leaves the path where the next leaf does
    same_tree = first[leaf[1:]] == first[leaf[:-1]]
    held[1:][same_tree] = starts[leaf[:-1][same_tree] + 1]
    return held


def first_leaf_below(branches: Sequence[Branch]) -> list[int]:
    """For each branch the first leaf that continues it, by its number among the branches: where its targets count."""
    # parents stand before their children, so one backward pass sees every child before its parent
    first = list(range(len(branches)))
    seen = [False] * len(branches)
    for node in range(len(branches) - 1, -1, -1):
        parent = branches[node].parent
        if parent >= 0:
            first[parent] = min(first[parent], first[node]) if seen[parent] else first[node]
            seen[parent] = True
    return first
