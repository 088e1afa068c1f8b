"""Rows of Arrow tables: parquet and arrow files, and what `datasets` gives. Each becomes one line of canonical JSON.

A null field of a struct means that the field is absent: columnar files cannot say otherwise (every message of a column
has all keys that any message has). Bytes become base64 text, dates and durations ISO text (nanoseconds are cut to
microseconds, which is all that Python's own types hold), NaN null. A value that has no JSON form becomes an object that
says why (`luthier.sources.rows.unreadable`), so a column that nobody uses costs no row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.files import DataFile, FileKind
from luthier.sources.rows import MAX_COLUMNAR_ROW_BYTES, RowBytes, row_too_long, unreadable

ROWS_PER_BATCH = 1000
_READ_BYTES = 1 << 20
_ARROW_MAGIC = b"ARROW1"
# What pyarrow raises where Python has no such value (year 10000, a time zone nobody knows, text that is no UTF-8), and
# what JSON has no form for.
_NO_VALUE = (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, AttributeError, ImportError)
_NO_JSON = (TypeError, ValueError, OverflowError, RecursionError)


def read_columnar_file(file: DataFile) -> Iterator[RowBytes | RowError]:
    """The rows of a parquet or arrow file, a batch of them in memory at a time. Raises `SourceError`."""
    try:
        row = 1
        for batch in read_batches(file):
            yield from table_rows(batch, file.path, first_row=row)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.path}: cannot be read as {file.kind}: {error}") from error


def count_columnar_rows(file: DataFile) -> int:
    """How many rows a file has, without reading them where the file says so itself."""
    try:
        if file.kind is FileKind.PARQUET:
            return int(pq.read_metadata(file.path).num_rows)
        return sum(batch.num_rows for batch in read_batches(file))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{file.path}: cannot be read as {file.kind}: {error}") from error


def read_batches(file: DataFile) -> Iterator[Any]:
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


def open_parquet(path: str) -> Any:
    """A parquet file, to be read a little at a time; by default, whole row groups or files are held in memory."""
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)


def is_arrow_file(source: Any) -> bool:
    """Whether an open file is of Arrow's file format; else it is a stream, as `datasets` writes them."""
    is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
    source.seek(0)
    return bool(is_file)


def table_rows(table: Any, name: str, *, first_row: int) -> Iterator[RowBytes | RowError]:
    """The rows of an Arrow table or record batch, addressed ``name:first_row`` and on."""
    names = table.schema.names
    has_nulls = _has_structs(table.schema)
    columns = [_column_values(table.column(index)) for index in range(len(names))]
    for offset, values in enumerate(zip(*columns, strict=True)):
        data = _row(names, values, has_nulls=has_nulls)
        yield encode_row(data, Address(file=name, row=first_row + offset))


def chosen_rows(table: Any, name: str, places: Iterable[tuple[int, int]]) -> Iterator[RowBytes | RowError]:
    """Some rows of a table or batch, as `table_rows` gives them; ``places`` are a place in it and the row's number."""
    names = table.schema.names
    has_nulls = _has_structs(table.schema)
    columns = [table.column(index) for index in range(len(names))]
    for place, number in places:
        values = [_column_values(column.slice(place, 1))[0] for column in columns]
        yield encode_row(_row(names, values, has_nulls=has_nulls), Address(file=name, row=number))


def encode_row(data: dict[str, Any], address: Address) -> RowBytes | RowError:
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


def _without_largest(data: dict[str, Any], excess: int) -> dict[str, Any]:
    """The row without its largest values, so that it is ``excess`` bytes shorter: most likely nobody uses them."""
    kept = {column: _encodable(value) for column, value in data.items()}
    sizes = {column: len(msgspec.json.encode(value)) for column, value in kept.items()}
    for column in sorted(sizes, key=lambda column: -sizes[column]):
        if excess > 0:
            why = f"{sizes[column]:,} bytes in a row that may have {MAX_COLUMNAR_ROW_BYTES:,}"
            kept[column] = unreadable(why, reason="row_too_long")
            excess -= sizes[column] - len(msgspec.json.encode(kept[column]))
    return kept


def _row(names: Sequence[str], values: Sequence[Any], *, has_nulls: bool) -> dict[str, Any]:
    data = dict(zip(names, values, strict=True))
    if len(data) < len(names):
        data |= {name: unreadable("two columns have this name") for name, count in Counter(names).items() if count > 1}
    return _without_null_fields(data) if has_nulls else data


def _column_values(column: Any) -> list[Any]:
    """The values of a column, or of a part of one, as Python has them; `unreadable` in the place of those it cannot."""
    try:
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        plain = _plain_type(column.type)
        return list((column if plain is column.type else column.cast(plain, safe=False)).to_pylist())
    except _NO_VALUE:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        plain = _plain_type(scalar.type)
        return (scalar if plain is scalar.type else pa.array([scalar]).cast(plain, safe=False)[0]).as_py()
    except _NO_VALUE as error:
        return unreadable(f"a value of type {scalar.type} cannot be read: {error}")


def _encodable(value: Any) -> Any:
    try:
        msgspec.json.encode(value)
    except _NO_JSON as error:
        return unreadable(f"a {type(value).__name__} has no JSON form: {error}", reason="not_json")
    return value


@lru_cache(maxsize=256)
def _plain_type(kind: Any) -> Any:
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


def _slices(batch: Any) -> Iterator[Any]:
    for start in range(0, batch.num_rows, ROWS_PER_BATCH):
        yield batch.slice(start, ROWS_PER_BATCH)


def _has_structs(schema: Any) -> bool:
    return any(_has_struct(field.type) for field in schema)


def _has_struct(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return True
    return kind.num_fields > 0 and any(_has_struct(kind.field(index).type) for index in range(kind.num_fields))


def _without_null_fields(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_null_fields(item) for key, item in value.items() if item is not None}
    if type(value) is list:
        return [_without_null_fields(item) for item in value]
    return value
