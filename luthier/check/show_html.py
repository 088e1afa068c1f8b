"""A `RowView` as HTML: one page that needs nothing else, or a fragment of another page.

Every text goes through a template that escapes; what comes out is `Markup`, the type of HTML that is safe to embed.
The page's one script is named by its digest in the page's content security policy: no other can run in it, and nothing
can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from luthier.check.previews import WAVE_HEIGHT, WAVE_WIDTH, Preview
from luthier.check.show import RowView, SegmentView
from luthier.check.show_blocks import Band, Block, bands, blocks, token_data

VOICES = (
    "system",
    "user",
    "assistant",
    "tool",
    "tools",
    "template",
    "text",
    "media",
    "unknown",
)  # in the order of the legend


Previews = Sequence[Sequence[Preview]]  # of each row's media; nothing at all: they are told in words alone


def tokens_html(rows: Sequence[RowView], *, heading: str | None = None, previews: Previews = ()) -> Markup:
    """The rows' tokens in colour, with their style sheet; each token's numbers come up when a pointer rests on it.

    ``heading`` is what stands above already: a row of that title gets no heading of its own. ``previews`` are shown as
    pictures from ``data:`` addresses, which the page's own policy has to allow.
    """
    laid_out = _all_laid_out(rows, previews)
    # our own template, which escapes all that is put into it
    return Markup(render("tokens.html.jinja", rows=laid_out, heading=heading, titles=True, **_legend(laid_out)))


def page_html(
    rows: Sequence[RowView], *, title: str, facts: Mapping[str, str] | None = None, previews: Previews = ()
) -> str:
    """A whole page: no link, font or script from elsewhere. ``facts`` stand in its head, by name."""
    laid_out = _all_laid_out(rows, previews)
    script = (files("luthier.check") / "templates" / "show.js").read_text(encoding="utf-8")
    return render(
        "show.html.jinja",
        title=title,
        facts=facts or {},
        rows=laid_out,
        heading=title,
        titles=False,
        num_tokens=sum(len(row.tokens) for row in rows),
        num_targets=sum(row.num_targets for row in rows),
        num_segments=sum(len(row.segments) for row in rows),
        has_pictures=any(preview.pictures for of_row in previews for preview in of_row),
        findings=list(dict.fromkeys(finding for row in rows for finding in row.findings)),
        data=_script_json([token_data(row.of_segment(n)) for row in rows for n in range(len(row.segments))]),
        script=Markup(script),  # our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **_legend(laid_out),
    )


def render(name: str, **values: object) -> str:
    """One of the templates beside this file, which escapes every value that is no `Markup`."""
    return _environment().get_template(name).render(wave_box=(WAVE_WIDTH, WAVE_HEIGHT), **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    segment: SegmentView
    blocks: list[Block]
    bands: list[Band]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    row: RowView
    segments: list[_Segment]


def _all_laid_out(rows: Sequence[RowView], previews: Previews) -> list[_Row]:
    return [_laid_out(row, previews[number] if previews else ()) for number, row in enumerate(rows)]


def _laid_out(row: RowView, previews: Sequence[Preview]) -> _Row:
    segments = []
    for number, segment in enumerate(row.segments):
        of_segment = blocks(row.of_segment(number), row.media, previews)
        segments.append(_Segment(segment=segment, blocks=of_segment, bands=bands(of_segment)))
    return _Row(row=row, segments=segments)


def _legend(rows: Sequence[_Row]) -> dict[str, object]:
    """What the legend has to explain: only what is to be seen."""
    all_blocks = [block for row in rows for segment in row.segments for block in segment.blocks]
    looks = {
        look for block in all_blocks for stretch in block.stretches for mark in stretch.marks for look in mark.looks
    }
    present = {block.voice for block in all_blocks}
    compared = any(row.row.is_compared for row in rows)
    return {"voices": [voice for voice in VOICES if voice in present], "looks": looks, "is_compared": compared}


def _script_json(data: object) -> Markup:
    """JSON that cannot end the script element it stands in: what could open a tag is written as an escape."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # no character of it means anything in HTML


@cache
def _environment() -> Environment:
    loader = PackageLoader("luthier.check")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["count"] = lambda number: f"{number:,}"
    return environment
