"""Token trees side by side in one row: which token each one follows, its position, and what it may see.

A row's branches stand one behind the other, each where the ones before it end, parents before their children. A pair
that shares its prompt (3 tokens; chosen 2, rejected 2):

    branches   prompt         chosen   rejected
    tokens     0   1   2      3   4    5   6
    follows   -1   0   1      2   3    2   5
    positions  0   1   2      3   4    3   4

T is the sum of the branches' lengths, n their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.layout.positions import segment_ids, segment_starts
from luthier.layout.trees import first_leaf_below, leaves
from luthier.records import Branch


def join_trees(trees: Iterable[Sequence[Branch]]) -> tuple[Branch, ...]:
    """The trees as one row's branches: parents are counted in the row."""
    joined: list[Branch] = []
    for tree in trees:
        before = len(joined)
        joined += [replace(b, parent=b.parent + before) if b.parent >= 0 else b for b in tree]
    return tuple(joined)


def ancestors(branches: Sequence[Branch]) -> list[tuple[int, ...]]:
    """For each branch those that it continues, the root first.

    Raises AssertionError where a parent stands behind its child.
    """
    found: list[tuple[int, ...]] = []
    for node, branch in enumerate(branches):
        assert -1 <= branch.parent < node, f"branch {node} continues branch {branch.parent}, which is not before it"
        found.append((*found[branch.parent], branch.parent) if branch.parent >= 0 else ())
    return found


def tree_positions(branches: Sequence[Branch]) -> NDArray[np.int64]:
    """int64[T], the number of tokens before each on its path: a branch counts on from its parent's end."""
    lengths = [branch.length for branch in branches]
    offsets = [sum(lengths[node] for node in path) for path in ancestors(branches)]
    pieces = [np.arange(start, start + length) for start, length in zip(offsets, lengths, strict=True)]
    return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)


def tree_reach(advance_T: NDArray[Any], branches: Sequence[Branch]) -> NDArray[Any]:
    """[T], of the same type: the sum of what the tokens before each on its path advance by.

    Ones give `tree_positions`; a picture advances by more or less than the number of its tokens.
    """
    total = np.zeros(len(advance_T) + 1, dtype=advance_T.dtype)
    np.cumsum(advance_T, out=total[1:])
    lengths = np.array([branch.length for branch in branches], dtype=np.int64)
    starts = segment_starts(lengths)
    shift = -total[starts]
    for node, branch in enumerate(branches):
        if branch.parent >= 0:  # parents stand before their children, so theirs is known
            shift[node] += total[starts[branch.parent] + branches[branch.parent].length] + shift[branch.parent]
    reached: NDArray[Any] = total[:-1] + np.repeat(shift, lengths)
    return reached


def tree_follows(branches: Sequence[Branch]) -> NDArray[np.int64]:
    """int64[T], the token that each one follows on its path; -1 where a path begins."""
    lengths = [branch.length for branch in branches]
    starts = segment_starts(lengths)
    follows = np.arange(sum(lengths), dtype=np.int64) - 1
    for node, path in enumerate(ancestors(branches)):
        if lengths[node]:
            filled = [a for a in path if lengths[a]]  # a branch without tokens has no last one
            follows[starts[node]] = starts[filled[-1]] + lengths[filled[-1]] - 1 if filled else -1
    return follows


def tree_leaves(branches: Sequence[Branch]) -> tuple[list[int], NDArray[np.int64]]:
    """The leaves in order, and int64[T]: which of them (by its number in that list) a token's target counts in.

    A token that several leaves share counts in the first of them, as `Sample.segments` has it.
    """
    ends = leaves(branches)
    number = {leaf: count for count, leaf in enumerate(ends)}
    of_branches = np.array([number[leaf] for leaf in first_leaf_below(branches)], dtype=np.int64)
    return ends, of_branches[segment_ids([branch.length for branch in branches])]


def seen_blocks(types_T: NDArray[np.integer], branches: Sequence[Branch]) -> NDArray[np.int64]:
    """int64[T]: the number of the run of seen tokens (types 1 and 2: of pictures and videos) that a token is in, or -1.

    [0 1 1 0 1], [whole 5] -> [-1 0 0 -1 1]. A run ends where its branch does. Types may be longer: of padding.
    """
    num_tokens = sum(branch.length for branch in branches)
    seen_T = (types_T[:num_tokens] == 1) | (types_T[:num_tokens] == 2)
    node_T = segment_ids([branch.length for branch in branches])
    begins_T = seen_T.copy()
    begins_T[1:] &= ~seen_T[:-1] | (node_T[1:] != node_T[:-1])
    return np.where(seen_T, np.cumsum(begins_T) - 1, -1)


def tree_mask(
    branches: Sequence[Branch],
    *,
    width: int,
    window: int | None = None,
    blocks_T: NDArray[np.int64] | None = None,
    whole_blocks: bool = False,
) -> NDArray[np.bool_]:
    """bool[width, width]: True where the token of the row may see that of the column.

    A token sees itself and what is before it on its path; under a sliding ``window`` the last ``window`` of these,
    itself among them. Tokens of one of ``blocks_T`` (`seen_blocks`) also see what is behind them in it; of
    ``whole_blocks`` what is before them in it past a window, too. Columns behind the row's T tokens are padding: each
    sees itself alone, so that no row is empty.
    """
    num_tokens = sum(branch.length for branch in branches)
    assert num_tokens <= width, f"{num_tokens} tokens in a row of {width}"
    node_T = segment_ids([branch.length for branch in branches])
    on_path = np.eye(len(branches), dtype=np.bool_)
    for node, path in enumerate(ancestors(branches)):
        on_path[node, list(path)] = True
    position_T = tree_positions(branches)
    distance_TT = position_T[:, None] - position_T[None, :]
    seen_TT = distance_TT >= 0
    near_TT = distance_TT < window if window is not None else np.ones_like(seen_TT)
    if blocks_T is not None:
        same_TT = (blocks_T[:, None] == blocks_T[None, :]) & (blocks_T >= 0)[:, None]
        seen_TT |= same_TT
        near_TT |= same_TT & whole_blocks
    seen_TT &= near_TT & on_path[node_T[:, None], node_T[None, :]]
    mask = np.eye(width, dtype=np.bool_)
    mask[:num_tokens, :num_tokens] = seen_TT
    return mask
