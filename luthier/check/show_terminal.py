"""A `RowView` in a terminal: the text with its targets in colour, and a table of every token."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luthier.check.show import RowView, TokenView
from luthier.check.show_text import visible
from luthier.check.tokens import TokenText, spans

TARGET = "bold green"
CONTROL_TARGET = "bold green underline"
CONTROL = "magenta"
CONTEXT = ""
LEGEND = Text.assemble(
    ("learned", TARGET), "  ", ("control token, learned", CONTROL_TARGET), "  ", ("control", CONTROL), "  context"
)


def coloured_text(row: RowView, *, max_tokens: int | None = None) -> Group:
    """The row's text, segment by segment, targets in green; cut after ``max_tokens`` tokens, which is said."""
    parts: list[RenderableType] = [_heading(row), Padding(LEGEND, (0, 0, 1, 2))]
    shown = row.tokens if max_tokens is None else row.tokens[:max_tokens]
    for number, segment in enumerate(row.segments):
        text = _segment_text([token for token in shown if token.segment == number])
        if not text:
            continue
        if len(row.segments) > 1:
            facts = (
                f"segment {number} · {segment.address} · {segment.num_tokens} tokens · {segment.num_targets} targets"
            )
            parts.append(Padding(Text(facts, style="dim"), (0, 0, 0, 2)))
        parts.append(Padding(text, (0, 0, 1, 2)))
    if len(shown) < len(row.tokens):
        parts.append(Padding(Text(f"… {len(row.tokens) - len(shown)} more tokens", style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def token_table(row: RowView) -> Table:
    """Every token of the row with its numbers; a character split over tokens stands at its first one."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("index", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True, overflow="ellipsis", min_width=12)
    for name in ("segment", "position"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for name in ("weight", "label"):
        table.add_column(name, justify="right", no_wrap=True)
    for token in row.tokens:
        text = Text(visible(token.text), style=_style(token)) if token.num_tokens else Text("⋯", style="dim")
        table.add_row(
            Text(str(token.index), style="dim"),
            str(token.id),
            text,
            str(token.segment),
            str(token.position),
            Text("target", style="green") if token.target else "",
            f"{token.weight:g}" if token.target else "",
            Text("–", style="dim") if token.label is None else str(token.label),
        )
    return table


def _heading(row: RowView) -> Text:
    count = len(row.tokens)
    facts = f"   {count} tokens, {row.num_targets} targets ({row.num_targets / count:.1%})"
    if len(row.segments) > 1:
        facts += f", {len(row.segments)} segments"
    if row.num_padding:
        facts += f", {row.num_padding} padding"
    return Text.assemble((row.title, "bold"), (facts, "dim"))


def _segment_text(tokens: list[TokenView]) -> Text:
    text = Text(overflow="fold")
    for piece, style in _pieces(tokens):
        text.append(piece, style=style)
    return text


def _pieces(tokens: list[TokenView]) -> Iterator[tuple[str, str]]:
    texts = [TokenText(text=token.text, tokens=token.num_tokens) for token in tokens]
    for span in spans(texts):
        first = tokens[span.start]
        # a line feed is shown and made: the sign takes the token's colour
        yield "↵\n".join(visible(line) for line in first.text.split("\n")), _style(first)


def _style(token: TokenView) -> str:
    if token.target:
        return CONTROL_TARGET if token.control else TARGET
    return CONTROL if token.control else CONTEXT
