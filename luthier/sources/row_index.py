"""Random access to the rows of a source by their numbers: what `Source.row_bytes` gives, in any order.

Each kind of file has its own way to a row (`LineRows`, `ColumnRows`, `SpooledRows`); the index knows which rows
are in which file. Nothing is decoded that is not asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Documents
from luthier.errors import RowError, SourceError
from luthier.sources import RowBytes, open_files, text_files
from luthier.sources.columnar import chosen_rows, index_columns
from luthier.sources.files import DataFile, FileKind
from luthier.sources.origins import HubRows, LocalFiles, Origin

if TYPE_CHECKING:
    import datasets

# --------------------------------------------------------------------------------------------------------------------
# Random access to files with a row a line: where each line begins is found once, at the speed of memory.


_CHUNK_BYTES = 1 << 20  # stays in the processor's cache
_NEWLINE = ord("\n")
# Bytes that a blank line may begin with; only such lines are looked at whole. In txt files the blanks of Unicode count.
_MAY_BE_BLANK = np.zeros(256, bool)
_MAY_BE_BLANK[list(b" \t\n\r\x0b\x0c")] = True
_MAY_BE_BLANK_TEXT = _MAY_BE_BLANK.copy()
_MAY_BE_BLANK_TEXT[[0x1C, 0x1D, 0x1E, 0x1F, 0xC2, 0xE1, 0xE2, 0xE3]] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRows:
    """Rows of one file by number. ``starts`` are byte offsets of all rows, and the size of the file."""

    file: DataFile
    begin: int  # where the text begins: behind the byte order mark
    starts: open_files.Ascending
    lines: open_files.LineNumbers

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def path(self) -> str:
        return self.file.path

    def digested(self) -> Iterator[bytes | memoryview]:
        """What the rows depend on: the file as it was found, and where they are in it."""
        yield repr(self.file).encode()
        yield self.starts.lows.data
        yield self.starts.steps.data

    def read(self, rows: NDArray[np.int64], opened: open_files.OpenFiles) -> list[RowBytes | RowError]:
        """Some rows, by rising number. Raises `SourceError` where lines are not where they were."""
        self.file.check_unchanged()
        starts, ends = self.starts.at(rows), self.starts.at(rows + 1)
        # with the newline that must stand before the row; of a line over the cap only as much as shows that it is
        begins, caps = np.maximum(starts - 1, self.begin), np.minimum(ends, starts + text_files.MAX_LINE_BYTES + 1)
        spans = opened.read_spans(self.path, begins, caps)
        lines = self.lines.at(rows)
        num_lines = self.lines.at(np.minimum(rows + 1, len(self) - 1)) - lines  # with the blank ones after each row
        places = zip(starts.tolist(), ends.tolist(), lines.tolist(), num_lines.tolist(), spans, strict=True)
        found = [self._row(_Place(*place), span, opened) for *place, span in places]
        self.file.check_unchanged()
        return found

    def _row(self, place: _Place, span: bytes, opened: open_files.OpenFiles) -> RowBytes | RowError:
        if place.start > self.begin:
            if span[:1] != b"\n":
                raise self._moved(place)
            span = span[1:]
        if len(span) < min(place.end - place.start, text_files.MAX_LINE_BYTES + 1):
            raise self._moved(place)  # the file is shorter now
        stop = span.find(b"\n") + 1 or len(span)
        if stop > text_files.MAX_LINE_BYTES:
            return text_files.line_too_long(self.file, self._line_length(place, opened), place.line)
        row = text_files.line_row(self.file, span[:stop], place.line)
        if row is None or not self._ends_as_indexed(place, span, stop):
            raise self._moved(place)
        return row

    def _ends_as_indexed(self, place: _Place, span: bytes, stop: int) -> bool:
        """Whether the row that is ``span[:stop]`` ends its line, and only blank lines follow, as many as there were."""
        if stop == len(span):
            return place.num_lines <= 1 and (span[-1:] == b"\n" or place.end == self.file.size)
        behind = span[stop:]
        if (behind.decode("utf-8", "ignore") if self.file.kind is FileKind.TXT else behind).strip():
            return False
        is_clipped = place.start + len(span) < place.end
        return is_clipped or place.num_lines in (0, span.count(b"\n"))

    def _line_length(self, place: _Place, opened: open_files.OpenFiles) -> int:
        """The length of a line over the cap, read a chunk at a time."""
        for offset in range(place.start, place.end, _CHUNK_BYTES):
            chunk = opened.read(self.path, offset, min(_CHUNK_BYTES, place.end - offset))
            if (stop := chunk.find(b"\n")) >= 0:
                return offset + stop + 1 - place.start
        return place.end - place.start

    def _moved(self, place: _Place) -> SourceError:
        what = f"{self.path}:{place.line}: no row begins at byte {place.start:,} and ends with the line any more"
        return SourceError(f"{what}: the file changed since it was indexed", hint="let the writer finish, start again")


class _Place(NamedTuple):
    """Where a row is: byte offsets of it and of the next one, its line, and lines to the next row (0 for the last)."""

    start: int
    end: int
    line: int
    num_lines: int


def index_lines(file: DataFile) -> LineRows:
    """Find the lines of a file; raises `SourceError`. Memory is that of the index, and a megabyte."""
    file.check_unchanged()
    with text_files.open_text_file(file) as stream:
        begin = stream.tell()
    starts, lines = open_files.AscendingBuilder(), open_files.LineNumbersBuilder()
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offsets, is_blank in _scan(descriptor, begin, file):
                starts.add(offsets[~is_blank] if is_blank.any() else offsets)
                lines.add(is_blank)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SourceError(f"{file.path}: cannot be read to its end: {error}") from error
    starts.add(np.array([file.size], np.int64))
    file.check_unchanged()
    index = LineRows(file=file, begin=begin, starts=starts.finish(), lines=lines.finish())
    _check_first(index)
    return index


def _scan(descriptor: int, offset: int, file: DataFile) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Where lines begin, and which of them are blank, a chunk at a time."""
    may_be_blank = _MAY_BE_BLANK_TEXT if file.kind is FileKind.TXT else _MAY_BE_BLANK
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    is_new = True  # whether the chunk begins with a line
    while num_bytes := os.preadv(descriptor, [buffer.data], offset):
        data = buffer[:num_bytes]
        starts = np.flatnonzero(data == _NEWLINE) + 1
        ends_line = len(starts) > 0 and starts[-1] == num_bytes
        starts = np.concatenate((np.zeros(int(is_new), np.int64), starts[: len(starts) - int(ends_line)]))
        is_new = bool(ends_line)
        first = data[starts]
        is_blank = first == _NEWLINE
        for place in np.flatnonzero(may_be_blank[first] & ~is_blank).tolist():
            is_blank[place] = _is_blank(descriptor, offset + int(starts[place]), file)
        yield starts + offset, is_blank
        offset += num_bytes


def _is_blank(descriptor: int, start: int, file: DataFile) -> bool:
    """Whether a line is no row. It is read as far as that takes."""
    size = 64
    while True:
        text = os.pread(descriptor, size, start)
        stop = text.find(b"\n") + 1 or len(text)
        is_whole = stop < len(text) or text[-1:] == b"\n" or len(text) < size
        if stop > text_files.MAX_LINE_BYTES:
            return False
        if is_whole:
            return text_files.line_row(file, text[:stop], 1) is None
        if text.decode("utf-8", "ignore").strip():
            return False
        size *= 16


def _check_first(index: LineRows) -> None:
    opened = open_files.OpenFiles()
    for number in range(len(index)):
        (row,) = index.read(np.array([number]), opened)
        text_files.check_first_row(index.file, row)
        if isinstance(row, RowBytes) or index.file.kind is not FileKind.JSONL:
            return


_WHOLE = 0  # the number under which a data set is kept that has no groups


class IndexPart(Protocol):
    """Rows that are together in one file or data set."""

    def __len__(self) -> int: ...

    def digested(self) -> Iterator[bytes | memoryview]:
        """What the rows depend on."""
        ...

    def read(self, rows: NDArray[np.int64], opened: open_files.OpenFiles) -> list[RowBytes | RowError]:
        """Some rows; ``rows`` rise, none comes twice. Raises `SourceError`."""
        ...


class RowIndex:
    """The rows of a source by number, from 0, as `Source.row_bytes` counts them.

    Costs at most 8 bytes a row. Can be sent to another process, where files open again as they are needed. Reads from
    one thread at a time.
    """

    def __init__(self, parts: Sequence[IndexPart], *, chosen: NDArray[np.integer] | None = None) -> None:
        """``chosen`` are the numbers, rising, of the rows that count, where not all do."""
        self._parts = tuple(parts)
        self._chosen = chosen
        self._starts = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
        self._opened = open_files.OpenFiles()

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._chosen is None else len(self._chosen)

    def __reduce__(self) -> tuple[Callable[..., RowIndex], tuple[object, ...]]:
        return partial(RowIndex, chosen=self._chosen), (self._parts,)

    @cached_property
    def identity(self) -> str:
        """A digest of what it was built from: paths, sizes, times, places of rows, and which rows count."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts:
            digest.update(f"{type(part).__name__}\0{len(part)}\0".encode())
            for content in part.digested():
                digest.update(content)
        if self._chosen is not None:
            digest.update(b"chosen\0" + self._chosen.astype("<i8").tobytes())
        return digest.hexdigest()

    def read(self, numbers: NDArray[np.int64]) -> list[RowBytes | RowError]:
        """The rows of some numbers, in their order; one that cannot be read is the `RowError` that says why.

        Raises `SourceError` if a file vanished or is not what it was, ``IndexError`` for numbers that no row has.
        """
        distinct, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < len(self):
            raise IndexError(f"rows {distinct[0]} to {distinct[-1]} of an index of {len(self)}")
        rows = distinct if self._chosen is None else self._chosen[distinct].astype(np.int64)
        cuts = np.searchsorted(rows, self._starts)
        found: list[RowBytes | RowError] = []
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            here = rows[cuts[number] : cuts[number + 1]] - self._starts[number]
            found += self._parts[number].read(here, self._opened)
        return [found[place] for place in places.tolist()]

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self._opened.close()


def index_origin(origin: Origin, spool: Path | None) -> list[IndexPart] | None:
    """The parts of an origin's index; None for a stream. Raises `SourceError`.

    Files that can only be read from their beginning are written to ``spool`` (`index_by_spool`).
    """
    match origin:
        case LocalFiles(files=files) if files[0].is_columnar:
            return list(index_columns(files, spool))
        case LocalFiles(files=files) if files[0].kind is FileKind.TXT and files[0].documents is Documents.FILE:
            return [_WholeFiles(files=files)]
        case LocalFiles(files=files):
            return [_index_text(file, spool) for file in files]
        case HubRows(streaming=True):
            return None
        case HubRows():
            data = origin.load()
            return [_DatasetRows(origin=origin, num_rows=int(data.num_rows), fingerprint=str(data._fingerprint))]
        case _:
            if origin.count() is None:
                return None
            rows = list(origin.rows())
            return [_ListedRows(origin=origin, num_rows=len(rows), digest=_digest(rows))]


def _index_text(file: DataFile, spool: Path | None) -> IndexPart:
    if not file.compression and text_files.has_row_a_line(file):
        return index_lines(file)
    return open_files.index_by_spool(file, text_files.read_text_file(file), spool)


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeFiles:
    """Text files each of which is one row."""

    files: tuple[DataFile, ...]

    def __len__(self) -> int:
        return len(self.files)

    def digested(self) -> Iterator[bytes]:
        for file in self.files:
            yield repr(file).encode()

    def read(self, rows: NDArray[np.int64], opened: open_files.OpenFiles) -> list[RowBytes | RowError]:
        found: list[RowBytes | RowError] = []
        for file in (self.files[row] for row in rows.tolist()):
            file.check_unchanged()
            found += text_files.read_text_file(file)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _DatasetRows:
    """Rows of a split of the Hub, from the files that `datasets` keeps of it."""

    origin: HubRows
    num_rows: int
    fingerprint: str

    def __len__(self) -> int:
        return self.num_rows

    def digested(self) -> Iterator[bytes]:
        yield repr(self).encode()

    def read(self, rows: NDArray[np.int64], opened: open_files.OpenFiles) -> list[RowBytes | RowError]:
        data = opened.kept(self.origin.address, _WHOLE, lambda: (self._load(), 0))
        table = data[rows.tolist()]
        places = zip(range(len(rows)), (rows + 1).tolist(), strict=True)
        return list(chosen_rows(table, self.origin.address, places))

    def _load(self) -> datasets.Dataset:
        data = self.origin.load()
        if (found := str(data._fingerprint)) != self.fingerprint:
            what = f"{self.origin.address}: the data set changed since it was indexed"
            raise SourceError(f"{what}: {self.fingerprint} then, {found} now", hint="name a revision")
        return data.with_format("arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ListedRows:
    """Rows of an origin that makes them anew each time, as presets do: few enough to be kept."""

    origin: Origin
    num_rows: int
    digest: str

    def __len__(self) -> int:
        return self.num_rows

    def digested(self) -> Iterator[bytes]:
        yield self.digest.encode()

    def read(self, rows: NDArray[np.int64], opened: open_files.OpenFiles) -> list[RowBytes | RowError]:
        listed = opened.kept("", _WHOLE, lambda: (self._load(), 0))
        return [listed[row] for row in rows.tolist()]

    def _load(self) -> list[RowBytes | RowError]:
        rows = list(self.origin.rows())
        if _digest(rows) != self.digest:
            raise SourceError(f"{type(self.origin).__name__}: the rows are not those that were indexed")
        return rows


def _digest(rows: list[RowBytes | RowError]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        content = row.raw if isinstance(row, RowBytes) else str(row).encode("utf-8", "replace")
        digest.update(f"{row.address}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
