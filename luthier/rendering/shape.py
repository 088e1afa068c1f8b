"""The shape of a row: everything about it but its strings. Rows of one shape may share one recording."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from luthier.records import Message, Text, Thinking, ToolCall

MessageShape = Hashable


def message_shape(message: Message) -> MessageShape:
    """Equal for messages that differ in their strings only; the keys of tool arguments count as shape."""
    if message.train is None and message.weight == 1 and message.name is None and message.tool_call_id is None:
        match message.parts:
            case (Text(train=None, weight=1.0),):
                return message.role  # by far the most frequent one
    return (
        message.role,
        message.train,
        message.weight,
        message.name is None,
        message.tool_call_id is None,
        tuple(map(_part_shape, message.parts)),
    )


def tools_shape(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Tools are the same for many rows, so all of them is shape."""
    return msgspec.json.encode(list(tools)) if tools else b""


def _part_shape(part: Any) -> Hashable:
    match part:
        case Text() | Thinking():
            return type(part).__name__, part.train, part.weight
        case ToolCall():
            return "ToolCall", part.train, part.weight, part.id is None, _structure(part.arguments)
        case _:
            return type(part).__name__


def _structure(value: Any) -> Hashable:
    match value:
        case str():
            return str
        case Mapping():
            return tuple((key, _structure(item)) for key, item in value.items())
        case list() | tuple():
            return list, *map(_structure, value)
        case _:
            return type(value).__name__, repr(value)  # repr: 1.0, 1 and True differ, NaN equals itself
