"""A `RowView` in a terminal: the text with its targets and owners in colour, and a table of every token.

Where there is no colour (NO_COLOR, a pipe), targets stand in brackets: nothing is said by colour alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luthier.check.show.token_origins import MEDIA, TEMPLATE
from luthier.check.show.token_text import CLOSE, CLOSE_ITEM, OPEN, OPEN_ITEM, lines_visible, visible
from luthier.check.show.view import RowView, SegmentView, TokenView, shown_spans, span_text
from luthier.records import MediaItem
from luthier.rendering.messages import kind_of_media
from luthier.writing import counted

TARGET = "bold green"
CONTROL_TARGET = "bold green underline"
CONTROL = "magenta"
ITEM = "bold white on dark_cyan"
FINDING = "bold red"
WIDE = 104  # columns; below it the table has one space between its columns
# What is only read has the colour of who said it.
VOICES: Mapping[str, str] = {
    "system": "yellow",
    "user": "blue",
    "assistant": "",
    "tool": "cyan",
    "tools": "dim yellow",
    "text": "",
    MEDIA: "dark_cyan",
    TEMPLATE: "dim",
}


def facts_line(facts: Mapping[str, str]) -> Text:
    """Under which settings the tokens were made, in a line or two."""
    return Text(" · ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in facts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class RowText:
    """The row's text, segment by segment, targets in green or, where the terminal has no colours, in brackets; cut
    after ``max_tokens`` tokens, which is said."""

    row: RowView
    max_tokens: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_colour = console.color_system is not None and not console.no_color
        row = self.row
        yield Text.assemble((row.title, "bold"), (f" · {_facts(row)}", "dim"))
        yield Padding(_legend(row, has_colour=has_colour), (0, 0, 1, 2))
        shown = row.tokens if self.max_tokens is None else row.tokens[: _num_shown(row, self.max_tokens)]
        for number, segment in enumerate(row.segments):
            tokens = [token for token in shown if token.segment == number]
            if not tokens:
                continue
            if len(row.segments) > 1:
                yield Padding(Text(_segment_line(row, number), style="dim"), (0, 0, 0, 2))
            for note in _notes(segment):
                yield Padding(note, (0, 0, 0, 2))
            yield Padding(_segment_text(tokens, row.media, has_colour=has_colour), (0, 0, 1, 2))
        if len(shown) < len(row.tokens):
            yield Padding(Text(f"… {counted(len(row.tokens) - len(shown), 'more token')}", style="dim"), (0, 0, 0, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Every token of the row with its numbers, one table a segment, which fits into 80 columns; a character split over
    tokens stands at its first one."""

    row: RowView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, segment in enumerate(self.row.segments):
            tokens = self.row.of_segment(number)
            yield Text(_segment_line(self.row, number), style="bold")
            yield from _notes(segment)
            yield _segment_table(tokens, self.row.media, is_wide=options.max_width >= WIDE)


def _facts(row: RowView) -> str:
    """``120 tokens · 31 targets (25.8 %) · 2 segments``."""
    count = len(row.tokens)
    parts = [
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


def _segment_line(row: RowView, number: int) -> str:
    """``segment 0 · rows.jsonl:7 · 60 tokens · 12 targets``."""
    segment = row.segments[number]
    return (
        f"segment {number} · {segment.address} · {counted(segment.num_tokens, 'token')} · "
        f"{counted(segment.num_targets, 'target')}"
    )


def _notes(segment: SegmentView) -> Iterator[Text]:
    for note in segment.notes:
        yield Text(note, style="italic dim")
    if segment.finding is not None:
        yield Text(f"! {segment.finding}", style=FINDING)


def _legend(row: RowView, *, has_colour: bool) -> Text:
    targets = {token.control for token in row.tokens if token.target}
    word = "scored" if row.is_compared else "learned"
    entries = [(word, TARGET)] if has_colour else [(f"{OPEN}{word}{CLOSE}", "")]
    if has_colour:
        entries += [(f"control token, {word}", CONTROL_TARGET)] if True in targets else []
        beside = [token for token in row.tokens if token.media is None and not token.target]
        entries += [("control token", CONTROL)] if any(token.control for token in beside) else []
        entries += [("media item", ITEM)] if row.media else []
        present = {_voice(token) for token in beside if not token.control}
        entries += [(voice, style) for voice, style in VOICES.items() if voice in present]
    legend = Text("   ").join(Text(name, style=style) for name, style in entries)
    return legend.append("   the rest is only read", style="dim") if not has_colour else legend


def _num_shown(row: RowView, max_tokens: int) -> int:
    """How many tokens are within the limit; a media item counts as one, or it would hide what is asked of it."""
    left, found = max_tokens, 0
    for span in shown_spans(row.tokens):
        left -= 1 if span[0].media is not None else len(span)
        if left < 0:
            break
        found += len(span)
    return found


def _segment_table(tokens: Sequence[TokenView], media: Sequence[MediaItem], *, is_wide: bool) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2 if is_wide else 1, 0, 0))
    for name in ("index", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", min_width=10, max_width=40)
    table.add_column("owner", no_wrap=True, overflow="ellipsis")
    table.add_column("target", no_wrap=True)
    for name in ("position", "label") if is_wide else ("pos", "label"):
        table.add_column(name, justify="right", no_wrap=True)
    for span in shown_spans(tokens):
        if span[0].media is not None:
            table.add_row(*_item_row(span, media))
            continue
        for token in span:
            table.add_row(
                Text(str(token.index), style="dim"),
                str(token.id),
                Text(visible(token.text), style=_style(token)) if token.num_tokens else Text("⋯", style="dim"),
                Text("–" if token.owner is None else str(token.owner), style=VOICES.get(_voice(token), "")),
                Text(_target_words(token), style="green"),
                token.place,
                Text("–", style="dim") if token.label is None else str(token.label),
            )
    return table


def _item_row(span: Sequence[TokenView], media: Sequence[MediaItem]) -> list[RenderableType]:
    """All tokens of a media item in one line, which says how many they are: the numbers of the first, the slot's id."""
    first, last = span[0], span[-1]
    assert first.media is not None, "asked only of a media item"
    (slot, _), *_ = Counter(token.id for token in span).most_common(1)
    return [
        Text(str(first.index), style="dim"),
        str(slot),
        Text(f"{OPEN_ITEM}{kind_of_media(media[first.media].media)} ×{len(span):,}{CLOSE_ITEM}", style=ITEM),
        Text("–" if first.owner is None else str(first.owner), style=VOICES[MEDIA]),
        "",
        first.place,
        Text("–", style="dim") if last.label is None else str(last.label),
    ]


def _target_words(token: TokenView) -> str:
    if not token.target:
        return ""
    return "✓" if token.weight == 1 else f"✓ ×{token.weight:g}"


def _segment_text(tokens: Sequence[TokenView], media: Sequence[MediaItem], *, has_colour: bool) -> Text:
    text = Text(overflow="fold")

    def looks(span: Sequence[TokenView]) -> tuple[int | None, str]:
        first = span[0]
        return first.media, _look(first) if has_colour else OPEN if first.target else ""

    for (item, look), group in groupby(shown_spans(tokens), key=looks):
        words = lines_visible("".join(span_text(span, media) for span in group))
        if item is not None:  # on a line of its own; breaks of the text itself have a sign
            text.append("\n" if text.plain and not text.plain.endswith("\n") else "")
            text.append(words, style=look if has_colour else "").append("\n")
        elif has_colour:
            text.append(words, style=look)
        else:
            text.append(f"{OPEN}{words}{CLOSE}" if look else words)
    return text


def _look(token: TokenView) -> str:
    return _style(token) if token.media is None else ITEM


def _style(token: TokenView) -> str:
    if token.target:
        return CONTROL_TARGET if token.control else TARGET
    return CONTROL if token.control else VOICES.get(_voice(token), "")


def _voice(token: TokenView) -> str:
    return "" if token.owner is None else token.owner.voice
