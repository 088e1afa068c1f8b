"""Shorthands written out: ``model: NAME`` -> ``model: {name_or_path: NAME}``, one source -> a list of one.

The schema accepts them too; here they are written out in the tree, so that overrides and messages meet one form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_origin

from luthier.config.schema import RunConfig, Section
from luthier.config.tree import ListNode, MappingNode, Node, Scalar


def expand(tree: Node) -> Node:
    """The tree of a run description in its long form."""
    return _expand_section(tree, RunConfig)


def _expand_section(node: Node, section: type[Section]) -> Node:
    if section.shorthand is not None and isinstance(node, Scalar) and isinstance(node.value, str):
        node = MappingNode(where=node.where, entries={section.shorthand: node})
    if not isinstance(node, MappingNode):
        return node
    fields = section.model_fields
    entries = {
        key: _expand_value(value, fields[key].annotation) if key in fields else value
        for key, value in node.entries.items()
    }
    return replace(node, entries=entries)


def _expand_value(node: Node, kind: Any) -> Node:
    if _is_section(kind):
        return _expand_section(node, kind)
    if get_origin(kind) is list and _is_section(item := get_args(kind)[0]):
        if isinstance(node, MappingNode) or (isinstance(node, Scalar) and isinstance(node.value, str)):
            node = ListNode(where=node.where, items=(node,))
        if isinstance(node, ListNode):
            return replace(node, items=tuple(_expand_section(entry, item) for entry in node.items))
    return node


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
