"""Rows of Arrow tables: parquet and arrow files, and what `datasets` gives. Each becomes one line of canonical JSON.

A null field of a struct means that the field is absent: columnar files cannot say otherwise (every message of a column
has all keys that any message has). Bytes become ``{"bytes": base64}``, which is media and never text, dates and
durations ISO text (nanoseconds are cut to microseconds, which is all that Python's own types hold), NaN null. A value
that has no JSON form (an infinite number, too) becomes an object that says why (`luthier.sources.unreadable`), so a
column that nobody uses costs no row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from math import isinf
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources import BYTES_KEYS, MAX_COLUMNAR_ROW_BYTES, RowBytes, row_too_long, unreadable
from luthier.sources.files import DataFile, FileKind
from luthier.sources.open_files import CACHE_BYTES, OpenFiles, SpooledRows, Value, index_by_spool, spooled
from luthier.writing import counted

ROWS_PER_BATCH = 1000
_READ_BYTES = 1 << 20
_ARROW_MAGIC = b"ARROW1"
# What pyarrow raises where Python has no such value (year 10000, a time zone nobody knows, text that is no UTF-8), and
# what JSON has no form for.
_NO_VALUE = (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, AttributeError, ImportError)
_NO_JSON = (TypeError, ValueError, OverflowError, RecursionError)


def read_columnar_file(file: DataFile) -> Iterator[RowBytes | RowError]:
    """The rows of a parquet or arrow file, a batch of them in memory at a time. Raises `SourceError`."""
    row = 1
    with _reading(file.path, file.kind):
        for batch in read_batches(file):
            yield from table_rows(batch, file.path, first_row=row)
            row += batch.num_rows


def count_columnar_rows(file: DataFile) -> int:
    """How many rows a file has, without reading them where the file says so itself."""
    with _reading(file.path, file.kind):
        if file.kind is FileKind.PARQUET:
            return int(pq.read_metadata(file.path).num_rows)
        return sum(batch.num_rows for batch in read_batches(file))


@contextmanager
def _reading(path: str, kind: FileKind) -> Iterator[None]:
    """Raises `SourceError` in the place of what pyarrow and the system raise."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: cannot be read as {kind}: {error}") from error


def read_batches(file: DataFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file as record batches of at most `ROWS_PER_BATCH`."""
    if file.kind is FileKind.PARQUET:
        with open_parquet(file.path) as parquet:
            yield from parquet.iter_batches(batch_size=ROWS_PER_BATCH)
        return
    with pa.memory_map(file.path) as source:
        if is_arrow_file(source):
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                yield from _slices(reader.get_batch(index))
            return
        with pa.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from _slices(batch)


def open_parquet(path: str) -> pq.ParquetFile:
    """A parquet file, to be read a little at a time; by default, whole row groups or files are held in memory. Pages
    that come with a checksum are compared with it."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True)


def is_arrow_file(source: pa.NativeFile) -> bool:
    """Whether an open file is of Arrow's file format; else it is a stream, as `datasets` writes them."""
    is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    source.seek(0)
    return bool(is_file)


def table_rows(table: pa.Table | pa.RecordBatch, name: str, *, first_row: int) -> Iterator[RowBytes | RowError]:
    """The rows of an Arrow table or record batch, addressed ``name:first_row`` and on."""
    names = table.schema.names
    has_nulls = any(_has(field.type, pa.types.is_struct) for field in table.schema)
    columns = [_column_values(table.column(index)) for index in range(len(names))]
    for offset, values in enumerate(zip(*columns, strict=True)):
        data = _row(names, values, has_nulls=has_nulls)
        yield encode_row(data, Address(file=name, row=first_row + offset))


def chosen_rows(
    table: pa.Table | pa.RecordBatch, name: str, places: Iterable[tuple[int, int]]
) -> Iterator[RowBytes | RowError]:
    """Some rows of a table or batch, as `table_rows` gives them; ``places`` are a place in it and the row's number."""
    names = table.schema.names
    has_nulls = any(_has(field.type, pa.types.is_struct) for field in table.schema)
    columns = [table.column(index) for index in range(len(names))]
    for place, number in places:
        values = [_column_values(column.slice(place, 1))[0] for column in columns]
        yield encode_row(_row(names, values, has_nulls=has_nulls), Address(file=name, row=number))


def encode_row(data: dict[str, object], address: Address) -> RowBytes | RowError:
    """A row that did not come as JSON, as canonical JSON; `RowError` if it cannot be one."""
    try:
        raw = msgspec.json.encode(data)
    except _NO_JSON:
        raw = msgspec.json.encode({column: _encodable(value) for column, value in data.items()})
    if len(raw) > MAX_COLUMNAR_ROW_BYTES:
        raw = msgspec.json.encode(_without_largest(data, len(raw) - MAX_COLUMNAR_ROW_BYTES))
    if len(raw) > MAX_COLUMNAR_ROW_BYTES:
        return row_too_long(len(raw), address, limit=MAX_COLUMNAR_ROW_BYTES)
    return RowBytes(raw=raw, address=address)


def _without_largest(data: dict[str, object], excess: int) -> dict[str, object]:
    """The row without its largest values, so that it is ``excess`` bytes shorter: most likely nobody uses them."""
    kept = {column: _encodable(value) for column, value in data.items()}
    sizes = {column: len(msgspec.json.encode(value)) for column, value in kept.items()}
    for column in sorted(sizes, key=lambda column: -sizes[column]):
        if excess > 0:
            why = f"{counted(sizes[column], 'byte')} in a row that may have {MAX_COLUMNAR_ROW_BYTES:,}"
            kept[column] = unreadable(why, reason="row_too_long")
            excess -= sizes[column] - len(msgspec.json.encode(kept[column]))
    return kept


def _row(names: Sequence[str], values: Sequence[object], *, has_nulls: bool) -> dict[str, object]:
    data: dict[str, object] = dict(zip(names, values, strict=True))
    if len(data) < len(names):
        data |= {name: unreadable("two columns have this name") for name, count in Counter(names).items() if count > 1}
    if has_nulls:
        return {name: _without_null_fields(value) for name, value in data.items() if value is not None}
    return data


def _column_values(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """The values of a column, or of a part of one, as Python has them; `unreadable` in the place of those it cannot."""
    try:
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        plain = _plain_type(column.type)
        values = list((column if plain is column.type else column.cast(plain, safe=False)).to_pylist())
    except _NO_VALUE:
        values = [_value(scalar) for scalar in column]
    return [_as_meant(value) for value in values] if _has(column.type, *_IS_BYTES) or _has_infinity(column) else values


def _as_meant(value: object) -> object:
    """A value of which msgspec would make another one.

    Bytes become ``{"bytes": …}``, unless they stand under such a name: base64 text would be learned where a column of
    text was written as one of bytes. An infinite number is `unreadable`: null stands for a default.
    """
    if type(value) is bytes:
        return {"bytes": value}
    if type(value) is float and isinf(value):
        return unreadable(f"{value} is no number that JSON has")
    if isinstance(value, list | tuple):  # the items of maps are tuples
        return [_as_meant(item) for item in value]
    if type(value) is dict:
        return {
            key: item if key in BYTES_KEYS and type(item) is bytes else _as_meant(item) for key, item in value.items()
        }
    return value


def _has_infinity(column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a number in the column is infinite, at any depth of structs and lists."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        return any(map(_has_infinity, column.chunks))
    if isinstance(kind, pa.BaseExtensionType):
        return _has_infinity(column.storage)
    if pa.types.is_dictionary(kind):
        return _has_infinity(column.dictionary)
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.is_inf(column.cast(pa.float64()))).as_py())
    if pa.types.is_struct(kind):
        return any(map(_has_infinity, column.flatten()))
    if pa.types.is_map(kind):
        return _has_infinity(column.keys) or _has_infinity(column.items)
    return any(is_of_kind(kind) for is_of_kind in _IS_LIST) and _has_infinity(column.flatten())


def _value(scalar: pa.Scalar) -> object:
    try:
        plain = _plain_type(scalar.type)
        return (scalar if plain is scalar.type else pa.array([scalar]).cast(plain, safe=False)[0]).as_py()
    except _NO_VALUE as error:
        return unreadable(f"a value of type {scalar.type} cannot be read: {error}")


def _encodable(value: object) -> object:
    try:
        msgspec.json.encode(value)
    except _NO_JSON as error:
        return unreadable(f"a {type(value).__name__} has no JSON form: {error}", reason="not_json")
    return value


@lru_cache(maxsize=256)
def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type itself, or one with microseconds in the place of nanoseconds and storage in that of extensions.

    What pyarrow makes of nanoseconds depends on whether pandas is installed; equal rows must have equal bytes.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_dictionary(kind):
        plain = _plain_type(kind.value_type)
        return kind if plain is kind.value_type else plain
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        plains = [_plain_type(field.type) for field in fields]
        if all(plain is field.type for plain, field in zip(plains, fields, strict=True)):
            return kind
        return pa.struct([field.with_type(plain) for plain, field in zip(plains, fields, strict=True)])
    if types.is_list(kind) or types.is_large_list(kind):
        plain = _plain_type(kind.value_type)
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return kind if plain is kind.value_type else make(plain)
    if types.is_fixed_size_list(kind):
        plain = _plain_type(kind.value_type)
        return kind if plain is kind.value_type else pa.list_(plain, kind.list_size)
    if types.is_map(kind):
        plains = [_plain_type(kind.key_type), _plain_type(kind.item_type)]
        return kind if plains[0] is kind.key_type and plains[1] is kind.item_type else pa.map_(*plains)
    return kind


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, ROWS_PER_BATCH):
        yield batch.slice(start, ROWS_PER_BATCH)


_IS_LIST = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view,
    pa.types.is_large_list_view,
)  # fmt: skip
_IS_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def _has(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type, or one in it, passes one of the tests."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has(kind.storage_type, *tests)
    if pa.types.is_dictionary(kind):
        return _has(kind.value_type, *tests)
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return any(test(kind) for test in tests) or any(_has(each, *tests) for each in inner)


def _without_null_fields(value: object) -> object:
    if type(value) is dict:
        return {key: _without_null_fields(item) for key, item in value.items() if item is not None}
    if type(value) is list:
        return [_without_null_fields(item) for item in value]
    return value


# --------------------------------------------------------------------------------------------------------------------
# Random access to rows of parquet and arrow files: a group of rows is decoded, and the rows asked for are taken.
#
# A group is a row group of a parquet file or a record batch of an arrow file. Decoded groups are kept as long as they
# fit in `CACHE_BYTES`. A file whose groups do not all fit there would be decoded anew for every few thousand shuffled
# rows; so it is spooled once as an uncompressed arrow file in small batches, which is mapped, not read.


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
        with _reading(self.path, self.kind):
            for start, stop in pairwise(cuts.tolist()):
                found += self._rows_of_group(int(groups[start]), rows[start:stop], opened)
        self.file.check_unchanged()
        return found

    def _rows_of_group(self, group: int, rows: NDArray[np.int64], opened: OpenFiles) -> Iterator[RowBytes | RowError]:
        batches = opened.kept(self.path, group, lambda: _measured(lambda: self._decode(group, opened)))
        first, last = int(self.bounds[group]), int(self.bounds[group + 1])
        if sum(batch.num_rows for batch in batches) != last - first:
            what = f"{self.path}: group {group} had {counted(last - first, 'row')} when it was indexed"
            raise SourceError(f"{what}, it has {sum(batch.num_rows for batch in batches):,} now")
        for batch in batches:
            here = rows[slice(*np.searchsorted(rows, (first, first + batch.num_rows)))]
            places = zip((here - first).tolist(), (here + 1).tolist(), strict=True)
            yield from chosen_rows(batch, self.file.path, places)
            first += batch.num_rows

    def _decode(self, group: int, opened: OpenFiles) -> list[pa.RecordBatch]:
        reader = opened.kept(self.path, _OPEN_FILE, lambda: (_open(self.path, self.kind), _MIN_KEPT_BYTES))
        if isinstance(reader, _OpenStream):
            assert self.places is not None, f"{self.path}: a stream whose batches have no places"
            reader.source.seek(int(self.places[group]))
            return [pa.ipc.read_record_batch(pa.ipc.read_message(reader.source), reader.schema)]
        if self.kind is FileKind.PARQUET:
            return list(reader.iter_batches(batch_size=ROWS_PER_BATCH, row_groups=[group]))
        return [reader.get_batch(group)]


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
    with _reading(file.path, file.kind):
        groups = _parquet_groups(file.path) if file.kind is FileKind.PARQUET else _arrow_groups(file.path)
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
        _write_batches(_readable(file), sink)
        file.check_unchanged()

    path = spooled(file, "arrow", folder, write, _is_whole)
    return _rows(file, path, FileKind.ARROW, _arrow_groups(path))


def _readable(file: DataFile) -> Iterator[pa.RecordBatch]:
    """As `read_batches`. Raises `SourceError`, so that a damaged file is not taken for a full disk."""
    with _reading(file.path, file.kind):
        yield from read_batches(file)


def _write_batches(batches: Iterator[pa.RecordBatch], sink: IO[bytes]) -> None:
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


def _open(path: str, kind: FileKind) -> pq.ParquetFile | pa.ipc.RecordBatchFileReader | _OpenStream:
    """What groups are read with: a parquet or arrow file, or the source and schema of a stream."""
    if kind is FileKind.PARQUET:
        return open_parquet(path)
    source = pa.memory_map(path)
    if is_arrow_file(source):
        return pa.ipc.open_file(source)
    return _OpenStream(source, pa.ipc.open_stream(source).schema)


class _OpenStream(NamedTuple):
    source: pa.NativeFile
    schema: pa.Schema


def _measured(load: Callable[[], Value]) -> tuple[Value, int]:
    """A value, and the memory that Arrow took for it."""
    allocated = pa.total_allocated_bytes()
    value = load()
    return value, max(_MIN_KEPT_BYTES, pa.total_allocated_bytes() - allocated)


def _has_dictionaries(schema: pa.Schema) -> bool:
    kinds = [field.type for field in schema]
    while kinds:
        kind = kinds.pop()
        if pa.types.is_dictionary(kind):
            return True
        kinds += [kind.field(index).type for index in range(kind.num_fields)]
    return False
