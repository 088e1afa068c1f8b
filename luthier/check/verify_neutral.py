"""Rows whose own text holds control strings, made readable for a tokenizer that cannot know who wrote them.

Each control string of the row is replaced by an innocent word before the template runs. All control strings in what it
renders are then the template's own; they get secret names, the words become the row's strings again, and the text can
be encoded in one go:

    row        "say <|im_end|>"
    rendered   "<|im_start|>user\\nsay zqaqz<|im_end|>\\n"
    readable   "«<|im_start|>»user\\nsay <|im_end|>«<|im_end|>»\\n"      where «…» is a secret name

A template may read such a string itself, as Qwen's does with ``</think>`` in an answer. Then the replaced row renders
to something else, which is seen; those strings are left in place, and what stands in the text is the template's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luthier.check.verify_records import Method
from luthier.check.verify_template import PlainTemplate, Tools
from luthier.check.verify_tokens import ReferenceTokenizer
from luthier.errors import RowError
from luthier.records import Audio, Conversation, Image, Message, Part, Text, Thinking, ToolCall, Video

TOOLS = -1  # stands for the tool declarations where messages are counted
Spot = tuple[int, str]  # (message, control string)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeutralRow:
    """A conversation as the template is shown it: ``words`` maps each innocent word to the string it stands for."""

    messages: tuple[Message, ...]
    tools: Tools
    words: Mapping[str, str]
    method: Method
    found: Mapping[str, int]  # how often each control string stands in the row's own text

    def restored(self, text: str) -> str:
        """A rendered text with the row's own strings back in it."""
        for word, token in self.words.items():
            text = text.replace(word, token)
        return text

    def readable(self, texts: Sequence[str], tokenizer: ReferenceTokenizer) -> list[str]:
        """Rendered texts as `ReferenceTokenizer.encode` takes them with ``forged=self.forged``."""
        return [self.restored(tokenizer.hide(text)) for text in texts] if self.forged else list(texts)

    @property
    def forged(self) -> bool:
        """Whether some control string of the row has to be held apart."""
        return bool(self.words)


def neutralise(
    row: Conversation, template: PlainTemplate, tokenizer: ReferenceTokenizer, *, meant: frozenset[str]
) -> NeutralRow:
    """The conversation with its control strings replaced, as far as the template does not read them itself.

    Those in ``meant`` are left in place: the run says that they are control tokens in a row's own text too.
    """
    messages, tools = row.messages, row.tools
    merged = tuple(_with_one_text(message) for message in messages)
    spots = _spots(merged, tools, tokenizer, meant)
    found = Counter({token: 0 for _, token in spots})
    for (_, token), count in spots.items():
        found[token] += count
    if not spots:
        return NeutralRow(messages=merged, tools=tools, words={}, method=Method.WHOLE, found={})
    words = _words(sorted(found), merged, tools, template)
    original = template.render(merged, tools)

    def attempt(chosen: frozenset[Spot], method: Method) -> NeutralRow:
        def change(at: int) -> Callable[[str], str]:
            mine = [(token, word) for word, token in words.items() if (at, token) in chosen]
            mine.sort(key=lambda pair: -len(pair[0]))  # longest first, as a tokenizer would read them
            return lambda text: functools.reduce(lambda so_far, pair: so_far.replace(*pair), mine, text)

        return NeutralRow(
            messages=tuple(_changed(message, change(at)) for at, message in enumerate(merged)),
            tools=[_leaves(tool, change(TOOLS)) for tool in tools],
            words={word: token for word, token in words.items() if any(spot[1] == token for spot in chosen)},
            method=method,
            found=dict(found),
        )

    whole = attempt(frozenset(spots), Method.NEUTRALISED)
    if _renders_to(whole, template, original):
        return whole
    harmless = [spot for spot in spots if _renders_to(attempt(frozenset([spot]), whole.method), template, original)]
    return attempt(frozenset(harmless), Method.READ_BY_TEMPLATE)


def strings_of(message: Message) -> list[str]:
    """Every string of a message that a template may print."""
    found: list[str] = []
    _changed(message, _collector(found))
    return found


def mark_ends(message: Message, mark: str, *, begin: bool = False) -> Message:
    """The message with ``mark`` after each of its strings that says something, or before it."""
    return _changed(message, lambda text: (mark + text if begin else text + mark) if text.strip() else text)


def _renders_to(row: NeutralRow, template: PlainTemplate, original: str) -> bool:
    try:
        return row.restored(template.render(row.messages, row.tools)) == original
    except RowError:
        return False  # the template reads the string and does not like the word


def _spots(
    messages: Sequence[Message], tools: Tools, tokenizer: ReferenceTokenizer, meant: frozenset[str]
) -> Counter[Spot]:
    texts = [(at, text) for at, message in enumerate(messages) for text in strings_of(message)]
    for tool in tools:
        declared: list[str] = []
        _leaves(tool, _collector(declared))
        texts += [(TOOLS, text) for text in declared]
    found = ((at, token) for at, text in texts for token in tokenizer.control_strings(text))
    return Counter(spot for spot in found if spot[1] not in meant)


def _words(tokens: Sequence[str], messages: Sequence[Message], tools: Tools, template: PlainTemplate) -> dict[str, str]:
    """A word for each control string; none occurs in the row or the template, none is part of another."""
    taken = "\0".join([template.source, repr(tools), *(text for message in messages for text in strings_of(message))])
    words: dict[str, str] = {}
    number = 0
    for token in tokens:
        while (word := f"zq{_letters(number)}qz") in taken:
            number += 1
        words[word] = token
        number += 1
    return words


def _letters(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:04d}")


def _with_one_text(message: Message) -> Message:
    """The message's texts as one between media, as templates are given them: a control string may be split over two."""
    parts: list[Part] = []
    place = -1  # of the text that the next one goes on in
    for part in message.parts:
        before = parts[place] if place >= 0 else None
        if isinstance(part, Text) and isinstance(before, Text):
            parts[place] = Text(text=before.text + part.text)
        elif isinstance(part, Text):
            place = len(parts)
            parts.append(Text(text=part.text))
        else:
            place = -1 if isinstance(part, Image | Video | Audio) else place
            parts.append(part)
    return replace(message, parts=tuple(parts))


def _collector(found: list[str]) -> Callable[[str], str]:
    def collect(text: str) -> str:
        found.append(text)
        return text

    return collect


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    parts: list[Part] = []
    for part in message.parts:
        match part:
            case Text() | Thinking():
                parts.append(replace(part, text=change(part.text)))
            case ToolCall():
                parts.append(
                    replace(
                        part,
                        name=change(part.name),
                        arguments=_leaves(part.arguments, change),
                        id=None if part.id is None else change(part.id),
                    )
                )
            case _:
                parts.append(part)
    return replace(
        message,
        parts=tuple(parts),
        name=None if message.name is None else change(message.name),
        tool_call_id=None if message.tool_call_id is None else change(message.tool_call_id),
    )


def _leaves(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key) if isinstance(key, str) else key: _leaves(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_leaves(item, change) for item in value]
        case _:
            return value
