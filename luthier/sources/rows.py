"""Rows as they were read: bytes with an address, before and after decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from luthier.errors import RowError
from luthier.records import Address
from luthier.sources.strict_json import decode_strict

# A row of text this long is a damaged file far more often than a sample: at 4 bytes a token it is 2.5 million tokens.
MAX_ROW_BYTES = 10_000_000
# Rows of columnar files may carry pictures, base64-coded in their canonical form.
MAX_COLUMNAR_ROW_BYTES = 100_000_000
_UNFINISHED = "it was cut off, or is still being written"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBytes:
    """A row that is not decoded yet: cheap to send to another process.

    ``raw`` is the row's JSON: the bytes as they stand in the file (json, jsonl), or the canonical JSON of the row where
    the file does not hold JSON (csv, txt, parquet, arrow, the Hub). Equal rows have equal bytes. ``is_open``: the last
    line of a file, without a line's end.
    """

    raw: bytes
    address: Address
    is_open: bool = False

    def __reduce__(self) -> tuple[Callable[..., RowBytes], tuple[bytes, str, int, bool]]:
        # Thousands of these go to workers at a time; what dataclasses with slots do by default is five times slower.
        return _restore, (self.raw, self.address.file, self.address.row, self.is_open)


def _restore(raw: bytes, file: str, row: int, is_open: bool) -> RowBytes:
    return RowBytes(raw=raw, address=Address(file=file, row=row), is_open=is_open)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """A decoded row: ``data`` is what ``raw`` says, nothing else."""

    raw: bytes
    data: dict[str, Any]
    address: Address


def decode_row(row: RowBytes) -> RawRow:
    """Decode one row; raises `RowError` (with the address) if it is not one well-formed JSON object."""
    try:
        data = decode_strict(row.raw)
    except RowError as error:
        if row.is_open and error.reason == "truncated_json":
            error = RowError(error.reason, f"{error.detail}, and the file ends there too: {_UNFINISHED}")
        raise error.at(row.address) from None
    if type(data) is not dict:
        detail = f"a row is a JSON object, this is a JSON {json_kind(data)}"
        raise RowError("not_an_object", detail, address=row.address)
    return RawRow(raw=row.raw, data=data, address=row.address)


def row_too_long(num_bytes: int, address: Address, *, limit: int = MAX_ROW_BYTES) -> RowError:
    """The error for a row over the cap."""
    return RowError("row_too_long", f"over {num_bytes:,} bytes, {limit:,} are allowed", address=address)


def unreadable(why: str, *, reason: str = "unreadable_value") -> dict[str, list[str]]:
    """What stands in a row in the place of a value that has no JSON form; it costs the row where its column is used."""
    return {"unreadable value": [reason, why]}


def refuse_unreadable(column: str, value: object) -> None:
    """Raises the `RowError` that `unreadable` speaks of, where that stands in the place of a value."""
    match value:
        case {"unreadable value": [str(reason), str(why)], **rest} if not rest:
            raise RowError(reason, why, field=column)


def json_kind(value: object) -> str:
    """JSON's name for the type of a decoded value, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case dict():
            return "object"
        case _:
            return type(value).__name__
