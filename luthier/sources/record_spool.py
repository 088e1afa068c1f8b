"""Random access to rows of files that can only be read from their beginning: they are spooled once, record by record.

A record is a checksum, the row's number in its file, whether it is an error, and the row's bytes (or the error as
JSON). Behind the records stand their offsets. Memory is flat both ways.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import PlainRowError, RowError, SourceError, plain_error, row_error
from luthier.locks import locked
from luthier.records import SAMPLES_VERSION, Address
from luthier.sources.files import DataFile
from luthier.sources.open_files import Ascending, AscendingBuilder, OpenFiles
from luthier.sources.rows import RowBytes
from luthier.writing import whole_file

_HEAD = struct.Struct("<I")  # a checksum of all that follows in the record
_BODY = struct.Struct("<QB")  # the row's number in its file; 1 for an error
_FOOT = struct.Struct("<QQI8s")  # how many offsets, how many steps (see `Ascending`), their checksum, the magic
_MAGIC = b"LUTHROW2"
_OFFSETS_PER_ADD = 4096
LONGEST_SPOOLING = 14_400.0  # seconds in which another process reads the whole file, which may be some TB


@dataclass(frozen=True, kw_only=True, slots=True)
class SpooledRows:
    """Rows of one file by number. ``starts`` are the offsets of their records in the spool, and the end of the last."""

    file: DataFile
    path: str
    starts: Ascending

    def __len__(self) -> int:
        return len(self.starts) - 1

    def digested(self) -> Iterator[bytes | memoryview]:
        """What the rows depend on: the file as it was found, and where they are in it."""
        yield repr(self.file).encode()
        yield self.starts.lows.data
        yield self.starts.steps.data

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        """Some rows, by rising number. Raises `SourceError`, also if the spool is damaged."""
        self.file.check_unchanged()
        records = opened.read_spans(self.path, self.starts.at(rows), self.starts.at(rows + 1))
        return [self._row(record) for record in records]

    def _row(self, record: bytes) -> RowBytes | RowError:
        head = _HEAD.size + _BODY.size
        if len(record) < head or _HEAD.unpack_from(record)[0] != crc32(memoryview(record)[_HEAD.size :]):
            raise SourceError(f"{self.path}: the spool of {self.file.path} is damaged", hint="delete it, start again")
        number, is_error = _BODY.unpack_from(record, _HEAD.size)
        address = Address(file=self.file.path, row=number)
        if not is_error:
            return RowBytes(raw=record[head:], address=address)
        return row_error(msgspec.json.decode(record[head:], type=PlainRowError), address)


def index_by_spool(file: DataFile, rows: Iterable[RowBytes | RowError], folder: Path | None) -> SpooledRows:
    """Spool the rows of a file, or find that they are spooled; raises `SourceError`, also what ``rows`` raises."""

    def write(sink: IO[bytes]) -> None:
        file.check_unchanged()
        write_records(rows, sink)
        file.check_unchanged()

    path = spooled(file, "rows", folder, write, lambda path: read_offsets(path) is not None)
    starts = read_offsets(path)
    if starts is None:
        raise SourceError(f"{path}: the spool of {file.path} is damaged", hint="delete it, start again")
    return SpooledRows(file=file, path=path, starts=starts)


def write_records(rows: Iterable[RowBytes | RowError], sink: IO[bytes]) -> None:
    """Write rows, and where each is."""
    starts, pending, offset = AscendingBuilder(), [0], 0
    for row in rows:
        offset += sink.write(_record(row))
        pending.append(offset)
        if len(pending) >= _OFFSETS_PER_ADD:
            starts.add(np.array(pending, np.int64))
            pending.clear()
    starts.add(np.array(pending, np.int64))
    table = starts.finish()
    lows, steps = table.lows.astype("<u4").tobytes(), table.steps.astype("<i8").tobytes()
    sink.write(lows + steps + _FOOT.pack(len(table.lows), len(table.steps), crc32(steps, crc32(lows)), _MAGIC))


def read_offsets(path: str) -> Ascending | None:
    """The offsets of a spool's records; None if it is not there, or not whole."""
    try:
        with Path(path).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(size - _FOOT.size, 0))
            foot = stream.read()
            if len(foot) != _FOOT.size or foot[-len(_MAGIC) :] != _MAGIC:
                return None
            num_rows, num_steps, checksum, _ = _FOOT.unpack(foot)
            start = size - _FOOT.size - 4 * num_rows - 8 * num_steps
            if start < 0:
                return None
            stream.seek(start)
            lows, steps = stream.read(4 * num_rows), stream.read(8 * num_steps)
    except FileNotFoundError:
        return None
    if crc32(steps, crc32(lows)) != checksum:
        return None
    starts = Ascending(lows=np.frombuffer(lows, "<u4"), steps=np.frombuffer(steps, "<i8"))
    return starts if num_rows and int(starts.at(np.array([num_rows - 1]))[0]) == start else None


def _record(row: RowBytes | RowError) -> bytes:
    if isinstance(row, RowBytes):
        number, is_error, body = row.address.row, 0, row.raw
    else:
        assert row.address is not None, f"a reader gave an error without an address: {row}"
        number, is_error, body = row.address.row, 1, msgspec.json.encode(plain_error(row))
    content = _BODY.pack(number, is_error) + body
    return _HEAD.pack(crc32(content)) + content


# --------------------------------------------------------------------------------------------------------------------
# Spools: files with the rows of another file, in a form in which each can be read on its own.
#
# A spool is named for the file that its rows come from (path, size, time) and for the version of the code that read
# them, so one that is there need not be written again. It is written under another name first: it is whole, or not
# there.


_OPEN_FILES = Path("/proc/self/fd")  # where the system has it, another process can open a file that has no name
_NAMELESS: dict[str, IO[bytes]] = {}  # the spools of this process that have no folder, by name


def spooled(
    file: DataFile,
    ending: str,
    folder: Path | None,
    write: Callable[[IO[bytes]], None],
    is_whole: Callable[[str], bool],
) -> str:
    """The path of the file's spool, written by ``write`` where ``is_whole`` does not find one; raises `SourceError`.

    Without a folder the spool has no name in the file system and is gone with the process; until then its path works in
    other processes too.
    """
    name = f"{_spool_key(file)}.{ending}"
    try:
        return _nameless(name, write) if folder is None else _named(folder, name, write, is_whole)
    except TimeoutError as error:
        hint = "end that process if it hangs, then start again"
        raise SourceError(f"{file.path}: {error.strerror}, which writes its spool", hint=hint) from error
    except OSError as error:
        where = tempfile.gettempdir() if folder is None else str(folder)
        hint = f"make room there; the rows of {file.path} are kept in it so that each can be read on its own"
        raise SourceError(f"{where}: the spool cannot be written: {error}", hint=hint) from error


def _named(folder: Path, name: str, write: Callable[[IO[bytes]], None], is_whole: Callable[[str], bool]) -> str:
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if is_whole(str(path)):
        return str(path)
    # a process that waits here finds the spool that the other process wrote
    with locked(folder / f"{name}.lock", seconds=LONGEST_SPOOLING):
        if not is_whole(str(path)):
            with whole_file(path) as sink:
                write(sink)
    return str(path)


@atexit.register
def _close_nameless() -> None:
    while _NAMELESS:
        _NAMELESS.popitem()[1].close()


def _nameless(name: str, write: Callable[[IO[bytes]], None]) -> str:
    if name not in _NAMELESS:
        sink: IO[bytes]
        if _OPEN_FILES.is_dir():
            sink = tempfile.TemporaryFile(prefix="luthier-")  # noqa: SIM115 (open as long as the process lives)
        else:
            sink = tempfile.NamedTemporaryFile(prefix="luthier-")  # noqa: SIM115
        try:
            write(sink)
            sink.flush()
        except BaseException:
            sink.close()
            raise
        _NAMELESS[name] = sink
    sink = _NAMELESS[name]
    return f"/proc/{os.getpid()}/fd/{sink.fileno()}" if _OPEN_FILES.is_dir() else str(sink.name)


def _spool_key(file: DataFile) -> str:
    parts = (Path(file.path).resolve(), repr(file), SAMPLES_VERSION)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
