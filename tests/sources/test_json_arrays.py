"""Rows of a JSON array: cut out a window at a time, they are the rows that decoding the whole file gives."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.sources import RowBytes, text_files
from luthier.sources.source import open_sources
from luthier.sources.text_files import read_json_rows
from tests.conftest import examples

GOOD = b'{"text": "some words"}'


def rows_of(content: bytes, window: int) -> list[bytes] | None:
    """The rows, read in windows of so many bytes; None if the file is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_WINDOW_BYTES", window)
        try:
            rows = list(read_json_rows(io.BytesIO(content), "rows.json"))
        except SourceError:
            return None
    assert [row.address.row for row in rows if row.address] == list(range(1, len(rows) + 1))
    assert all(isinstance(row, RowBytes) for row in rows)
    return [row.raw for row in rows if isinstance(row, RowBytes)]


def rows_at_once(content: bytes) -> list[bytes] | None:
    """The oracle: the whole array is decoded strictly, or else row by row by Python's decoder."""
    try:
        return [bytes(row) for row in msgspec.json.decode(content, type=list[msgspec.Raw])]
    except msgspec.DecodeError:
        pass
    text, rows, decoder = content.decode("utf-8", "surrogateescape").rstrip(), [], json.JSONDecoder()
    position = len(text) - len(text.lstrip())
    if text[position : position + 1] != "[":
        return None
    position += 1
    while True:
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n"))
        if text[position:] == "]":
            return rows
        try:
            _, end = decoder.raw_decode(text, position)
        except ValueError:
            return None
        rows.append(text[position:end].encode("utf-8", "surrogateescape"))
        position = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n"))
        if text[position : position + 1] == ",":
            position += 1
        elif text[position:] != "]":
            return None


TEXTS = st.text(alphabet='ab\\"[]{},: \n\té\u3042', max_size=8)
VALUES = st.recursive(
    st.integers() | st.none() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
BLANKS = st.text(alphabet=" \n\t\r", max_size=3)


@st.composite
def arrays(draw: st.DrawFn) -> bytes:
    rows = [json.dumps(row, ensure_ascii=draw(st.booleans())) for row in draw(st.lists(VALUES, max_size=6))]
    parts = [draw(BLANKS) + row + draw(BLANKS) for row in rows]
    return (draw(BLANKS) + "[" + (",".join(parts) or draw(BLANKS)) + "]" + draw(BLANKS)).encode()


@settings(max_examples=examples(500), deadline=None)
@given(content=arrays(), window=st.integers(1, 80))
def test_the_rows_of_an_array_do_not_depend_on_the_windows(content: bytes, window: int) -> None:
    expected = rows_at_once(content)
    assert expected is not None
    assert rows_of(content, window) == expected


@settings(max_examples=examples(700), deadline=None)
@given(content=arrays(), window=st.integers(1, 80), data=st.data())
def test_a_damaged_array_is_refused_where_decoding_it_at_once_refuses_it(
    content: bytes, window: int, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        width = data.draw(st.integers(0, 2))
        content = content[:place] + data.draw(st.sampled_from(b'[]{},:"\\ 1\xff')).to_bytes() + content[place + width :]
    if content.strip()[:1] == b"[":
        assert rows_of(content, window) == rows_at_once(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + GOOD + b",\n" + GOOD + b",,\n" + GOOD + b"]", r"rows\.json:2: .*\(byte 48\).*Expecting value"),
        (b"\n\n[" + GOOD + b",\n" + GOOD, r"rows\.json:4: .*\(byte 49\).*not closed"),
        (b"[" + GOOD + b",\n" + GOOD + b"}\n", r"rows\.json:2: .*\(byte 47\).*',' or '\]' is needed"),
        (b"[" + GOOD + b"]\n \n[" + GOOD + b"]", r"rows\.json:3: .*\(byte 27\).*text follows the array's end"),
    ],
    ids=["two commas", "cut off", "brace", "two arrays"],
)
@pytest.mark.parametrize("window", [1, 30, 1000])
def test_a_fault_is_found_at_its_line_and_byte(content: bytes, message: str, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SourceError, match=message):
        patch.setattr(text_files, "_WINDOW_BYTES", window)
        list(read_json_rows(io.BytesIO(content), "rows.json"))


@pytest.mark.parametrize("key", ["data", "\\u0064ata", "other"])
def test_rows_under_a_key_that_comes_twice_are_not_lost_in_silence(key: str) -> None:
    lists = b'{"data": [%s], "a": ":", "%s": [%s]}' % (GOOD, key.encode(), GOOD)
    if key == "other":  # control: two lists, so the object is a row
        assert rows_of(lists, 64) == [lists]
    else:
        assert rows_of(lists, 64) is None
    assert rows_of(b'{"data" : [{"text": "a: b", "more": {"c": 1}}], "a": {"b": [":"]}}', 64) is not None, "control"


def test_a_number_of_thousands_of_digits_loses_its_row_alone() -> None:
    rows = rows_of(b"[" + GOOD + b',{"a": NaN},{"a": ' + b"9" * 5000 + b"}," + GOOD + b"]", 64)
    assert rows is not None
    assert [len(row) for row in rows] == [22, 10, 5007, 22]


@pytest.mark.parametrize("with_index", [False, True])
def test_a_large_array_is_read_in_flat_memory(tmp_path: Path, with_index: bool) -> None:
    path = tmp_path / "rows.json"
    row = b'{"messages": [{"role": "user", "content": "' + b"x" * 3000 + b'"}]}'
    with path.open("wb") as file:
        file.write(b"[" + row)
        for _ in range(29_999):
            file.write(b",\n" + row)
        file.write(b"]")
    [source] = open_sources([SourceConfig(path=str(path))], seed=0)
    tracemalloc.start()
    count = len(source.index(spool=tmp_path) or ()) if with_index else sum(1 for _ in source.row_bytes())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 30_000
    assert peak < 50_000_000


def test_a_row_over_the_cap_is_an_error_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"[" + GOOD + b',{"a": "' + b"x" * 12_000_000 + b'"},' + GOOD + b"]")
    [source] = open_sources([SourceConfig(path=str(path))], seed=0)
    rows: list[Any] = list(source.row_bytes())
    assert [getattr(row, "reason", None) for row in rows] == [None, "row_too_long", None]
    assert isinstance(rows[1], RowError)
