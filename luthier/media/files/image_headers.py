"""Width, height, EXIF orientation and memory of an image file, read from its header: JPEG, PNG, WebP, GIF, BMP, TIFF.

Some dozens of bytes of each are read. Opening with PIL takes about twice as long, and asking it for the orientation of
a PNG decodes all of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from luthier.errors import RowError
from luthier.media.files import Content

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

_ORIENTATION = 0x0112
_WIDTH, _HEIGHT, _CHANNELS = 0x0100, 0x0101, 0x0115
_TILE = (0x0142, 0x0143)  # width and height of a TIFF's tiles
_PNG_BYTES = {0: 5, 2: 4, 3: 5}  # gray, RGB, palette; with transparency 8
_WEBP_BYTES = 17  # the decoder keeps two canvases of its own, for the frames of animations
_TIFF_BYTES = 10  # up to 16 bits a channel; how many they are stands elsewhere in the file
_READ_AT_ONCE = 2048  # most JPEGs have their size within
_MAX_TAG_BYTES = 1 << 20  # an EXIF or XMP block is at most 64 KiB in a JPEG
# What PIL looks for in XMP where the EXIF says nothing
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_XMP_KEYWORD = b"XML:com.adobe.xmp\0"
_JPEG_SIZES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_JPEG_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_JPEG_SCAN, _JPEG_END, _JPEG_APP1 = 0xDA, 0xD9, 0xE1


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Pixels as they are stored; ``orientation`` as in EXIF, 1 to 8: from 5 on, width and height change places.

    ``bytes_a_pixel``: the most memory that decoding takes for each pixel, the steps to RGB included. As measured with
    Pillow: it keeps RGB in 4 bytes and everything else beside its RGB form; a turned image stands there twice.
    ``tile_pixels``: of one tile, which is decoded whole, also where it is larger than the image.
    """

    width: int
    height: int
    orientation: int = 1
    bytes_a_pixel: int = 8
    tile_pixels: int = 0

    @property
    def decoded_bytes(self) -> int:
        """The most memory that decoding takes."""
        turned = 8 if self.orientation > 1 else 0
        return max(self.width * self.height, self.tile_pixels) * max(self.bytes_a_pixel, turned)

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height as the image is meant to be seen."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def read_stored_size(content: Content) -> StoredSize:
    """The size of an image file; of an animation, that of its first frame.

    Raises `RowError`: ``media_format`` for a file of another type, which is named, ``media_broken`` for a header that
    is cut off or contradicts itself.
    """
    start = content.read(0, _READ_AT_ONCE)
    match start[:4]:
        case head if head.startswith(b"\xff\xd8\xff"):
            size = _jpeg(content, start)
        case b"\x89PNG":
            size = _png(content, start)
        case b"RIFF" if start[8:12] == b"WEBP":
            size = _webp(content, start)
        case b"GIF8":
            size = StoredSize(*_unpack("<HH", start, 6, content))
        case head if head.startswith(b"BM"):
            size = _bmp(start, content)
        case b"II*\0" | b"MM\0*":
            size = _tiff(content)
        case _:
            detail = f"{content.name} is {found_type(start)}, an image is one of {', '.join(FORMATS)}"
            raise RowError("media_format", detail)
    if size.width < 1 or size.height < 1:
        raise RowError("media_broken", f"the header of {content.name} says {size.width} x {size.height} pixels")
    return size


# ------------------------------------------------------------------------------------------------------ JPEG, PNG


def _jpeg(content: Content, start: bytes) -> StoredSize:
    width = height = bytes_a_pixel = 0
    exif = xmp = None
    for marker, offset, length in _jpeg_segments(content, start):
        if marker in _JPEG_SIZES:
            height, width, channels = _unpack(">HHB", _bytes(content, start, offset + 1, 5), 0, content)
            # progressive ones keep two bytes of coefficients for each channel until the last scan
            bytes_a_pixel = {1: 5, 3: 4}.get(channels, 8) + (2 * channels if marker in _JPEG_PROGRESSIVE else 0)
        elif marker == _JPEG_APP1:
            segment = _bytes(content, start, offset, length)
            if segment.startswith(b"Exif\0") and exif is None:
                exif = _orientation(segment[6:])
            elif segment.startswith(b"http://ns.adobe.com/xap/1.0/"):
                xmp = _xmp_orientation(segment)
    return StoredSize(width, height, exif or xmp or 1, bytes_a_pixel)


def _jpeg_segments(content: Content, start: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, where its data is, how long it is) of all segments up to the first scan."""
    at = 2
    while True:
        head = start[at : at + 4]
        if len(head) < 4:
            head = content.read(at, 4)
        if len(head) < 4:
            raise _cut_off(content)
        marker = head[1]
        if head[0] != 0xFF or marker == _JPEG_END:
            raise RowError("media_broken", f"{content.name}: no JPEG segment at byte {at}")
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker == _JPEG_SCAN:
            return
        else:
            length = (head[2] << 8) | head[3]
            yield marker, at + 4, length - 2
            at += 2 + length


def _png(content: Content, start: bytes) -> StoredSize:
    """The size in the first chunk; then all chunks up to the last, which also shows that the file is whole."""
    if start[:16] != b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR":
        if len(start) < 16:
            raise _cut_off(content)
        raise RowError("media_broken", f"{content.name} begins like a PNG but has no header chunk")
    width, height, depth, colour = _unpack(">IIBB", start, 16, content)
    bytes_a_pixel = 10 if depth == 16 else _PNG_BYTES.get(colour, 8)
    exif = xmp = None
    at = 8
    while True:
        head = start[at : at + 8]
        if len(head) < 8:
            head = content.read(at, 8)
        if len(head) < 8:
            raise _cut_off(content)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if at + 12 + length > content.size:
            raise _cut_off(content)
        if kind == b"IEND":
            return StoredSize(width, height, exif or xmp or 1, bytes_a_pixel)
        if kind == b"eXIf" and length <= _MAX_TAG_BYTES:
            exif = _orientation(content.read(at + 8, length))
        elif kind == b"iTXt" and length <= _MAX_TAG_BYTES:
            text = content.read(at + 8, length)
            xmp = _xmp_orientation(text) if text.startswith(_XMP_KEYWORD) else xmp
        at += 12 + length


# --------------------------------------------------------------------------------------------------- WebP, BMP, TIFF


def _webp(content: Content, start: bytes) -> StoredSize:
    match start[12:16]:
        case b"VP8 ":
            width, height = _unpack("<HH", start, 26, content)
            return StoredSize(width & 0x3FFF, height & 0x3FFF, bytes_a_pixel=_WEBP_BYTES)
        case b"VP8L":  # 14 bits of width - 1, 14 bits of height - 1
            (bits,) = _unpack("<I", start, 21, content)
            return StoredSize((bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, bytes_a_pixel=_WEBP_BYTES)
        case b"VP8X":
            if len(start) < 30:
                raise _cut_off(content)
            width = int.from_bytes(start[24:27], "little") + 1
            height = int.from_bytes(start[27:30], "little") + 1
            return StoredSize(width, height, _webp_orientation(content) if start[20] & 0x0C else 1, _WEBP_BYTES)
        case _:
            raise RowError("media_broken", f"{content.name} begins like a WebP but holds no image")


def _webp_orientation(content: Content) -> int:
    exif = xmp = None
    at = 12
    while len(head := content.read(at, 8)) == 8:
        length = int.from_bytes(head[4:], "little")
        if head[:4] == b"EXIF" and length <= _MAX_TAG_BYTES:
            exif = _orientation(content.read(at + 8, length).removeprefix(b"Exif\0\0"))
        elif head[:4] == b"XMP " and length <= _MAX_TAG_BYTES:
            xmp = _xmp_orientation(content.read(at + 8, length))
        at += 8 + length + (length & 1)
    return exif or xmp or 1


def _bmp(start: bytes, content: Content) -> StoredSize:
    (header_size,) = _unpack("<I", start, 14, content)
    if header_size == 12:
        return StoredSize(*_unpack("<HH", start, 18, content))
    width, height = _unpack("<ii", start, 18, content)
    return StoredSize(width, abs(height))  # a negative height: the first row is the topmost


def _tiff(content: Content) -> StoredSize:
    tags = _tags(content, 0)
    if not tags.keys() >= {_WIDTH, _HEIGHT}:
        raise RowError("media_broken", f"{content.name} begins like a TIFF and does not say its size")
    bytes_a_pixel = max(_TIFF_BYTES, 4 + 2 * tags.get(_CHANNELS, 1))
    tile_pixels = tags.get(_TILE[0], 0) * tags.get(_TILE[1], 0)
    return StoredSize(tags[_WIDTH], tags[_HEIGHT], _turn(tags.get(_ORIENTATION)) or 1, bytes_a_pixel, tile_pixels)


# ------------------------------------------------------------------------------------------------------------ pieces


def _orientation(exif: bytes) -> int | None:
    """The orientation in an EXIF block; None if it says none, or nothing that can be read."""
    try:
        return _turn(_tags(Content(name="EXIF", size=len(exif), version="", data=exif), 0).get(_ORIENTATION))
    except RowError:
        return None  # a picture with odd tags is a picture all the same


def _turn(value: int | None) -> int | None:
    return value if value is not None and 1 <= value <= 8 else None


def _xmp_orientation(xmp: bytes) -> int | None:
    match = _XMP_ORIENTATION.search(xmp)
    return None if match is None else _turn(int(match[1]))


def _tags(content: Content, start: int) -> dict[int, int]:
    """Width, height, channels, orientation and tiles among the tags of the first directory of a TIFF, which EXIF is
    too."""
    head = content.read(start, 8)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(head[:4])
    if order is None or len(head) < 8:
        raise _cut_off(content)
    (directory,) = struct.unpack_from(f"{order}I", head, 4)
    (count,) = _unpack(f"{order}H", content.read(start + directory, 2), 0, content)
    entries = content.read(start + directory + 2, 12 * count)
    tags: dict[int, int] = {}
    for at in range(0, len(entries) - 11, 12):
        tag, kind = struct.unpack_from(f"{order}HH", entries, at)
        if tag not in (_WIDTH, _HEIGHT, _ORIENTATION, _CHANNELS, *_TILE):
            continue
        if kind in (3, 4):  # SHORT, LONG
            before = tags.get(tag, 0) if tag in _TILE else 0  # libtiff takes the first of two, PIL the last
            (value,) = struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", entries, at + 8)
            tags[tag] = max(value, before)
        elif tag in _TILE:  # libtiff reads other kinds of numbers as well, which no known program writes
            raise RowError("media_broken", f"{content.name} gives the size of its tiles in an unusual kind of number")
    return tags


def _bytes(content: Content, start: bytes, offset: int, size: int) -> bytes:
    return start[offset : offset + size] if offset + size <= len(start) else content.read(offset, size)


def _unpack(form: str, data: bytes, offset: int, content: Content) -> tuple[int, ...]:
    if len(data) < offset + struct.calcsize(form):
        raise _cut_off(content)
    return struct.unpack_from(form, data, offset)


def _cut_off(content: Content) -> RowError:
    return RowError(
        "media_broken", f"{content.name} is cut off: it ends at byte {content.size:,}, before its data does"
    )


# --------------------------------------------------------------------------------------------------------------------
# What a file is, told from its first bytes and never from its name.


_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"BM", "a BMP image"),
    (0, b"II*\0", "a TIFF image"),
    (0, b"MM\0*", "a TIFF image"),
    (8, b"WEBP", "a WebP image"),
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftyphei", "a HEIF image"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"%!PS", "PostScript"),
    (0, b"\xc5\xd0\xd3\xc6", "PostScript"),
    (0, b"%PDF", "a PDF"),
    (0, b"SIMPLE  =", "a FITS file"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"#EXTM3U", "a playlist (m3u8)"),
    (0, b"ffconcat", "a list of files (ffconcat)"),
    (0, b"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded"),
    (4, b"ftyp", "an MP4 file"),
    (8, b"WAVE", "a WAV file"),
    (8, b"AVI ", "an AVI file"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"ID3", "an MP3 file"),
)
_MARKUP = ((b"<svg", "an SVG drawing"), (b"<!doctype html", "HTML"), (b"<html", "HTML"), (b"<", "XML or HTML"))


def found_type(start: bytes) -> str:
    """What a file that begins like this is, in words: ``HTML``, ``a PDF``, or its first bytes."""
    for offset, mark, name in _SIGNATURES:
        if start.startswith(mark, offset):
            return name
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, name in _MARKUP:
        if text.startswith(mark):
            return "an SVG drawing" if b"<svg" in text else name
    words = start[:40].decode("ascii", errors="replace")
    if words.replace("\n", " ").replace("\t", " ").isprintable() and words.isascii():
        return f"text ({words!r})"
    return f"of no known type (it begins with {start[:8].hex(' ')})"
