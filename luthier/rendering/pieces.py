"""A recording cut into pieces, each with one owner. Their texts are sketches still."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType

from luthier.records import ControlPiece, MediaPiece, Piece, TextPiece
from luthier.rendering.control import ControlTokens
from luthier.rendering.template import Recording
from luthier.rendering.trace import Owner, owner_runs
from luthier.rendering.turns import Span

# What a character counts in the loss: (its owner, the span it lies in or None, whether it is in the stop token).
Weigh = Callable[[Owner, Span | None, bool], float]


def cut_pieces(
    recording: Recording,
    control: ControlTokens,
    spans: Sequence[Span],
    weigh: Weigh,
    *,
    media: Mapping[int, int] = MappingProxyType({}),
    start: int = 0,
    end: int | None = None,
) -> tuple[Piece, ...]:
    """Control tokens that the template wrote become `ControlPiece`s, all else `TextPiece`s cut at owners and spans.

    ``media`` says which items stand at which control tokens (`media_slots.place_media`). No string of the row is in a
    sketch, so what looks like a control token there is one. Gives the pieces from ``start`` on, which is the end of a
    control token, to ``end``.
    """
    sketch = recording.sketch[:end]
    spans = sorted((span for span in spans if span.end > start), key=attrgetter("seam", "end"))
    seams = {start, len(sketch), *(span.seam for span in spans if start < span.seam < len(sketch))}
    pieces: list[Piece] = []
    for begin, stop in pairwise(sorted(seams)):  # no token reaches over a seam: inference encodes the two sides apart
        position = begin
        for token_start, token_end, token in control.find(sketch[begin:stop]):
            place = begin + token_start
            pieces.extend(_texts(recording, position, place, spans, weigh))
            position = begin + token_end
            span = _span_at(spans, place)
            owner = recording.owner(place)
            if place in media:
                pieces.append(MediaPiece(token=token, number=media[place], message=owner.scope))
                continue
            weight = _weight(weigh, owner, span, place)
            message = span.message if owner.scope is None and span is not None else owner.scope
            pieces.append(ControlPiece(token=token, by_model=span is not None, weight=weight, message=message))
        pieces.extend(_texts(recording, position, stop, spans, weigh))
    return tuple(pieces)


def _texts(recording: Recording, start: int, end: int, spans: Sequence[Span], weigh: Weigh) -> Iterator[TextPiece]:
    edges = {start, end}
    edges.update(start + stop for _, stop in owner_runs(recording.owners[start:end]))
    seam = attrgetter("seam")
    near = spans[max(0, bisect_right(spans, start, key=seam) - 1) : bisect_left(spans, end, key=seam)]
    edges.update(edge for span in near for edge in (span.seam, span.stop, span.end) if start < edge < end)
    for begin, stop in pairwise(sorted(edges)):
        owner, span = recording.owner(begin), _span_at(spans, begin)
        own = None if span is None else span.message
        yield TextPiece(
            text=recording.sketch[begin:stop],
            by_model=span is not None,
            weight=_weight(weigh, owner, span, begin),
            message=owner.message if owner.field is not None else own if owner.scope is None else owner.scope,
            field=owner.field,
        )


def _weight(weigh: Weigh, owner: Owner, span: Span | None, position: int) -> float:
    learned = None if span is None or span.is_history else span
    return weigh(owner, learned, learned is not None and position >= learned.stop)


def _span_at(spans: Sequence[Span], position: int) -> Span | None:
    number = bisect_right(spans, position, key=attrgetter("seam")) - 1
    return spans[number] if number >= 0 and position < spans[number].end else None
