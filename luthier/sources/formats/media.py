"""Media of a row, by reference: from the row's media columns, taken in order, or from the parts of a message.

Nothing is opened or checked for existence here.
"""

from __future__ import annotations

import binascii
import os.path
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from luthier.errors import RowError
from luthier.records import Audio, Image, Media, Part, Text, Video
from luthier.sources.rows import json_kind

KINDS = ("image", "video", "audio")
COLUMN_OF_KIND = {"image": "images", "video": "videos", "audio": "audios"}
_MARKER = re.compile("(<image>|<video>|<audio>)")
_KIND_OF_MARKER = {"<image>": "image", "<video>": "video", "<audio>": "audio"}


class MediaQueue:
    """The media of one row that stand in its columns; each marker in the text takes the next of its kind.

    A kind without items in the row has no markers: ``<image>`` is then plain text.
    """

    def __init__(self, items: Mapping[str, list[Media]], root: str) -> None:
        self.root = root
        self._items = {kind: media for kind, media in items.items() if media} if items else {}
        self._taken = dict.fromkeys(self._items, 0) if items else {}

    def split(self, text: str) -> list[Part]:
        """The text with media in place of markers: ``"<image>Who?"`` -> ``[Image(…), Text("Who?")]``."""
        if not self._items or "<" not in text:
            return [Text(text=text)]
        parts: list[Part] = []
        run = ""
        for piece in _MARKER.split(text):
            kind = _KIND_OF_MARKER.get(piece)
            if kind is None or kind not in self._items:
                run += piece
                continue
            if run:
                parts.append(Text(text=run))
                run = ""
            parts.append(self.take(kind))
        return [*parts, Text(text=run)] if run or not parts else parts

    def take(self, kind: str) -> Media:
        """The next item of a kind; raises `RowError` if the row has no column of that kind."""
        items = self._items.get(kind)
        if items is None:
            raise RowError("bad_media", f"{kind} part without a reference, and no {COLUMN_OF_KIND[kind]} in the row")
        index = self._taken[kind]
        self._taken[kind] += 1
        return items[min(index, len(items) - 1)]  # too many: `finish` refuses the row, with both counts

    def finish(self) -> None:
        """Raises `RowError` unless every item was taken exactly once."""
        for kind, items in self._items.items():
            if self._taken[kind] != len(items):
                raise RowError(
                    "media_count",
                    f"{self._taken[kind]} places for {kind}s in the text, {len(items)} in the row",
                    field=COLUMN_OF_KIND[kind],
                )


def media_queue(columns: Mapping[str, Any], root: str) -> MediaQueue:
    """A queue of a row's media; ``columns`` maps kinds to the values of their columns."""
    return MediaQueue({kind: _read_column(kind, value, root) for kind, value in columns.items()}, root)


def read_media(kind: str, item: Any, root: str) -> Media:
    """One reference: a path, URL or data URI; ``{path, bytes, url}``; bytes; for videos also a list of frame paths."""
    if kind == "video" and type(item) is list and item and all(type(frame) is str and frame for frame in item):
        return Video(source=tuple(_join(frame, root) for frame in item))
    source = _read_source(kind, item, root)
    match kind:
        case "image":
            return Image(source=source)
        case "video":
            return Video(source=source)
        case "audio":
            return Audio(source=source)
        case _:
            raise AssertionError(f"no media kind {kind}")


def _read_column(kind: str, value: Any, root: str) -> list[Media]:
    if value is None:
        return []
    items = value if type(value) is list else [value]  # one bare item is a list of one
    try:
        return [read_media(kind, item, root) for item in items]
    except RowError as error:
        raise RowError(error.reason, error.detail, field=COLUMN_OF_KIND[kind]) from None


def _read_source(kind: str, item: Any, root: str) -> str | bytes:
    if type(item) is str and item:
        return _join(item, root)
    if type(item) is bytes and item:
        return item
    if type(item) is dict:
        # Hugging Face's Image and Audio features: the bytes if the data set holds them, else a path.
        for key in ("bytes", "data", "base64"):
            if item.get(key):
                return _read_bytes(item[key])
        for key in ("path", "url", kind):
            if type(item.get(key)) is str and item[key]:
                return _join(item[key], root)
    raise RowError(
        "bad_media", f"an {kind} is a path, a URL or {{path, bytes}}, not {json_kind(item)} {str(item)[:60]!r}"
    )


def _read_bytes(value: Any) -> bytes:
    match value:
        case bytes():
            return value
        case str():
            try:
                return b64decode(value, validate=True)
            except (binascii.Error, ValueError) as error:
                raise RowError("bad_media", f"not base64: {error}") from None
        case _:
            raise RowError("bad_media", f"media bytes are base64 text, not {json_kind(value)}")


def _join(path: str, root: str) -> str:
    if "://" in path or path.startswith("data:") or not root:
        return path
    return os.path.join(root, path)
