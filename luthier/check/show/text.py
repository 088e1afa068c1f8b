"""Tokens as plain text: white space and control characters made visible, targets in brackets.

For terminals and pages alike; what is here needs no colour.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby

from luthier.check.show.token_text import CLOSE_ITEM, OPEN_ITEM, TokenText, item_words, spans
from luthier.check.show.view import RowView, TokenView
from luthier.records import MediaItem
from luthier.writing import counted

OPEN, CLOSE = "⟦", "⟧"  # around what is learned, where there is no colour

_SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x1b": "␛"}


def visible(text: str) -> str:
    """Text in which what moves or hides the cursor is a sign: ``"a\\n" -> "a↵"``. Spaces stay spaces.

    Format characters such as bidirectional overrides are spelled out; the joiner of emoji is left in place.
    """
    return "".join(_SHOWN.get(character) or _sign(character) for character in text)


def plain_text(row: RowView) -> str:
    """The row as text, segment by segment, a line break wherever the text has one; targets stand in ``⟦⟧``."""
    lines = [headline(row)]
    for number, segment in enumerate(row.segments):
        if len(row.segments) > 1:
            lines.append(segment_line(row, number))
        lines += segment.notes
        text = "".join(
            f"{OPEN}{words}{CLOSE}" if is_target else words
            for is_target, words in _stretches(row.of_segment(number), row.media)
        )
        lines += ["", text, ""]
    return "\n".join(lines)


def headline(row: RowView) -> str:
    """``rows.jsonl:7 · 120 tokens · 31 targets (25.8 %) · 2 segments``."""
    count = len(row.tokens)
    parts = [
        row.title,
        counted(count, "token"),
        f"{counted(row.num_targets, 'target')} ({100 * row.num_targets / count:.1f} %)",
    ]
    if len(row.segments) > 1:
        parts.append(counted(len(row.segments), "segment"))
    if row.media:
        parts.append(counted(len(row.media), "media item"))
    if row.num_padding:
        parts.append(f"{row.num_padding:,} padding")
    return " · ".join(parts)


def segment_line(row: RowView, number: int) -> str:
    """``segment 0 · rows.jsonl:7 · 60 tokens · 12 targets``."""
    segment = row.segments[number]
    return (
        f"segment {number} · {segment.address} · {counted(segment.num_tokens, 'token')} · "
        f"{counted(segment.num_targets, 'target')}"
    )


def shown_spans(tokens: Sequence[TokenView]) -> Iterator[Sequence[TokenView]]:
    """The tokens of each shown text: one, those that a character is split over, or all that a media item stands on."""
    for item, group in groupby(tokens, key=lambda token: token.media):
        neighbours = list(group)
        if item is not None:
            yield neighbours
            continue
        for span in spans([TokenText(text=token.text, tokens=token.num_tokens) for token in neighbours]):
            yield neighbours[span.start : span.stop]


def span_text(span: Sequence[TokenView], media: Sequence[MediaItem]) -> str:
    """The text of a span of `shown_spans`; of a media item its words, ``⟨image 300×168 · 50 tokens⟩``."""
    number = span[0].media
    return span[0].text if number is None else f"{OPEN_ITEM}{item_words(media[number])}{CLOSE_ITEM}"


def lines_visible(text: str) -> str:
    """As `visible`, but a line feed is shown and made."""
    return "↵\n".join(visible(line) for line in text.split("\n"))


def _stretches(tokens: Sequence[TokenView], media: Sequence[MediaItem]) -> Iterator[tuple[bool, str]]:
    for is_target, group in groupby(shown_spans(tokens), key=lambda span: span[0].target):
        yield is_target, lines_visible("".join(span_text(span, media) for span in group))


def _sign(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cc" or (category == "Cf" and character != "\N{ZERO WIDTH JOINER}"):
        return f"‹U+{ord(character):04X}›"
    return character
