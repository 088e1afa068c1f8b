"""Rows that are compared: the prompt and its continuations, encoded one by one, become one token tree.

    chosen     q q q A A              branch 0: q q q, the prompt
    rejected   q q q B B B     ->     branch 1: A A,   parent 0
                                      branch 2: B B B, parent 0

Continuations part where the first of them begins to be learned, also if they begin alike: two continuations are two
leaves, and no target is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowDropped, RowError
from luthier.layout import prompt_tree
from luthier.records import ControlPiece, MediaPiece, Sample
from luthier.rendering.filled import Comparison, Filled


def parts_of(filled: Filled) -> tuple[Filled, ...]:
    """What is encoded of a row: itself and, of a pair, the prompt with the rejected continuation."""
    comparison = filled.comparison
    return (filled,) if comparison is None or comparison.rejected is None else (filled, comparison.rejected)


def join(filled: Filled, outcomes: Sequence[Sample | RowError], control_ids: NDArray[np.int32]) -> Sample | RowError:
    """The row's sample from those of `parts_of`, or why there is none. ``control_ids`` are all control tokens' ids."""
    samples: list[Sample] = []
    for outcome in outcomes:
        if isinstance(outcome, RowError):
            return outcome
        if not outcome.target.any():
            return RowDropped("no_target", "no token of this row is trained", address=filled.address)
        samples.append(outcome)
    if filled.comparison is None:
        return samples[0]
    prompt_length = min(int(sample.target.argmax()) for sample in samples)
    try:
        _check(samples, prompt_length)
    except RowError as error:
        return error.at(filled.address)
    turns = _turns(filled, filled.comparison, samples[0], prompt_length, control_ids)
    return replace(
        prompt_tree(samples, prompt_length),
        notes=_notes(samples),
        verdict=filled.comparison.verdict,
        prompt_turns=turns,
    )


def _check(samples: Sequence[Sample], prompt_length: int) -> None:
    if not prompt_length:
        raise RowError("empty_prompt", "nothing stands before the answer, so nothing predicts its first token")
    first = samples[0].input_ids
    for other in samples[1:]:
        if np.array_equal(first, other.input_ids):
            what = (
                f"chosen and rejected are the same {len(first) - prompt_length} tokens, so there is nothing to prefer"
            )
            raise RowError("no_difference", what, field="rejected")
        assert np.array_equal(first[:prompt_length], other.input_ids[:prompt_length]), "one prompt, encoded twice"


def _notes(samples: Sequence[Sample]) -> tuple[tuple[str, int], ...]:
    # both sides count what is in the prompt, so the larger count is that of the row, or close to it
    most: dict[str, int] = {}
    for sample in samples:
        for what, count in sample.notes:
            most[what] = max(count, most.get(what, 0))
    return tuple(most.items())


def _turns(
    filled: Filled, comparison: Comparison, sample: Sample, prompt_length: int, control_ids: NDArray[np.int32]
) -> tuple[int, ...]:
    """Where the user's messages begin in the prompt: at the control tokens with which the template opens them.

    ``()`` where they cannot be told, as in a row whose own text may hold control tokens.
    """
    if filled.allowed:
        return ()
    opening: list[int] = []  # which of the control tokens of the path
    count, seen = 0, set[int]()
    for piece in filled.blueprint.paths[0]:
        if isinstance(piece, MediaPiece):
            continue
        is_control = isinstance(piece, ControlPiece)
        # a begin token belongs to the sequence, also where a template prints it with its first message
        begins_text = isinstance(piece, ControlPiece) and piece.token in filled.blueprint.control.opening
        if piece.message is not None and piece.message not in seen and not begins_text:
            seen.add(piece.message)
            if is_control and piece.message in comparison.users:
                opening.append(count)
        count += is_control
    is_own = np.isin(sample.input_ids[:prompt_length], control_ids)
    for item in sample.media:  # those are the processor's
        is_own[item.start : item.start + item.length] = False
    places = np.flatnonzero(is_own).tolist()
    return tuple(places[number] for number in opening if number < len(places))
