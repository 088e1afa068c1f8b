"""The format of a source is seen in its rows, or refused with what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.config.schema import Format, SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import Conversation
from luthier.sources import Source, open_sources


def source_of(path: Path, **fields: Any) -> Source:
    [source] = open_sources([SourceConfig(path=str(path), **fields)], seed=0)
    return source


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages_of(source: Source) -> list[Any]:
    rows = [source.convert(row) for row in source.rows() if not isinstance(row, RowError)]
    return [row.messages for row in rows if isinstance(row, Conversation)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}]}, Format.SHAREGPT),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, Format.MESSAGES),
        ({"messages": [{"role": "user", "content": "Hi"}]}, Format.MESSAGES),
        ({"instruction": "Hi", "input": None, "output": "Hello"}, Format.ALPACA),
        ({"prompt": "Hi", "completion": "Hello"}, Format.PROMPT_COMPLETION),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, Format.PREFERENCE),
        ({"prompt": "Hi", "completion": "Hello", "label": True}, Format.FEEDBACK),
        ({"text": "Once", "label": 1}, Format.TEXT),
    ],
)
def test_the_format_is_seen_in_the_rows(tmp_path: Path, row: dict[str, Any], expected: Format) -> None:
    assert source_of(write_jsonl(tmp_path / "rows.jsonl", [row])).format is expected


def test_an_unknown_format_is_refused_with_what_was_seen_and_what_each_needs(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"frage": "a", "antwort": "b", "nichts": None}])
    with pytest.raises(SourceError) as caught:
        source_of(path)
    report = str(caught.value)
    assert "columns seen: antwort, frage\n" in report
    assert "alpaca needs: instruction + output" in report
    mapped = source_of(path, columns={"prompt": "frage", "completion": "antwort"})
    assert [message.text for message in messages_of(mapped)[0]] == ["a", "b"]


def test_columns_and_tags_that_do_not_exist_are_refused_with_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(SourceError, match=r"no column called 'respons'[\s\S]*did you mean response"):
        source_of(path, columns={"respons": "text"})
    with pytest.raises(SourceError, match=r"no tag called 'roletag'[\s\S]*did you mean role_tag"):
        source_of(path, tags={"roletag": "x"})
