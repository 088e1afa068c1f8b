"""Text files: what a document is, compressed forms, separators of CSV files, and archives that blow up."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.sources import files, text_files
from luthier.sources.source import open_sources

PAGE = "One.\nTwo.\n\n \t\n\nThree.\r\n\r\nFour\n"


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read(path: Path, **settings: Any) -> list[tuple[int, Any]]:
    """The line and the text, or the reason, of each row; rows asked for by number must be the same ones."""
    (source,) = open_sources([SourceConfig(path=str(path), **settings)], seed=0)
    rows = list(source.row_bytes())
    index = source.index()
    assert index is not None
    assert list(map(repr, index.read(np.arange(len(rows))[::-1]))) == list(map(repr, rows[::-1]))
    return [(row.address.row, row.reason if isinstance(row, RowError) else said(source, row)) for row in rows]


def said(source: Any, row: Any) -> Any:
    data = source.reader.read(row).data
    return data["text"] if list(data) == ["text"] else data


@pytest.mark.parametrize("ending", ["", *PACKERS])
@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("line", [(1, "One."), (2, "Two."), (6, "Three."), (8, "Four")]),
        ("paragraph", [(1, "One.\nTwo."), (6, "Three."), (8, "Four")]),
        ("file", [(1, "One.\nTwo.\n\n \t\n\nThree.\r\n\r\nFour")]),
    ],
)
def test_a_document_is_a_line_a_paragraph_or_a_file(
    tmp_path: Path, documents: str, expected: list[tuple[int, str]], ending: str
) -> None:
    path = tmp_path / f"page.txt{ending}"
    path.write_bytes(PACKERS.get(ending, bytes)(b"\xef\xbb\xbf" + PAGE.encode()))
    assert read(path, documents=documents) == expected


def test_markdown_files_are_one_document_each_and_lines_where_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"# {name}\n\ntext\n")
    assert read(tmp_path) == [(1, "# a.md\n\ntext"), (1, "# b.md\n\ntext")]
    assert [text for _, text in read(tmp_path, documents="line")] == ["# a.md", "text", "# b.md", "text"]


def test_a_readme_beside_data_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# About\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    assert read(tmp_path) == [(1, "row")]


def test_only_the_paragraph_that_is_damaged_or_too_long_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 60)
    monkeypatch.setattr(text_files, "_SKIP_BYTES", 16)
    path = tmp_path / "page.txt"
    path.write_bytes(b"good\n\nbad\xff\n\n" + b"long line of twenty.\n" * 3 + b"\nwith a line beyond one bite\nend")
    assert read(path, documents="paragraph") == [
        (1, "good"),
        (3, "invalid_utf8"),
        (5, "row_too_long"),
        (9, "with a line beyond one bite\nend"),
    ]


@pytest.mark.parametrize("settings", [{"documents": "file"}, {"separator": ";"}])
def test_settings_of_other_kinds_of_files_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "row"}\n')
    with pytest.raises(SourceError, match=next(iter(settings))):
        read(path, **settings)


@pytest.mark.parametrize("separator", ["", ";;", "\n", '"'])
def test_a_separator_is_one_character_that_can_be_one(separator: str) -> None:
    with pytest.raises(ValidationError):
        SourceConfig(path="rows.csv", separator=separator)


@pytest.mark.parametrize("ending", ["", *PACKERS])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_of_csv_files_is_found_in_their_header(tmp_path: Path, separator: str, ending: str) -> None:
    rows = [["prompt, or so", "completion"], ["a,b;c|d\te", 'said "hi"\nand left']]
    text = "".join(
        separator.join('"' + cell.replace('"', '""') + '"' for cell in row) + "\r\n" for row in rows
    ).encode()
    path = tmp_path / f"rows.csv{ending}"
    path.write_bytes(PACKERS.get(ending, bytes)(text))
    ((line, data),) = read(path, columns={"prompt": "prompt, or so"})
    assert (line, data) == (2, dict(zip(*rows, strict=True)))


def test_the_config_says_what_separates_where_the_header_misleads(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text~a,b,c\nword~x\n")
    ((_, data),) = read(path, separator="~")
    assert data == {"text": "word", "a,b,c": "x"}


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files_are_the_files(tmp_path: Path, ending: str) -> None:
    lines = "".join(f'{{"text": "row {number}"}}\n' for number in range(5_000)).encode()
    path = tmp_path / f"rows.jsonl{ending}"
    pack = PACKERS[ending]
    path.write_bytes(pack(lines[:1_000]) + pack(lines[1_000:]))  # in two members, as parallel compressors write them
    assert read(path) == [(number + 1, f"row {number}") for number in range(5_000)]
    for damage in (path.read_bytes()[:-9], path.read_bytes()[:200] + b"\0" * 9 + path.read_bytes()[209:]):
        path.write_bytes(damage)
        with pytest.raises(SourceError, match="cannot be"):
            read(path)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("line", [b"x", b'{"text": "' + b"x" * 1_000 + b'"}\n'], ids=["one line", "rows"])
def test_a_bomb_is_refused_before_it_is_inflated_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, line: bytes
) -> None:
    monkeypatch.setattr(files, "ALWAYS_ALLOWED_BYTES", 1 << 20)
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(PACKERS[ending](line * ((50 << 20) // len(line))))
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"bytes came out of it") as refused:
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()
    assert refused.value.hint is not None


def test_an_honest_file_that_repeats_itself_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "the same again"}\n' * 50_000))  # 250 times smaller
    assert len(read(path)) == 50_000


def test_what_a_document_is_and_a_separator_that_was_found_are_told(tmp_path: Path) -> None:
    def remarks(name: str, text: str, **settings: Any) -> tuple[str, ...]:
        (tmp_path / name).write_text(text)
        return open_sources([SourceConfig(path=str(tmp_path / name), **settings)], seed=0)[0].remarks

    assert "line" in remarks("a.txt", "text\n")[0]
    assert "paragraph" in remarks("a.txt", "text\n", documents="paragraph")[0]
    assert "file" in remarks("a.md", "text\n")[0]
    assert "';'" in remarks("a.csv", "prompt;completion\nHi;You\n")[0]
    (told,) = remarks("a.jsonl", '{"text": "a"}\n', drop_system=True)
    assert told == "drop_system is not read: its rows are plain text, without messages"
    (told,) = remarks("b.jsonl", '{"prompt": "Hi", "completion": "You"}\n', prompt_format=["Q: {prompt}"])
    assert told == "prompt_format is not read: it is about plain text, and the rows are of format prompt_completion"
    assert remarks("a.jsonl", '{"text": "a"}\n', prompt_format=["Q: {q}"]) == ()
    assert remarks("a.jsonl", '{"text": "a"}\n', format="text", drop_system=True) == (), "it was told before"
    # a run's folder has all keys
    every_key = SourceConfig(path="a.jsonl", same_role="keep").model_dump(exclude={"path"})
    assert remarks("a.jsonl", '{"text": "a"}\n', **every_key) == ()
    assert remarks("a.csv", "prompt,completion\nHi,You\n") == ()
    assert remarks("a.jsonl", '{"text": "row"}\n') == ()
