"""How results are written: JSON that every reader understands, and files that are whole or not there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from luthier.errors import UserError

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def to_json(data: Any) -> str:
    """JSON with two spaces of indent. A number that JSON has no word for (an infinite loss) is ``null``.

    Raises ``TypeError`` where something is no JSON value.
    """
    # a control character can only stand inside of a string there, where its escape means the same
    return printable(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def printable(text: str) -> str:
    """The text with every character that could steer a terminal, or turn what is read around, written as ``\\u001b``.

    These are the control characters of ASCII and Latin-1 (but line feed and tab), the marks for the direction of
    writing, line and paragraph separators, and halves of surrogate pairs, as names of files that are no UTF-8 hold.
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_text(path: Path, text: str) -> None:
    """Write a file at once or not at all; `UserError` where the place cannot be written to."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        hint = "name a file in a folder you may write to"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _finite(value: Any) -> Any:
    match value:
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
