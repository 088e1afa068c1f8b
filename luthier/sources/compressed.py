"""Compressed text files (gzip, zstandard, bzip2, xz), read as if they were not, and never inflated without a bound."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from luthier.errors import SourceError

# Text shrinks 3 to 20 times, rows that repeat each other 100 times; a file that shrank more is no data set.
MAX_RATIO = 200
ALWAYS_ALLOWED_BYTES = 64 << 20  # small files may shrink as they like
_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MB; a header may claim gigabytes
_CHUNK_BYTES = 1 << 20


class Compression(StrEnum):
    """How a file is compressed, by its ending."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"
    BZIP2 = ".bz2"
    XZ = ".xz"


def open_compressed(path: str, compression: Compression) -> IO[bytes]:
    """The file's content, from its beginning; raises ``OSError``.

    Reading raises `SourceError` where the file is damaged or cut off, and once more than `MAX_RATIO` times its size has
    come out of it.
    """
    return io.BufferedReader(_Inflated(path, compression), _CHUNK_BYTES)


class _Inflated(io.RawIOBase):
    """What comes out of a compressed file. Going back begins anew, which is all that the readers of rows need."""

    def __init__(self, path: str, compression: Compression) -> None:
        self._path, self._compression = path, compression
        size = Path(path).stat().st_size
        self._limit = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * size)
        self._stream = _open(path, compression)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "what is inflated has no end that is known"
        if offset < self._position:
            self._stream.close()
            self._stream, self._position = _open(self._path, self._compression), 0
        while self._position < offset and self.read(min(_CHUNK_BYTES, offset - self._position)):
            pass
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            found = self._stream.read(min(len(view), _CHUNK_BYTES))
        except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise SourceError(f"{self._path}: cannot be read to its end: {error}") from error
        self._position += len(found)
        if self._position > self._limit:
            what = f"{self._path}: more than {self._limit:,} bytes came out of it, {MAX_RATIO} times its own size"
            hint = "no data set shrinks so far; if you trust the file, unpack it yourself and name the unpacked one"
            raise SourceError(what, hint=hint)
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class _Members:
    """bzip2 and xz, one member behind the other. (The standard library's files end at the first member that is damaged
    from its beginning, without a word.)"""

    def __init__(self, path: str, make: Callable[[], Any]) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 (closed by `close`)
        self._make, self._member = make, make()

    def read(self, num_bytes: int) -> bytes:
        """At most so many bytes, none only at the end."""
        found = b""
        while not found:
            if self._member.eof:
                start = self._member.unused_data.lstrip(b"\0")  # zeros are padding
                while not start and (more := self._file.read(_CHUNK_BYTES)):
                    start = more.lstrip(b"\0")
                if not start:
                    return b""
                self._member = self._make()
                found = self._member.decompress(start, num_bytes)
            elif self._member.needs_input:
                if not (more := self._file.read(_CHUNK_BYTES)):
                    raise EOFError("the compressed file ends before its end marker")
                found = self._member.decompress(more, num_bytes)
            else:
                found = self._member.decompress(b"", num_bytes)
        return found

    def close(self) -> None:
        self._file.close()


def _open(path: str, compression: Compression) -> Any:
    match compression:
        case Compression.GZIP:
            return gzip.open(path, "rb")
        case Compression.BZIP2:
            return _Members(path, bz2.BZ2Decompressor)
        case Compression.XZ:
            return _Members(path, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES))
        case Compression.ZSTD:
            return pa.CompressedInputStream(pa.OSFile(path, "rb"), "zstd")
        case _:
            raise AssertionError(f"{compression!r} is no compression")
