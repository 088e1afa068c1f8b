"""The run description: typed, read from YAML with line numbers, every mistake found at once.

Here is its text as a tree that remembers where each value stands and how it was written.

    train:
      learning_rate: 1e-4     ->  Mapping{"train": Mapping{"learning_rate": Scalar(1e-4, text="1e-4", line 2)}}

Paths into the tree are tuples, ``("data", "train", 0, "path")``, written ``data.train[0].path`` for people.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from luthier.errors import UserError
from luthier.writing import counted, shortened

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """A place: a line of a source (a file), or the whole of it (``override a.b=1``) where ``line`` is None."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    @property
    def short(self) -> str:
        """The place as seen from the same file: ``line 12``."""
        return self.source if self.line is None else f"line {self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A single value. ``text`` is what was written, without quotes."""

    where: Where
    value: bool | int | float | str | None
    text: str
    quoted: bool = False
    size: int = 1


_CONVERTED = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|true|false", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListNode:
    """A list. ``size`` counts all nodes in it, aliases in full."""

    where: Where
    items: tuple[Node, ...]
    size: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingNode:
    """A mapping; each value's ``where`` is the line of its key."""

    where: Where
    entries: Mapping[str, Node] = field(default_factory=dict)
    size: int = 1


Node = Scalar | ListNode | MappingNode


def plain(node: Node) -> object:
    """The tree as dicts, lists and values."""
    match node:
        case Scalar():
            return node.value
        case ListNode():
            return [plain(item) for item in node.items]
        case MappingNode():
            return {key: plain(value) for key, value in node.entries.items()}
        case _:
            raise AssertionError(node)


def unquoted(node: Node) -> Node:
    """The number or truth value that stands in quotes; everything else as it is. ``text`` stays what was written."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or not _CONVERTED.fullmatch(node.text):
        return node
    if node.text[0].isalpha():
        return replace(node, value=node.text.lower() == "true")
    return replace(node, value=int(node.text) if node.text.lstrip("+-").isdigit() else float(node.text))


def find(node: Node, path: KeyPath) -> tuple[Node, KeyPath]:
    """The deepest node on the way along ``path``, and how far that is.

    Steps that are not in the tree are skipped if a later one is (validators put the names of union members between).
    """
    reached: KeyPath = ()
    for step in path:
        child = _child(node, step)
        if child is not None:
            node, reached = child, (*reached, step)
    return node, reached


def get(node: Node, path: KeyPath) -> Node | None:
    for step in path:
        child = _child(node, step)
        if child is None:
            return None
        node = child
    return node


def put(node: Node, path: KeyPath, value: Node) -> Node:
    """The tree with ``value`` at ``path``; what is missing is made, a list grows by one at its end.

    Raises LookupError with the reason where the path leads through a value, or past the end of a list.
    """
    if not path:
        return value
    step, rest = path[0], path[1:]
    match node:
        case MappingNode():
            child = node.entries.get(str(step))
            if child is None or (isinstance(child, Scalar) and child.value is None):
                child = _empty(rest, value.where)
            return replace(node, entries={**node.entries, str(step): put(child, rest, value)})
        case ListNode():
            index = _index(step, len(node.items))
            last = [] if index < len(node.items) else [_empty(rest, value.where)]
            items = [*node.items, *last]
            items[index] = put(items[index], rest, value)
            return replace(node, items=tuple(items))
        case Scalar():
            raise LookupError(f"{show_value(node)} is a single value, there is nothing below it")
        case _:
            raise AssertionError(node)


def show_path(path: KeyPath) -> str:
    """``("data", "train", 0, "path")`` -> ``data.train[0].path``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def parse_path(text: str) -> KeyPath | None:
    """``data.train[0].path`` or ``data.train.0.path`` -> ``("data", "train", 0, "path")``; None if it is no path."""
    if not re.fullmatch(r"[^\s.\[\]=]+(\.[^\s.\[\]=]+|\[\d{1,6}\])*", text):
        return None
    steps = re.findall(r"[^.\[\]]+", text)
    return tuple(int(step) if re.fullmatch(r"[0-9]{1,6}", step) else step for step in steps)


def show_value(node: Node) -> str:
    """What stands there, in words for an error message."""
    match node:
        case Scalar(value=None):
            return "no value"
        case Scalar(value=str(), quoted=True):
            return f'the text "{_cut(node.text)}" (in quotes)'
        case Scalar(value=str()):
            return f'the text "{_cut(node.text)}"'
        case Scalar():
            return _cut(node.text)
        case ListNode(items=items):
            return f"a list of {len(items)}" if items else "an empty list"
        case MappingNode(entries=entries):
            return f"a mapping ({_cut(', '.join(entries))})" if entries else "an empty mapping"
        case _:
            raise AssertionError(node)


def num_processes() -> int:
    """How many processes a launcher (torchrun, accelerate) has started for this run; 1 without one. What a run
    description means may depend on it. Raises `UserError` where ``WORLD_SIZE`` is no such number."""
    told = os.environ.get("WORLD_SIZE", "") or "1"
    if not told.isdecimal() or not int(told):
        hint = "a launcher sets this variable of the environment: unset it where there is none"
        raise UserError(f"WORLD_SIZE is {told!r}, and says how many processes there are", hint=hint)
    return int(told)


def _child(node: Node, step: str | int) -> Node | None:
    match node:
        case MappingNode():
            return node.entries.get(str(step))
        case ListNode() if isinstance(step, int) and 0 <= step < len(node.items):
            return node.items[step]
        case _:
            return None


def _empty(rest: KeyPath, where: Where) -> Node:
    """What a path can go on into: a list where a number comes next, else a mapping."""
    return ListNode(where=where, items=()) if rest and isinstance(rest[0], int) else MappingNode(where=where)


def _index(step: str | int, length: int) -> int:
    if not isinstance(step, int):
        raise LookupError(f"this is a list, so its entries have numbers, not names such as {step}")
    if step > length:
        raise LookupError(
            f"the list has {counted(length, 'entry', 'entries')}, so {length} is the next free number, not {step}"
        )
    return step


def _cut(text: str) -> str:
    return shortened(" ".join(text.split()) if "\n" in text else text, 60)
