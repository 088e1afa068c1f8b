"""How results are written: JSON that every reader understands, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from luthier.errors import UserError


def to_json(data: Any) -> str:
    """JSON with two spaces of indent. A number that JSON has no word for (an infinite loss) is ``null``.

    Raises ``TypeError`` where something is no JSON value.
    """
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


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
