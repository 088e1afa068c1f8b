"""Media of a row, by reference: from the row's media columns, taken in order, or from the parts of a message.

Nothing is opened or checked for existence here.
"""

from __future__ import annotations

import binascii
import io
import math
import os.path
import re
import struct
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.records import Audio, Image, Media, Part, Text, Video
from luthier.sources import BYTES_KEYS, json_kind
from luthier.writing import counted

if TYPE_CHECKING:
    import PIL.Image

KINDS = ("image", "video", "audio")
COLUMN_OF_KIND = {"image": "images", "video": "videos", "audio": "audios"}
_MARKER = re.compile("(<image>|<video>|<audio>)")
# (text) -> where it has what a processor writes for an item
FindSlots = Callable[[str], list[tuple[int, int]]]
_KIND_OF_MARKER = {"<image>": "image", "<video>": "video", "<audio>": "audio"}


class MediaQueue:
    """The media of one row that stand in its columns; each marker in the text takes the next of its kind.

    A kind without items in the row has no markers: ``<image>`` is then plain text. With ``slots`` the text has no
    markers, but what a processor writes for an item (`written_slots`); that is for rows with media of one kind.
    """

    def __init__(self, items: Mapping[str, list[Media]], root: str, slots: FindSlots | None = None) -> None:
        self.root = root
        self._slots = slots
        self._items = {kind: media for kind, media in items.items() if media}
        self._taken = dict.fromkeys(self._items, 0)

    def split(self, text: str) -> list[Part]:
        """The text with media in place of markers: ``"<image>Who?"`` -> ``[Image(…), Text("Who?")]``."""
        if self._slots is not None:
            return self._split_slots(text, self._slots(text))
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

    @property
    def may_be_written(self) -> bool:
        """Whether media of one kind are in the row's columns, and no place for any of them was found."""
        return len(self._items) == 1 and not any(self._taken.values())

    def _split_slots(self, text: str, spans: list[tuple[int, int]]) -> list[Part]:
        [kind] = self._items
        parts: list[Part] = []
        position = 0
        for start, end in spans:
            if position < start:
                parts.append(Text(text=text[position:start]))
            parts.append(replace(self.take(kind), slots=text[start:end]))
            position = end
        return [*parts, Text(text=text[position:])] if position < len(text) or not parts else parts

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
                    f"{counted(self._taken[kind], 'place')} for {kind}s in the text, {len(items)} in the row",
                    field=COLUMN_OF_KIND[kind],
                )


def read_media(kind: str, item: object, root: str) -> Media:
    """One reference: a path or URL; bytes; a data URI or base64; ``{path, bytes, url}``, as the Hub's features are.

    An image may be a PIL image or an array, a sound ``{array, sampling_rate}``, a video a list of images, also as
    ``{frames, fps}``. Raises `RowError` (``bad_media``).
    """
    match kind:
        case "image":
            source = _read_source(kind, item)
            return Image(source=_join(source, root), root=_root_of(source, root))
        case "audio":
            if type(item) is dict and item.get("array") is not None:
                return Audio(source=sound_bytes(item["array"], item.get("sampling_rate")))
            source = _read_source(kind, item)
            return Audio(source=_join(source, root), root=_root_of(source, root))
        case "video":
            return _read_video(item, root)
        case _:
            raise AssertionError(f"no media kind {kind}")


def names_media(item: Mapping[str, object]) -> bool:
    """Whether a part without a value of its own says which media it is: ``{"type": "image", "path": …}``."""
    values = [item[key] for key in ("url", "path", "bytes", "base64", "data", "frames", "array") if key in item]
    return any(not (value is None or (type(value) in (str, bytes) and not value)) for value in values)


def _read_video(item: object, root: str) -> Video:
    fps = None
    if type(item) is dict and item.get("frames") is not None:
        fps = item.get("fps")
        if fps is not None and not (type(fps) in (int, float) and 0 < fps < math.inf):
            raise RowError("bad_media", f"fps is a number of frames a second, not {fps!r}")
        item = item["frames"]
        if type(item) is not list:
            item = list(item) if isinstance(item, np.ndarray) and item.ndim == 4 else [item]
    elif isinstance(item, np.ndarray) and item.ndim == 4:
        item = list(item)
    if type(item) is not list:
        source = _read_source("video", item)
        return Video(source=_join(source, root), root=_root_of(source, root))
    if not item:
        raise RowError("bad_media", "a video without frames")
    frames = [_read_source("image", frame) for frame in item]
    roots = {_root_of(frame, root) for frame in frames} - {None}
    fps = None if fps is None else float(fps)
    return Video(source=tuple(_join(frame, root) for frame in frames), root=roots.pop() if roots else None, fps=fps)


def read_column(kind: str, value: object, root: str) -> list[Media]:
    """The media in the row's column of a kind."""
    if value is None:
        return []
    items = value if type(value) is list else [value]  # one bare item is a list of one
    try:
        return [read_media(kind, item, root) for item in items]
    except RowError as error:
        raise error.inside(COLUMN_OF_KIND[kind]) from None


def _read_source(kind: str, item: object) -> str | bytes:
    if type(item) is str and item:
        return _read_data_uri(item) if item.startswith("data:") else item
    if type(item) is bytes and item:
        return item
    if type(item) is dict:
        # Hugging Face's Image, Audio and Video features: the bytes if the data set holds them, else a path.
        for key in BYTES_KEYS:
            if item.get(key):
                return _read_bytes(item[key])
        for key in ("path", "url", kind):
            if type(item.get(key)) is str and item[key]:
                return _read_source(kind, item[key])
    if kind == "image" and (data := image_bytes(item)) is not None:
        return data
    raise RowError(
        "bad_media", f"an {kind} is a path, a URL or {{path, bytes}}, not {json_kind(item)} {str(item)[:60]!r}"
    )


def _read_data_uri(uri: str) -> bytes:
    """The bytes of ``data:image/png;base64,iVBO…``; the type that it states is not asked, as the bytes tell."""
    head, comma, data = uri.partition(",")
    if not comma:
        raise RowError("bad_media", f"a data URI without a comma: {uri[:40]!r}")
    if not head.lower().endswith(";base64"):
        raise RowError("bad_media", f"a data URI that is not base64: {head[:40]!r}")
    return _read_bytes(data)


def _read_bytes(value: object) -> bytes:
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


@overload
def _join(source: str, root: str) -> str: ...
@overload
def _join(source: str | bytes, root: str) -> str | bytes: ...
def _join(source: str | bytes, root: str) -> str | bytes:
    if isinstance(source, bytes) or "://" in source or root in ("", "."):
        return source
    return os.path.join(root, source)


def _root_of(source: str | bytes, root: str) -> str | None:
    """The folder that a path may not leave. ``""`` is the root of rows from the Hub: there is no such folder."""
    return None if isinstance(source, bytes) or "://" in source or not root else root


# --------------------------------------------------------------------------------------------------------------------
# Media that rows in Python hold as objects, PIL images and numpy arrays: written as the bytes of a lossless file.
#
# So a record holds nothing but references, can be sent to a worker, and its content can be told by a digest.


def image_bytes(item: object) -> bytes | None:
    """A PIL image (turned as its EXIF says) or a uint8 array ``[H, W]`` or ``[H, W, 3 or 4]`` as TIFF.

    None if it is neither. Raises `RowError` (``bad_media``) for an array of another type or shape.
    """
    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim not in (2, 3) or (item.ndim == 3 and item.shape[2] not in (3, 4)):
            detail = f"an array is an image if it is uint8[H, W, 3], not {item.dtype}{list(item.shape)}"
            raise RowError("bad_media", detail)
        from PIL import Image

        return _tiff(Image.fromarray(item))
    imaging = sys.modules.get("PIL.Image")  # who never imported it has no such image
    if imaging is None or not isinstance(item, imaging.Image):
        return None
    from PIL import ImageOps

    return _tiff(ImageOps.exif_transpose(item))


def sound_bytes(samples: object, sampling_rate: object) -> bytes:
    """Samples of one channel, from -1 to 1, as a WAV of float32.

    Raises `RowError` (``bad_media``) for anything but a list or array of numbers, and without a sampling rate.
    """
    if type(sampling_rate) is not int or sampling_rate < 1:
        raise RowError("bad_media", f"an array of samples needs a sampling_rate, not {sampling_rate!r}")
    try:
        array: NDArray[np.generic] = np.asarray(samples)
    except ValueError as error:
        raise RowError("bad_media", f"no array of samples: {error}") from None
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iuf":
        detail = f"samples are numbers of one channel, [n], not {array.dtype}{list(array.shape)}"
        raise RowError("bad_media", detail)
    if array.dtype.kind == "f":
        data = array.astype("<f4").tobytes()
    elif array.dtype == np.int16:
        data = (array.astype("<f4") / 32768).tobytes()
    else:
        raise RowError("bad_media", f"samples are floats from -1 to 1 or int16, not {array.dtype}")
    # a RIFF file: its size, the chunk of the format (3 is float, one channel), the chunk of the samples
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, sampling_rate, 4 * sampling_rate, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def _tiff(image: PIL.Image.Image) -> bytes:
    out = io.BytesIO()
    try:
        image.save(out, format="TIFF")
    except OSError as error:
        raise RowError("bad_media", f"an image of the mode {image.mode} cannot be kept: {error}") from None
    return out.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# Texts that hold what a processor writes for an item: ``<|vision_start|><|image_pad|><|image_pad|><|vision_end|>``.
#
# Rows of this form were prepared for one model. They are told by their look alone, and only in rows that say in no
# other way where their media stand; that a stretch is one item's, as many slots as its header promises, is checked
# where the model's processor is known (`encoding.measuring`).


_TOKEN = r"(?:<[^<>\n]{1,48}>|\[[A-Z_]{1,24}\])"
# Tokens one behind the other, with no more between them than what processors write: line breaks, numbers ("12*15").
_STRETCH = re.compile(rf"{_TOKEN}(?:[\s\d.*]{{0,12}}{_TOKEN})*")
_REPEATED = re.compile(rf"({_TOKEN})\1")


def written_slots(text: str) -> list[tuple[int, int]]:
    """Where a text has stretches of tokens in which one is repeated: ``"a <i><i> b"`` -> ``[(2, 8)]``."""
    return [found.span() for found in _STRETCH.finditer(text) if _REPEATED.search(found[0])]


def parted_slots(text: str) -> list[tuple[int, int]]:
    """The same with a stretch cut where its first token comes again: ``"<s><i><i><e><s><i><i><e>"`` has two items."""
    parts = []
    for start, end in written_slots(text):
        first = re.match(_TOKEN, text[start:end])
        assert first is not None, "a stretch begins with a token"
        places = [start + found.start() for found in re.finditer(re.escape(first[0]), text[start:end])]
        repeated = text.startswith(first[0] * 2, start)
        edges = [start, end] if repeated else [*places, end]
        parts += list(pairwise(edges))
    return parts
