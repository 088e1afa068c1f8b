"""What an index keeps open between reads, and where rows are in files, in few bytes."""

from __future__ import annotations

import atexit
import hashlib
import os
import struct
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import PlainRowError, RowError, SourceError, plain_error, row_error
from luthier.records import SAMPLES_VERSION, Address
from luthier.sources import RowBytes
from luthier.sources.files import DataFile
from luthier.writing import counted, locked, whole_file

_MAX_DESCRIPTORS = 64
CACHE_BYTES = 32 << 20  # of decoded columns; what does not fit in here is spooled (see `columnar`)
_BLOCK_BYTES = 1 << 20  # rows that stand one behind the other are read together, up to this

Value = TypeVar("Value")


class OpenFiles:
    """Descriptors and decoded groups, the least recently used ones given up first. For one thread at a time."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], tuple[object, int]] = OrderedDict()
        self._kept_bytes = 0

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Bytes of a file, fewer only at its end; raises `SourceError`."""
        descriptor = self._descriptor(path)
        try:
            return os.pread(descriptor, num_bytes, offset)
        except OSError as error:
            where = f"{counted(num_bytes, 'byte')} at {offset:,}"
            raise SourceError(f"{path}: cannot be read ({where}): {error.strerror}") from error

    def read_spans(self, path: str, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[bytes]:
        """The bytes of each span ``begins[i]:ends[i]``, both in rising order; spans may touch or overlap."""
        blocks = _blocks(zip(begins.tolist(), ends.tolist(), strict=True))
        self._announce(path, blocks)
        for spans in blocks:
            start = spans[0][0]
            block = self.read(path, start, spans[-1][1] - start)
            for begin, end in spans:
                yield block[begin - start : end - start]

    def kept(self, path: str, number: int, load: Callable[[], tuple[Value, int]]) -> Value:
        """Something made of a file; ``load`` gives it, and the bytes it holds, where it is not kept any more."""
        key = (path, number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return cast(Value, self._kept[key][0])
        value, num_bytes = load()
        if num_bytes <= CACHE_BYTES:
            self._kept[key] = (value, num_bytes)
            self._kept_bytes += num_bytes
        while self._kept_bytes > CACHE_BYTES:
            _, (_, freed) = self._kept.popitem(last=False)
            self._kept_bytes -= freed
        return value

    def close(self) -> None:
        """Close all; files open again when they are asked for."""
        self._kept.clear()
        self._kept_bytes = 0
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _announce(self, path: str, blocks: list[list[tuple[int, int]]]) -> None:
        """Tell the system what will be read, so that the disk works on all of it at once (4 times faster when cold)."""
        if sys.platform == "linux" and len(blocks) > 1:
            descriptor = self._descriptor(path)
            for spans in blocks:
                start = spans[0][0]
                os.posix_fadvise(descriptor, start, spans[-1][1] - start, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, path: str) -> int:
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
            return self._descriptors[path]
        while len(self._descriptors) >= _MAX_DESCRIPTORS:
            os.close(self._descriptors.popitem(last=False)[1])
        try:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error
        return self._descriptors[path]


def _blocks(spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans that touch each other, up to `_BLOCK_BYTES` together."""
    blocks: list[list[tuple[int, int]]] = []
    for begin, end in spans:
        if blocks and begin <= blocks[-1][-1][1] and end - blocks[-1][0][0] <= _BLOCK_BYTES:
            blocks[-1].append((begin, end))
        else:
            blocks.append([(begin, end)])
    return blocks


# --------------------------------------------------------------------------------------------------------------------
# Where rows are, in few bytes: byte offsets at 4 bytes a row, and the numbers of lines among which some are blank.


_HIGH_BITS = np.int64(32)
_LOW_MASK = np.int64(0xFFFFFFFF)
_BYTES_PER_BREAK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Ascending:
    """Numbers that never fall, such as offsets into one file: their lower 32 bits, and where the upper ones step up.

    ``[5, 2**32 + 1, 2**33]`` -> lows ``[5, 1, 0]``, steps ``[1, 2]``.
    """

    lows: NDArray[np.uint32]
    steps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lows)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lows[places].astype(np.int64) + (np.searchsorted(self.steps, places, side="right") << _HIGH_BITS)

    @property
    def num_bytes(self) -> int:
        """What it costs in memory."""
        return self.lows.nbytes + self.steps.nbytes


class AscendingBuilder:
    """Collects the numbers of an `Ascending`, array by array, in little more memory than they will need."""

    def __init__(self) -> None:
        self._lows = bytearray()
        self._steps: list[NDArray[np.int64]] = []
        self._high = 0

    def __len__(self) -> int:
        return len(self._lows) // 4

    def add(self, numbers: NDArray[np.int64]) -> None:
        """Numbers that do not fall, and are not below those added before."""
        if not len(numbers):
            return
        if (last := int(numbers[-1]) >> 32) > self._high:
            risen = np.diff(numbers >> _HIGH_BITS, prepend=self._high)
            self._steps.append(np.repeat(np.arange(len(self), len(self) + len(numbers), dtype=np.int64), risen))
            self._high = last
        self._lows += (numbers & _LOW_MASK).astype("<u4").tobytes()

    def finish(self) -> Ascending:
        steps = np.concatenate(self._steps) if self._steps else np.empty(0, np.int64)
        return Ascending(lows=np.frombuffer(self._lows, dtype="<u4"), steps=steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineNumbers:
    """Which line of a file each row is: row + 1, and the blank lines before it.

    Where few rows follow blank lines, only those are kept: ``rows[i]`` and all rows up to ``rows[i + 1]`` have
    ``counts[i]`` blank lines before them. Where many do, ``dense`` has the count of every row.
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    dense: Ascending | None = None

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lines of some rows, from 1."""
        if self.dense is not None:
            return rows + 1 + self.dense.at(rows)
        if not len(self.rows):
            return rows + 1
        place = np.searchsorted(self.rows, rows, side="right")
        blank = np.where(place > 0, self.counts[np.maximum(place - 1, 0)], 0)
        return rows + 1 + blank

    @property
    def num_bytes(self) -> int:
        """What it costs in memory: at most 4 bytes a row."""
        return self.rows.nbytes + self.counts.nbytes + (0 if self.dense is None else self.dense.num_bytes)


class LineNumbersBuilder:
    """Collects which lines are blank."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_blank = 0
        self._num_counted = 0  # blank lines before the last row
        self._rows: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []

    def add(self, is_blank: NDArray[np.bool_]) -> None:
        """The next lines of the file."""
        if self._num_blank == self._num_counted and not is_blank.any():
            self._num_rows += len(is_blank)
            return
        before = (np.cumsum(is_blank) + self._num_blank)[~is_blank]
        changed = np.flatnonzero(np.diff(before, prepend=self._num_counted))
        self._rows.append(changed + self._num_rows)
        self._counts.append(before[changed])
        self._num_rows += len(before)
        self._num_blank += int(is_blank.sum())
        if len(before):
            self._num_counted = int(before[-1])

    def finish(self) -> LineNumbers:
        none = [np.empty(0, np.int64)]
        rows, counts = np.concatenate(self._rows or none), np.concatenate(self._counts or none)
        if len(rows) * _BYTES_PER_BREAK <= 4 * self._num_rows:
            return LineNumbers(rows=rows, counts=counts)
        dense = AscendingBuilder()
        dense.add(np.repeat(np.concatenate(([0], counts)), np.diff(np.concatenate(([0], rows, [self._num_rows])))))
        return LineNumbers(rows=none[0], counts=none[0], dense=dense.finish())


# ---- Random access to rows of files that can only be read from their beginning: they are spooled once.
#
# A record is a checksum, the row's number in its file, whether it is an error, and the row's bytes (or the error as
# JSON). Behind the records stand their offsets. Memory is flat both ways.

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
# A spool is named for the file that its rows come from (path, size, times) and for the version of the code that read
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
    path = Path(file.path).resolve()
    changed = path.stat().st_ctime_ns  # which no program sets, as those that copy or unpack set the time that is told
    parts = (path, repr(file), changed, SAMPLES_VERSION)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
