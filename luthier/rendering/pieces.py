"""A traced text cut into pieces, each with one owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from luthier.records import ControlPiece, Piece, TextPiece
from luthier.rendering.control import ControlTokens
from luthier.rendering.template import Traced
from luthier.rendering.trace import Owner
from luthier.rendering.tracked import runs
from luthier.rendering.turns import Span, is_scaffold

# What a character counts in the loss: (its owner, the span it lies in or None, whether it is in the stop token).
Weigh = Callable[[Owner, Span | None, bool], float]


def cut_pieces(traced: Traced, control: ControlTokens, spans: Sequence[Span], weigh: Weigh) -> tuple[Piece, ...]:
    """Control tokens that the template wrote become `ControlPiece`s, all else `TextPiece`s cut at owners and spans."""
    pieces: list[Piece] = []
    position = 0
    for start, end, token in control.find(traced.text):
        if not is_scaffold(traced, start, end, token):
            continue  # a user's text that only looks like a control token stays text
        pieces.extend(_texts(traced, position, start, spans, weigh))
        span = _span_at(spans, traced.text.index(token, start, end))
        owner = traced.owner(start)
        pieces.append(
            ControlPiece(
                token=token,
                by_model=span is not None,
                weight=weigh(owner, span, span is not None and start >= span.stop),
                message=owner.scope,
            )
        )
        position = end
    pieces.extend(_texts(traced, position, len(traced.text), spans, weigh))
    return tuple(pieces)


def _texts(traced: Traced, start: int, end: int, spans: Sequence[Span], weigh: Weigh) -> Iterator[TextPiece]:
    edges = {start, end}
    edges.update(start + stop for _, stop in runs(traced.shadow[start:end]))
    edges.update(edge for span in spans for edge in (span.seam, span.stop, span.end) if start < edge < end)
    ordered = sorted(edges)
    for begin, stop in pairwise(ordered):
        owner, span = traced.owner(begin), _span_at(spans, begin)
        yield TextPiece(
            text=traced.text[begin:stop],
            by_model=span is not None,
            weight=weigh(owner, span, span is not None and begin >= span.stop),
            message=owner.scope if owner.field is None else owner.message,
            field=owner.field,
        )


def _span_at(spans: Sequence[Span], position: int) -> Span | None:
    return next((span for span in spans if span.seam <= position < span.end), None)
