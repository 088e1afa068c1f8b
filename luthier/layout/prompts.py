"""Runs that begin alike as one tree: a prompt and the continuations that are compared, turns with what they share. And
how a prompt is shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luthier.records import Branch, MediaItem, Sample, Segment, media_within
from luthier.writing import counted


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
        weight=np.concatenate([_weight(run)[cut] for run, cut in zip(runs, own, strict=True)]) if is_weighted else None,
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
        weight=np.concatenate([_weight(prompt), _weight(answer)]) if is_weighted else None,
        media=(*prompt.media, *(replace(item, start=item.start + len(prompt)) for item in answer.media)),
    )


def span_of(segment: Segment, start: int, stop: int) -> Segment:
    """The tokens ``start:stop`` of a segment, targets and all."""
    return replace(
        segment,
        input_ids=segment.input_ids[start:stop],
        target=segment.target[start:stop],
        weight=None if segment.weight is None else segment.weight[start:stop],
        media=media_within(segment.media, [slice(start, stop)]),
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


def _weight(run: Segment | Sample) -> NDArray[np.float32]:
    return np.ones(len(run.input_ids), dtype=np.float32) if run.weight is None else run.weight
