"""Columns of any Arrow type: a column that nobody uses costs no row, and one that is used is converted or refused."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luthier.config.inputs import SourceConfig
from luthier.errors import RowError
from luthier.sources.source import open_sources

BIG = 2**62


def run_end_encoded() -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([BIG, None], pa.timestamp("ns")))


def union() -> Any:
    kinds = pa.array([0, 1, 0], pa.int8())
    return pa.UnionArray.from_sparse(kinds, [pa.array([1, 2, 3]), pa.array([b"\xff", b"x", b"y"])])


def twice_named() -> Any:
    return pa.StructArray.from_arrays([pa.array([1, 2, 3]), pa.array(["a", "b", "c"])], names=["same", "same"])


# Values that Python, JSON or both have no words for, in columns of every kind of type that Arrow has.
COLUMNS: dict[str, Any] = {
    "timestamp_ns": pa.array([1, BIG, None], pa.timestamp("ns")),
    "timestamp_ns_zone": pa.array([1, BIG, None], pa.timestamp("ns", tz="Europe/Berlin")),
    "timestamp_zone_unknown": pa.array([1, 2, None], pa.timestamp("us", tz="Nowhere/Atall")),
    "timestamp_far": pa.array([2**52, -(2**52), None], pa.timestamp("ms")),
    "date_far": pa.array([2**31 - 1, -(2**31), None], pa.date32()),
    "date64_far": pa.array([86_400_000 * 2**30, -86_400_000 * 2**30, None], pa.date64()),
    "time_ns": pa.array([1, 86_399_999_999_999, None], pa.time64("ns")),
    "duration_s": pa.array([BIG, 1, None], pa.duration("s")),
    "duration_ns": pa.array([BIG, 1, None], pa.duration("ns")),
    "interval": pa.array([(1, 2, 3), (0, 0, BIG), None], pa.month_day_nano_interval()),
    "decimal": pa.array([Decimal("1." + "3" * 30), Decimal(0), None], pa.decimal256(60, 30)),
    "binary": pa.array([b"\xff\0", b"", None], pa.binary()),
    "binary_view": pa.array([b"\xff\0", b"", None], pa.binary_view()),
    "fixed_binary": pa.array([b"\xff\0", b"ab", None], pa.binary(2)),
    "string_view": pa.array(["a", "", None], pa.string_view()),
    "not_utf8": pa.array([b"\xff\xfe", b"ok", None], pa.binary()).view(pa.string()),
    "large_string": pa.array(["a", "", None], pa.large_string()),
    "half": pa.array(np.array([1.5, np.nan, np.inf], np.float16)),
    "float": pa.array([float("nan"), float("inf"), None]),
    "unsigned": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "null": pa.nulls(3),
    "dictionary": pa.array(["a", "b", None]).dictionary_encode(),
    "dictionary_ns": pa.array([1, BIG, None], pa.timestamp("ns")).dictionary_encode(),
    "list_ns": pa.array([[1, BIG], [], None], pa.list_(pa.duration("ns"))),
    "large_list_ns": pa.array([[1, BIG], [], None], pa.large_list(pa.timestamp("ns"))),
    "fixed_list_ns": pa.array([[1, BIG], [1, None], None], pa.list_(pa.timestamp("ns"), 2)),
    "struct_ns": pa.array([{"when": BIG}, {"when": None}, None], pa.struct([("when", pa.timestamp("ns"))])),
    "map": pa.array([[(1, BIG)], [], None], pa.map_(pa.int32(), pa.timestamp("ns"))),
    "struct_twice_named": twice_named(),
    "union": union(),
    "run_end_encoded": run_end_encoded(),
    "uuid": pa.array([b"0" * 16, b"1" * 16, None], pa.uuid()),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2))
    ),
    "json": pa.array(["{", "{}", None], pa.json_()),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
    "opaque": pa.ExtensionArray.from_storage(
        pa.opaque(pa.binary(), "thing", "vendor"), pa.array([b"\xff", b"", None], pa.binary())
    ),
}
ARROW_ONLY = {"interval", "union", "run_end_encoded", "duration_s", "map"}  # types that parquet, or its writer, has not


def write(folder: Path, kind: str, columns: dict[str, Any]) -> Path:
    """A file of three rows: a text to train on, beside other columns."""
    table = pa.table({"text": ["one", "two", "three"], **columns})
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        make = pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table)
    return path


def texts(path: Path, **settings: Any) -> list[Any]:
    """What each row says, read from the beginning; the same must come when rows are asked for by number."""
    (source,) = open_sources([SourceConfig(path=str(path), **settings)], seed=0)
    in_order = list(source.row_bytes())
    index = source.index()
    assert index is not None
    backwards = np.arange(len(in_order))[::-1]
    assert list(index.read(backwards)) == in_order[::-1]
    return [converted(source, row) for row in in_order]


def converted(source: Any, row: Any) -> Any:
    try:
        return source.convert(source.reader.read(row)).parts[0].text
    except RowError as error:
        return error


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
@pytest.mark.parametrize("column", COLUMNS)
def test_an_unused_column_of_any_type_costs_no_row(tmp_path: Path, column: str, kind: str) -> None:
    if kind == "parquet" and column in ARROW_ONLY:
        pytest.skip("parquet has no such type")
    path = write(tmp_path, kind, {"other": COLUMNS[column]})
    assert texts(path, columns={"text": "text"}) == ["one", "two", "three"]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_used_column_is_converted_or_refused_by_name(tmp_path: Path, column: str) -> None:
    table = pa.table({"page": COLUMNS[column]})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    for read in texts(path, format="text", columns={"text": "page"}):
        if isinstance(read, RowError):
            assert read.reason in {"unreadable_value", "bad_content", "missing_column", "empty_text"}
            assert read.address is not None
            assert "binary" not in column or read.reason != "bad_content" or "bytes" in read.detail
        else:
            assert isinstance(read, str)


def test_a_used_text_that_is_no_utf8_is_quarantined_alone(tmp_path: Path) -> None:
    page = pa.array([b"fine", b"\xff\xfe", b"fine too"], pa.binary()).view(pa.string())
    path = write(tmp_path, "arrow", {"page": page})
    first, second, third = texts(path, format="text", columns={"text": "page"})
    assert (first, third) == ("fine", "fine too")
    assert (second.reason, second.field, second.address.row) == ("unreadable_value", "page", 2)


def test_two_columns_of_one_name_are_refused_where_they_are_used_and_ignored_elsewhere(tmp_path: Path) -> None:
    twice = pa.table([["a"], ["b"], ["c"]], names=["text", "page", "page"])
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_stream(path, twice.schema) as writer:
        writer.write_table(twice)
    assert texts(path, columns={"text": "text"}) == ["a"]
    (refused,) = texts(path, format="text", columns={"text": "page"})
    assert refused.reason == "unreadable_value"


def test_a_huge_column_costs_the_row_only_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luthier.sources.columnar.MAX_COLUMNAR_ROW_BYTES", 2_000)
    pages = ["x" * 1_500, "y" * 2_500, "z"]
    path = write(tmp_path, "parquet", {"page": pages, "scan": [b"\xff" * 1_000, b"", b"\xff" * 2_000]})
    assert texts(path, columns={"text": "text"}) == ["one", "two", "three"]
    first, second, third = texts(path, format="text", columns={"text": "page"})
    assert third == "z"
    assert {first.reason, second.reason} == {"row_too_long"}


def test_rows_have_the_same_bytes_with_and_without_pandas(tmp_path: Path) -> None:
    times = {name: COLUMNS[name] for name in ("timestamp_ns", "timestamp_ns_zone", "duration_ns", "time_ns", "list_ns")}
    path = write(tmp_path, "arrow", {**times, "map": COLUMNS["map"], "fixed": COLUMNS["fixed_list_ns"]})
    script = (
        "import sys, importlib.abc\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'pandas': raise ImportError(name)\n"
        "{}; from luthier.config.inputs import SourceConfig; from luthier.sources.source import open_sources\n"
        "print([row.raw for row in open_sources([SourceConfig(path=sys.argv[1])], seed=0)[0].row_bytes()])"
    )
    pytest.importorskip("pandas")
    told = [
        subprocess.run(
            [sys.executable, "-c", script.format(first), str(path)], capture_output=True, text=True, check=True
        ).stdout
        for first in ("import pandas", "sys.meta_path.insert(0, Hidden())")
    ]
    assert told[0] == told[1]
    assert "2116-02-20T23:53:38.427387" in told[0]


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())]
)
def test_bytes_are_never_learned_as_text(tmp_path: Path, kind: Any) -> None:
    prompt = pa.array([b"Hi", b"Hello", b"Hey"]).cast(pa.binary()).cast(kind)
    messages = pa.array([[{"role": b"user", "content": b"Hi"}, {"role": b"assistant", "content": b"Yes"}]] * 3)
    for columns, field in (({"prompt": prompt, "completion": ["a", "b", "c"]}, "prompt"), ({"messages": messages}, "")):
        table = pa.table(columns)
        path = tmp_path / "rows.arrow"
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
        read = texts(path)
        assert all(isinstance(each, RowError) and field in str(each) for each in read) and len(read) == 3


@pytest.mark.parametrize("kind", [pa.float16(), pa.float64(), "dictionary"])
def test_an_infinite_weight_is_none_and_not_the_default(tmp_path: Path, kind: Any) -> None:
    weights = pa.array([1.0, float("inf"), float("nan")])
    weights = weights.dictionary_encode() if kind == "dictionary" else weights.cast(pa.float32()).cast(kind)
    answers = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": w}]
        for w in (1.0, 2.0, -np.inf)
    ]
    pairs = {"prompt": ["a", "b", "c"], "completion": ["x", "y", "z"], "weight": weights}
    for columns, lost in ((pairs, 1), ({"messages": pa.array(answers)}, 2)):
        path = tmp_path / "rows.arrow"
        with pa.ipc.new_stream(path, pa.table(columns).schema) as writer:
            writer.write_table(pa.table(columns))
        (source,) = open_sources([SourceConfig(path=str(path))], seed=0)
        refused = []
        for number, row in enumerate(source.row_bytes()):
            try:
                source.convert(source.reader.read(row))
            except RowError:
                refused.append(number)
        assert refused == [lost]


INFINITE = [1.0, float("inf")]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((INFINITE, make(pa.float64())) for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)),
        (INFINITE, pa.list_(pa.float32(), 2)),
        ([("a", float("inf"))], pa.map_(pa.string(), pa.float64())),
        ([("a", b"Hi")], pa.map_(pa.string(), pa.binary())),
        ({"a": INFINITE}, pa.struct([("a", pa.list_(pa.float32()))])),
    ],
    ids=str,
)
def test_what_json_would_make_another_value_of_is_found_at_any_depth(tmp_path: Path, value: Any, kind: Any) -> None:
    path = write(tmp_path, "arrow", {"other": pa.array([None, value, None], kind)})
    (source,) = open_sources([SourceConfig(path=str(path), columns={"text": "text"})], seed=0)
    raw = [row.raw for row in source.row_bytes() if not isinstance(row, RowError)]
    said = (b'"bytes":', b"unreadable value")
    assert [any(word in row for word in said) for row in raw] == [False, True, False]


def test_bytes_in_a_column_of_media_are_items(tmp_path: Path) -> None:
    """Bare, in a list, and as the Hub's features have them."""
    feature = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for images in (
        pa.array([b"\xffpng"], pa.binary()),
        pa.array([[b"\xffpng"]], pa.list_(pa.binary())),
        pa.array([[{"bytes": b"\xffpng", "path": None}]], pa.list_(feature)),
    ):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"prompt": ["<image>?"], "completion": ["A cat."], "images": images}), path)
        (source,) = open_sources([SourceConfig(path=str(path))], seed=0)
        (row,) = source.rows()
        assert not isinstance(row, RowError)
        assert source.convert(row).messages[0].parts[0].source == b"\xffpng"  # type: ignore[union-attr]
