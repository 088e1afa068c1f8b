"""Random access to rows of files that can only be read from their beginning: they are spooled once, record by record.

A record is a checksum, the row's number in its file, whether it is an error, and the row's bytes (or the error as
JSON). Behind the records stand their offsets. Memory is flat both ways.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.files import DataFile
from luthier.sources.offsets import Ascending, AscendingBuilder
from luthier.sources.open_files import OpenFiles
from luthier.sources.rows import RowBytes
from luthier.sources.spools import spooled

_HEAD = struct.Struct("<I")  # a checksum of all that follows in the record
_BODY = struct.Struct("<QB")  # the row's number in its file; 1 for an error
_FOOT = struct.Struct("<QQI8s")  # how many offsets, how many steps (see `Ascending`), their checksum, the magic
_MAGIC = b"LUTHROWS"
_OFFSETS_PER_ADD = 4096


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
        reason, detail, field = msgspec.json.decode(record[head:], type=tuple[str, str, str | None])
        return RowError(reason, detail, address=address, field=field)


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
        number, is_error, body = row.address.row, 1, msgspec.json.encode((row.reason, row.detail, row.field))
    content = _BODY.pack(number, is_error) + body
    return _HEAD.pack(crc32(content)) + content
