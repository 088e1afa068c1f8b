"""Media items among the tokens of a row: where they stand, and what a person calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from luthier.records import AudioHeader, ImageHeader, MediaItem, Segment, VideoHeader

OPEN_ITEM, CLOSE_ITEM = "⟨", "⟩"


def placed_media(segments: Sequence[Segment]) -> tuple[MediaItem, ...]:
    """The items of segments that stand one behind the other, where they are in the whole."""
    placed: list[MediaItem] = []
    before = 0
    for segment in segments:
        placed += (replace(item, start=item.start + before) for item in segment.media)
        before += len(segment)
    return tuple(placed)


def numbers_along(items: Sequence[MediaItem], num_tokens: int) -> list[int | None]:
    """For each token the number of the item that it stands for: items at 1:3 and 3:4 -> ``[None, 0, 0, 1, None]``."""
    numbers: list[int | None] = [None] * num_tokens
    for number, item in enumerate(items):
        numbers[item.start : item.start + item.length] = [number] * item.length
    return numbers


def item_words(item: MediaItem) -> str:
    """``image 300×168 · 50 tokens``, ``video 640×360 · 12.5 s · 400 tokens``, ``audio 3.2 s · 80 tokens``."""
    tokens = f"{item.length:,} token{'s' if item.length != 1 else ''}"
    return f"{header_words(item)} · {tokens}"


def header_words(item: MediaItem) -> str:
    """What kind of item it is, and how large."""
    match item.header:
        case ImageHeader(width=width, height=height):
            return f"image {width}×{height}"
        case VideoHeader(width=width, height=height, num_frames=count, extracted=True):
            return f"video {width}×{height} · {count:,} pictures"
        case VideoHeader(width=width, height=height) as header:
            return f"video {width}×{height} · {header.seconds:.1f} s"
        case AudioHeader() as header:
            return f"audio {header.seconds:.1f} s"
        case _:
            raise AssertionError(f"unknown header {item.header!r}")


def source_name(item: MediaItem) -> str:
    """The name of its file, without the folders: ``/data/images/1.jpg -> 1.jpg``; of bytes, how many they are."""
    match item.media.source:
        case str() as name:
            return name.rstrip("/").rsplit("/", 1)[-1]
        case bytes() as content:
            return f"{len(content):,} bytes"
        case frames:
            return f"{len(frames):,} files"
