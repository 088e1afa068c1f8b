"""A `RowView` as HTML: one page that needs nothing else, or a fragment of another page.

Every text goes through a template that escapes; what comes out is `Markup`, the type of HTML that is safe to embed.
The page's one script is named by its digest in the page's content security policy: no other can run in it, and nothing
can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from numpy.typing import NDArray

from luthier.check.show import item_words, lines_visible, source_name
from luthier.check.show.token_origins import MEDIA, PROMPT, STOP, TEMPLATE, TOOLS, TokenOrigin
from luthier.check.show.view import RowView, SegmentView, TokenView, shown_spans
from luthier.errors import RowError
from luthier.media.families import MediaKind
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import DecodedAudio, DecodedImage, DecodedVideo, decode
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader, ImageHeader, MediaItem, VideoHeader
from luthier.writing import counted, printable

if TYPE_CHECKING:
    import PIL.Image

# in the order of the legend
VOICES = ("system", "user", "assistant", "tool", "tools", "template", "text", "media", "unknown")


Previews = Sequence[Sequence["Preview"]]  # of each row's media; nothing at all: they are told in words alone


def tokens_html(rows: Sequence[RowView]) -> Markup:
    """The rows' tokens in colour, with their style sheet; each token's numbers come up when a pointer rests on it."""
    laid_out = _all_laid_out(rows, ())
    # our own template, which escapes all that is put into it
    return Markup(render("tokens.html.jinja", rows=laid_out, heading=None, titles=True, **_legend(laid_out)))


def page_html(
    rows: Sequence[RowView], *, title: str, facts: Mapping[str, str] | None = None, previews: Previews = ()
) -> str:
    """A whole page: no link, font or script from elsewhere. ``facts`` stand in its head, by name."""
    laid_out = _all_laid_out(rows, previews)
    script = (files("luthier.check.show") / "templates" / "show.js").read_text(encoding="utf-8")
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
class _SegmentHtml:
    segment: SegmentView
    blocks: list[HtmlBlock]
    bands: list[Band]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowHtml:
    row: RowView
    segments: list[_SegmentHtml]


def _all_laid_out(rows: Sequence[RowView], previews: Previews) -> list[_RowHtml]:
    return [_laid_out(row, previews[number] if previews else ()) for number, row in enumerate(rows)]


def _laid_out(row: RowView, previews: Sequence[Preview]) -> _RowHtml:
    segments = []
    for number, segment in enumerate(row.segments):
        of_segment = blocks(row.of_segment(number), row.media, previews)
        segments.append(_SegmentHtml(segment=segment, blocks=of_segment, bands=bands(of_segment)))
    return _RowHtml(row=row, segments=segments)


def _legend(rows: Sequence[_RowHtml]) -> dict[str, object]:
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
    loader = PackageLoader("luthier.check.show")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["counted"] = counted
    environment.filters["printable"] = printable
    return environment


# --------------------------------------------------------------------------------------------------------------------
# A segment laid out for a page: blocks of one message each, in them stretches of targets and of context.


MOST_SLOTS = 24  # runs of slots that a page tells of one item
UNKNOWN = "unknown"  # the voice of tokens whose owner is not known
# Spaces that a reader would not see: two and more, or a whole token of them.
_HIDDEN_SPACES = re.compile(r"^ +$| {2,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotGroup:
    """Neighbouring tokens of a media item that are one control token, or text between such."""

    text: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBox:
    """A media item on a page: its words, all that stands for it in the row, and what it looks or sounds like."""

    words: str
    slots: tuple[SlotGroup, ...]
    num_left_out: int  # of the slots, where they are many
    preview: Preview | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetMark:
    """One shown text: a token, the tokens that a character is split over, or those of a media item.

    ``looks`` are names of its look.
    """

    text: str
    tokens: Sequence[TokenView]
    looks: tuple[str, ...]
    item: ItemBox | None = None

    @property
    def words(self) -> str:
        """Its numbers in one line."""
        first = self.tokens[0]
        counts = [(number, sum(1 for _ in group)) for number, group in groupby(token.id for token in self.tokens)]
        ids = " ".join(str(number) if count == 1 else f"{number}×{count}" for number, count in counts[:MOST_SLOTS])
        parts = [
            f"id {ids}{' …' if len(counts) > MOST_SLOTS else ''}",
            "owner unknown" if first.owner is None else str(first.owner),
            f"position {first.place}",
        ]
        parts.append(f"target, weight {first.weight:g}" if first.target else "context")
        return " · ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRun:
    """Neighbouring texts that are all targets, or all context."""

    is_target: bool
    num_tokens: int
    marks: tuple[TargetMark, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HtmlBlock:
    """Neighbouring tokens of one message, or of none. ``fields`` are what of the message they show."""

    voice: str
    message: int | None
    name: str
    fields: tuple[str, ...]
    num_tokens: int
    num_targets: int
    stretches: tuple[TargetRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A part of the overview strip: tokens ``start`` and on, in the colour of a voice or of targets."""

    start: int
    length: int
    voice: str
    is_target: bool


def blocks(
    tokens: Sequence[TokenView], media: Sequence[MediaItem] = (), previews: Sequence[Preview] = ()
) -> list[HtmlBlock]:
    """The blocks of a segment's tokens, in the order of the text. ``media`` are the row's items, with their previews,
    if these are wanted.
    """
    boxes = {
        number: _item_box(span, media[number], previews[number] if previews else None)
        for span in shown_spans(tokens)
        if (number := span[0].media) is not None
    }
    shown = list(shown_spans(tokens))
    groups = groupby(zip(_speakers(shown), shown, strict=True), key=lambda told: told[0])
    return [_block([span for _, span in group], boxes) for _, group in groups]


def bands(of_segment: Sequence[HtmlBlock]) -> list[Band]:
    """Where the messages, the targets and the media of a segment lie."""
    found = []
    start = 0
    for block in of_segment:
        found.append(Band(start=start, length=block.num_tokens, voice=block.voice, is_target=False))
        inner = start
        for stretch in block.stretches:
            if stretch.is_target:
                found.append(Band(start=inner, length=stretch.num_tokens, voice=block.voice, is_target=True))
            for mark in stretch.marks:
                if mark.item is not None:
                    found.append(Band(start=inner, length=len(mark.tokens), voice=MEDIA, is_target=False))
                inner += len(mark.tokens)
        start += block.num_tokens
    return found


def token_data(tokens: Sequence[TokenView]) -> dict[str, object]:
    """All numbers of a segment as columns, as short as they can be: a page of 20 000 tokens should stay small.

    What follows from another column is null: positions that count up from 0, weights that are all 1, a label that is
    the next token wherever that is a target.
    """
    owners = list(dict.fromkeys("–" if token.owner is None else str(token.owner) for token in tokens))
    number_of = {owner: number for number, owner in enumerate(owners)}
    weights = [token.weight for token in tokens]
    positions = [token.place if token.axes else token.position for token in tokens]
    sizes = [len(span) if place == 0 else 0 for span in shown_spans(tokens) for place in range(len(span))]
    labels = [token.label for token in tokens]
    expected = [after.id if after.target else None for _, after in pairwise(tokens)] + [None]
    return {
        "first": tokens[0].index if tokens else 0,
        "segment": tokens[0].segment if tokens else 0,
        "ids": [token.id for token in tokens],
        "names": [token.name for token in tokens],
        "sizes": None if all(size == 1 for size in sizes) else sizes,
        "owners": owners,
        "owner": [number_of["–" if token.owner is None else str(token.owner)] for token in tokens],
        "target": "".join("1" if token.target else "0" for token in tokens),
        "weights": None if set(weights) <= {1.0} else weights,
        "positions": None if positions == list(range(len(tokens))) else positions,
        "labels": None if labels == expected else labels,
    }


def spaces_visible(text: str) -> str:
    """Dots for spaces that one would not see: two and more, or nothing but spaces."""
    return _HIDDEN_SPACES.sub(lambda found: "·" * len(found.group()), text)


def _speakers(shown: Sequence[Sequence[TokenView]]) -> list[tuple[int | None, str | None]]:
    """Who speaks in each shown text. What the template writes between two strings of the tool declarations is theirs,
    though it stands in some message's turn: else a declaration would be dozens of blocks of a token each."""
    owners = [span[0].owner for span in shown]
    speakers = [_speaker(owner) for owner in owners]
    last: int | None = None  # the last text of the declarations, with nothing but the template's own behind it
    for place, owner in enumerate(owners):
        if owner is not None and owner.field == TOOLS:
            if last is not None:
                speakers[last:place] = [speakers[place]] * (place - last)
            last = place
        elif owner is None or owner.voice != TEMPLATE:
            last = None
    return speakers


def _speaker(owner: TokenOrigin | None) -> tuple[int | None, str | None]:
    return (None, UNKNOWN) if owner is None else (owner.message, owner.role)


def _item_box(span: Sequence[TokenView], item: MediaItem, preview: Preview | None) -> ItemBox:
    runs = []
    for (is_control, _), group in groupby(span, key=lambda token: (token.control, token.id if token.control else None)):
        same = list(group)
        text = same[0].name if is_control else lines_visible("".join(token.text for token in same)).strip()
        runs.append(SlotGroup(text=text, count=len(same) if is_control else 1))
    return ItemBox(
        words=item_words(item),
        slots=tuple(runs[:MOST_SLOTS]),
        num_left_out=len(runs[MOST_SLOTS:]),
        preview=preview,
    )


def _block(spans: Sequence[Sequence[TokenView]], boxes: Mapping[int, ItemBox]) -> HtmlBlock:
    tokens = [token for span in spans for token in span]
    owners = list(dict.fromkeys(token.owner for token in tokens if token.owner is not None))
    fields = tuple(dict.fromkeys(owner.field for owner in owners if owner.voice != TEMPLATE))
    message, role = _speaker(tokens[0].owner)
    name = role or (fields[0] if fields else TEMPLATE)
    return HtmlBlock(
        voice=name,
        message=message,
        name=name,
        fields=tuple(field for field in fields if field != name),
        num_tokens=len(tokens),
        num_targets=sum(token.target for token in tokens),
        stretches=tuple(_stretches(spans, boxes)),
    )


def _stretches(spans: Sequence[Sequence[TokenView]], boxes: Mapping[int, ItemBox]) -> Iterator[TargetRun]:
    for is_target, group in groupby(spans, key=lambda span: any(token.target for token in span)):
        marks = tuple(_mark(span, boxes) for span in group)
        yield TargetRun(is_target=is_target, num_tokens=sum(len(mark.tokens) for mark in marks), marks=marks)


def _mark(span: Sequence[TokenView], boxes: Mapping[int, ItemBox]) -> TargetMark:
    first = span[0]
    if first.media is not None:
        box = boxes[first.media]
        return TargetMark(text=box.words, tokens=span, looks=("item",), item=box)
    looks = []
    if first.control:
        looks.append("control")
    if first.owner is not None:
        looks += [_LOOKS[first.owner.field]] if first.owner.field in _LOOKS else []
    if any(token.target and token.weight != 1 for token in span):
        looks.append("weighted")
    return TargetMark(text=lines_visible(spaces_visible(first.text)) or "∅", tokens=span, looks=tuple(looks))


_LOOKS = {MEDIA: "media", TEMPLATE: "template", PROMPT: "template", STOP: "stop", "reasoning_content": "thought"}


# ---- What media items look and sound like, small enough for a page: decoded for the rows that are shown only.

LONGEST_SIDE = 160  # pixels of a picture
FRAME_SIDE = 96  # of a video's frame
MOST_FRAMES = 12
WAVE_WIDTH, WAVE_HEIGHT = 240, 40  # units of the drawing


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A small picture as a ``data:`` address; ``caption`` is the time of a frame, else empty."""

    uri: str
    width: int
    height: int
    caption: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """One item. ``wave`` is the outline of its sound, a path in a box of ``WAVE_WIDTH`` × ``WAVE_HEIGHT``.

    ``finding`` says why it cannot be had any more: the store has its tokens, a run would not get its pixels.
    """

    facts: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()
    wave: str | None = None
    finding: str | None = None


def previews(rows: Sequence[RowView], processor: MediaProcessor | None, access: MediaAccess) -> list[list[Preview]]:
    """For each row the previews of its media. ``processor`` says which frames of a video are taken; rows of a model
    that has none have no media.
    """
    found: dict[tuple[object, object], Preview] = {}
    for row in rows:
        for item in row.media:
            assert processor is not None, "a model that takes no media has no rows with them"
            if (item.media, item.header) not in found:
                found[item.media, item.header] = preview(item, processor, access)
    return [[found[item.media, item.header] for item in row.media] for row in rows]


def preview(item: MediaItem, processor: MediaProcessor, access: MediaAccess) -> Preview:
    """One item, decoded now; of a video at most `MOST_FRAMES` of the frames that the model is given."""
    facts, frames = _told(item, processor)
    hears = bool(access.config.use_audio_in_video)
    try:
        decoded = decode(item.media, item.header, access, frame_indices=frames, with_audio=hears)
    except RowError as error:
        return Preview(facts=facts, finding=f"{error.reason}: {error.detail}")
    match decoded:
        case DecodedImage():
            return Preview(facts=facts, pictures=(_picture(decoded.pixels, LONGEST_SIDE),))
        case DecodedAudio():
            return Preview(facts=facts, wave=outline(decoded.samples))
        case DecodedVideo():
            return Preview(
                facts=facts,
                pictures=_frames(decoded),
                wave=None if decoded.audio is None else outline(decoded.audio.samples),
            )
        case _:
            raise AssertionError(f"unknown item {decoded!r}")


def outline(samples: NDArray[np.float32]) -> str:
    """A sound as the path of its loudest and softest sample in each of `WAVE_WIDTH` stretches; silence is a line."""
    edges = np.linspace(0, len(samples), min(WAVE_WIDTH, len(samples)) + 1).astype(int)
    loudest = max(float(np.abs(samples).max()), 1e-6)
    high = np.maximum.reduceat(samples, edges[:-1]) / loudest
    low = np.minimum.reduceat(samples, edges[:-1]) / loudest
    middle = WAVE_HEIGHT / 2
    step = WAVE_WIDTH / len(high)
    over = [f"{place * step:.1f},{middle - 0.95 * middle * value:.1f}" for place, value in enumerate(high)]
    under = [f"{place * step:.1f},{middle - 0.95 * middle * value:.1f}" for place, value in enumerate(low)]
    return f"M{' L'.join([*over, *reversed(under)])} Z"


def _told(item: MediaItem, processor: MediaProcessor) -> tuple[tuple[str, ...], list[int] | None]:
    """What is said of an item, and which frames are shown, if it has any."""
    name = source_name(item)
    match item.header:
        case ImageHeader():
            return (name,), None
        case AudioHeader(num_samples=count, sampling_rate=rate):
            return (name, f"{counted(count, 'sample')}, {rate:,} a second"), None
        case VideoHeader() as header:
            taken = sampled_frames(processor.settings(MediaKind.VIDEO), header)
            shown = _some(taken)
            here = f", {len(shown)} of them here" if len(shown) < len(taken) else ""
            sees = f"the model sees {counted(len(taken), 'frame')}{here}"
            return (name, f"{counted(header.num_frames, 'frame')}, {header.fps:g} a second", sees), shown
        case _:
            raise AssertionError(f"unknown header {item.header!r}")


def _some(frames: Sequence[int]) -> list[int]:
    """At most `MOST_FRAMES` of them, evenly, the first and the last among them."""
    if len(frames) <= MOST_FRAMES:
        return list(frames)
    return [frames[int(place)] for place in np.linspace(0, len(frames) - 1, MOST_FRAMES).round()]


def _frames(video: DecodedVideo) -> tuple[Picture, ...]:
    from PIL import Image

    return tuple(
        _picture(Image.fromarray(pixels), FRAME_SIDE, caption=f"{index / video.fps:.2f} s")
        for pixels, index in zip(video.frames, video.frame_indices, strict=True)
    )


def _picture(pixels: PIL.Image.Image, side: int, *, caption: str = "") -> Picture:
    small = pixels.copy()
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    uri = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(uri=uri, width=small.width, height=small.height, caption=caption)
