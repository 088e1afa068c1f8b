"""A config file -> its text, or the reason why it has none. JSON is checked here and read as the YAML that it is."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path

from luthier.config.explain import nearest
from luthier.config.yaml_text import MAX_DEPTH, Parsed, parse_yaml
from luthier.errors import ConfigError, Problem

MAX_BYTES = 1_000_000  # a run description is some hundred lines


def read_text(path: Path) -> str:
    """The file's text, without a byte-order mark. Raises ConfigError if it cannot be read as UTF-8."""
    name = str(path)
    if os.path.isdir(path):
        raise _fault(name, "this is a folder, not a file", _yaml_files(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise _fault(name, "this is neither a file nor a folder", "name a .yaml or .json file")
    data = _read_bytes(path, name)
    if len(data) > MAX_BYTES:
        raise _fault(name, f"the file is larger than {MAX_BYTES} bytes", "is this a data file? name it in data.train")
    return _decode(data, name)


def parse_text(text: str, name: str) -> Parsed:
    """The tree of a YAML text, or of a JSON text if ``name`` ends in .json."""
    if not text.strip():
        return Parsed(tree=None, problems=(_empty(name),))
    if name.lower().endswith(".json"):
        if (problem := _json_problem(text, name)) is not None:
            return Parsed(tree=None, problems=(problem,))
        # All tabs of valid JSON are between tokens, where YAML wants blanks.
        text = text.replace("\t", " ")
    parsed = parse_yaml(text, name)
    if parsed.tree is None and not parsed.problems:
        return Parsed(tree=None, problems=(_empty(name),))
    return parsed


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _fault(name, f"there is no such file: {os.path.abspath(path)}", _nearest_file(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _fault(name, f"the file cannot be read: {reason}", "check its name and permissions") from error


def _decode(data: bytes, name: str) -> str:
    is_utf16 = data[:2].count(0) == 1 and data[2:4].count(0) == 1  # every other byte of its first two letters
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or is_utf16:
        raise _fault(name, "the file is UTF-16", "save it as UTF-8")
    if b"\0" in data:
        raise _fault(
            name, "the file holds bytes that no text has (0x00)", "name the run description, a YAML or JSON text"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"this line is not UTF-8 (byte 0x{data[error.start]:02x})"
        raise ConfigError([Problem(where=f"{name}:{line}", key="", what=what, hint="save it as UTF-8")]) from None
    return text.replace("\r\n", "\n")


def _json_problem(text: str, name: str) -> Problem | None:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        said = error.msg[:1].lower() + error.msg[1:]
        what = f"this is not JSON: {said}, at column {error.colno}"
        return Problem(where=f"{name}:{error.lineno}", key="", what=what, hint=_json_hint(error.msg))
    except RecursionError:
        what = f"values are nested more than {MAX_DEPTH} deep"
        return Problem(where=name, key="", what=what, hint="a run description needs about 5")
    return None


def _json_hint(message: str) -> str:
    if "property name" in message or "Illegal trailing comma" in message:
        return 'keys stand in double quotes, with no comma after the last: {"a": 1}'
    if "delimiter" in message:
        return "a comma or a colon is missing, or a quote or bracket is not closed"
    if "Extra data" in message:
        return "a file holds one value: remove what follows it"
    return "values are numbers, true, false, null, lists, objects, and texts in double quotes; comments need YAML"


def _empty(name: str) -> Problem:
    hint = "a run needs at least model: NAME and data: {train: FILE}"
    return Problem(where=f"{name}:1", key="", what="the file is empty", hint=hint)


def _fault(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where=name, key="", what=what, hint=hint)])


def _yaml_files(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml", ".json"))
    except OSError:
        names = []
    return f"did you mean {folder / names[0]}?" if names else "name a .yaml or .json file"


def _nearest_file(path: Path) -> str:
    try:
        close = nearest(path.name, (entry.name for entry in path.parent.iterdir()))
    except OSError:
        return f"the folder {path.parent} does not exist"
    return f"did you mean {path.parent / close}?" if close else "relative paths start from the current directory"
