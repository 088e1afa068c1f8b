"""A `RunConfig` -> YAML that `load_config` reads back to an equal one. Defaults are written out, so that a saved run
keeps its meaning when a default changes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from luthier.config.adapters import keys_in_force
from luthier.config.schema import AdapterConfig, RunConfig
from luthier.config.yaml_text import read_plain

_PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")
# what YAML 1.1 readers take for a boolean: quoted, although ours does not
_OLD_BOOLEANS = frozenset({"y", "n", "yes", "no", "on", "off"})
_UNPRINTABLE = re.compile("[\x7f-\x9f\ufeff\u2028\u2029\ufffe\uffff]")


def dump_config(config: RunConfig) -> str:
    """The run description as YAML text.

    Raises TypeError where a free-form value (``config_overrides``, ``kwargs`` …) is no plain YAML value.
    """
    values = config.model_dump(mode="python")
    values["adapter"] = _own_keys(config.adapter, values["adapter"])
    return "".join(_entry(key, _plain_value(value), indent=0) for key, value in values.items())


def _own_keys(adapter: AdapterConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that decide nothing, which the loader refuses; unless they were set all the same."""
    foreign = values.keys() - keys_in_force(adapter) - {"type"}
    default = AdapterConfig.model_fields
    return {key: value for key, value in values.items() if key not in foreign or value != default[key].default}


def _plain_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return str(value)
        case dict():
            return {str(key): _plain_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain_value(entry) for entry in value]
        case _ if hasattr(value, "__fspath__"):
            return str(value)
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written to YAML: {value!r}")


def _entry(key: str, value: Any, indent: int) -> str:
    return f"{' ' * indent}{_text(key)}:{_value(value, indent)}"


def _value(value: Any, indent: int) -> str:
    """What follows a key's colon: `` value``, or a block on the next lines."""
    pad = " " * (indent + 2)
    match value:
        case dict() if value:
            return "\n" + "".join(_entry(key, entry, indent + 2) for key, entry in value.items())
        case list() if value:
            return "\n" + "".join(f"{pad}-{_item(entry, indent + 2)}" for entry in value)
        case _:
            return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    match value:
        case dict() if value:
            # the first key stands on the line of the dash: `- path: rows.jsonl`
            return " " + "".join(_entry(key, entry, indent + 2) for key, entry in value.items()).lstrip(" ")
        case list() if value:
            return "\n" + "".join(f"{' ' * (indent + 2)}-{_item(entry, indent + 2)}" for entry in value)
        case _:
            return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if math.isnan(value):
            return ".nan"
        case float() if math.isinf(value):
            return ".inf" if value > 0 else "-.inf"
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case dict():
            return "{}"
        case _:
            return "[]"


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and isinstance(read_plain(text), str) and text.lower() not in _OLD_BOOLEANS:
        return text
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
