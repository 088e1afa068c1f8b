"""Sources: raw rows of files, the Hub and presets become conversations, documents, preferences and feedback.

Here are rows as they were read: bytes with an address, before and after decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np

from luthier.errors import RowError
from luthier.records import Address
from luthier.writing import JsonObject, counted

# A row of text this long is a damaged file far more often than a sample: at 4 bytes a token it is 2.5 million tokens.
MAX_ROW_BYTES = 10_000_000
# Rows of columnar files may carry pictures, base64-coded in their canonical form.
MAX_COLUMNAR_ROW_BYTES = 100_000_000
BYTES_KEYS = ("bytes", "data", "base64")  # under these a row says an item of media itself, as bytes or base64 text
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
    data: JsonObject
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
    return RowError("row_too_long", f"over {counted(num_bytes, 'byte')}, {limit:,} are allowed", address=address)


def invalid_utf8(raw: bytes, error: UnicodeDecodeError) -> RowError:
    """The error for a row whose bytes are no text, without its address."""
    return RowError("invalid_utf8", f"byte 0x{raw[error.start]:02x} at offset {error.start} of the row")


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
        case {"bytes": str(), **rest} if not rest:
            return "value of bytes (store text as strings)"
        case dict():
            return "object"
        case _:
            return type(value).__name__


# --------------------------------------------------------------------------------------------------------------------
# JSON, decoded fast and strictly: what other parsers let pass (repeated keys, NaN, half surrogates) is an error here.
#
# msgspec decodes; two counts prove that no key came twice; only a row that fails is looked at again, slowly, to say
# why.


MAX_DEPTH = 100  # tool schemas reach about 20; recursive code downstream must never meet a row that can overflow it

_DECODER: msgspec.json.Decoder[object] = msgspec.json.Decoder()
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_SPACED_COLON = re.compile(rb'"[ \t\r\n]+:')


def decode_strict(raw: bytes | str) -> object:
    """Decode one JSON value; raises `RowError` that names the fault and, where it can, the byte offset in ``raw``.

    Reasons: ``invalid_utf8``, ``truncated_json``, ``invalid_json``, ``non_finite_number``, ``number_out_of_range``,
    ``lone_surrogate``, ``nesting``, ``duplicate_key``.
    """
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogatepass")
    try:
        data = _DECODER.decode(raw)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _diagnose(raw, error)
    num_keys = _count_keys(data)
    if num_keys and _may_repeat_keys(raw, num_keys):
        # With all strings replaced by nothing, every colon left belongs to a key.
        num_written = _STRING.sub(b"", raw).count(b":")
        if num_written != num_keys:
            raise RowError(
                "duplicate_key",
                f"{counted(num_written, 'key is', 'keys are')} written, {num_keys} are different: {_repeated_key(raw)}",
            )
    return data


def decode_text(text: str, *, reason: str, field: str | None = None) -> object:
    """Decode JSON that stands as text in a row; raises `RowError` with the given reason and field."""
    try:
        return decode_strict(text)
    except RowError as error:
        raise RowError(reason, f"not JSON: {error} in {text[:60]!r}", field=field) from None


def _count_keys(data: object) -> int:
    """Keys of all objects in a decoded value; refuses values nested deeper than `MAX_DEPTH`."""
    num_keys = 0
    level: list[Any] = [data] if type(data) is dict or type(data) is list else []
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for node in level:
            values: Iterable[object] = node
            if type(node) is dict:
                num_keys += len(node)
                values = node.values()
            for value in values:
                kind = type(value)
                if kind is dict or kind is list:
                    below.append(value)
        if not below:
            return num_keys
        level = below
    raise _too_deep()


def num_outer_keys(raw: bytes) -> int:
    """How many keys are written in the outermost object of a well-formed text, those that come twice counted twice."""
    text = np.frombuffer(_STRING.sub(b"", raw), np.uint8)
    depth = np.cumsum(np.isin(text, list(b"[{")).astype(np.int64) - np.isin(text, list(b"]}")))
    return int(((depth == 1) & (text == ord(":"))).sum())


def _may_repeat_keys(raw: bytes, num_keys: int) -> bool:
    """Whether the text may hold more keys than were decoded: false is a proof, true asks for the exact count.

    A key is a string followed by a colon, and a colon inside a string can only follow an escaped quote, so
    {"a": 1, "b": "\\":"} -> 3 of `":` less 1 of `\\":` = 2 keys.
    """
    num_quoted_colons = raw.count(b'":')
    if num_quoted_colons != num_keys:
        if b'\\\\":' in raw:  # a key or a text that ends in a backslash: the subtraction below would be wrong
            return True
        num_quoted_colons -= raw.count(b'\\":')
    return num_quoted_colons != num_keys or _SPACED_COLON.search(raw) is not None


def _repeated_key(raw: bytes) -> str:
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        repeated.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    json.loads(raw, object_pairs_hook=note)
    return ", ".join(repr(name) for name in repeated)


class _NonFinite(Exception):
    """Found NaN or Infinity."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NonFinite(name)


def _diagnose(raw: bytes, error: Exception) -> NoReturn:
    """Say why msgspec refused ``raw``: Python's own decoder is slower and more lenient, so it gets further."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise invalid_utf8(raw, fault) from None
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except _NonFinite as fault:
        raise RowError("non_finite_number", f"{fault} is not JSON; write null or a number") from None
    except json.JSONDecodeError as fault:
        offset = len(text[: fault.pos].encode())
        if fault.pos >= len(text.rstrip()) or fault.msg.startswith("Unterminated string"):
            raise RowError(
                "truncated_json", f"the row ends after {counted(len(raw), 'byte')}, inside a value"
            ) from None
        raise RowError("invalid_json", f"{fault.msg} at byte {offset} of the row") from None
    except ValueError:
        raise RowError("number_out_of_range", "an integer has thousands of digits") from None
    for path in _surrogates(data):
        raise RowError("lone_surrogate", "half of a UTF-16 surrogate pair is not a character", field=path or None)
    raise RowError("number_out_of_range", str(error))


def _surrogates(data: object) -> Iterator[str]:
    """Paths of the strings that hold a lone surrogate: ``messages[0].content``."""
    stack = [("", data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
            if any(not _is_encodable(key) for key in value):
                yield path
        elif isinstance(value, list):
            stack += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, str) and not _is_encodable(value):
            yield path


def _is_encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _too_deep() -> RowError:
    return RowError("nesting", f"nested deeper than {MAX_DEPTH} levels")
