"""The longest text that a row may have: what no program should be asked to tokenize."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from luthier.errors import RowError
from luthier.records import Conversation, Document, Feedback, Message, Part, Preference, Row, Text, Thinking, ToolCall


def check_texts(row: Row, limit: int) -> None:
    """Raises `RowError` (``text_too_long``) if a text of the row has ``limit`` characters or more."""
    for field, length in _lengths(row):
        if length >= limit:
            detail = f"{length:,} characters, texts have fewer than {limit:,} (data.text_limit)"
            raise RowError("text_too_long", detail, field=field)


def _lengths(row: Row) -> Iterator[tuple[str, int]]:
    match row:
        case Document():
            yield "text", _length(row.parts, Text)
        case Conversation():
            yield from _of_messages("messages", row.messages)
        case Preference():
            for name, messages in (("prompt", row.prompt), ("chosen", row.chosen), ("rejected", row.rejected)):
                yield from _of_messages(name, messages)
        case Feedback():
            for name, messages in (("prompt", row.prompt), ("completion", row.completion)):
                yield from _of_messages(name, messages)
        case _:
            raise AssertionError(f"unknown kind of row {row!r}")


def _of_messages(name: str, messages: Iterable[Message]) -> Iterator[tuple[str, int]]:
    for index, message in enumerate(messages):
        path = f"{name}[{index}]"
        yield f"{path}.content", _length(message.parts, Text)
        yield f"{path}.reasoning_content", _length(message.parts, Thinking)
        yield f"{path}.tool_calls", sum(_leaves(part.arguments) for part in message.parts if isinstance(part, ToolCall))


def _length(parts: Iterable[Part], kind: type[Text] | type[Thinking]) -> int:
    """A text that is cut into parts, because they count differently, is still one."""
    return sum(len(part.text) for part in parts if isinstance(part, kind))


def _leaves(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(_leaves, value.values()))
        case list() | tuple():
            return sum(map(_leaves, value))
        case _:
            return 0
