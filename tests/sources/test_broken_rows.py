"""A broken row is yielded as an error that says what and where; its neighbours are read; nothing is skipped."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import Conversation
from luthier.sources import RawRow
from luthier.sources.source import Source, open_sources
from tests.conftest import refused

GOOD = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


def source_of(path: Path, **fields: object) -> Source:
    [source] = open_sources([SourceConfig(path=str(path), **fields)], seed=0)
    return source


def rows_of(path: Path, content: bytes, **fields: object) -> list[RawRow | RowError]:
    path.write_bytes(content)
    return list(source_of(path, **fields).rows())


def only_error(rows: list[RawRow | RowError]) -> RowError:
    errors = [row for row in rows if isinstance(row, RowError)]
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"messages": oops}', "invalid_json", "byte 13"),
        (b'{"messages": [{"role": "us', "truncated_json", "26 bytes"),
        (b'{"messages": "caf\xe9"}', "invalid_utf8", "0xe9 at offset 17"),
        (b'{"a": {"b": ["x", "\\ud800"]}}', "lone_surrogate", "surrogate"),
        (b'{"a": 1, "b": 2, "a": 3}', "duplicate_key", "'a'"),
        (b'{"t": "say \\":", "a": {"b": 1, "b": 2}}', "duplicate_key", "'b'"),
        (b'{"a\\\\":1,"x":1,"x":2}', "duplicate_key", "'x'"),
        (b'{"a" :1,"b":1,"b":2}', "duplicate_key", "'b'"),
        (b'{"a": NaN}', "non_finite_number", "NaN"),
        (b'{"a": -Infinity}', "non_finite_number", "Infinity"),
        (b'{"a": 1e999}', "number_out_of_range", ""),
        (b'{"a": ' + b"9" * 5000 + b"}", "number_out_of_range", ""),
        (b'{"a":' * 100_000, "nesting", "100"),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "nesting", "100"),
        (b'["a", "list"]', "not_an_object", "array"),
        (b"3", "not_an_object", "number"),
        (b'{"a": "' + b"x" * 10_000_001 + b'"}', "row_too_long", "10,000,000"),
    ],
    ids=lambda value: value[:24].decode("latin1") if isinstance(value, bytes) else value or "-",
)
def test_a_line_that_is_no_row_is_an_error_in_its_place(tmp_path: Path, line: bytes, reason: str, detail: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows = rows_of(path, GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    error = rows[1]
    assert isinstance(error, RowError)
    assert (error.reason, error.address.row) == (reason, 2)
    assert detail in error.detail
    assert str(error).startswith(f"{path}:2")
    assert [isinstance(row, RawRow) for row in rows] == [True, False, True]


@pytest.mark.parametrize(
    "line",
    [
        b'{"t": "a \\": b \\":", "u": "\\\\", "v": {"t": 1}, "w": [{"t": 1}, {"t": 1}]}',
        b'{"t\\\\": 1, "t\\"": 2, "t": "\\\\\\":"}',
        b'{ "a" : 1 ,\t"b"\t:\t2 }',
        '{"t": "line\u2028separator"}'.encode(),
        b'{"t": "\\u0000 \\u001f \\ud83d\\ude00"}',
        b'{"a":' + b"[" * 90 + b"]" * 90 + b"}",
    ],
)
def test_odd_but_well_formed_lines_are_read_exactly(tmp_path: Path, line: bytes) -> None:
    rows = rows_of(tmp_path / "rows.jsonl", GOOD + b"\n" + line)
    assert isinstance(rows[1], RawRow)
    assert rows[1].data == json.loads(line)
    assert rows[1].raw == line


def test_the_field_with_half_a_character_is_named(tmp_path: Path) -> None:
    line = b'{"messages": [{"role": "user", "content": "\\udc00"}]}'
    assert only_error(rows_of(tmp_path / "rows.jsonl", GOOD + b"\n" + line)).field == "messages[0].content"


def test_blank_lines_bom_and_mixed_line_ends_are_allowed_and_addresses_are_lines(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \n" + GOOD + b"\n" + GOOD)
    assert [row.address.row for row in rows if row.address] == [1, 4, 5]
    assert all(isinstance(row, RawRow) and row.raw == GOOD for row in rows)


def test_a_line_of_70_mb_is_passed_over_in_flat_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b'\n{"a": "')
        for _ in range(70):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + GOOD)
    source = source_of(path)
    tracemalloc.start()
    rows = list(source.rows())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert only_error(rows).reason == "row_too_long"
    assert [row.address.row for row in rows if row.address] == [1, 2, 3]
    assert peak < 40_000_000


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_refused_with_the_way_out(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(SourceError, match=r"iconv -f UTF-16"):
        rows_of(tmp_path / "rows.jsonl", GOOD.decode().encode(encoding))
    # these do not begin in ASCII, and the last two are UTF-8, too
    for text in ("春眠不觉晓，处处闻啼鸟。\n中一丁\n", "Привет\nмир\n", "Привет, мир"):
        with pytest.raises(SourceError, match=r"iconv -f UTF-16"):
            rows_of(tmp_path / "rows.txt", text.encode(encoding))
    assert [row.data for row in rows_of(tmp_path / "rows.txt", "晓\n\0一".encode()) if isinstance(row, RawRow)]


def test_an_array_in_a_jsonl_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"must end in \.json"):
        rows_of(tmp_path / "rows.jsonl", b"[" + GOOD + b",\n" + GOOD + b"]")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match="empty"):
        rows_of(tmp_path / name, b"")
    with pytest.raises(SourceError, match=r"no row|neither"):
        rows_of(tmp_path / name, b"\n\n")


def test_a_file_of_which_nothing_can_be_read_is_refused_with_the_first_error(tmp_path: Path) -> None:
    with refused(SourceError, "2", "rows.jsonl:1", "invalid_json"):
        rows_of(tmp_path / "rows.jsonl", b"{oops\n{oops\n")


def test_only_the_bad_row_of_a_json_array_is_lost(tmp_path: Path) -> None:
    for bad, reason in (
        (b'{"a": NaN}', "non_finite_number"),
        (b'{"a": "\\ud800"}', "lone_surrogate"),
        (b"7", "not_an_object"),
    ):
        rows = rows_of(tmp_path / "rows.json", b"[" + GOOD + b",\n " + bad + b" ,\n" + GOOD + b"]\n")
        assert only_error(rows).reason == reason
        assert only_error(rows).address.row == 2
        assert [row.raw for row in rows if isinstance(row, RawRow)] == [GOOD, GOOD]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" + GOOD + b", oops]", r"rows\.json:1: .*Expecting value"),
        (b"[" + GOOD + b",\n" + GOOD, "not closed"),
        (b"[" + GOOD + b"\n" + GOOD + b"]", r"rows\.json:2: .*is needed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"text"', "neither a JSON array nor an object"),
    ],
    ids=["garbage", "cut off", "no comma", "deep", "text"],
)
def test_a_json_array_that_cannot_be_cut_into_rows_is_refused_with_the_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        rows_of(tmp_path / "rows.json", content)


def test_json_files_may_be_arrays_objects_with_one_list_single_rows_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for content, count in (
        (b"[" + GOOD + b"," + GOOD + b"]", 2),
        (b'{"version": 1, "data": [' + GOOD + b"," + GOOD + b"," + GOOD + b"]}", 3),
        (GOOD, 1),
        (json.dumps(json.loads(GOOD), indent=1).encode(), 1),
        (GOOD + b"\n" + GOOD + b"\n", 2),
    ):
        rows = rows_of(path, content)
        assert [isinstance(row, RawRow) and "messages" in row.data for row in rows] == [True] * count


def test_csv_loses_only_rows_that_do_not_fit_the_header(tmp_path: Path) -> None:
    content = b'prompt,completion\nHi,"Hello,\nthere"\nonly one\nno\xff,utf8\nBye,Ciao\n'
    rows = rows_of(tmp_path / "rows.csv", content)
    assert [row.reason if isinstance(row, RowError) else row.data["completion"] for row in rows] == [
        "Hello,\nthere",
        "invalid_csv",
        "invalid_utf8",
        "Ciao",
    ]
    assert [row.address.row for row in rows if row.address] == [2, 4, 5, 6]


def test_gzip_is_read_and_a_cut_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress((GOOD + b"\n") * 2000, mtime=0)
    assert len(rows_of(tmp_path / "rows.jsonl.gz", packed)) == 2000
    with pytest.raises(SourceError, match="cannot be read to its end"):
        rows_of(tmp_path / "rows.jsonl.gz", packed[: len(packed) // 2])


def test_a_file_that_changes_or_vanishes_while_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    source = source_of(path)
    rows = source.rows()
    next(rows)
    path.write_bytes(GOOD + b"\n" + GOOD + b"\n" + GOOD)
    with pytest.raises(SourceError, match="changed while it was in use"):
        list(rows)
    path.unlink()
    with pytest.raises(SourceError, match="vanished"):
        list(source.rows())


def test_a_type_that_changes_late_in_the_file_loses_that_row_alone(tmp_path: Path) -> None:
    lines = [GOOD] * 300 + [b'{"messages": [{"role": "user", "content": 7}]}'] + [GOOD] * 5
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    source = source_of(path)
    rows = [row for row in source.rows() if isinstance(row, RawRow)]
    with refused(RowError, "rows.jsonl:301", "messages[0].content", "bad_content"):
        source.convert(rows[300])
    assert sum(isinstance(source.convert(row), Conversation) for row in rows[:300] + rows[301:]) == 305
