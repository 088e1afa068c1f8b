"""Random access to rows of parquet and arrow files: a group of rows is decoded, and the rows asked for are taken.

A group is a row group of a parquet file or a record batch of an arrow file. Decoded groups are kept as long as they fit
in `CACHE_BYTES`. A file whose groups do not all fit there would be decoded anew for every few thousand shuffled rows;
so it is spooled once as an uncompressed arrow file in small batches, which is mapped, not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from luthier.errors import RowError, SourceError
from luthier.sources.columnar import (
    ROWS_PER_BATCH,
    chosen_rows,
    is_arrow_file,
    open_parquet,
    read_batches,
    read_columnar_file,
)
from luthier.sources.files import DataFile, FileKind
from luthier.sources.open_files import CACHE_BYTES, OpenFiles
from luthier.sources.record_spool import SpooledRows, index_by_spool, spooled
from luthier.sources.rows import RowBytes

_OPEN_FILE = -1  # the number under which an open file is kept beside its groups
_MIN_KEPT_BYTES = 1 << 14  # a batch that is mapped costs no more than its bookkeeping


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRows:
    """Rows of one columnar file by number. Group ``g`` has the rows ``bounds[g]:bounds[g + 1]``.

    ``path`` is read: the file itself, or its spool. ``places`` are byte offsets of the batches of an arrow stream.
    """

    file: DataFile
    path: str
    kind: FileKind
    bounds: NDArray[np.int64]
    places: NDArray[np.int64] | None

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def digested(self) -> Iterator[bytes | memoryview]:
        """What the rows depend on: the file as it was found, and where they are in it."""
        yield repr(self.file).encode()
        yield self.bounds.data

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        """Some rows, by rising number; each group is decoded once at most. Raises `SourceError`."""
        self.file.check_unchanged()
        found: list[RowBytes | RowError] = []
        groups = np.searchsorted(self.bounds, rows, side="right") - 1
        cuts = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
        try:
            for start, stop in pairwise(cuts.tolist()):
                found += self._rows_of_group(int(groups[start]), rows[start:stop], opened)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{self.path}: cannot be read as {self.kind}: {error}") from error
        self.file.check_unchanged()
        return found

    def _rows_of_group(self, group: int, rows: NDArray[np.int64], opened: OpenFiles) -> Iterator[RowBytes | RowError]:
        batches = opened.kept(self.path, group, lambda: _measured(lambda: self._decode(group, opened)))
        first, last = int(self.bounds[group]), int(self.bounds[group + 1])
        if sum(batch.num_rows for batch in batches) != last - first:
            what = f"{self.path}: group {group} had {last - first:,} rows when it was indexed"
            raise SourceError(f"{what}, it has {sum(batch.num_rows for batch in batches):,} now")
        for batch in batches:
            here = rows[slice(*np.searchsorted(rows, (first, first + batch.num_rows)))]
            places = zip((here - first).tolist(), (here + 1).tolist(), strict=True)
            yield from chosen_rows(batch, self.file.path, places)
            first += batch.num_rows

    def _decode(self, group: int, opened: OpenFiles) -> list[Any]:
        reader = opened.kept(self.path, _OPEN_FILE, lambda: (_open(self.path, self.kind), _MIN_KEPT_BYTES))
        if self.kind is FileKind.PARQUET:
            return list(reader.iter_batches(batch_size=ROWS_PER_BATCH, row_groups=[group]))
        if self.places is None:
            return [reader.get_batch(group)]
        source, schema = reader
        source.seek(int(self.places[group]))
        return [pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)]


def index_columns(files: tuple[DataFile, ...], folder: Path | None) -> list[ColumnRows | SpooledRows]:
    """Find the groups of columnar files; raises `SourceError`. Files that are too large once decoded are spooled."""
    found = [_find_groups(file) for file in files]
    is_too_large = sum(groups.decoded_bytes for groups in found) > CACHE_BYTES
    parts: list[ColumnRows | SpooledRows] = []
    for file, groups in zip(files, found, strict=True):
        if not groups.can_be_read or (is_too_large and groups.decoded_bytes):
            parts.append(_spool(file, groups, folder))
        else:
            parts.append(_rows(file, file.path, file.kind, groups))
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """What is in a columnar file. ``decoded_bytes`` is what all of its groups would hold in memory, about."""

    num_rows: list[int]
    places: list[int] | None = None
    decoded_bytes: int
    has_dictionaries: bool

    @property
    def can_be_read(self) -> bool:
        """Not so where a batch may need dictionaries that stand anywhere before it in a stream."""
        return self.places is None or not self.has_dictionaries


def _find_groups(file: DataFile) -> _Groups:
    file.check_unchanged()
    try:
        groups = _parquet_groups(file.path) if file.kind is FileKind.PARQUET else _arrow_groups(file.path)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.path}: cannot be read as {file.kind}: {error}") from error
    file.check_unchanged()
    return groups


def _parquet_groups(path: str) -> _Groups:
    with open_parquet(path) as parquet:
        groups = [parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups)]
        num_rows, encoded = [group.num_rows for group in groups], sum(group.total_byte_size for group in groups)
        # text that repeats is stored once: what the first rows take up tells more than the file's own sizes
        first = next(parquet.iter_batches(batch_size=ROWS_PER_BATCH), None)
        decoded = 0 if not first else first.nbytes * sum(num_rows) // first.num_rows
        has_dictionaries = _has_dictionaries(parquet.schema_arrow)
    return _Groups(num_rows=num_rows, decoded_bytes=max(encoded, decoded), has_dictionaries=has_dictionaries)


def _arrow_groups(path: str) -> _Groups:
    num_rows, places, decoded_bytes = [], [], 0
    with pa.memory_map(path) as source:
        is_file = is_arrow_file(source)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        schema = reader.schema
        for number in count() if not is_file else range(reader.num_record_batches):
            places.append(source.tell())
            allocated = pa.total_allocated_bytes()
            try:
                batch = reader.get_batch(number) if is_file else reader.read_next_batch()
            except StopIteration:
                break
            num_rows.append(batch.num_rows)
            decoded_bytes += max(0, pa.total_allocated_bytes() - allocated)
            del batch  # else the next one would seem to need no memory
    return _Groups(
        num_rows=num_rows,
        places=None if is_file else places,
        decoded_bytes=decoded_bytes,
        has_dictionaries=_has_dictionaries(schema),
    )


def _rows(file: DataFile, path: str, kind: FileKind, groups: _Groups) -> ColumnRows:
    bounds = np.concatenate(([0], np.cumsum(groups.num_rows, dtype=np.int64))).astype(np.int64)
    places = None if groups.places is None else np.array(groups.places, np.int64)
    return ColumnRows(file=file, path=path, kind=kind, bounds=bounds, places=places)


def _spool(file: DataFile, groups: _Groups, folder: Path | None) -> ColumnRows | SpooledRows:
    if groups.has_dictionaries:  # a file of arrow's has one dictionary for all batches, and these have their own
        return index_by_spool(file, read_columnar_file(file), folder)

    def write(sink: IO[bytes]) -> None:
        file.check_unchanged()
        try:
            _write_batches(read_batches(file), sink)
        except pa.ArrowException as error:
            raise SourceError(f"{file.path}: cannot be read as {file.kind}: {error}") from error
        file.check_unchanged()

    path = spooled(file, "arrow", folder, write, _is_whole)
    return _rows(file, path, FileKind.ARROW, _arrow_groups(path))


def _write_batches(batches: Iterator[Any], sink: IO[bytes]) -> None:
    first = next(batches)
    with pa.ipc.new_file(sink, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _is_whole(path: str) -> bool:
    try:
        with pa.memory_map(path) as source:
            return bool(pa.ipc.open_file(source).num_record_batches)
    except (FileNotFoundError, pa.ArrowException):
        return False


def _open(path: str, kind: FileKind) -> Any:
    """What groups are read with: a parquet or arrow file, or the source and schema of a stream."""
    if kind is FileKind.PARQUET:
        return open_parquet(path)
    source = pa.memory_map(path)
    if is_arrow_file(source):
        return pa.ipc.open_file(source)
    return source, pa.ipc.open_stream(source).schema


def _measured(load: Callable[[], Any]) -> tuple[Any, int]:
    """A value, and the memory that Arrow took for it."""
    allocated = pa.total_allocated_bytes()
    value = load()
    return value, max(_MIN_KEPT_BYTES, pa.total_allocated_bytes() - allocated)


def _has_dictionaries(schema: Any) -> bool:
    kinds = [field.type for field in schema]
    while kinds:
        kind = kinds.pop()
        if pa.types.is_dictionary(kind):
            return True
        kinds += [kind.field(index).type for index in range(kind.num_fields)]
    return False
