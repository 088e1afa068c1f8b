"""Texts that hold what a processor writes for an item: ``<|vision_start|><|image_pad|><|image_pad|><|vision_end|>``.

Rows of this form were prepared for one model. They are told by their look alone, and only in rows that say in no other
way where their media stand; that a stretch is one item's, as many slots as its header promises, is checked where the
model's processor is known (`encoding.measuring`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from luthier.errors import RowError
from luthier.records import Conversation, Document, Feedback, Message, Part, Preference, Row, Text, Thinking, ToolCall

_TOKEN = r"(?:<[^<>\n]{1,48}>|\[[A-Z_]{1,24}\])"
# Tokens one behind the other, with no more between them than what processors write: line breaks, numbers ("12*15").
_STRETCH = re.compile(rf"{_TOKEN}(?:[\s\d.*]{{0,12}}{_TOKEN})*")
_REPEATED = re.compile(rf"({_TOKEN})\1")


def written_slots(text: str) -> list[tuple[int, int]]:
    """Where a text has stretches of tokens in which one is repeated: ``"a <i><i> b"`` -> ``[(2, 8)]``."""
    return [found.span() for found in _STRETCH.finditer(text) if _REPEATED.search(found[0])]


def parted_slots(text: str) -> list[tuple[int, int]]:
    """The same with a stretch cut where its first token comes again: ``"<s><i><i><e><s><i><i><e>"`` has two items."""
    parts = []
    for start, end in written_slots(text):
        first = re.match(_TOKEN, text[start:end])
        assert first is not None, "a stretch begins with a token"
        places = [start + found.start() for found in re.finditer(re.escape(first[0]), text[start:end])]
        repeated = text.startswith(first[0] * 2, start)
        edges = [start, end] if repeated else [*places, end]
        parts += list(pairwise(edges))
    return parts


# --------------------------------------------------------------------------------------------------------------------
# The longest text that a row may have: what no program should be asked to tokenize.


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


def _leaves(value: object) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(_leaves, value.values()))
        case list() | tuple():
            return sum(map(_leaves, value))
        case _:
            return 0
