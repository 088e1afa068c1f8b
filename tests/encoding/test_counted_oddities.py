"""What is odd about a file and costs no row is counted: blank lines, and ids that come again."""

from __future__ import annotations

import json
from pathlib import Path

import luthier
from luthier.config.loading import load_config_text
from luthier.errors import RowError
from luthier.records import Address
from luthier.sources import RowBytes
from luthier.sources.source import id_digests


def _line(question: str, **more: object) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
    return json.dumps({**more, "messages": messages}) + "\n"


def _notes(tmp_path: Path, text: str) -> dict[str, int]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    section = {"train": str(rows), "store": str(tmp_path / "store")}
    config = load_config_text(json.dumps({"model": "preset:tiny-qwen3", "data": section}))
    prepared = luthier.prepare(config)
    assert prepared.train.ledger.read == prepared.train.ledger.prepared == text.count("messages")
    return dict(prepared.train.ledger.notes)


def test_blank_lines_and_repeated_ids_are_counted_and_counted_again_from_memory(tmp_path: Path) -> None:
    text = "\n" + _line("a", id=1) + "  \n" + _line("b", id="1") + "\n" + _line("c", id=1) + _line("d", id=1)
    expected = {"blank_line": 3, "repeated_id": 2}
    assert _notes(tmp_path, text) == expected
    assert _notes(tmp_path, text) == expected, "nothing is read as rows now: the results of its units are known"


def test_a_file_without_oddities_has_no_such_note(tmp_path: Path) -> None:
    assert _notes(tmp_path, _line("a", id=1) + _line("b", id=2) + _line("c")) == {}


def test_digests_tell_ids_apart_as_they_are_written_wherever_they_stand() -> None:
    place = Address(file="f", row=1)

    def row(raw: str) -> RowBytes:
        return RowBytes(raw=raw.encode(), address=place)

    rows = [
        row('{"id": "x", "a": 1}'), row('{"a": {"id": 5}, "id": "x"}'), row('{"id": 1.5}'), row('{"id": "\\"x"}'),
        row('{"id": null}'), row('{"b": "\\"id\\": 7"}'), row("broken"), RowError("bad", "row", address=place),
    ]  # fmt: skip
    found = id_digests(rows)
    assert found[0] == found[1] != 0 and len(set(found[:4].tolist())) == 3
    assert found[4:].tolist() == [0, 0, 0, 0]
    assert id_digests([rows[6]]).size == 0, "a portion whose first rows have no id is looked at no further"


def test_a_file_need_not_end_its_last_line(tmp_path: Path) -> None:
    assert "blank_line" not in _notes(tmp_path, (_line("a", id=1) + _line("b", id=2)).rstrip("\n"))
    (tmp_path / "rows.jsonl").unlink()
    assert _notes(tmp_path, ("\n" + _line("c", id=1) + _line("d", id=2)).rstrip("\n"))["blank_line"] == 1
