"""Whose each token is: the pieces of a rendered row laid along its tokens.

The store keeps ids, targets and weights, no owners: training needs none. Who wants to see them renders the row again
and lays its pieces along the stored tokens. That is also a check: the two agree in every token and weight, or what was
stored is not what rendering gives now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.pieces import split_expansion
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import StoreError
from luthier.layout.trees import token_weights
from luthier.records import ControlPiece, MediaPiece, Piece, Rendered, Sample, Segment, TextPiece
from luthier.rendering.control import ControlTokens
from luthier.writing import counted

OwnedToken = tuple[int, Piece]
AGAIN = "delete the folder of the store and prepare again; please report it, the store should have noticed"


def token_owners(
    rendered: Rendered, tokenizer: Tokenizer, *, allowed: frozenset[str] = frozenset(), expansions: Sequence[str] = ()
) -> list[list[OwnedToken]]:
    """For each path its tokens, as ids with the piece each belongs to. ``expansions`` are the texts of its media.

    A token that reaches over two pieces (``" the"``) belongs to the one it ends in, as its weight does. ``allowed`` are
    strings that are control tokens even in a row's own text, if the run says so. Raises `RowError` where encoding does.
    """
    paths = [list(_with_expansions(path, expansions, tokenizer.control)) for path in rendered.paths]
    return [list(_owned(path, tokenizer, allowed)) for path in paths]


def leaf_owners(sample: Sample, paths: Sequence[Sequence[OwnedToken]]) -> list[list[Piece]]:
    """For each segment of ``sample.segments()`` the piece of every token; ``paths`` come from `token_owners`.

    Where paths share tokens, a token belongs to the piece that makes it a target. Raises `StoreError` if the segments
    are not those paths, or a target does not weigh what its piece does.
    """
    ids = [np.array([token_id for token_id, _ in path], dtype=np.int32) for path in paths]
    taken: set[int] = set()
    return [_pieces_of(segment, number, paths, ids, taken) for number, segment in enumerate(sample.segments())]


def sample_difference(stored: Sample, now: Sample, tokenizer: Tokenizer) -> str | None:
    """The first thing in which two samples differ, in words; None if there is none."""
    if [branch.length for branch in stored.branches] != [branch.length for branch in now.branches]:
        return f"branches of {_lengths(stored)} tokens are stored, {_lengths(now)} come now"
    differs = np.flatnonzero(stored.input_ids != now.input_ids)
    if len(differs):
        place = int(differs[0])
        old, new = int(stored.input_ids[place]), int(now.input_ids[place])
        return f"token {place} is {old} {tokenizer.token(old)!r} in the store, {new} {tokenizer.token(new)!r} now"
    for name, old_values, new_values in (
        ("target", stored.target, now.target),
        ("weight", token_weights(stored), token_weights(now)),
    ):
        differs = np.flatnonzero(old_values != new_values)
        if len(differs):
            place = int(differs[0])
            return f"the {name} of token {place} is {old_values[place]} in the store, {new_values[place]} now"
    if stored.branches != now.branches:
        return "the branches hang together differently"
    return None


@dataclass(frozen=True, slots=True)
class _ExpandedSlots:
    """A control token, ``count`` times, that a media item's expansion has."""

    token: str
    count: int
    owner: MediaPiece


def _with_expansions(
    path: Sequence[Piece], expansions: Sequence[str], control: ControlTokens
) -> Iterator[TextPiece | ControlPiece | _ExpandedSlots]:
    for piece in path:
        if not isinstance(piece, MediaPiece):
            yield piece
            continue
        for part in split_expansion(expansions[piece.number], control):
            if isinstance(part, str):
                yield TextPiece(text=part, message=piece.message, field="media")
            else:
                yield _ExpandedSlots(*part, piece)


def _owned(
    path: Sequence[TextPiece | ControlPiece | _ExpandedSlots], tokenizer: Tokenizer, allowed: frozenset[str]
) -> Iterator[OwnedToken]:
    # Runs are cut as encoding cuts them: at control tokens, and where `by_model` changes.
    for _, group in groupby(path, key=lambda piece: piece.by_model if isinstance(piece, TextPiece) else id(piece)):
        pieces = list(group)
        texts = [piece for piece in pieces if isinstance(piece, TextPiece)]
        if texts:
            yield from _owned_run(texts, tokenizer, allowed)
        for piece in pieces:
            match piece:
                case ControlPiece():
                    yield tokenizer.control_id(piece.token), piece
                case _ExpandedSlots():
                    token_id = tokenizer.control_id(piece.token)
                    yield from ((token_id, piece.owner) for _ in range(piece.count))


def _owned_run(pieces: Sequence[TextPiece], tokenizer: Tokenizer, allowed: frozenset[str]) -> Iterator[OwnedToken]:
    starts = np.array(list(accumulate((len(piece.text) for piece in pieces[:-1]), initial=0)))
    for ids, last in _stretches("".join(piece.text for piece in pieces), tokenizer, allowed):
        # [0, 3, 5] starts, a token whose last character is 4 -> piece 1; one that covers nothing belongs to the first
        owners = np.maximum(np.searchsorted(starts, last, side="right") - 1, 0)
        for token_id, owner in zip(ids.tolist(), owners.tolist(), strict=True):
            yield token_id, pieces[owner]


def _stretches(
    text: str, tokenizer: Tokenizer, allowed: frozenset[str]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Ids and the last character of each: of the text between allowed control strings, and of these."""
    position = 0
    for start, end, token in tokenizer.control.find(text) if allowed else ():
        if token in allowed:
            ids, last = tokenizer.encode_with_last(text[position:start])
            yield ids, last + position
            yield np.array([tokenizer.control_id(token)], dtype=np.int32), np.array([end - 1])
            position = end
    ids, last = tokenizer.encode_with_last(text[position:])
    yield ids, last + position


def _pieces_of(
    segment: Segment,
    number: int,
    paths: Sequence[Sequence[OwnedToken]],
    ids: Sequence[NDArray[np.int32]],
    taken: set[int],
) -> list[Piece]:
    whole = (n for n in range(len(paths)) if n not in taken and np.array_equal(ids[n], segment.input_ids))
    home = next(whole, None)
    if home is None:
        raise StoreError(
            f"{segment.address}: run {number + 1} is {counted(len(segment), 'token')} in the store, and rendering "
            f"gives none of these tokens now (it gives {', '.join(str(len(path)) for path in paths)} tokens)",
            hint=AGAIN,
        )
    taken.add(home)
    pieces = [piece for _, piece in paths[home]]
    beside = [
        path
        for path, own in zip(paths, ids, strict=True)
        if len(own) <= len(pieces) and np.array_equal(own, segment.input_ids[: len(own)])
    ]
    weights = np.ones(len(segment), np.float32) if segment.weight is None else segment.weight
    for place in np.flatnonzero(segment.target).tolist():
        # a path that ends on the way has its targets in this run
        able = [pieces[place], *(path[place][1] for path in beside if place < len(path))]
        owner = next((piece for piece in able if np.isclose(_weight(piece), weights[place])), None)
        if owner is None:
            raise StoreError(
                f"{segment.address}: token {place} of run {number + 1} counts {weights[place]:g} in the store, and "
                f"{_weight(pieces[place]):g} as rendered now",
                hint=AGAIN,
            )
        pieces[place] = owner
    return pieces


def _weight(piece: Piece) -> float:
    return 0.0 if isinstance(piece, MediaPiece) else piece.weight


def _lengths(sample: Sample) -> str:
    return ", ".join(str(branch.length) for branch in sample.branches)
