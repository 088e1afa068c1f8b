"""A `RowView` as HTML: one page that needs nothing else, or a fragment of another page.

Every text goes through a template that escapes; what comes out is `Markup`, the type of HTML that is safe to embed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from luthier.check.show import RowView, TokenView
from luthier.check.show_text import visible
from luthier.check.tokens import TokenText, spans


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Tokens that are shown as one text, with the classes of its look and the words of its tooltip."""

    text: str
    breaks: int  # line feeds at its end: the page breaks its lines where the text does
    classes: str
    title: str


def tokens_html(rows: Sequence[RowView], *, table: bool = False, heading: str | None = None) -> Markup:
    """The rows' tokens in colour, with their style sheet; ``table`` adds every token's numbers.

    ``heading`` is what stands above already: a row of that title gets no heading of its own.
    """
    # our own template, which escapes all that is put into it
    return Markup(_template("tokens.html.jinja", rows=[_described(row) for row in rows], table=table, heading=heading))


def page_html(rows: Sequence[RowView], *, title: str) -> str:
    """A whole page: no link, script or font from elsewhere."""
    return _template("show.html.jinja", title=title, tokens=tokens_html(rows, table=True, heading=title))


def _template(name: str, **values: object) -> str:
    loader = PackageLoader("luthier.check")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    return environment.get_template(name).render(**values)


def _described(row: RowView) -> dict[str, object]:
    return {"row": row, "runs": [(row.segments[number], run) for number, run in _segment_runs(row)]}


def _segment_runs(row: RowView) -> list[tuple[int, list[_Span]]]:
    runs: list[list[_Span]] = [[] for _ in row.segments]
    texts = [TokenText(text=token.text, tokens=token.num_tokens) for token in row.tokens]
    for span in spans(texts):
        tokens = row.tokens[span.start : span.stop]
        runs[tokens[0].segment].append(_span(tokens))
    return list(enumerate(runs))


def _span(tokens: Sequence[TokenView]) -> _Span:
    first = tokens[0]
    classes = ["t", "target" if any(token.target for token in tokens) else "context"]
    classes += ["control"] if first.control else []
    classes += ["weighted"] if any(token.target and token.weight != 1.0 for token in tokens) else []
    ids = " ".join(str(token.id) for token in tokens)
    title = f"id {ids} · position {first.position} · {'target' if first.target else 'context'}"
    title += f" · weight {first.weight:g}" if first.weight != 1.0 else ""
    breaks = 0 if first.control else first.text.count("\n")
    return _Span(text=visible(first.text) or "∅", breaks=breaks, classes=" ".join(classes), title=title)
