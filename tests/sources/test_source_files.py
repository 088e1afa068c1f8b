"""Files, folders, splits, columnar data and samples: which rows a source has, wherever they are stored."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luthier.config.choices import Format, rows_of_slice
from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import Address, Conversation, Document, Row
from luthier.sources import RowBytes, decode_row, refuse_unreadable
from luthier.sources.columnar import encode_row
from luthier.sources.source import RowReader, Source, open_sources

CALL = {"function": {"name": "add", "arguments": {"a": 1, "note": "x"}}}
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Question {index}?"}, {"role": "assistant", "content": "Yes"}]}
    for index in range(7)
] + [
    {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ]
    }
]


def source_of(path: Path | str, **fields: Any) -> Source:
    [source] = open_sources([SourceConfig(path=str(path), **fields)], seed=0)
    return source


def converted(source: Source) -> list[Row]:
    rows = []
    for row in source.rows():
        assert not isinstance(row, RowError), row
        rows.append(source.convert(row))
    return rows


def messages_of(source: Source) -> list[Any]:
    return [row.messages for row in converted(source) if isinstance(row, Conversation)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(source: Source) -> list[str]:
    return [row.parts[0].text for row in converted(source) if isinstance(row, Document)]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------ columnar


def write_as(kind: str, folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    path = folder / f"rows.{kind.split('-')[-1]}"
    match kind:
        case "parquet":
            pq.write_table(table, path, row_group_size=3)
        case "file-arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
        case "stream-arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
        case "jsonl":
            write_jsonl(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS, indent=2))
    return path


@pytest.mark.parametrize("kind", ["parquet", "file-arrow", "stream-arrow", "json"])
def test_the_same_rows_mean_the_same_in_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    reference = messages_of(source_of(write_as("jsonl", tmp_path)))
    source = source_of(write_as(kind, tmp_path))
    assert source.format is Format.MESSAGES
    assert messages_of(source) == reference
    assert len(reference) == len(ROWS)
    assert [row.address.row for row in source.rows() if row.address] == list(range(1, len(ROWS) + 1))


def test_rows_of_columnar_files_have_canonical_bytes_that_say_all_of_the_row(tmp_path: Path) -> None:
    rows = list(source_of(write_as("parquet", tmp_path)).rows())
    again = list(source_of(write_as("stream-arrow", tmp_path)).rows())
    assert [row.raw for row in rows] == [row.raw for row in again]  # type: ignore[union-attr]
    assert all(row.data == json.loads(row.raw) for row in rows)  # type: ignore[union-attr]
    assert b"null" not in rows[0].raw  # type: ignore[union-attr]


def test_a_flipped_bit_in_a_parquet_page_with_a_checksum_is_refused(tmp_path: Path) -> None:
    texts = [f"row {number}: Ébène et épicéa" for number in range(50)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False, write_page_checksum=True)
    assert len(list(source_of(path).rows())) == 50
    place = path.read_bytes().index(b"row 17")
    flip_bit(path, place)
    with pytest.raises(SourceError, match=r"rows\.parquet: cannot be read as parquet: .*(?i:checksum|crc)"):
        list(source_of(path).rows())
    with pytest.raises(SourceError, match=r"rows\.parquet: cannot be read as parquet"):
        source_of(path).index(spool=tmp_path)


def flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = write_as("parquet", tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"rows\.parquet: cannot be read as parquet"):
        source_of(path)


def test_what_json_cannot_say_is_an_error_of_its_row_where_the_column_is_used() -> None:
    row = encode_row({"a": {(1, 2): "x"}, "text": "fine"}, Address(file="f", row=3))
    assert isinstance(row, RowBytes)
    data = decode_row(row).data
    assert data["text"] == "fine"
    refuse_unreadable("text", data["text"])
    with pytest.raises(RowError) as refused:
        refuse_unreadable("a", data["a"])
    assert (refused.value.reason, refused.value.field) == ("not_json", "a")


@pytest.mark.parametrize("in_dict", [False, True])
def test_folders_of_save_to_disk_are_read_without_the_library_that_wrote_them(tmp_path: Path, in_dict: bool) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"text": f"row {index}"} for index in range(20)])
    if in_dict:
        datasets.DatasetDict({"train": data.select([3, 1]), "test": data}).save_to_disk(str(tmp_path / "set"))
        assert texts(source_of(tmp_path / "set")) == ["row 3", "row 1"]
        assert len(texts(source_of(tmp_path / "set", split="test"))) == 20
        with pytest.raises(SourceError, match=r"no split 'dev'[\s\S]*train, test"):
            source_of(tmp_path / "set", split="dev")
    else:
        data.save_to_disk(str(tmp_path / "set"), num_shards=3)
        assert texts(source_of(tmp_path / "set")) == [f"row {index}" for index in range(20)]


@pytest.mark.parametrize(
    ("name", "text"),
    [("dataset_dict.json", '{"splits": 3}'), ("state.json", '{"_data_files": 3}'), ("state.json", "[]")],
)
def test_a_saved_folder_that_lists_no_files_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=name):
        open_sources([SourceConfig(path=str(tmp_path))], seed=0)


# ---------------------------------------------------------------------------------------------- folders, splits


def test_txt_files_have_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_bytes("First \u2028 line\r\n\n  second\n".encode())
    assert texts(source_of(path)) == ["First \u2028 line", "  second"]


def test_csv_cells_may_hold_json_where_a_list_is_needed_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('instruction,input,output,history\nGo,,"[[1, 2], [3, 4]]","[[""Hi"", ""Hello""]]"\n')
    [row] = converted(source_of(path))
    assert isinstance(row, Conversation)
    assert [message.text for message in row.messages] == ["Hi", "Hello", "Go", "[[1, 2], [3, 4]]"]
    path = tmp_path / "rows.tsv"
    path.write_text('messages\tid\n"[{""role"": ""user"", ""content"": ""Hi""}]"\t1\n')
    [row] = converted(source_of(path, format=Format.MESSAGES))
    assert isinstance(row, Conversation)
    assert row.messages[0].text == "Hi"


def test_a_folder_is_read_in_the_order_of_its_names_without_what_is_no_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [{"text": "2"}])
    write_jsonl(tmp_path / "a" / "x.jsonl", [{"text": "1"}])
    write_jsonl(tmp_path / ".cache" / "x.jsonl", [{"text": "hidden"}])
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "README.md").write_text("read me")
    assert texts(source_of(tmp_path)) == ["1", "2"]
    assert texts(source_of(tmp_path / "*.jsonl")) == ["2"]
    write_jsonl(tmp_path / "c.json", [{"text": "3"}])
    with pytest.raises(SourceError, match="several kinds: 1 json, 2 jsonl"):
        source_of(tmp_path)


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl"])
def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path: Path, pattern: str) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write_jsonl(data / "a.jsonl", [{"text": "1"}])
    write_jsonl(data / "below" / "a.jsonl", [{"text": "2"}])
    write_jsonl(elsewhere / "c.jsonl", [{"text": "3"}])
    (data / "linked").symlink_to(elsewhere)
    (data / "d.jsonl").symlink_to(elsewhere / "c.jsonl")
    (data / "below" / "loop").symlink_to("..")
    (data / "again").symlink_to("linked")
    assert sorted(texts(source_of(data / pattern))) == ["1", "2", "3", "3"]


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl"])
@pytest.mark.parametrize("name", ["b.jsonl", "folder"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path, pattern: str, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "1"}])
    (tmp_path / name).symlink_to("gone")
    if (name, pattern) == ("folder", "*.jsonl"):  # control: it does not match
        assert texts(source_of(tmp_path / pattern)) == ["1"]
        return
    with pytest.raises(SourceError, match=f"{name}: .*gone"):
        source_of(tmp_path / pattern)


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl"])
def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "1"}])
    write_jsonl(tmp_path / "closed" / "b.jsonl", [{"text": "2"}])
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may list everything
    with pytest.raises(SourceError, match=r"closed: .*Permission denied"):
        source_of(tmp_path / pattern)


def test_a_name_that_begins_with_a_tilde_is_that_of_a_file_where_no_user_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "~rows.jsonl", [{"text": "1"}])
    assert texts(source_of("~rows.jsonl")) == ["1"]


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"),
        ("train/0.jsonl", "test/0.jsonl"),
        ("data/train.jsonl", "data/test.jsonl"),
        ("other.jsonl", "eval.jsonl"),
    ],
)
def test_split_chooses_the_files_that_are_named_for_it(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, text in zip(names, ("learn", "examine"), strict=True):
        write_jsonl(tmp_path / name, [{"text": text}])
    assert texts(source_of(tmp_path)) == ["learn"]
    assert texts(source_of(tmp_path, split="test")) == ["examine"]
    with pytest.raises(SourceError, match="no split 'validation'"):
        source_of(tmp_path, split="validation")


def test_files_that_are_left_out_for_their_names_are_told(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "test_cases.jsonl", "chat.jsonl", "val/0.jsonl"):
        write_jsonl(tmp_path / name, ROWS[:1])

    def told(where: Path, *names: str) -> bool:
        remark = " ".join(source_of(where).remarks)
        return [name for name in ("train-0", "test_cases", "chat", "val", "0.jsonl") if name in remark] == [*names]

    assert told(tmp_path / "*.jsonl", "test_cases", "chat") and told(tmp_path, "chat")
    assert told(tmp_path / "train-*.jsonl") and told(tmp_path / "chat.jsonl")
    assert source_of(tmp_path, split="test").remarks == ()


def test_a_single_file_is_read_whatever_its_name_and_has_no_other_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", [{"text": "x"}])
    assert texts(source_of(path)) == ["x"]
    with pytest.raises(SourceError, match="split 'test' is asked for"):
        source_of(path, split="test")


def test_a_subset_is_a_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "en" / "train.jsonl", [{"text": "yes"}])
    write_jsonl(tmp_path / "fr" / "train.jsonl", [{"text": "oui"}])
    assert texts(source_of(tmp_path, subset="fr")) == ["oui"]
    assert texts(source_of(tmp_path / "fr", subset="default")) == ["oui"]  # as a copy of a data set of the Hub has it
    with pytest.raises(SourceError, match=r"no subset 'de'[\s\S]*en, fr"):
        source_of(tmp_path, subset="de")


def test_a_missing_file_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "identity.jsonl", [{"text": "x"}])
    with pytest.raises(SourceError, match=r"no such file[\s\S]*near it: identity\.jsonl"):
        source_of(tmp_path / "identiy.jsonl")
    with pytest.raises(SourceError, match=r"ending '\.doc'"):
        (tmp_path / "x.doc").write_text("x")
        source_of(tmp_path / "x.doc")


# ------------------------------------------------------------------------------------------------------ samples


def test_max_rows_is_a_sample_in_file_order_that_the_seed_fixes(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": str(index)} for index in range(200)])

    def sample(seed: int, where: str) -> list[int]:
        [source] = open_sources([SourceConfig(path=where, max_rows=None if "#" in where else 20)], seed=seed)
        return [int(text) for text in texts(source)]

    first = sample(1, str(path))
    assert len(set(first)) == 20
    assert first == sorted(first) == sample(1, str(path)) == sample(1, f"{path}#20")
    assert first != sample(2, str(path))
    assert max(first) > 100
    assert sample(1, f"{path}#1000") == list(range(200))


def test_a_sample_does_not_depend_on_how_the_rows_are_stored(tmp_path: Path) -> None:
    samples = [messages_of(source_of(write_as(kind, tmp_path), max_rows=3)) for kind in ("jsonl", "parquet", "json")]
    assert samples[0] == samples[1] == samples[2]
    assert len(samples[0]) == 3


@pytest.mark.parametrize("max_rows", [None, 20])
def test_first_rows_are_those_that_a_file_or_its_sample_begins_with(tmp_path: Path, max_rows: int | None) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": str(index)} for index in range(200)])
    [whole] = open_sources([SourceConfig(path=str(path), max_rows=max_rows)], seed=1)
    for number in (1, 7, 1000):
        [source] = open_sources([SourceConfig(path=str(path), max_rows=max_rows, first_rows=number)], seed=1)
        assert texts(source) == texts(whole)[:number]
        index = source.index()
        assert index is not None and len(index) == len(texts(source)) == source.count_at_most(1 << 20)[0]
        assert index.read(np.arange(len(index))) == list(source.row_bytes())


SLICES = {":50%": (0, 100), "90%:": (180, 200), "-10%:": (180, 200), "5:9": (5, 9), "-3:": (197, 200),
          "150:999": (150, 200), "33%:34%": (66, 68), "0:": (0, 200)}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("slice_", SLICES)
def test_a_slice_takes_its_rows_alone_before_all_other_choices(tmp_path: Path, kind: str, slice_: str) -> None:
    rows = [{"text": str(index)} for index in range(200)]
    path = tmp_path / f"rows.{kind}"
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text(text)
    else:
        path.write_bytes(gzip.compress(text.encode()))
    first, last = SLICES[slice_]
    for more, expected in (({}, [str(number) for number in range(first, last)]),
                           ({"first_rows": 2}, [str(first), str(first + 1)]),
                           ({"max_rows": 2}, None), ({"max_rows": 2, "first_rows": 1}, None)):  # fmt: skip
        [source] = open_sources([SourceConfig(path=str(path), slice=slice_, **more)], seed=1)
        taken = texts(source)
        assert taken == expected or (expected is None and len(taken) == min(more.values()))
        assert all(first <= int(each) < last for each in taken)
        index = source.index()
        assert index is not None and len(index) == len(taken) <= source.count_at_most(1 << 20)[0]
        assert [row.raw for row in index.read(np.arange(len(index))) if isinstance(row, RowBytes)] == [
            row.raw for row in source.row_bytes() if isinstance(row, RowBytes)
        ]


def test_shares_of_a_slice_are_rounded_as_datasets_rounds_them() -> None:
    reader = pytest.importorskip("datasets.arrow_reader")
    ends = ["", "0", "3", "-2", "10%", "-10%", "55%", "33%", "100%"]
    for count in (1, 2, 5, 7, 101):
        for start, end in itertools.product(ends, repeat=2):
            if (start or end) and not (start and end and start.endswith("%") is not end.endswith("%")):
                theirs = reader.ReadInstruction.from_spec(f"train[{start}:{end}]").to_absolute({"train": count})[0]
                ours = rows_of_slice(f"{start}:{end}", count)
                assert list(ours) == list(range(theirs.from_, theirs.to))


def test_a_slice_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
    [source] = open_sources([SourceConfig(path=str(path), slice="5:9")], seed=1)
    with pytest.raises(SourceError, match="takes none"):
        list(source.row_bytes())
    with pytest.raises(SourceError, match="takes none"):
        source.index()


@pytest.mark.parametrize("slice_", [":", "a:b", "5", "1:2:3", "10%:5", "101%:", "", "1.5:"])
def test_what_is_no_slice_is_refused(slice_: str) -> None:
    with pytest.raises(ValueError, match="slice"):
        SourceConfig(path="rows.jsonl", slice=slice_)


# -------------------------------------------------------------------------------------------- other ways to read


def test_rows_read_in_another_process_are_the_rows_read_in_this_one(tmp_path: Path) -> None:
    source = source_of(write_as("jsonl", tmp_path))
    rows = [row for row in source.row_bytes() if isinstance(row, RowBytes)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        remote = pool.starmap(read_and_convert, [(source.reader, row) for row in rows])
        assert pool.apply(converted, (source,)) == remote
    assert remote == converted(source)


def read_and_convert(reader: RowReader, row: RowBytes) -> Row:
    return reader.convert(reader.read(row))


def test_the_hub_is_read_as_arrow_tables_with_the_names_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, **fields: Any) -> Any:
        asked.append((path, fields["name"], fields["data_dir"], fields["split"], fields["revision"]))
        data = datasets.Dataset.from_list(ROWS)
        return data.to_iterable_dataset() if fields["streaming"] else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = source_of("hub:owner/name/python", subset="en", split="test", revision="abc")
    expected = [row["messages"][0]["content"] for row in ROWS]
    assert [messages[0].text for messages in messages_of(source)] == expected
    assert set(asked) == {("owner/name", "en", "python", "test", "abc")}
    assert str(next(iter(source.rows())).address) == "hub:owner/name[test]:1"
    streamed = messages_of(source_of("hub:owner/name", streaming=True, max_rows=2))
    assert [messages[0].text for messages in streamed] == expected[:2]


def test_the_preset_has_rows_and_two_splits() -> None:
    train, test = source_of("preset:skills#50"), source_of("preset:skills", split="test", max_rows=50)
    assert train.format is Format.MESSAGES
    assert len(converted(train)) == len(converted(test)) == 50
    with pytest.raises(SourceError, match="no split 'dev'"):
        source_of("preset:skills", split="dev")
    with pytest.raises(SourceError, match="no such preset"):
        source_of("preset:skils")
