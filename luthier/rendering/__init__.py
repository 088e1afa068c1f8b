"""Rows become pieces of text whose every character has an owner: what a chat template prints, followed through it.

Here are messages as chat templates take them (plain dicts, in Hugging Face's form), and control tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any

from luthier.errors import RowError, TemplateError
from luthier.records import Audio, Document, Image, Media, Message, Part, Text, Thinking, ToolCall, Video
from luthier.rendering.text_references import NumberText, RowString, is_number
from luthier.rendering.trace import Owner, Trace
from luthier.rendering.tracked import FollowedNumber, FollowedTool, Tracked, concatenate, own_text, row_value
from luthier.writing import counted

# ---- Control tokens: the strings that mean something to the model beyond their letters.


@dataclass(frozen=True, kw_only=True)
class ControlTokens:
    """The control vocabulary of a tokenizer under a chat template, as far as rendering needs it.

    tokens   all control strings: special tokens, and added tokens that the template writes itself (``<think>``)
    special  those that the tokenizer calls special
    stops    those that end a generation (end of sequence, and the generation config's)
    lstrip   those that swallow white space on their left when a text is tokenized; ``rstrip``: on their right
    opening  what the tokenizer puts before plain text (a begin-of-sequence token, or nothing)
    closing  what ends a plain document (the end-of-sequence token)
    """

    tokens: frozenset[str]
    special: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()
    lstrip: frozenset[str] = frozenset()
    rstrip: frozenset[str] = frozenset()
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = field(default=())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def with_places(self, tokens: Iterable[str]) -> ControlTokens:
        """The same where these count as control tokens, too: what a template prints for a media item need not be one,
        for a processor replaces it in text (Qianfan-OCR's ``<image>``).
        """
        more = frozenset(tokens) - self.tokens
        return replace(self, tokens=self.tokens | more) if more else self

    def count(self, texts: Sequence[str]) -> Mapping[str, int]:
        """How often each control string stands in some texts."""
        text = "\0".join(texts)
        # far quicker than to look for each of them
        firsts, stems = self._beginnings
        if not any(first in text for first in firsts) or not any(stem in text for stem in stems):
            return {}
        return Counter(token for _, _, token in self.find(text))

    @cached_property
    def _beginnings(self) -> tuple[frozenset[str], frozenset[str]]:
        """The first characters of all tokens, and their first two."""
        return frozenset(token[:1] for token in self.tokens), frozenset(token[:2] for token in self.tokens)

    def without(self, text: str) -> str:
        """The text with no control string left in it."""
        while (found := self._pattern.sub("", text)) != text:  # what is left may come together to another one
            text = found
        return text

    def find(self, text: str, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """Every control string in a text from ``start`` on: where it begins, where it ends, and the token."""
        return ((*match.span(), match.group()) for match in self._pattern.finditer(text, start))


# ---- Messages

# How a value of a message (a string; a number, list or dict of arguments) enters the template:
# (value, field, part, is part of the row's shape) -> what stands there.
MarkPart = Callable[[Any, str, int | None, bool], Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython"})


class ContentForm(Enum):
    """How a template wants ``content``: as text, or as a list of parts (``[{"type": "text", "text": …}]``)."""

    TEXT = "text"
    PARTS = "parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageForm:
    """How a template is given messages: the form of their content; and what is written into a text for media of some
    kinds, those of others being parts of a list."""

    content: ContentForm = ContentForm.TEXT
    inline: Mapping[str, str] = field(default_factory=dict)


PLAIN = MessageForm()


def plain_messages(messages: Sequence[Message], form: MessageForm = PLAIN) -> list[dict[str, object]]:
    """Messages as dicts of ordinary strings, what ``apply_chat_template`` would be given."""
    return [_message(message, lambda text, *_: text, form) for message in messages]


def marked_messages(
    messages: Sequence[Message], trace: Trace, form: MessageForm, *, first: int = 0, are_own: bool = True
) -> list[dict[str, object]]:
    """The same with every string tracked back to its message, field and part; the trace knows each dict.

    ``first`` is the number of the first message. Those that are not the row's own are the same for all rows.
    """
    dicts = []
    trace.is_marking = True
    for index, message in enumerate(messages, first):
        dicts.append(_message(message, _marker(trace, index, are_own), form))
        trace.message_of[id(dicts[-1])] = index
        trace.container_owners[id(dicts[-1])] = trace.number(Owner(message=index, field="message"))
    trace.is_marking = False
    return dicts


def other_message(
    message: Message, form: MessageForm, strings: Iterator[str] | None, constants: Mapping[str, str]
) -> dict[str, object]:
    """A message with other strings in the places of those that `marked_messages` marks; ``strings``: of its own."""

    def mark(value: object, field: str, _part: int | None, is_shape: bool) -> object:
        if strings is not None and is_number(value):
            return NumberText(next(strings)).value
        if not isinstance(value, str) or _is_ours(value, field):
            return value
        return constants[value] if is_shape or strings is None else next(strings)

    return _message(message, mark, form)


def other_tools(tools: Sequence[Mapping[str, object]], constants: Mapping[str, str]) -> list[object] | None:
    """Tools with other strings in the places of those that `marked_tools` marks."""
    return [_leaves(tool, lambda value, _: constants.get(value, value) if isinstance(value, str) else value)
            for tool in tools] or None  # fmt: skip


def marked_tools(tools: Sequence[Mapping[str, object]], trace: Trace) -> list[object] | None:
    """Tool declarations with every string tracked: they are content too, and may hold no control token."""
    if not tools:
        return None
    number = trace.number(Owner(field="tools"))
    if trace.tool_texts:
        trace.strings += trace.tool_texts
        followed: list[object] = [
            FollowedTool(
                Tracked(trace.strings[-1 - place], trace.alphabet.char(RowString(-1 - place)), number, trace), tool
            )
            for place, tool in enumerate(tools)
        ]
        trace.container_owners[id(followed)] = number
        return followed
    trace.is_marking = True

    def mark(value: object, _: bool = False) -> object:
        if isinstance(value, dict | list):
            trace.tools[id(value)] = len(trace.tools)
        return _marked(value, number, trace, is_shape=True)

    marked = mark([_leaves(tool, mark) for tool in tools])
    trace.is_marking = False
    assert isinstance(marked, list)
    return marked


def message_strings(message: Message) -> list[str]:
    """The strings of a message, numbers of tool arguments among them, in the order in which `marked_messages` marks
    them."""
    strings: list[str] = []

    def collect(value: object, is_key: bool) -> object:
        if isinstance(value, str) and not is_key:
            strings.append(value)
        elif is_number(value):
            strings.append(NumberText(repr(value)))
        return value

    for part in message.parts:
        match part:
            case Text() | Thinking():
                strings.append(part.text)
            case ToolCall():
                strings += (part.name,) if part.id is None else (part.id, part.name)
                _leaves(part.arguments, collect)
    if message.name is not None:
        strings.append(message.name)
    if message.tool_call_id is not None:
        strings.append(message.tool_call_id)
    return strings


def with_strings(message: Message, strings: Iterator[str]) -> Message:
    """The message with other strings in the places of its `message_strings`, which are taken in their order."""
    parts: list[Part] = []
    for part in message.parts:
        match part:
            case Text() | Thinking():
                parts.append(replace(part, text=next(strings)))
            case ToolCall():
                call_id, called = None if part.id is None else next(strings), next(strings)
                arguments = _leaves(
                    part.arguments,
                    lambda value, is_key: next(strings) if isinstance(value, str) and not is_key
                    else NumberText(next(strings)).value if is_number(value) else value,
                )  # fmt: skip
                parts.append(replace(part, id=call_id, name=called, arguments=arguments))
            case _:
                parts.append(part)
    name = None if message.name is None else next(strings)
    tool_call_id = None if message.tool_call_id is None else next(strings)
    return replace(message, parts=tuple(parts), name=name, tool_call_id=tool_call_id)


def _marker(trace: Trace, index: int, is_own: bool) -> MarkPart:
    def mark(value: Any, field: str, part: int | None, is_shape: bool) -> Any:
        if _is_ours(value, field):
            return own_text(value, trace)
        owner = trace.number(Owner(message=index, field=field, part=part))
        return _marked(value, owner, trace, is_shape=is_shape or not is_own)

    return mark


def _is_ours(value: object, field: str) -> bool:
    """Whether a value is no row's: the name of a known role, what is written into a text for a picture."""
    return field == "inline" or (field == "role" and value in ROLES)


def _marked(value: object, owner: str, trace: Trace, *, is_shape: bool) -> object:
    """A value of a row as the template gets it."""
    match value:
        case str():
            text = trace.swaps.get(value if is_shape else len(trace.strings), value)
            return Tracked(text, trace.add_constant(text) if is_shape else trace.add_string(text), owner, trace)
        case bool() | int() | float() | None:
            if not is_shape and is_number(value):
                text = NumberText(repr(value))
                char = trace.add_string(text)
                if trace.follows_numbers:
                    return FollowedNumber(Tracked(text, char, owner, trace), value)
            return row_value(value, owner)
        case _:
            trace.container_owners[id(value)] = owner
            return value


def _message(message: Message, mark: MarkPart, form: MessageForm) -> dict[str, object]:
    content: list[str | dict[str, Any]] = []
    thoughts, calls = [], []
    for index, part in enumerate(message.parts):
        match part:
            case Text():
                content.append(mark(part.text, "content", index, False))
            case Thinking():
                thoughts.append(mark(part.text, "reasoning_content", index, False))
            case ToolCall():
                calls.append(_call(part, index, mark))
            case Image() | Video() | Audio():
                kind = kind_of_media(part)
                content.append(mark(form.inline[kind], "inline", None, True) if kind in form.inline else {"type": kind})
            case _:
                raise AssertionError(f"unknown part {part!r}")
    role = mark(message.role, "role", None, True)
    result: dict[str, object] = {"role": role, "content": _content(content, form.content)}
    if thoughts:  # gpt-oss reads `thinking`, all others `reasoning_content`
        thinking = _joined(thoughts)
        result |= {"thinking": thinking, "reasoning_content": thinking}
    if calls:
        result["tool_calls"] = calls
    if message.name is not None:
        result["name"] = mark(message.name, "name", None, False)
    if message.tool_call_id is not None:
        result["tool_call_id"] = mark(message.tool_call_id, "tool_call_id", None, False)
    return result


def _content(content: list[str | dict[str, object]], form: ContentForm) -> object:
    texts = [item for item in content if isinstance(item, str)]
    if len(texts) == len(content):
        match form:
            case ContentForm.TEXT:
                return _joined(texts)
            case ContentForm.PARTS:
                return [{"type": "text", "text": _joined(texts)}] if texts else []
    parts: list[dict[str, object]] = []  # media stand between texts, whatever the template wants where there are none
    for _, run in groupby(content, key=lambda item: isinstance(item, str)):
        items = list(run)
        texts = [item for item in items if isinstance(item, str)]
        parts += [{"type": "text", "text": _joined(texts)}] if texts else [i for i in items if isinstance(i, dict)]
    return parts


def _joined(texts: list[str]) -> str:
    tracked = next((text for text in texts if isinstance(text, Tracked)), None)
    return "".join(texts) if tracked is None else concatenate(texts, tracked._trace)


def _call(call: ToolCall, part: int, mark: MarkPart) -> dict[str, Any]:
    def mark_call(value: object, is_shape: bool = False) -> object:
        return mark(value, "tool_calls", part, is_shape)

    result: dict[str, object] = {"type": "function"}
    if call.id is not None:
        result["id"] = mark_call(call.id)
    result["function"] = {"name": mark_call(call.name), "arguments": _leaves(call.arguments, mark_call)}
    return result


def _leaves(value: object, mark: Callable[[object, bool], object]) -> Any:
    match value:
        case Mapping():
            named = {
                mark(key, True) if isinstance(key, str) else key: _leaves(item, mark) for key, item in value.items()
            }
            return mark(named, False)
        case list() | tuple():
            return mark([_leaves(item, mark) for item in value], False)
        case _:
            return mark(value, False)


# --------------------------------------------------------------------------------------------------------------------
# How media enter a chat template, and where in what it prints they stand.
#
# Templates of multimodal models take ``{"type": "image"}`` among the parts of a message and print the token that the
# model's processor replaces (``<|image_pad|>``). Templates of text know no parts; there the token is put into the
# text.


KINDS: Mapping[type, str] = {Image: "image", Video: "video", Audio: "audio"}
PLURAL = {"image": "images", "video": "videos", "audio": "audios"}  # as their columns are called


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSlots:
    """For each kind (``image``, ``video``, ``audio``) that a model takes, what stands for an item of it.

    tokens   the token that its processor replaces
    inline   what Luthier writes into a message's text where the template takes no media of that kind: the token with
             the marks around it
    written  those of the tokens that are not in the vocabulary: the processor finds them in the text (Qianfan-OCR)
    wrapped  for some tokens the token with its marks, where the processor replaces both together
    """

    tokens: Mapping[str, str]
    inline: Mapping[str, str]
    written: frozenset[str] = frozenset()
    wrapped: Mapping[str, str] = field(default_factory=dict)

    def tokens_of(self, media: Iterable[Media]) -> set[str]:
        """The tokens that stand for some items."""
        return {self.tokens[kind_of_media(item)] for item in media}

    def printed_for(self, media: Iterable[Media]) -> set[str]:
        """The same as templates may print them: with their marks, too, where those go with them."""
        tokens = self.tokens_of(media)
        return tokens | {self.wrapped[token] for token in tokens & self.wrapped.keys()}

    def find(self, text: str, token: str) -> Iterator[re.Match[str]]:
        """Where a text has what stands for an item, with the marks that go with it."""
        return re.finditer("|".join(map(re.escape, filter(None, (self.wrapped.get(token), token)))), text)


NO_SLOTS = MediaSlots(tokens={}, inline={})


class SlotsOnDemand:
    """A model's slots, asked for by the first row with media: finding them takes seconds, and most runs have none."""

    def __init__(self, ask: Callable[[], MediaSlots], control: ControlTokens) -> None:
        self._ask = ask
        self._control = control

    @cached_property
    def slots(self) -> MediaSlots:
        """Those of the model. Raises `TemplateError` where a text could hold what stands for an item."""
        found = self._ask()
        for kind, token in found.tokens.items():
            if token not in self._control.tokens | found.written:
                raise TemplateError(
                    f"{token} stands for {PLURAL[kind]} in this model's processor, and is not a control token of its "
                    "tokenizer: any text could hold it",
                    hint=f"make it a special token in tokenizer.json, or set model.add_special_tokens: ['{token}']",
                )
        return found

    def for_media(self, media: Sequence[Media]) -> MediaSlots:
        """The slots, if there is an item. Raises `RowError` for a kind that the model does not take."""
        for item in media:
            if (kind := kind_of_media(item)) not in self.slots.tokens:
                takes = ", ".join(PLURAL[kind] for kind in self.slots.tokens) or "no media"
                raise RowError("media_kind", f"the row has {PLURAL[kind]}, and this model takes {takes}")
        return self.slots if media else NO_SLOTS


def kind_of_media(media: Media) -> str:
    """``image``, ``video`` or ``audio``."""
    return KINDS[type(media)]


def media_of(messages: Iterable[Message | Document]) -> tuple[Media, ...]:
    """The media of some messages, or of documents, in order."""
    return tuple([part for message in messages for part in message.parts if type(part) in KINDS])  # type: ignore[misc]


def place_media(sketch: str, messages: Sequence[Message], slots: MediaSlots) -> dict[int, int]:
    """Where in what was printed which item of the messages stands: ``{position: number}``.

    The n-th token of a kind is the place of the n-th item of that kind. Raises `RowError` where there are more or fewer
    places than items, which is how a template says that it takes none.
    """
    numbers: dict[str, list[int]] = {}
    for number, media in enumerate(media_of(messages)):
        numbers.setdefault(slots.tokens[kind_of_media(media)], []).append(number)
    placed: dict[int, int] = {}
    for token, of_items in numbers.items():
        places = [match.start() for match in slots.find(sketch, token)]
        if len(places) != len(of_items):
            raise RowError(
                "media_places",
                f"the chat template printed {token} {counted(len(places), 'time')} for "
                f"{counted(len(of_items), 'item')}; use the template that came with the model",
                field="messages",
            )
        placed.update(zip(places, of_items, strict=True))
    return placed


def thoughts_of(messages: Iterable[Message]) -> list[Thinking]:
    """All thoughts in some messages; those that were part of a text in the row say how they were ``written``."""
    return [part for message in messages for part in message.parts if isinstance(part, Thinking)]


def with_thinking_in_text(message: Message) -> Message:
    """For a template that knows no thinking: what a row had as part of its text is text again."""
    return _with_thinking(
        message,
        lambda part: part if part.written is None else Text(text=part.written, train=part.train, weight=part.weight),
    )


def without_empty_thinking(message: Message) -> Message:
    """For a template that knows thinking: a thought of no characters that the text wrote is none, as where a row has it
    in a field."""
    return _with_thinking(message, lambda part: part if part.text or part.written is None else Text(text=""))


def _with_thinking(message: Message, change: Callable[[Thinking], Part]) -> Message:
    parts = (change(part) if isinstance(part, Thinking) else part for part in message.parts)
    return replace(message, parts=tuple(parts))
