"""Rows of text files: jsonl, json, csv, tsv, txt, each also as .gz. Bytes in, bytes out: nothing is decoded here.

Every reader yields the rows in file order as `RowBytes`, and a `RowError` in the place of a row that it cannot cut out.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.files import DataFile, FileKind
from luthier.sources.rows import MAX_ROW_BYTES, RowBytes, row_too_long

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20  # a line over the cap is passed over in bites of this size, so memory stays flat
_MESSAGE_KEYS = {"role", "from"}


def read_text_file(file: DataFile) -> Iterator[RowBytes | RowError]:
    """The rows of a text file. Raises `SourceError` if the file as a whole is not what its name says."""
    with _open(file) as stream:
        try:
            match file.kind:
                case FileKind.JSONL:
                    yield from _read_lines(stream, file.path, refuse_array=True)
                case FileKind.JSON:
                    yield from _read_json(stream, file.path)
                case FileKind.TXT:
                    yield from _read_documents(stream, file.path)
                case FileKind.CSV:
                    yield from _read_table(stream, file.path, delimiter=",")
                case FileKind.TSV:
                    yield from _read_table(stream, file.path, delimiter="\t")
                case _:
                    raise AssertionError(f"{file.kind} is not text")
        except (EOFError, zlib.error, OSError) as error:
            raise SourceError(f"{file.path}: cannot be read to its end: {error}") from error


def _open(file: DataFile) -> IO[bytes]:
    try:
        stream: IO[bytes] = (gzip.open if file.is_gzip else open)(file.path, "rb")  # type: ignore[assignment]
        start = stream.read(4)
        stream.seek(0)
    except OSError as error:
        raise SourceError(f"{file.path}: cannot be opened: {error.strerror or error}") from error
    # A text that begins with an ASCII character has a NUL as its first or second byte in UTF-16 and UTF-32.
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\0" in start[:2] and len(start) > 1):
        stream.close()
        hint = f"iconv -f UTF-16 -t UTF-8 {file.path} > utf8{file.path[file.path.rfind('.') :]}"
        raise SourceError(f"{file.path}: the file is UTF-16 or UTF-32, UTF-8 is needed", hint=hint)
    if start[:3] == _BOM:
        stream.seek(3)
    return stream


def _read_lines(stream: IO[bytes], path: str, *, refuse_array: bool) -> Iterator[RowBytes | RowError]:
    """One row a line; blank lines are allowed. Addresses are line numbers."""
    for number, line in _lines(stream):
        if isinstance(line, RowError):
            yield line.at(Address(file=path, row=number))
            continue
        raw = line.strip()
        if not raw:
            continue
        if refuse_array and raw[:1] == b"[":
            hint = f"if the file is one JSON array, its name must end in .json: mv {path} {path.removesuffix('l')}"
            raise SourceError(f"{path}:{number}: the first row is a JSON array, not an object", hint=hint)
        refuse_array = False
        yield RowBytes(raw=raw, address=Address(file=path, row=number))


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | RowError]]:
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 2):
        number += 1
        if len(line) <= MAX_ROW_BYTES + 1:
            yield number, line
            continue
        num_bytes = len(line)
        while line and not line.endswith(b"\n"):
            line = stream.readline(_SKIP_BYTES)
            num_bytes += len(line)
        yield number, RowError("row_too_long", f"{num_bytes:,} bytes, {MAX_ROW_BYTES:,} are allowed")


def _read_documents(stream: IO[bytes], path: str) -> Iterator[RowBytes | RowError]:
    """A text file: every line that is not blank is a row ``{"text": line}``."""
    for number, line in _lines(stream):
        address = Address(file=path, row=number)
        if isinstance(line, RowError):
            yield line.at(address)
            continue
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield _invalid_utf8(line, error).at(address)
            continue
        if text.strip():
            yield RowBytes(raw=msgspec.json.encode({"text": text}), address=address)


def _read_table(stream: IO[bytes], path: str, *, delimiter: str) -> Iterator[RowBytes | RowError]:
    """CSV with a header; cells are text. Addresses are the lines on which rows begin."""
    csv.field_size_limit(MAX_ROW_BYTES)
    # surrogateescape keeps bytes that are not UTF-8 recognisable, so that only their row is lost
    with io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="") as text:
        yield from _table_rows(csv.reader(text, delimiter=delimiter, strict=True), path)


def _table_rows(reader: Any, path: str) -> Iterator[RowBytes | RowError]:
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
        return RowError("invalid_csv", f"{len(cells)} cells, the header has {len(header)} columns", address=address)
    try:
        return RowBytes(raw=msgspec.json.encode(dict(zip(header, cells, strict=True))), address=address)
    except UnicodeEncodeError:
        line = "".join(cells).encode("utf-8", "surrogateescape")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return _invalid_utf8(line, error).at(address)
        return RowError("invalid_utf8", "in one of the cells", address=address)


def _read_json(stream: IO[bytes], path: str) -> Iterator[RowBytes | RowError]:
    """One array of rows, an object that holds one, or (as the Hub has it) lines of JSON under the name .json.

    An array is read whole, its rows are cut out without decoding them. Addresses count rows from 1.
    """
    start = stream.tell()
    first = _first_line(stream)
    stream.seek(start)
    if first[:1] == b"{" and _is_lines(first, stream):
        stream.seek(start)
        yield from _read_lines(stream, path, refuse_array=False)
        return
    stream.seek(start)
    for index, raw in enumerate(_cut_rows(stream.read(), path), start=1):
        address = Address(file=path, row=index)
        yield row_too_long(len(raw), address) if len(raw) > MAX_ROW_BYTES else RowBytes(raw=raw, address=address)


def _first_line(stream: IO[bytes]) -> bytes:
    while line := stream.readline(MAX_ROW_BYTES):
        if line.strip():
            return line.strip()
    return b""


def _is_lines(first: bytes, stream: IO[bytes]) -> bool:
    """Whether the first line is a whole object and another line follows it."""
    try:
        msgspec.json.decode(first, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    _first_line(stream)
    return bool(_first_line(stream))


def _cut_rows(text: bytes, path: str) -> Iterator[bytes]:
    body = text.lstrip()
    if body[:1] == b"{":
        yield from _rows_of_object(body, path)
        return
    if body[:1] != b"[":
        raise SourceError(
            f"{path}: the file holds neither a JSON array nor an object", hint="it begins " + repr(body[:40])
        )
    try:
        rows = [bytes(row) for row in msgspec.json.decode(body, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, RecursionError):
        rows = list(_cut_leniently(body, path))
    yield from rows


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


def _cut_leniently(body: bytes, path: str) -> Iterator[bytes]:
    """The rows of an array in which some row is not strict JSON (NaN …), so that only that row is lost.

    Python's decoder finds where each row ends. Where it cannot either, the rest of the file is unreadable.
    """
    text = body.decode("utf-8", "surrogateescape")
    decoder = json.JSONDecoder()
    position = _skip_space(text, 1)
    while position < len(text) and text[position] != "]":
        try:
            _, end = decoder.raw_decode(text, position)
        except RecursionError:
            raise _broken_array(text, position, path, "a row is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise _broken_array(text, error.pos, path, error.msg) from None
        yield text[position:end].encode("utf-8", "surrogateescape")
        position = _skip_space(text, end)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif position < len(text) and text[position] != "]":
            raise _broken_array(text, position, path, "',' or ']' is needed")
    if position >= len(text):
        raise _broken_array(text, position, path, "the array is not closed, the file may be cut off")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _broken_array(text: str, position: int, path: str, what: str) -> SourceError:
    line = text.count("\n", 0, position) + 1
    hint = "mend the file, or write one row a line (.jsonl): then only the broken row is lost"
    return SourceError(f"{path}:{line}: the JSON array cannot be read (character {position}): {what}", hint=hint)


def _invalid_utf8(line: bytes, error: UnicodeDecodeError) -> RowError:
    return RowError("invalid_utf8", f"byte 0x{line[error.start]:02x} at offset {error.start} of the row")
