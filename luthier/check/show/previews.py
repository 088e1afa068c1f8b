"""What media items look and sound like, small enough for a page: decoded for the rows that are shown, and no others."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.check.show.token_text import source_name
from luthier.check.show.view import RowView
from luthier.errors import RowError
from luthier.media import MediaAccess, MediaKind, MediaProcessor, decode, sampled_frames
from luthier.media.files.decoding import DecodedAudio, DecodedImage, DecodedVideo
from luthier.records import AudioHeader, ImageHeader, MediaItem, VideoHeader
from luthier.writing import counted

if TYPE_CHECKING:
    import PIL.Image

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
