"""A `RunConfig` -> YAML that `load_config` reads back to an equal one. Defaults are written out, so that a saved run
keeps its meaning when a default changes. (Apart from the commands, which start without what this imports.)
"""

from __future__ import annotations

import io
import re

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from luthier.config.adapters import own_values
from luthier.config.peers.translation import Translation
from luthier.config.schema import RunConfig
from luthier.config.tree import ListNode, MappingNode, Node, plain
from luthier.config.yaml_text import read_plain

_PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")
# what YAML 1.1 readers take for a boolean: quoted, although ours does not
_OLD_BOOLEANS = frozenset({"y", "n", "yes", "no", "on", "off"})
_NEVER_FOLDED = 1 << 30  # characters of a line


class _Explicit(RoundTripRepresenter):
    """Writes ``null`` where ruamel writes nothing."""


_Explicit.add_representer(type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null"))


def dump_config(config: RunConfig) -> str:
    """The run description as YAML text.

    Raises TypeError where a free-form value (``config_overrides``, ``kwargs`` …) is no plain YAML value.
    """
    values = config.model_dump(mode="python")
    values["adapter"] = own_values(config.adapter, values["adapter"])
    return _written(_plain_value(values))


def dump_translation(translation: Translation, name: str) -> str:
    """What the file ``name`` of another tool says, as a run description of ours that loads: of each line the comment
    says where it comes from, and comments at the end name what was passed over."""
    values = CommentedMap()
    for section in RunConfig.model_fields:
        if (node := translation.tree.entries.get(section)) is not None:
            values[section] = _with_comments(node, section, translation)
    head = [f"Read from {name}.", *translation.told]
    tail = [f"{key} is passed over: {why}" for key, why in translation.passed.items()]
    return "".join(f"# {line}\n" for line in head) + _written(values) + "".join(f"# {line}\n" for line in tail)


def _written(values: object) -> str:
    yaml = YAML()
    yaml.Representer = _Explicit
    yaml.width = _NEVER_FOLDED
    yaml.indent(mapping=2, sequence=4, offset=2)
    written = io.StringIO()
    yaml.dump(values, written)
    return written.getvalue()


def _with_comments(node: Node, key: str, translation: Translation) -> object:
    if isinstance(node, ListNode):
        return [_with_comments(item, f"{key}[{index}]", translation) for index, item in enumerate(node.items)]
    if not isinstance(node, MappingNode):
        return _plain_value(plain(node))
    commented = CommentedMap()
    for name, value in node.entries.items():
        commented[name] = _with_comments(value, f"{key}.{name}", translation)
        if (theirs := translation.origins.get(f"{key}.{name}")) is not None:
            line = "" if value.where.line is None else f", line {value.where.line}"
            commented.yaml_add_eol_comment(f"{theirs}{line}", name)
    return commented


def _plain_value(value: object) -> object:
    """The value as YAML has it; a text that a reader could take for anything else is in quotes."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            is_plain = _PLAIN.fullmatch(value) and isinstance(read_plain(value), str)
            return str(value) if is_plain and value.lower() not in _OLD_BOOLEANS else DoubleQuotedScalarString(value)
        case dict():
            return {_plain_value(str(key)): _plain_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain_value(entry) for entry in value]
        case _ if hasattr(value, "__fspath__"):
            return _plain_value(str(value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written to YAML: {value!r}")
