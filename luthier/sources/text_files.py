"""Rows of text files: jsonl, json, csv, tsv, txt, each also compressed. Bytes in, bytes out: nothing is decoded here.

Every reader yields the rows in file order as `RowBytes`, and a `RowError` in the place of a row that it cannot cut out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from luthier.config.choices import Documents
from luthier.errors import RowError, SourceError
from luthier.records import Address
from luthier.sources.files import DataFile, FileKind, open_compressed
from luthier.sources.json_arrays import read_json_rows
from luthier.sources.rows import MAX_ROW_BYTES, RowBytes, row_too_long
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
                    yield from _read_lines(stream, file)
                case FileKind.JSON if _is_lines(stream):
                    yield from _read_lines(stream, file)
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


def open_text_file(file: DataFile) -> IO[bytes]:
    """The file, opened behind its byte order mark; raises `SourceError`, also for other encodings than UTF-8."""
    try:
        stream = _open(file)
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
        hint = (
            f"if the file is one JSON array, its name must end in .json: mv {file.path} {file.path.removesuffix('l')}"
        )
        raise SourceError(f"{row.address}: the first row is a JSON array, not an object", hint=hint)


def _read_lines(stream: IO[bytes], file: DataFile) -> Iterator[RowBytes | RowError]:
    """One row a line; blank lines are allowed. Addresses are line numbers."""
    is_first = True
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            num_bytes = len(line)
            while line and not line.endswith(b"\n"):
                line = stream.readline(_SKIP_BYTES)
                num_bytes += len(line)
            yield line_too_long(file, num_bytes, number)
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
        return _invalid_utf8(text, error).at(address)
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
            return _invalid_utf8(line, error).at(address)
        return RowError("invalid_utf8", "in one of the cells", address=address)


def _invalid_utf8(line: bytes, error: UnicodeDecodeError) -> RowError:
    return RowError("invalid_utf8", f"byte 0x{line[error.start]:02x} at offset {error.start} of the row")
