"""A recording cut into pieces, each with one owner. Their texts are sketches still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from luthier.records import ControlPiece, Piece, TextPiece
from luthier.rendering.control import ControlTokens
from luthier.rendering.template import Recording, owner_runs
from luthier.rendering.trace import Owner
from luthier.rendering.turns import Span

# What a character counts in the loss: (its owner, the span it lies in or None, whether it is in the stop token).
Weigh = Callable[[Owner, Span | None, bool], float]


def cut_pieces(
    recording: Recording, control: ControlTokens, spans: Sequence[Span], weigh: Weigh, end: int | None = None
) -> tuple[Piece, ...]:
    """Control tokens that the template wrote become `ControlPiece`s, all else `TextPiece`s cut at owners and spans.

    No string of the row is in a sketch, so what looks like a control token there is one. ``end`` cuts the rest off.
    """
    sketch = recording.sketch[:end]
    seams = {0, len(sketch), *(span.seam for span in spans if span.seam < len(sketch))}
    pieces: list[Piece] = []
    for begin, stop in pairwise(sorted(seams)):  # no token reaches over a seam: inference encodes the two sides apart
        position = begin
        for start, token_end, token in control.find(sketch[begin:stop]):
            pieces.extend(_texts(recording, position, begin + start, spans, weigh))
            span = _span_at(spans, begin + start)
            owner = recording.owner(begin + start)
            in_stop = span is not None and begin + start >= span.stop
            pieces.append(
                ControlPiece(
                    token=token, by_model=span is not None, weight=weigh(owner, span, in_stop), message=owner.scope
                )
            )
            position = begin + token_end
        pieces.extend(_texts(recording, position, stop, spans, weigh))
    return tuple(pieces)


def _texts(recording: Recording, start: int, end: int, spans: Sequence[Span], weigh: Weigh) -> Iterator[TextPiece]:
    edges = {start, end}
    edges.update(start + stop for _, stop in owner_runs(recording.owners[start:end]))
    edges.update(edge for span in spans for edge in (span.seam, span.stop, span.end) if start < edge < end)
    for begin, stop in pairwise(sorted(edges)):
        owner, span = recording.owner(begin), _span_at(spans, begin)
        yield TextPiece(
            text=recording.sketch[begin:stop],
            by_model=span is not None,
            weight=weigh(owner, span, span is not None and begin >= span.stop),
            message=owner.scope if owner.field is None else owner.message,
            field=owner.field,
        )


def _span_at(spans: Sequence[Span], position: int) -> Span | None:
    return next((span for span in spans if span.seam <= position < span.end), None)
