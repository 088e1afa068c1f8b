"""Integers before tensors: positions, cuts and trees as pure functions of numbers and numpy arrays.

Here are token trees as numbers: the tokens of each leaf, what follows what, positions, and which tokens see which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.records import Branch, MediaItem, Sample, Segment, media_within
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# Token trees side by side in one row: which token each one follows, its position, and what it may see.
#
# A row's branches stand one behind the other, each where the ones before it end, parents before their children. A
# pair that shares its prompt (3 tokens; chosen 2, rejected 2):
#
#     branches   prompt         chosen   rejected
#     tokens     0   1   2      3   4    5   6
#     follows   -1   0   1      2   3    2   5
#     positions  0   1   2      3   4    3   4
#
# T is the sum of the branches' lengths, n their number.


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


def tree_reach(advance_T: NDArray[np.generic], branches: Sequence[Branch]) -> NDArray[Any]:
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
    reached: NDArray[np.generic] = total[:-1] + np.repeat(shift, lengths)
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
    assert num_tokens <= width, f"{counted(num_tokens, 'token')} in a row of {width}"
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
            for_rewards=sample.for_rewards,
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
        for_rewards=sample.for_rewards,
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


# --------------------------------------------------------------------------------------------------------------------
# Positions of segments that stand one behind the other in a row. T is the sum of their n lengths.


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
    assert boundaries[-1] <= np.iinfo(np.int32).max, f"{counted(boundaries[-1], 'token')} do not fit int32 boundaries"
    return boundaries.astype(np.int32)


def _counts(lengths: Lengths) -> NDArray[np.int64]:
    counts = np.asarray(lengths, dtype=np.int64)
    assert counts.ndim == 1 and (counts >= 0).all(), f"lengths must be a flat list of counts, got {lengths!r}"
    return counts


# ----------------------------------------------------------------------------------- runs that begin alike, as one tree


def tree_of_runs(runs: Sequence[Segment | Sample], held: Sequence[int]) -> Sample:
    """Whole runs as a tree: the first ``held[i]`` tokens of run i are those of the run before it, and stand there once.

    ``tree_of_runs([q a b], [q a c], [q d], held=[0, 2, 1]) -> q a b c d``, branches ``q``, ``a``, ``b``, ``c``, ``d``
    with parents -1, 0, 1, 1, 0. The tokens of each run that no run before it holds are side by side. A token that runs
    share is a target if it is one in the first of them. What a `Sample` has besides is the first run's address alone.

    Raises AssertionError where a run does not begin as the one before it, or ends with what it shares.
    """
    assert len(runs) == len(held) and held[0] == 0, "the first run holds all of its tokens itself"
    for before, run, shared in zip(runs, runs[1:], held[1:], strict=False):
        assert shared < min(len(before.input_ids), len(run.input_ids)), "every run ends in a branch of its own"
        same = np.array_equal(before.input_ids[:shared], run.input_ids[:shared])
        assert same, f"{run.address}: a run does not begin with the {counted(shared, 'token')} of the one before it"
    own = [slice(shared, None) for shared in held]
    is_weighted = any(run.weight is not None for run in runs)
    return Sample(
        input_ids=np.concatenate([run.input_ids[cut] for run, cut in zip(runs, own, strict=True)]),
        target=np.concatenate([run.target[cut] for run, cut in zip(runs, own, strict=True)]),
        weight=np.concatenate([token_weights(run)[cut] for run, cut in zip(runs, own, strict=True)])
        if is_weighted
        else None,
        branches=branches_of_runs([len(run.input_ids) for run in runs], held),
        media=_media_of(runs, held),
        address=runs[0].address,
    )


def branches_of_runs(lengths: Sequence[int], held: Sequence[int]) -> tuple[Branch, ...]:
    """The branches of `tree_of_runs`: each run's own tokens, parted where later runs leave it.

    ``branches_of_runs([3, 3, 2], [0, 2, 1])`` -> lengths 1, 1, 1, 1, 1 with parents -1, 0, 1, 1, 0
    """
    path: list[tuple[int, int, int]] = []  # (run, from, to): whose tokens the present path is made of
    leaves_at: list[set[int]] = [set() for _ in lengths]  # where a run's own tokens are left
    parents: list[tuple[int, int] | None] = []  # of each run's own tokens: the run that it leaves, and where
    for run, (length, shared) in enumerate(zip(lengths, held, strict=True)):
        while path and path[-1][1] >= shared:
            path.pop()
        if path:
            owner, start, _ = path.pop()
            path.append((owner, start, shared))
            leaves_at[owner].add(shared)
        parents.append((path[-1][0], shared) if path else None)
        path.append((run, shared, length))
    branches: list[Branch] = []
    ends: dict[tuple[int, int], int] = {}  # (run, place) -> the branch that ends there
    for run, (length, shared) in enumerate(zip(lengths, held, strict=True)):
        left = parents[run]
        parent, start = (-1 if left is None else ends[left]), shared
        for stop in sorted({*leaves_at[run], length}):
            branches.append(Branch(parent=parent, length=stop - start))
            parent = ends[run, stop] = len(branches) - 1
            start = stop
    return tuple(branches)


def prompt_tree(runs: Sequence[Segment | Sample], prompt_length: int) -> Sample:
    """Whole runs that begin with the same ``prompt_length`` tokens as a tree that holds these once.

    ``prompt_tree([q q A], [q q B B]) -> q q A B B``, branches of 2, 1 and 2 tokens. What a `Sample` has besides is the
    first run's address alone.
    """
    branches = [Branch(parent=0, length=len(run.input_ids) - prompt_length) for run in runs]
    return replace(
        tree_of_runs(runs, [0] + [prompt_length] * (len(runs) - 1)),
        branches=(Branch(parent=-1, length=prompt_length), *branches),  # of a single run, too
    )


def cut_prompt(turns: Sequence[int], length: int, *, room: int) -> tuple[int, int] | None:
    """``(head, start)``: of a prompt of ``length`` tokens ``[0:head)`` and ``[start:length)`` stay, ``room`` at most.

    ``turns`` are where the user's messages begin. What stands before the first of them (the system message) stays, and
    so does the last one, which asks the question; messages go from the first question on, as few as will do. None if
    that is not enough.

    ``cut_prompt([3, 8, 15], 20, room=16) -> (3, 8)``   the first question and its answer, tokens 3 to 7, are left out
    """
    if length <= room:
        return 0, 0
    return next(((turns[0], start) for start in turns[1:] if turns[0] + length - start <= room), None)


def splice(prompt: Segment, answer: Segment) -> Segment:
    """One row's prompt with another row's answer behind it; the answer's own targets stay, its first token's too."""
    is_weighted = prompt.weight is not None or answer.weight is not None
    return replace(
        prompt,
        input_ids=np.concatenate([prompt.input_ids, answer.input_ids]),
        target=np.concatenate([np.zeros_like(prompt.target), answer.target]),
        weight=np.concatenate([token_weights(prompt), token_weights(answer)]) if is_weighted else None,
        media=(*prompt.media, *(replace(item, start=item.start + len(prompt)) for item in answer.media)),
    )


def spans_of(segment: Segment, *spans: slice, first: bool = True, last: bool = True) -> Segment:
    """The tokens of some spans, one behind the other; ``first``, ``last``: these may be targets if they were."""
    kept = spans[0] if len(spans) == 1 else np.r_[spans]
    target = segment.target[kept]
    if not (first and last):
        target = target.copy()
        target[:1] = target[:1] if first else False
        target[-1:] = target[-1:] if last else False
    return Segment(  # in half the time of `replace`: each cut segment of each batch is one
        input_ids=segment.input_ids[kept],
        target=target,
        weight=None if segment.weight is None else segment.weight[kept],
        media=media_within(segment.media, spans) if segment.media else (),
        for_rewards=segment.for_rewards,
        address=segment.address,
    )


def _media_of(runs: Sequence[Segment | Sample], held: Sequence[int]) -> tuple[MediaItem, ...]:
    found: list[MediaItem] = []
    before = 0
    for run, shared in zip(runs, held, strict=True):
        own = [item for item in run.media if item.start >= shared]
        assert all(item.start + item.length <= shared for item in run.media if item.start < shared), "a parted item"
        found += [replace(item, start=item.start - shared + before) for item in own]
        before += len(run.input_ids) - shared
    return tuple(found)


def token_weights(run: Segment | Sample) -> NDArray[np.float32]:
    """float32[T]: what each token counts in the loss."""
    return np.ones(len(run.input_ids), dtype=np.float32) if run.weight is None else run.weight
