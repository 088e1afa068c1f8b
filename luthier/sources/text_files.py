"""Rows of text files: jsonl, json, csv, tsv, txt, each also compressed. Bytes in, bytes out: nothing is decoded here.

Every reader yields the rows in file order as `RowBytes`, and a `RowError` in the place of a row that it cannot cut out.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Documents
from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources import MAX_ROW_BYTES, RowBytes, invalid_utf8, num_outer_keys, row_too_long
from luthier.sources.files import DataFile, FileKind, is_wide, open_compressed
from luthier.writing import counted

if TYPE_CHECKING:
    from _csv import Reader


MAX_LINE_BYTES = MAX_ROW_BYTES + 1  # with the line's end
_BOM = b"\xef\xbb\xbf"
_HEADER_BYTES = 1 << 16
_SEPARATORS = (",", ";", "\t", "|")
_SKIP_BYTES = 1 << 20  # a line over the cap is passed over in bites of this size, so memory stays flat


def read_text_file(file: DataFile) -> Iterator[RowBytes | RowError]:
    """The rows of a text file. Raises `SourceError` if the file as a whole is not what its name says."""
    with open_text_file(file) as stream:
        try:
            match file.kind:
                case FileKind.TXT if file.documents is Documents.PARAGRAPH:
                    yield from _read_paragraphs(stream, file)
                case FileKind.TXT if file.documents is Documents.FILE:
                    yield from _read_whole(stream, file)
                case FileKind.JSONL | FileKind.TXT:
                    yield from read_lines(stream, file)
                case FileKind.JSON if _is_lines(stream):
                    yield from read_lines(stream, file)
                case FileKind.JSON:
                    yield from read_json_rows(stream, file.path)
                case FileKind.CSV | FileKind.TSV:
                    yield from _read_table(stream, file.path, delimiter=_separator(stream, file))
                case _:
                    raise AssertionError(f"{file.kind} is not text")
        except OSError as error:
            raise SourceError(f"{file.path}: cannot be read to its end: {error}") from error


def has_row_a_line(file: DataFile) -> bool:
    """Whether each line of the file is a row of its own: jsonl, txt, and lines of JSON under the name .json."""
    match file.kind:
        case FileKind.JSONL:
            return True
        case FileKind.TXT:
            return file.documents is Documents.LINE
        case FileKind.JSON:
            with open_text_file(file) as stream:
                try:
                    return _is_lines(stream)
                except OSError as error:
                    raise SourceError(f"{file.path}: cannot be read to its end: {error}") from error
        case _:
            return False


_POINTER = b"version https://git-lfs.github.com/spec/"


def open_text_file(file: DataFile) -> IO[bytes]:
    """The file, opened behind its byte order mark; raises `SourceError`, also for other encodings than UTF-8."""
    try:
        stream = _open(file)
        start = stream.read(_HEADER_BYTES)
        stream.seek(0)
    except OSError as error:
        raise SourceError(f"{file.path}: cannot be opened: {error.strerror or error}") from error
    if is_wide(start, file.kind):
        stream.close()
        hint = f"iconv -f UTF-16 -t UTF-8 {file.path} > utf8{file.path[file.path.rfind('.') :]}"
        raise SourceError(f"{file.path}: the file is UTF-16 or UTF-32, UTF-8 is needed", hint=hint)
    if start.startswith(_POINTER):
        stream.close()
        what = f"{file.path}: this is a pointer of Git LFS, which stands for a file, not the data"
        raise SourceError(what, hint="fetch the data: git lfs pull, in its folder")
    if start[:3] == _BOM:
        stream.seek(3)
    return stream


def _open(file: DataFile) -> IO[bytes]:
    return open_compressed(file.path, file.compression) if file.compression else Path(file.path).open("rb")


def cell_separator(file: DataFile) -> str:
    """What stands between two cells of a CSV file; raises `SourceError`."""
    with open_text_file(file) as stream:
        return _separator(stream, file)


def line_row(file: DataFile, line: bytes, number: int) -> RowBytes | RowError | None:
    """What a line of a file with a row a line says; None if it is blank. ``number`` is the line's, from 1."""
    address = Address(file=file.path, row=number)
    if file.kind is not FileKind.TXT:
        raw = line.strip()
        return RowBytes(raw=raw, address=address, is_open=line[-1:] != b"\n") if raw else None
    return _text_row(line.rstrip(b"\r\n"), address)


def line_too_long(file: DataFile, num_bytes: int, number: int) -> RowError:
    """The error for a line of more than `MAX_LINE_BYTES`."""
    detail = f"{counted(num_bytes, 'byte')}, {MAX_ROW_BYTES:,} are allowed"
    return RowError("row_too_long", detail, address=Address(file=file.path, row=number))


def check_first_row(file: DataFile, row: RowBytes | RowError) -> None:
    """Raises `SourceError` if the first row of a jsonl file shows that the file is one JSON array."""
    if file.kind is FileKind.JSONL and isinstance(row, RowBytes) and row.raw[:1] == b"[":
        hint = f"if the file is one JSON array, its name must end in .json: mv {file.path} {file.path[:-1]}"
        raise SourceError(f"{row.address}: the first row is a JSON array, not an object", hint=hint)


def read_lines(
    stream: IO[bytes], file: DataFile, *, number: int = 0, is_first: bool = True, more: int = 0
) -> Iterator[RowBytes | RowError]:
    """One row a line; blank lines are allowed. Addresses are line numbers.

    Of a part of a file ``number`` lines are before it, and no row if it ``is_first``; ``more`` bytes of its last line
    are behind it.
    """
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            num_bytes = len(line)
            while line and not line.endswith(b"\n"):
                line = stream.readline(_SKIP_BYTES)
                num_bytes += len(line)
            yield line_too_long(file, num_bytes if line.endswith(b"\n") else num_bytes + more, number)
            continue
        row = line_row(file, line, number)
        if row is None:
            continue
        if is_first:
            check_first_row(file, row)
            is_first = False
        yield row


def _read_paragraphs(stream: IO[bytes], file: DataFile) -> Iterator[RowBytes | RowError]:
    """One row for the lines between two blank ones. Addresses are the lines on which paragraphs begin."""
    text, num_bytes = bytearray(), 0  # what is kept of the paragraph, and how long it is
    number, first, begins_line = 0, 1, True
    while line := stream.readline(_SKIP_BYTES):
        number += begins_line
        if begins_line and not line.strip():
            yield from _text_rows(text, num_bytes, Address(file=file.path, row=first))
            text, num_bytes = bytearray(), 0
        else:
            first = first if num_bytes else number
            num_bytes += len(line)
            if num_bytes <= MAX_LINE_BYTES:
                text += line
        begins_line = line.endswith(b"\n")
    yield from _text_rows(text, num_bytes, Address(file=file.path, row=first))


def _read_whole(stream: IO[bytes], file: DataFile) -> Iterator[RowBytes | RowError]:
    """The whole text of a file as one row, none if it is blank."""
    text = stream.read(MAX_LINE_BYTES + 1)
    num_bytes = len(text)
    while more := stream.read(_SKIP_BYTES):
        num_bytes += len(more)
    yield from _text_rows(text, num_bytes, Address(file=file.path, row=1))


def _text_rows(text: bytes | bytearray, num_bytes: int, address: Address) -> Iterator[RowBytes | RowError]:
    """The row that a text of ``num_bytes`` is, without its last line's end; none if it is blank."""
    if num_bytes > MAX_LINE_BYTES:
        yield row_too_long(num_bytes, address)
    elif (row := _text_row(bytes(text).rstrip(b"\r\n"), address)) is not None:
        yield row


def _text_row(text: bytes, address: Address) -> RowBytes | RowError | None:
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        return invalid_utf8(text, error).at(address)
    return RowBytes(raw=msgspec.json.encode({"text": decoded}), address=address) if decoded.strip() else None


def _is_lines(stream: IO[bytes]) -> bool:
    """Whether the first line of a JSON file is a whole object and another line follows it. Leaves the stream there."""
    start = stream.tell()
    first = _first_line(stream)
    second = _first_line(stream) if first[:1] == b"{" and _is_json(first) else b""
    stream.seek(start)
    return bool(second)


def _first_line(stream: IO[bytes]) -> bytes:
    while line := stream.readline(MAX_ROW_BYTES):
        if line.strip():
            return line.strip()
    return b""


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _separator(stream: IO[bytes], file: DataFile) -> str:
    """What stands between two cells: what the config says, a tab in .tsv, else what makes the most of the header."""
    if file.separator is not None or file.kind is FileKind.TSV:
        return file.separator or "\t"
    start = stream.tell()
    beginning = stream.read(_HEADER_BYTES).decode("utf-8", "replace")
    stream.seek(start)

    def num_cells(separator: str) -> int:
        try:
            return len(next(csv.reader(io.StringIO(beginning, newline=""), delimiter=separator, strict=True), []))
        except csv.Error:
            return 0

    return max(_SEPARATORS, key=num_cells)  # of equals, the first


def _read_table(stream: IO[bytes], path: str, *, delimiter: str) -> Iterator[RowBytes | RowError]:
    """CSV with a header; cells are text. Addresses are the lines on which rows begin."""
    csv.field_size_limit(MAX_ROW_BYTES)
    # surrogateescape keeps bytes that are not UTF-8 recognisable, so that only their row is lost
    with io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="") as text:
        yield from _table_rows(csv.reader(text, delimiter=delimiter, strict=True), path)


def _table_rows(reader: Reader, path: str) -> Iterator[RowBytes | RowError]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise SourceError(f"{path}:1: the header cannot be read: {error}") from error
    if len(set(header)) != len(header):
        raise SourceError(f"{path}:1: a column name comes twice in the header: {', '.join(header)}")
    while True:
        address = Address(file=path, row=reader.line_num + 1)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield RowError("invalid_csv", str(error), address=address)
            continue
        if cells:
            yield _table_row(header, cells, address)


def _table_row(header: list[str], cells: list[str], address: Address) -> RowBytes | RowError:
    if len(cells) != len(header):
        return RowError(
            "invalid_csv",
            f"{counted(len(cells), 'cell')}, the header has {counted(len(header), 'column')}",
            address=address,
        )
    try:
        return RowBytes(raw=msgspec.json.encode(dict(zip(header, cells, strict=True))), address=address)
    except UnicodeEncodeError:
        line = "".join(cells).encode("utf-8", "surrogateescape")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return invalid_utf8(line, error).at(address)
        return RowError("invalid_utf8", "in one of the cells", address=address)


# ---------------------------------------------------------------------------------------------------------- JSON arrays


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
            if (written := num_outer_keys(body)) != len(fields):
                what = f"{path}: the object around the rows has {written} keys, and only {len(fields)} different ones"
                raise SourceError(what, hint="write all rows into one list")
            yield from items
            return
    yield body.rstrip()


def _is_message(raw: bytes) -> bool:
    try:
        return bool(_MESSAGE_KEYS & msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
