"""What a file is, told from its first bytes and never from its name."""

from __future__ import annotations

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
