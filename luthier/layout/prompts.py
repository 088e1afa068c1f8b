"""A prompt and the continuations that are compared: how they hang together, and how a prompt is shortened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luthier.records import Branch, MediaItem, Sample, Segment, media_within


def prompt_tree(runs: Sequence[Segment | Sample], prompt_length: int) -> Sample:
    """Whole runs that begin with the same ``prompt_length`` tokens as a tree that holds these once.

    ``prompt_tree([q q A], [q q B B]) -> q q A B B``, branches of 2, 1 and 2 tokens. What a `Sample` has besides is the
    first run's address alone.
    """
    cuts = [slice(0, None), *(slice(prompt_length, None) for _ in runs[1:])]
    is_weighted = any(run.weight is not None for run in runs)
    return Sample(
        input_ids=np.concatenate([run.input_ids[cut] for run, cut in zip(runs, cuts, strict=True)]),
        target=np.concatenate([run.target[cut] for run, cut in zip(runs, cuts, strict=True)]),
        weight=np.concatenate([_weight(run)[cut] for run, cut in zip(runs, cuts, strict=True)])
        if is_weighted
        else None,
        branches=(
            Branch(parent=-1, length=prompt_length),
            *(Branch(parent=0, length=len(run.input_ids) - prompt_length) for run in runs),
        ),
        media=_media_of(runs, prompt_length),
        address=runs[0].address,
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


def _media_of(runs: Sequence[Segment | Sample], prompt_length: int) -> tuple[MediaItem, ...]:
    found: list[MediaItem] = list(runs[0].media)
    before = len(runs[0].input_ids)
    for run in runs[1:]:
        own = (item for item in run.media if item.start >= prompt_length)
        found += [replace(item, start=item.start - prompt_length + before) for item in own]
        before += len(run.input_ids) - prompt_length
    return tuple(found)


def _weight(run: Segment | Sample) -> NDArray[np.float32]:
    return np.ones(len(run.input_ids), dtype=np.float32) if run.weight is None else run.weight
