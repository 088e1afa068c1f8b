"""Rows of Arrow tables: parquet and arrow files, and what `datasets` gives. Each becomes one line of canonical JSON.

A null field of a struct means that the field is absent: columnar files cannot say otherwise (every message of a column
has all keys that any message has). Bytes become base64 text, dates ISO text, NaN null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.files import DataFile, FileKind
from luthier.sources.rows import MAX_COLUMNAR_ROW_BYTES, RowBytes, row_too_long

ROWS_PER_BATCH = 1000
_READ_BYTES = 1 << 20
_ARROW_MAGIC = b"ARROW1"


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
    has_nulls = _has_structs(table.schema)
    for offset, data in enumerate(table.to_pylist()):
        address = Address(file=name, row=first_row + offset)
        yield encode_row(_without_null_fields(data) if has_nulls else data, address)


def chosen_rows(table: Any, name: str, places: Iterable[tuple[int, int]]) -> Iterator[RowBytes | RowError]:
    """Some rows of a table or batch, as `table_rows` gives them; ``places`` are a place in it and the row's number."""
    has_nulls = _has_structs(table.schema)
    columns = [(column, table.column(index)) for index, column in enumerate(table.schema.names)]
    for place, number in places:
        data = {column: values[place].as_py() for column, values in columns}
        yield encode_row(_without_null_fields(data) if has_nulls else data, Address(file=name, row=number))


def encode_row(data: dict[str, Any], address: Address) -> RowBytes | RowError:
    """A row that did not come as JSON, as canonical JSON; `RowError` if it cannot be one."""
    try:
        raw = msgspec.json.encode(data)
    except (TypeError, ValueError, RecursionError) as error:
        return RowError("not_json", f"the row cannot be written as JSON: {error}", address=address)
    if len(raw) > MAX_COLUMNAR_ROW_BYTES:
        return row_too_long(len(raw), address, limit=MAX_COLUMNAR_ROW_BYTES)
    return RowBytes(raw=raw, address=address)


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
