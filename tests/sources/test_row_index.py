"""Random access: whatever kind of file a row is in, the index gives what reading from the beginning gives."""

from __future__ import annotations

import errno
import gzip
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Format
from luthier.config.inputs import SourceConfig
from luthier.errors import PlainRowError, RowError, SourceError, plain_error, row_error
from luthier.records import Address
from luthier.sources import RowBytes, columnar, open_files, row_index
from luthier.sources.open_files import Ascending, AscendingBuilder, LineNumbersBuilder
from luthier.sources.row_index import RowIndex
from luthier.sources.source import Source, open_sources
from tests.conftest import examples

GOOD = b'{"text": "some words"}'
LONG = b'{"text": "' + b"x" * 10_000_000 + b'"}'
TABLE: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"Question {index}?", "name": None if index % 2 else "Ada"}],
        "raw": bytes([index % 256]),
    }
    for index in range(2500)
]


def source_of(path: Path | str, seed: int = 0, **fields: Any) -> Source:
    [source] = open_sources([SourceConfig(path=str(path), **fields)], seed=seed)
    return source


def index_of(source: Source, spool: Path | None = None) -> RowIndex:
    index = source.index(spool=spool)
    assert index is not None
    return index


def told(rows: Any) -> list[tuple[Any, ...]]:
    """Rows and errors as values that can be compared."""
    return [
        (row.raw, str(row.address))
        if isinstance(row, RowBytes)
        else (type(row).__name__, row.reason, row.detail, row.field, str(row.address))
        for row in rows
    ]


def assert_same_rows(source: Source, spool: Path | None = None) -> RowIndex:
    """Reading by number is reading from the beginning: in order, in any order, one by one, with repetitions."""
    expected = told(source.row_bytes())
    index = index_of(source, spool)
    assert len(index) == len(expected)
    assert told(index.read(np.arange(len(index)))) == expected
    order = np.random.default_rng(0).permutation(len(index))
    order = np.concatenate((order, order[: len(order) // 2]))
    assert told(index.read(order)) == [expected[number] for number in order]
    assert [told(index.read(np.array([number])))[0] for number in order[:50]] == [
        expected[number] for number in order[:50]
    ]
    assert index.read(np.array([], np.int64)) == []
    return index


def overwrite(path: Path, content: bytes) -> None:
    """Other content, of the same size and time."""
    stat = path.stat()
    assert len(content) == stat.st_size
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def write_table(path: Path, kind: str, rows: list[dict[str, Any]] = TABLE) -> Path:
    table = pa.Table.from_pylist(rows)
    match kind:
        case "parquet":
            pq.write_table(table, path, row_group_size=700)
        case "feather":
            pa.feather.write_feather(table, path, compression="lz4", chunksize=300)
        case "file" | "stream":
            options = pa.ipc.IpcWriteOptions(compression="zstd" if path.stem == "packed" else None)
            new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=300)
    return path


# --------------------------------------------------------------------------------------------------- the same rows

FILES = {
    "plain.jsonl": GOOD + b"\n" + GOOD + b"\n",
    "no_end.jsonl": GOOD + b"\n" + GOOD,
    "one.jsonl": GOOD,
    "bom_crlf.jsonl": b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n  \n" + GOOD + b"\r\n\t\n" + GOOD + b"\n\n\n",
    "blank_first.jsonl": b"\n\n \n" + GOOD + b"\n",
    "double_spaced.jsonl": (GOOD + b"\n\n") * 3000,
    "indented.jsonl": (b"   " + GOOD + b"\n") * 3000,
    "broken.jsonl": GOOD + b"\n{oops\n\xff\n[1]\n" + GOOD,
    "odd_blanks.jsonl": GOOD + b"\n\x0b\x0c\n\x1c\n\xc2\xa0\n" + GOOD,
    "too_long.jsonl": GOOD + b"\n" + LONG + b"\n\n\n" + GOOD + b"\n" + b" " * 10_000_001 + b"\n" + GOOD + b"\n" + LONG,
    "just_fits.jsonl": GOOD + b"\n" + b"x" * 10_000_000 + b"\n" + b"y" * 10_000_001 + b"\n" + b"z" * 10_000_001,
    "long_lines.jsonl": b"\n".join(b'{"text": "' + b"x" * (70_000 * n) + b'"}' for n in range(40)),
    "many.jsonl": b"".join(b'{"text": "%d"}\n%s' % (n, b"\n" * (n % 97 == 0)) for n in range(40_000)),
    "lines.json": GOOD + b"\n\n" + GOOD + b"\n",
    "array.json": b"[" + GOOD + b",\n " + GOOD + b"]\n",
    "object.json": b'{"data": [' + GOOD + b"," + GOOD + b"]}",
    "nan.json": b"[" + GOOD + b',{"a": NaN} ,\n' + GOOD + b", 7]",
    "text.txt": "One\r\n\n \u3000\n\u00a0\n\u3042\u3042\n\u2003x\n\x1c\nlast".encode(),
    "latin.txt": b"caf\xe9\n\xa0\n\xc2\n ok\n",
    "cells.csv": b'prompt,completion\nHi,"Hello,\nthere"\nonly one\nno\xff,utf8\n\nBye,Ciao\n',
    "cells.tsv": b"text\tid\nHi\t1\n\nYou\t2\n",
    "packed.jsonl.gz": gzip.compress((GOOD + b"\n\n") * 50 + b"{oops\n", mtime=0),
    "packed.json.gz": gzip.compress(b"[" + GOOD + b"," + GOOD + b"]", mtime=0),
    "packed.csv.gz": gzip.compress(b"text\nHi\nYou\n", mtime=0),
}


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_the_index_of_a_text_file_has_its_rows(tmp_path: Path, name: str, has_folder: bool) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert_same_rows(source_of(path), tmp_path / "spool" if has_folder else None)


@pytest.mark.parametrize(
    "name", ["t.parquet", "file.arrow", "packed.arrow", "stream.arrow", "packed-stream.arrow", "lz4.feather"]
)
@pytest.mark.parametrize("cache_bytes", [1 << 28, 1000])
def test_the_index_of_a_columnar_file_has_its_rows(
    tmp_path: Path, name: str, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "CACHE_BYTES", cache_bytes)
    kind = {"t.parquet": "parquet", "lz4.feather": "feather"}.get(name, "stream" if "stream" in name else "file")
    source = source_of(write_table(tmp_path / name, kind))
    assert_same_rows(source, tmp_path / "spool")
    is_decoded = kind in ("parquet", "feather") or name.startswith("packed.")
    assert len(list(tmp_path.glob("spool/*.arrow"))) == (is_decoded and cache_bytes < 5000)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_dictionaries_of_columns_are_read_by_number_too(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "CACHE_BYTES", 0)
    path = tmp_path / f"rows.{ending}"
    tables = [
        pa.table({"text": pa.array([f"{part} {n % 3}" for n in range(20)]).dictionary_encode()}) for part in range(3)
    ]
    if ending == "parquet":
        pq.write_table(pa.concat_tables(tables), path, row_group_size=7)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    assert_same_rows(source_of(path), tmp_path / "spool")


def test_several_files_are_one_index(tmp_path: Path) -> None:
    for number in range(70):  # more than descriptors are kept open
        (tmp_path / f"{number:02}.jsonl").write_bytes((GOOD + b"\n\n") * (number % 4 + 1))
    assert_same_rows(source_of(tmp_path))
    assert_same_rows(source_of(tmp_path / "*0.jsonl"))
    for number in range(3):
        write_table(tmp_path / "table" / f"{number}.parquet", "parquet") if number else (tmp_path / "table").mkdir()
    assert_same_rows(source_of(tmp_path / "table"))


@pytest.mark.parametrize("name", ["broken.jsonl", "array.json", "double_spaced.jsonl", "packed.jsonl.gz"])
@pytest.mark.parametrize("max_rows", [1, 2, 1000, 10**9])
def test_a_sample_is_the_same_sample(tmp_path: Path, name: str, max_rows: int) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    identities = {
        assert_same_rows(source_of(path, seed, max_rows=max_rows), tmp_path / "spool").identity for seed in (0, 1, 1)
    }
    assert len(identities) <= 2


def test_presets_and_the_hub_have_an_index_and_streams_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(TABLE)

    def load_dataset(path: str, **fields: Any) -> Any:
        return data.to_iterable_dataset() if fields["streaming"] else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert_same_rows(source_of("preset:skills#300"))
    assert_same_rows(source_of("hub:owner/name", format=Format.MESSAGES))
    index = assert_same_rows(source_of("hub:owner/name", format=Format.MESSAGES, max_rows=20))
    assert source_of("hub:owner/name", streaming=True, format=Format.MESSAGES).index() is None
    data = data.select(range(2499))
    with pytest.raises(SourceError, match=r"hub:owner/name\[train\]: the data set changed since it was indexed"):
        RowIndex(*index.__reduce__()[1][:1]).read(np.arange(3))


LINES = st.lists(
    st.sampled_from([GOOD, GOOD, b"", b" ", b"\t\r", b"\x0b", b"\x1c", "\u3000".encode(), b"\xff", b"{", "é".encode()]),
    min_size=1,
    max_size=30,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    lines=LINES, end=st.sampled_from([b"\n", b"\r\n"]), kind=st.sampled_from(["jsonl", "txt"]), chunk=st.integers(1, 64)
)
def test_lines_are_found_wherever_the_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, kind: str, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"chunked.{kind}"
    path.write_bytes(end.join([GOOD, *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "_CHUNK_BYTES", chunk)
        assert_same_rows(source_of(path))


# --------------------------------------------------------------------------------------------------- what it costs


def test_numbers_beyond_32_bits_are_kept_in_4_bytes() -> None:
    rng = np.random.default_rng(0)
    numbers = np.cumsum(rng.integers(0, 1 << 31, 5000)) + np.repeat([0, 1 << 40], 2500)
    builder = AscendingBuilder()
    for part in np.array_split(numbers, 7):
        builder.add(part)
    ascending = builder.finish()
    assert (ascending.at(np.arange(5000)) == numbers).all()
    assert Ascending(lows=ascending.lows, steps=ascending.steps[:0]).at(np.array([4999]))[0] != numbers[-1]
    assert ascending.lows.nbytes == 4 * 5000


@pytest.mark.parametrize("share_blank", [0, 0.001, 0.3, 0.5, 0.9, 1])
def test_line_numbers_are_exact_and_cost_at_most_4_bytes_a_row(share_blank: float) -> None:
    rng = np.random.default_rng(0)
    is_blank = rng.random(20_000) < share_blank
    builder = LineNumbersBuilder()
    for part in np.array_split(is_blank, 11):
        builder.add(part)
    lines = builder.finish()
    expected = np.flatnonzero(~is_blank) + 1
    assert (lines.at(np.arange(len(expected))) == expected).all()
    assert lines.num_bytes <= 4 * len(expected)


def test_an_index_costs_at_most_8_bytes_a_row_also_on_its_way_to_another_process(tmp_path: Path) -> None:
    for name, count in (("many.jsonl", 40_000), ("double_spaced.jsonl", 3000)):
        path = tmp_path / name
        path.write_bytes(FILES[name])
        assert len(pickle.dumps(index_of(source_of(path)))) <= 8 * count + 2000
        assert len(pickle.dumps(index_of(source_of(path, max_rows=count - 1)))) <= 12 * count + 2000


def test_what_was_spooled_is_not_read_again_until_the_file_is_another(tmp_path: Path) -> None:
    path, spool = tmp_path / "array.json", tmp_path / "spool"
    path.write_bytes(FILES["array.json"])
    first = index_of(source_of(path), spool)
    [kept] = spool.glob("*.rows")
    stamp = kept.stat().st_mtime_ns
    second = index_of(source_of(path), spool)
    assert (kept.stat().st_mtime_ns, second.identity) == (stamp, first.identity)
    path.write_bytes(b"[" + GOOD + b"]")
    third = assert_same_rows(source_of(path), spool)
    assert len(list(spool.glob("*.rows"))) == 2
    assert third.identity != first.identity


def test_a_spool_that_was_cut_off_is_written_again_and_no_other_file_stays(tmp_path: Path) -> None:
    path, spool = tmp_path / "array.json", tmp_path / "spool"
    path.write_bytes(FILES["array.json"])
    index_of(source_of(path), spool)
    [kept] = spool.glob("*.rows")
    whole = kept.read_bytes()
    for size in (0, 10, len(whole) - 1, len(whole) // 2):
        kept.write_bytes(whole[:size])
        assert_same_rows(source_of(path), spool)
        assert kept.read_bytes() == whole
    source = source_of(path)
    overwrite(path, whole_array := b"[" + GOOD + b",\n " + GOOD + b"}\n")
    assert len(whole_array) == len(FILES["array.json"])
    for file in spool.iterdir():
        file.unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        source.index(spool=spool)
    assert [file.suffix for file in spool.iterdir()] == [".lock"]


def test_each_flipped_bit_of_a_spool_is_detected(tmp_path: Path) -> None:
    path, spool = tmp_path / "cells.csv", tmp_path / "spool"
    path.write_bytes(FILES["cells.csv"])
    expected = told(source_of(path).row_bytes())
    index_of(source_of(path), spool)
    [kept] = spool.glob("*.rows")
    whole = kept.read_bytes()
    for place in range(len(whole)):
        kept.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            rows = told(index_of(source_of(path), spool).read(np.arange(len(expected))))
        except SourceError as error:
            assert "damaged" in str(error)
        else:
            assert rows == expected  # it was found out as the index was opened, and written again


# --------------------------------------------------------------------------------------------------- other processes


@pytest.mark.parametrize("name", ["bom_crlf.jsonl", "nan.json", "t.parquet", "stream.arrow"])
def test_an_index_can_be_sent_to_another_process(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name])
    else:
        write_table(path, "parquet" if name.endswith("parquet") else "stream")
    index = index_of(source_of(path))
    expected = told(index.read(np.arange(len(index))))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_all, (index,)) == (expected, index.identity)


def read_all(index: RowIndex) -> tuple[list[tuple[Any, ...]], str]:
    return told(index.read(np.arange(len(index)))), index.identity


def test_a_spool_without_a_folder_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system has no /proc")
    monkeypatch.setattr(open_files.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = tmp_path / "array.json"
    path.write_bytes(FILES["array.json"])
    assert_same_rows(source_of(path))
    assert list((tmp_path / "temporary").iterdir()) == []


# --------------------------------------------------------------------------------------------------- changed files


@pytest.mark.parametrize("name", ["plain.jsonl", "array.json", "text.txt", "t.parquet", "stream.arrow"])
def test_a_file_that_changed_or_vanished_since_it_was_indexed_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name])
    else:
        write_table(path, "parquet" if name.endswith("parquet") else "stream")
    index = index_of(source_of(path), tmp_path / "spool")
    index.read(np.array([0]))
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(SourceError, match="changed while it was in use"):
        index.read(np.array([0]))
    path.unlink()
    with pytest.raises(SourceError, match="vanished"):
        index.read(np.array([0]))


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize(
    "lines",
    [
        ["aaaa", "bb", "cccccc"],
        ["aaaaaaaaaaaaaa"],
        ["aaa", "", "aaaa", "aaaa"],
        ["aaaa", "    ", "aaaa"],
        ["aaaa", "aaaa", "", "aaa"],
        ["", "aaaaaaaa", "aaaa"],
    ],
)
def test_lines_that_moved_in_a_file_of_the_same_size_and_time_are_found_out(
    tmp_path: Path, kind: str, lines: list[str]
) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"aaaa\naaaa\naaaa\n")
    source = source_of(path) if kind == "txt" else None
    if source is None:
        path.write_bytes(b"[1] \n[2] \n[3] \n".replace(b"[", b"{").replace(b"]", b"}"))
        file = row_index.DataFile(
            path=str(path), kind=row_index.FileKind.JSONL, size=15, mtime_ns=path.stat().st_mtime_ns
        )
        index = RowIndex([row_index.index_lines(file)])
    else:
        index = index_of(source)
    index.read(np.arange(3))
    overwrite(path, ("\n".join(lines) + "\n").encode())
    with pytest.raises(SourceError, match="changed since it was indexed"):
        index.read(np.arange(3))


def test_rows_of_the_same_length_in_the_same_places_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"aaaa\naaaa\naaaa\n")
    index = index_of(source_of(path))
    overwrite(path, b"aaaa\nbbbb\naaaa\n")
    assert told(index.read(np.array([1])))[0][0] == b'{"text":"bbbb"}'


def test_groups_of_other_sizes_in_a_file_of_the_same_size_and_time_are_found_out(tmp_path: Path) -> None:
    sizes = [(2, 3), (3, 2)]
    contents = []
    for first, second in sizes:
        path = tmp_path / "rows.arrow"
        batches = [pa.record_batch({"text": ["ab"] * count}) for count in (first, second)]
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        contents.append(path.read_bytes())
    index = index_of(source_of(path))
    overwrite(path, contents[0])
    with pytest.raises(SourceError, match="had 3 rows when it was indexed, it has 2 now"):
        index.read(np.array([0]))


def test_numbers_that_no_row_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b"a\nb\n")
    index = index_of(source_of(path))
    for numbers in ([-1], [0, 2]):
        with pytest.raises(IndexError, match="of an index of 2"):
            index.read(np.array(numbers))
    assert isinstance(index.read(np.array([1]))[0], RowBytes)
    index.close()
    assert not isinstance(index.read(np.array([1]))[0], RowError)


# --------------------------------------------------------------------------------------------------- many writers


def test_several_processes_spool_a_file_once_and_agree(tmp_path: Path) -> None:
    path, spool = tmp_path / "array.json", tmp_path / "spool"
    path.write_bytes(b"[" + b",".join([GOOD] * 50_000) + b"]")
    source = source_of(path)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(index_and_read, [(source, spool)] * 3)
    assert len({(identity, inode) for _, identity, inode in found}) == 1
    assert all(rows == told(source.row_bytes())[:10] for rows, _, _ in found)
    assert sorted(file.suffix for file in spool.iterdir()) == [".lock", ".rows"]


def index_and_read(source: Source, spool: Path) -> tuple[list[tuple[Any, ...]], str, int]:
    index = index_of(source, spool)
    [kept] = spool.glob("*.rows")
    return told(index.read(np.arange(10))), index.identity, kept.stat().st_ino


def test_a_writer_that_is_killed_holds_nobody_up_and_leaves_no_half_of_a_spool(tmp_path: Path) -> None:
    path, spool = tmp_path / "array.json", tmp_path / "spool"
    path.write_bytes(FILES["array.json"])
    source = source_of(path)
    child = multiprocessing.get_context("spawn").Process(target=write_half, args=(source, spool))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [file.suffix for file in sorted(spool.iterdir())] == [".lock", ".partial"]
    assert_same_rows(source, spool)
    assert [file.suffix for file in sorted(spool.iterdir())] == [".rows", ".lock"]


def write_half(source: Source, spool: Path) -> None:
    def die(rows: Any, sink: Any) -> None:
        sink.write(b"half of it")
        sink.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    open_files.write_records = die  # type: ignore[assignment]
    source.index(spool=spool)


def test_a_disk_without_room_is_reported_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, spool = tmp_path / "array.json", tmp_path / "spool"
    path.write_bytes(FILES["array.json"])
    source = source_of(path)

    def fill(rows: Any, sink: Any) -> None:
        sink.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(open_files, "write_records", fill)
        with pytest.raises(SourceError, match=r"spool: the spool cannot be written: .*No space left[\s\S]*make room"):
            source.index(spool=spool)
        with pytest.raises(SourceError, match=r"the spool cannot be written: .*No space left"):
            source.index()
    assert [file.suffix for file in spool.iterdir()] == [".lock"]
    assert_same_rows(source, spool)


@pytest.mark.parametrize("kind", [RowError, *RowError.__subclasses__()])
def test_every_kind_of_row_error_comes_back_as_it_was(kind: type[RowError]) -> None:
    address = Address(file="a.jsonl", row=7)
    error = kind("some_reason", "detail: \u00e4\n", address=address, field="messages[1]")
    sent = msgspec.json.decode(msgspec.json.encode(plain_error(error)), type=PlainRowError)
    found = row_error(sent, address)
    assert (type(found), str(found)) == (kind, str(error))


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz"])
def test_rows_are_read_again_where_a_file_was_changed_that_tells_the_same_size_and_time(
    name: str, tmp_path: Path
) -> None:
    """As copies and unpacked archives do that restore times."""
    path, spool = tmp_path / name, tmp_path / "spool"
    for text in ("one", "two"):
        content = msgspec.json.encode([{"text": text}]) if name == "rows.json" else f'{{"text": "{text}"}}\n'.encode()
        path.write_bytes(content if name == "rows.json" else gzip.compress(content, 0, mtime=0))
        os.utime(path, ns=(0, 0))
        (row,) = index_of(source_of(path), spool).read(np.array([0]))
        assert isinstance(row, RowBytes) and text.encode() in row.raw
    assert path.stat().st_mtime_ns == 0
