"""Whether what is learned reads as the answer that the row gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luthier.check.verify.policy import Spoken
from luthier.check.verify.reference_tokenizer import ReferenceTokenizer
from luthier.records import Text, Thinking, ToolCall

LONGEST_SHOWN = 60  # characters of a text in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedText:
    """What is learned, as text, and what the prompt ends with: a template may begin the answer itself (``<think>``)."""

    before: str
    learned: str

    def holds(self, text: str, *, loosely: bool = False) -> bool:
        """Whether a text ends in what is learned; ``loosely``: whatever the white space."""
        before, learned = (_dense(self.before), _dense(self.learned)) if loosely else (self.before, self.learned)
        text = _dense(text) if loosely else text
        place = (before + learned).rfind(text)
        return place >= 0 and (not text or place + len(text) > len(before))


def missing_of_part(part: Spoken, learned: LearnedText, tokenizer: ReferenceTokenizer, *, loosely: bool) -> str | None:
    """What of a part is not to be read in the text that is learned, in words; None if all is there.

    White space at a text's ends is the template's to trim; with ``loosely``, as where the template reads ``<think>`` in
    an answer and lays it out anew, all white space is. A tool call's arguments are found as JSON, whatever the
    order and white space of its keys, or, where the template writes no JSON, as their strings one by one. A media
    item is no such part: nothing of it is emitted.
    """
    match part:
        case Text() | Thinking():
            text = tokenizer.normalised(part.text).strip()
            kind = "answer" if isinstance(part, Text) else "thinking"
            if learned.holds(text, loosely=loosely):
                return None
            return f"the {kind} {short(text)} is not what is learned: {short(learned.learned)}"
        case ToolCall():
            if not learned.holds(tokenizer.normalised(part.name).strip()):
                return f"the tool's name {part.name!r} is not learned"
            if any(holds_arguments(value, part.arguments) for value in json_values(learned.learned)):
                return None
            said = [leaf for leaf in leaves(part.arguments) if not isinstance(leaf, bool | None)]  # True or true
            texts = [tokenizer.normalised(str(leaf)).strip() for leaf in said]
            lost = [text for text in texts if not learned.holds(text)]
            return f"the argument {short(lost[0])} of {part.name!r} is not learned" if lost else None
        case _:
            raise AssertionError(f"unknown part {part!r}")


def json_values(text: str) -> Iterator[object]:
    """Every JSON object that begins somewhere in a text, outermost first."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            continue
        yield value
        place = end


def holds_arguments(value: object, arguments: Mapping[str, object]) -> bool:
    """Whether a JSON value is the arguments, or an object that has them under some key."""
    return isinstance(value, Mapping) and (
        value == arguments or any(holds_arguments(inner, arguments) for inner in value.values())
    )


def changed_leaves(
    value: object, string: Callable[[str], str], other: Callable[[object], object] = lambda value: value
) -> Any:
    """A JSON value with its strings changed, keys among them, and by ``other`` its numbers, truth values and nulls."""
    match value:
        case str():
            return string(value)
        case Mapping():
            return {
                string(key) if isinstance(key, str) else key: changed_leaves(item, string, other)
                for key, item in value.items()
            }
        case list() | tuple():
            return [changed_leaves(item, string, other) for item in value]
        case _:
            return other(value)


def leaves(value: object) -> Iterator[object]:
    """The strings of a JSON value (keys among them), its numbers, truth values and nulls, in order."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from leaves(item)
        case list() | tuple():
            for item in value:
                yield from leaves(item)
        case _:
            yield value


def _dense(text: str) -> str:
    return "".join(text.split())


def short(text: str) -> str:
    """A text as messages quote it."""
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…")
