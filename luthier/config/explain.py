"""What is wrong with values and keys, in our words: the value seen, what is expected, and the way out."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import ErrorDetails

from luthier.config import KeyPath, ListNode, MappingNode, Node, Scalar, find, parse_path, plain, show_path, show_value
from luthier.config.objective import LOSSES, OBJECTIVES, losses_of
from luthier.config.words import JsonSchema, all_keys, choices, expected, kinds, known_keys, resolve, schema_at
from luthier.config.yaml_text import number_meant
from luthier.errors import Problem
from luthier.writing import JsonObject, counted

MAX_CHOICES = 14  # names that a message lists
_EXAMPLES = {
    "model": "model: preset:tiny-qwen3",
    "data": "data: {train: rows.jsonl}",
    "name_or_path": "name_or_path: preset:tiny-qwen3",
    "path": "path: rows.jsonl",
    "targets": "targets: [{part: thinking, train: false}]",
}
_FILLS = frozenset({"name_or_path", "path", "train", "use"})  # keys that a required section is there for
_OF_KEY = ("[key]",)  # how pydantic ends the place of a key that is at fault, not its value
_YES = frozenset({"yes", "on", "y", "true", "1"})
_NO = frozenset({"no", "off", "n", "false", "0", "none"})
_INVISIBLE = frozenset({"Cc", "Cf", "Zl", "Zp", "Zs"})  # categories of characters: controls, marks and spaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A problem, the path whose value cannot be used, and the path that was probably meant."""

    problem: Problem
    path: KeyPath
    meant: KeyPath | None = None
    is_missing: bool = False

    def is_met_by(self, others: list[Explained]) -> bool:
        """True if what is missing stands elsewhere: ``model_name_or_path: x`` is one mistake, no missing model too."""
        names = [other.meant for other in others if other.meant is not None and other.meant[-1] in _FILLS]
        return self.is_missing and any(meant[: len(self.path)] == self.path for meant in names)


def explain(details: list[ErrorDetails], tree: Node, name: str) -> list[Explained]:
    """One explanation per faulty path; a validator reports each member of a union, a person wants to hear it once."""
    found: dict[KeyPath, Explained] = {}
    for detail in details:
        location = tuple(detail["loc"])
        match detail["type"]:
            case "missing":
                explained = _missing(location, tree, name)
            case "extra_forbidden":
                explained = _unknown(location, tree)
            case "value_error":
                explained = _unfit(location, tree, str(detail["ctx"]["error"]))
            case _:
                explained = _unfit(location, tree, None)
        found.setdefault(explained.path, explained)
    return list(found.values())


def _missing(path: KeyPath, tree: Node, name: str) -> Explained:
    parent, reached = find(tree, path)
    key = str(path[-1])
    where = str(parent.where) if reached and parent.where.line is not None else f"{name}:1"  # of the whole file
    hint = f"for example {_EXAMPLES[key]}" if key in _EXAMPLES else None
    return Explained(
        problem=Problem(where=where, key=show_path(path), what="this key is required and missing", hint=hint),
        path=path,
        is_missing=True,
    )


def _unknown(path: KeyPath, tree: Node) -> Explained:
    node, _ = find(tree, path)
    section, key = path[:-1], str(path[-1])
    odd = sorted({char for char in key if not char.isascii()})
    typed = "".join(char for char in key if unicodedata.category(char) not in _INVISIBLE).strip()
    hint, meant = _what_was_meant(section, typed if odd else key, plain(node))
    what = f"the section {show_path(section)} has no such key" if section else "there is no such section or key"
    if odd:  # an invisible character, or one that only looks like a letter of a key
        shown = (f"U+{ord(char):04X} ({unicodedata.name(char, 'without a name').lower()})" for char in odd)
        what, hint = f"{what}: it holds {', '.join(shown)}", f"{hint}; type the key anew, keys are of plain letters"
    return Explained(
        problem=Problem(where=str(node.where), key=show_path(path), what=what, hint=hint), path=path, meant=meant
    )


def _what_was_meant(section: KeyPath, key: str, value: object) -> tuple[str, KeyPath | None]:
    here = known_keys(section)
    if key in here:
        return f"did you mean {key}?", (*section, key)
    if "." in key and key in all_keys():
        head, tail = key.split(".", 1)
        return f"nest it: write {tail} below {head}:", parse_path(key)
    if not section and (key in OBJECTIVES or key in LOSSES):
        inside = ", ".join(f"{one}: …" for one in value) if isinstance(value, dict) else ""
        name = f"name: {key}" if key in OBJECTIVES else f"name: {LOSSES[key].objectives[0]}, loss: {key}"
        return f"write objective: {{{name}{', ' if inside else ''}{inside}}}", ("objective",)
    in_section = what_is_meant(show_path((*section, key)), value) if section else None
    if (ours := in_section or what_is_meant(key, value)) is not None:
        if ours.key is None:
            return str(ours.told), None
        path = parse_path(ours.key)
        assert path is not None, ours
        if ours.value is not None:
            return f"Luthier's name for it is {ours.key}: write {ours.key}: {ours.value}", path
        return f"Luthier's name for it is {ours.key}{_of(path)}", path
    elsewhere = [full for full in all_keys() if full.rsplit(".", 1)[1] == key]
    if elsewhere:
        return f"{key} belongs in another section: {' or '.join(elsewhere)}", parse_path(elsewhere[0])
    if (close := nearest(key, here)) is not None:
        return f"did you mean {close}?", (*section, close)
    by_name = {full.rsplit(".", 1)[1]: full for full in reversed(all_keys())}
    if (close := nearest(key, by_name)) is not None:
        return f"did you mean {by_name[close]}?", parse_path(by_name[close])
    return f"allowed here: {', '.join(here)}", None


def _of(path: KeyPath) -> str:
    schema = schema_at(path)
    names = choices(schema) if schema is not None else ()
    return f", one of {', '.join(names)}" if 0 < len(names) <= MAX_CHOICES else ""


def _unfit(location: KeyPath, tree: Node, reason: str | None) -> Explained:
    node, path = find(tree, location)
    if location[len(path) :] == _OF_KEY:
        return _unfit_key(path, node)
    schema = schema_at(path) or {}
    what = f"{show_value(node)} {reason}" if reason else f"expected {expected(schema)}, got {show_value(node)}"
    hint = _way_out(node, schema, path)
    if reason and isinstance(node, MappingNode) and "properties" in schema:  # keys of a section that do not go together
        what, _, told = reason.partition("; ")
        hint = told or hint
    return Explained(problem=Problem(where=str(node.where), key=show_path(path), what=what, hint=hint), path=path)


def _unfit_key(path: KeyPath, node: Node) -> Explained:
    """A key of a mapping that has no fixed keys, such as those of parts with a rate of their own."""
    names = {"type": "string", **resolve((schema_at(path[:-1]) or {}).get("propertyNames", {}))}
    key = str(path[-1])
    what = f"expected {expected(names)} as a key, got {json.dumps(key, ensure_ascii=False)}"
    hint = _for_choices(key, names) or "write a name before the colon"
    return Explained(problem=Problem(where=str(node.where), key=show_path(path[:-1]), what=what, hint=hint), path=path)


def _way_out(node: Node, schema: JsonSchema, path: KeyPath) -> str:
    hint: str | None = None
    if isinstance(node, Scalar) and (meant := value_meant(show_path(path), node.value)) is not None:
        return meant.told or f"did you mean {meant.value}? write {meant.key}: {meant.value}"
    match node:
        case Scalar(value=None):
            keys_below = "write its keys below it, indented, or remove the line"
            hint = keys_below if "properties" in schema else "give it a value, or remove the line"
        case Scalar(value=bool()):
            hint = _for_boolean(node, schema)
        case Scalar(value=str()):
            hint = _for_text(node, schema, path)
        case Scalar() if "string" in kinds(schema) and not kinds(schema) & {"number", "integer"}:
            hint = _for_choices(node.text, schema) or f'put it in quotes: "{node.text}"'
        case ListNode() if "array" not in kinds(schema):
            hint = "give one value, not a list"
        case Scalar() if kinds(schema) & {"integer", "number"}:
            hint = _for_number(node, schema, path)
        case MappingNode() if "array" in kinds(schema):
            hint = "write a list: [a, b]"
        case MappingNode() if isinstance(schema.get("default"), dict):  # it has keys, of which some do not go together
            hint = "see docs/config.md"
        case _:
            pass
    return hint or _for_example(schema, path)


def _for_boolean(node: Scalar, schema: JsonSchema) -> str | None:
    allowed = kinds(schema)
    if allowed & {"integer", "number"} and "string" not in allowed:
        return f"{node.text} is not a number: write {int(bool(node.value))} if that is meant"
    if names := _for_choices(node.text, schema):
        return names
    return f'put it in quotes: "{node.text}"' if "string" in allowed else None


def _for_text(node: Scalar, schema: JsonSchema, path: KeyPath) -> str | None:
    text, allowed = node.text.strip(), kinds(schema)
    if "boolean" in allowed and text.lower() in _YES | _NO and not choices(schema):
        value = "true" if text.lower() in _YES else "false"
        return f"remove the quotes: {value}" if node.quoted and text.lower() == value else "write true or false"
    if "boolean" in allowed and text.lower() in _YES | _NO:
        return f"write true or false, or {' or '.join(choices(schema))}"
    if "null" in allowed and text.lower() == "none":
        return "write null"
    if allowed & {"integer", "number"}:
        if re.fullmatch(r"[-+]?0[0-9]+", text):
            return f"{text} could be octal or decimal: write {int(text[:100])}" + _octal(text)
        if re.fullmatch(r"[-+]?[0-9]+", text) and len(text) > 20:
            return f"{counted(len(text), 'digit is', 'digits are')} more than any run has"
        if (number := number_meant(text)) is not None:
            return f"remove the quotes: {number}" if node.quoted and number == text else f"write {number}"
    if "array" in allowed and (names := _for_choices(text, resolve(schema.get("items", {})))) is not None:
        return f"write [] for none, or names; {names}" if text.lower() in _NO else names
    if path == ("template",):
        return f"the model's own template is the default; for another write chat_template: {text[:40]} below template:"
    if "properties" in schema and path and (ours := our_name(str(path[-1]))) is not None:
        return f"to set {ours}, write {ours.rsplit('.', 1)[1]}: {text[:40]} below {path[-1]}:"
    if (names := _for_choices(text, schema)) is not None and _is_open(path) and nearest(text, choices(schema)) is None:
        names += "; a plugin's name? its package has to be installed here (docs/plugins.md)"
    return _for_other_half(text, path) or names


def _is_open(path: KeyPath) -> bool:
    """Whether plugins add to the names that this key may have."""
    return path[0] == "objective" or (path[0] == "data" and path[-1] == "format")


def _for_other_half(text: str, path: KeyPath) -> str | None:
    """A loss was named as the objective, as elsewhere ``orpo`` is a trainer of its own; or an objective as the loss."""
    if path == ("objective", "name") and text in LOSSES:
        return f"{text} is a loss: write objective: {{name: {LOSSES[text].objectives[0]}, loss: {text}}}"
    if path == ("objective", "loss") and text in OBJECTIVES:
        return f"{text} is an objective: write objective: {{name: {text}}}; its losses are {', '.join(losses_of(text))}"
    return None


def _octal(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0")
    return f", or 0o{digits} for octal" if re.fullmatch(r"[0-7]+", digits) else ""


def _for_choices(text: str, schema: JsonSchema) -> str | None:
    names = choices(schema)
    if not names:
        return None
    close = nearest(text, names)
    ask = f"did you mean {close}? " if close is not None else ""
    if len(names) <= MAX_CHOICES:  # what is expected lists them, too
        return f"did you mean {close}?" if close is not None else f"allowed: {', '.join(names)}"
    return f"{ask}allowed: {', '.join(names[:6])} … all {len(names)} are in `luthier config schema`"


def _for_example(schema: JsonSchema, path: KeyPath) -> str:
    default = schema.get("default")
    key = next((step for step in reversed(path) if isinstance(step, str)), "")
    if default is None or default in ([], {}):
        example = _EXAMPLES.get(key)
        return f"for example {example}" if example else "see docs/config.md"
    if isinstance(default, dict):
        return f"write keys such as {next(iter(default))}: … below it, indented"
    shown = str(default).lower() if isinstance(default, bool) else f"{default}"
    return f"the default is {shown}"


def _for_number(node: Scalar, schema: JsonSchema, path: KeyPath) -> str | None:
    value = node.value
    if isinstance(value, float) and math.isfinite(value) and "integer" in kinds(schema):
        if value == 1:
            return "write 1 for a count of one, or a share below 1"
        low = max(math.floor(value), 0)
        return f"write {low} or {low + 1}" if not value.is_integer() and abs(value) < 1e15 else None
    if schema.get("default") is None and isinstance(path[-1], str):
        example = f"for example {path[-1]}: {'1' if 'integer' in kinds(schema) else '0.5'}"
        return f"{example}, or null" if "null" in kinds(schema) else example
    return None


# --------------------------------------------------------------------------------------------------------------------
# What other tools call our keys and values: for error messages, not a second way to write a config.
#
# The table is ``other_tools.toml``. What it says is read once somebody has made a mistake.


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
    table, name = _other_tools_table(), key.lower().replace("-", "_")
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


def setting_meant(option: str) -> str | None:
    """Our dotted key for an option of a command line (``--learning-rate``); None if there is none near."""
    name = option.lstrip("-").replace("-", "_")
    path = parse_path(name) if name in all_keys() else _what_was_meant((), name, None)[1]
    return None if path is None else show_path(path)


def value_meant(key: str, value: object) -> Meant | None:
    """The same for a value of a key of ours that it may not have: ``adapter.type``, ``qlora``. Of a data set's keys
    (``data.train[0].format``) the last name counts."""
    found = _other_tools_table()["values"].get(key.rpartition("].")[2], {}).get(_text(value))
    return None if found is None else _parsed(found)


def our_name(key: str) -> str | None:
    """Our dotted key for what another tool, or plain speech, calls ``key``; None if there is none."""
    meant = what_is_meant(key)
    return None if meant is None else meant.key


@functools.cache
def _other_tools_table() -> JsonObject:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _parsed(text: str) -> Meant:
    if not _OURS.fullmatch(text):
        return Meant(told=text)
    key, _, value = text.partition(": ")
    return Meant(key=key, value=value or None)


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower()


# --------------------------------------------------------------------------------------------------------------------
# The nearest known name to one that is not known.


LONGEST_NAME = 80  # characters; a longer one is no typing slip, and comparing it takes long
SHORTEST_STEM = 4  # characters of a name's beginning that tell what was meant


def nearest(key: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that ``key`` was most likely meant to be, or None if none is near.

    >>> nearest("learning_rte", ["learning_rate", "warmup_steps"])
    'learning_rate'
    """
    if len(key) > LONGEST_NAME:
        return None
    by_form = {_form(name): name for name in allowed}
    form = _form(key)
    if form in by_form:
        return by_form[form]
    if len(form) >= SHORTEST_STEM:
        for known, name in by_form.items():
            if known.startswith(form):
                return name  # adamw -> adamw_torch, the first of its family
    close = difflib.get_close_matches(form, by_form, n=1, cutoff=0.7)
    return by_form[close[0]] if close else None


def _form(name: str) -> str:
    # Learning-Rate, learningRate and learning_rate are one name
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


# --------------------------------------------------------------------------------------------------------------------
# Names close to a mistyped one, for the hints of error messages.


def nearest_names(name: str, names: Iterable[str]) -> str:
    """``"identiy"`` among data set names -> ``"identity"``; empty if nothing is close."""
    return ", ".join(difflib.get_close_matches(name, list(names), cutoff=0.6))
