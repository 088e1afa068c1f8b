"""What other tools call our keys and values: for error messages, not a second way to write a config.

The table is ``other_tools.toml``. What it says is read once somebody has made a mistake.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("other_tools.toml")
_OURS = re.compile(r"[a-z_]+(\[0\])?(\.[a-z_]+(\[0\])?)+(: .+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Meant:
    """What a key of another tool means here: our key, perhaps with the value to write, or a sentence about it."""

    key: str | None = None
    value: str | None = None
    told: str | None = None


def what_is_meant(key: str, value: object = None) -> Meant | None:
    """Look up a key of another tool, or one of plain speech, with the value that it was given; None: it is in no table.

    >>> what_is_meant("cutoff_len", 2048)
    Meant(key='data.max_length', value=None, told=None)
    >>> what_is_meant("flash_attn", "fa2")
    Meant(key='model.attn_implementation', value='flash_attention_2', told=None)
    """
    table, name = _table(), key.lower().replace("-", "_")
    if (of_value := table["values"].get(name, {}).get(_text(value))) is not None:
        return _parsed(of_value)
    found = table["keys"].get(name)
    if found is not None:
        meant = _parsed(found)
        if meant.value is not None and _text(value) in ("false", "null", "0"):
            return Meant(told=f"leave it out: {meant.key}: {meant.value} is what true would mean")
        return meant
    for group in table["told"]:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group["keys"]):
            return Meant(told=group["why"])
    return None


def value_meant(key: str, value: object) -> Meant | None:
    """The same for a value of a key of ours that it may not have: ``adapter.type``, ``qlora``."""
    found = _table()["values"].get(key, {}).get(_text(value))
    return None if found is None else _parsed(found)


def our_name(key: str) -> str | None:
    """Our dotted key for what another tool, or plain speech, calls ``key``; None if there is none."""
    meant = what_is_meant(key)
    return None if meant is None else meant.key


def all_meanings() -> list[tuple[str, Meant]]:
    """Everything that the table may answer, each with where it stands: for tests."""
    table = _table()
    found = [(key, _parsed(text)) for key, text in table["keys"].items()]
    found += [(f"{key}={value}", _parsed(text)) for key, of in table["values"].items() for value, text in of.items()]
    return found + [(pattern, Meant(told=group["why"])) for group in table["told"] for pattern in group["keys"]]


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _parsed(text: str) -> Meant:
    if not _OURS.fullmatch(text):
        return Meant(told=text)
    key, _, value = text.partition(": ")
    return Meant(key=key, value=value or None)


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower()
