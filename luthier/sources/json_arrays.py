"""The rows of a JSON array, cut out a window of the file at a time. They are not decoded: bytes in, bytes out.

Where a window may end is found by counting brackets outside strings. That is a guess, and msgspec proves it: if
``[window]`` is an array, its elements are elements of the whole array, for JSON is read in one way only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.rows import MAX_ROW_BYTES, RowBytes, row_too_long

_WINDOW_BYTES = 1 << 20
_MESSAGE_KEYS = {"role", "from"}
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING, _CLOSING = ord("{"), ord("}")
_FOLD = np.uint8(0x20)  # makes square brackets curly
_STEPS = np.zeros(256, np.int64)  # how much deeper a byte leads
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
# Only ends of values are of interest: numbers stay text, which may have thousands of digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


def read_json_rows(stream: IO[bytes], path: str) -> Iterator[RowBytes | RowError]:
    """The rows of one array, or of an object that holds one (which is read whole). Addresses count rows from 1.

    Raises `SourceError` where the file cannot be cut into rows: rows before that place were given out by then.
    """
    for index, raw in enumerate(_cut_rows(stream, path), start=1):
        address = Address(file=path, row=index)
        yield row_too_long(len(raw), address) if len(raw) > MAX_ROW_BYTES else RowBytes(raw=raw, address=address)


def _cut_rows(stream: IO[bytes], path: str) -> Iterator[bytes]:
    text = _TextPosition(path=path, offset=stream.tell(), line=1)
    head = stream.read(_WINDOW_BYTES)
    while head and not head.lstrip():
        text, head = text.after(head), stream.read(_WINDOW_BYTES)
    body = head.lstrip()
    match body[:1]:
        case b"[":
            yield from _rows_of_array(stream, body, text.after(head[: len(head) - len(body)]))
        case b"{":
            yield from _rows_of_object(body + stream.read(), path)
        case _:
            hint = "it begins " + repr(body[:40])
            raise SourceError(f"{path}: the file holds neither a JSON array nor an object", hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextPosition:
    """Where in the file a text begins: offset from 0, line from 1."""

    path: str
    offset: int
    line: int

    def after(self, text: bytes) -> _TextPosition:
        return _TextPosition(path=self.path, offset=self.offset + len(text), line=self.line + text.count(b"\n"))

    def fault(self, text: bytes, what: str) -> SourceError:
        """The array cannot be read at the end of ``text``, which begins here."""
        place = self.after(text)
        hint = "fix the file, or write one row a line (.jsonl): then only the broken row is lost"
        where = f"{place.path}:{place.line}"
        return SourceError(f"{where}: the JSON array cannot be read (byte {place.offset}): {what}", hint=hint)


# -------------------------------------------------------------------------------------------------------- arrays


def _rows_of_array(stream: IO[bytes], body: bytes, text: _TextPosition) -> Iterator[bytes]:
    """``body`` is the array's beginning, ``text`` where it is."""
    window, text = body[1:], text.after(body[:1])
    size = _WINDOW_BYTES
    while True:
        cut, is_end = _last_cut(window)
        if cut is None:
            if not (more := stream.read(size)):
                yield from _rows_of_window(window, text, is_last=True, is_closed=False)
                return
            window += more
            size = max(_WINDOW_BYTES, len(window))  # a long row: the window doubles until it holds it
            continue
        yield from _rows_of_window(window[:cut], text, is_last=is_end, is_closed=is_end)
        text, window = text.after(window[: cut + 1]), window[cut + 1 :]
        if is_end:
            _check_nothing_follows(stream, window, text)
            return
        size = _WINDOW_BYTES
        window += stream.read(size)


def _last_cut(window: bytes) -> tuple[int | None, bool]:
    """Where the array ends in the window (and True), else the last comma between two of its rows (and False)."""
    data = np.frombuffer(window, np.uint8)
    folded = data | _FOLD
    places = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
    quotes = _quotes(data)
    if len(quotes):
        places = places[np.searchsorted(quotes, places) % 2 == 0]
    depth = np.cumsum(_STEPS[data[places]])
    if len(ends := np.flatnonzero(depth < 0)):
        end = int(places[ends[0]])
        return (end if window[end : end + 1] == b"]" else end + 1), True  # a brace ends no array: the window is faulty
    # {…}, {…}, {… -> the comma after the last row that is closed, or after the one before if that is still to come
    for close in np.flatnonzero(depth == 0)[:-3:-1]:
        if (comma := window.find(b",", int(places[close]) + 1)) >= 0:
            return comma, False
    return None, False


def _quotes(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where strings begin and end: quotes that an even number of backslashes precedes."""
    quotes = np.flatnonzero(data == _QUOTE)
    escaped = np.flatnonzero(data[np.maximum(quotes - 1, 0)] == _BACKSLASH)
    if not len(escaped):
        return quotes
    # a run of backslashes begins where the one before is none: the n-th backslash at place p, p - n is the run's own
    slashes = np.flatnonzero(data == _BACKSLASH)
    first = np.ones(len(slashes), bool)
    first[1:] = np.diff(slashes) > 1
    run_begins = np.maximum.accumulate(np.where(first, slashes, 0))
    last = quotes[escaped] - 1
    lengths = last - run_begins[np.searchsorted(slashes, last)] + 1
    return np.delete(quotes, escaped[lengths % 2 == 1])


def _rows_of_window(window: bytes, text: _TextPosition, *, is_last: bool, is_closed: bool) -> list[bytes]:
    """All rows of a window. Between windows there are commas, so one that is not the last must hold a row."""
    if is_closed or not is_last:
        try:
            rows = [bytes(row) for row in msgspec.json.decode(b"[" + window + b"]", type=list[msgspec.Raw])]
        except (msgspec.DecodeError, RecursionError):
            rows = []
        if rows:
            return rows
    return list(_cut_leniently(window, text, is_last=is_last, is_closed=is_closed))


def _cut_leniently(window: bytes, text: _TextPosition, *, is_last: bool, is_closed: bool) -> Iterator[bytes]:
    """The rows of a window in which some row is not strict JSON (NaN …), so that only that row is lost.

    Python's decoder finds where each row ends. Where it cannot either, the rest of the file is unreadable.
    """
    body = window.decode("utf-8", "surrogateescape")

    def fault(position: int, what: str) -> SourceError:
        return text.fault(body[:position].encode("utf-8", "surrogateescape"), what)

    position = _skip_space(body, 0)
    while position < len(body):
        try:
            _, end = _DECODER.raw_decode(body, position)
        except RecursionError:
            raise fault(position, "a row is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise fault(error.pos, error.msg) from None
        yield body[position:end].encode("utf-8", "surrogateescape")
        position = _skip_space(body, end)
        if position == len(body):
            break
        if body[position] != ",":
            raise fault(position, "',' or ']' is needed")
        position = _skip_space(body, position + 1)
        if position == len(body) and not is_last:
            raise fault(position, "Expecting value")
    else:
        if not is_last:
            raise fault(position, "Expecting value")
    if is_last and not is_closed:
        raise fault(len(body), "the array is not closed, the file may be cut off")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _check_nothing_follows(stream: IO[bytes], rest: bytes, text: _TextPosition) -> None:
    while not (tail := rest.lstrip()):
        text, rest = text.after(rest), stream.read(_WINDOW_BYTES)
        if not rest:
            return
    raise text.fault(rest[: -len(tail)], "text follows the array's end; a file holds one array")


# ------------------------------------------------------------------------------------------------------- objects


def _rows_of_object(body: bytes, path: str) -> Iterator[bytes]:
    """``{"data": [row, …]}`` -> its rows; an object that is itself a row -> that row."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{path}: not well-formed JSON: {error}") from None
    lists = {name: bytes(value) for name, value in fields.items() if bytes(value).lstrip()[:1] == b"["}
    if len(lists) == 1:
        (rows,) = lists.values()
        items = [bytes(row) for row in msgspec.json.decode(rows, type=list[msgspec.Raw])]
        if items and all(item.lstrip()[:1] == b"{" for item in items) and not _is_message(items[0]):
            yield from items
            return
    yield body.rstrip()


def _is_message(raw: bytes) -> bool:
    try:
        return bool(_MESSAGE_KEYS & msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
