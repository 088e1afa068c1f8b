"""Messages as chat templates take them: plain dicts, in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

from luthier.records import Audio, Image, Message, Text, Thinking, ToolCall, Video
from luthier.rendering.media_slots import kind_of_media
from luthier.rendering.trace import Owner, Trace
from luthier.rendering.tracked import Tracked, concatenate, own_text, row_value

# How a value of a message (a string; a number, list or dict of arguments) enters the template:
# (value, field, part, is part of the row's shape) -> what stands there.
Mark = Callable[[Any, str, int | None, bool], Any]
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


def plain_messages(messages: Sequence[Message], form: MessageForm = PLAIN) -> list[dict[str, Any]]:
    """Messages as dicts of ordinary strings, what ``apply_chat_template`` would be given."""
    return [_message(message, lambda text, *_: text, form) for message in messages]


def marked_messages(
    messages: Sequence[Message], trace: Trace, form: MessageForm, *, first: int = 0, are_own: bool = True
) -> list[dict[str, Any]]:
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
) -> dict[str, Any]:
    """A message with other strings in the places of those that `marked_messages` marks; ``strings``: of its own."""

    def mark(value: Any, field: str, _part: int | None, is_shape: bool) -> Any:
        if not isinstance(value, str) or _is_ours(value, field):
            return value
        return constants[value] if is_shape or strings is None else next(strings)

    return _message(message, mark, form)


def other_tools(tools: Sequence[Mapping[str, Any]], constants: Mapping[str, str]) -> list[Any] | None:
    """Tools with other strings in the places of those that `marked_tools` marks."""
    return [_leaves(tool, lambda value, _: constants.get(value, value) if isinstance(value, str) else value)
            for tool in tools] or None  # fmt: skip


def marked_tools(tools: Sequence[Mapping[str, Any]], trace: Trace) -> list[Any] | None:
    """Tool declarations with every string tracked: they are content too, and may hold no control token."""
    if not tools:
        return None
    number = trace.number(Owner(field="tools"))
    trace.is_marking = True

    def mark(value: Any, _: bool = False) -> Any:
        if isinstance(value, dict | list):
            trace.tools[id(value)] = len(trace.tools)
        return _marked(value, number, trace, is_shape=True)

    marked = mark([_leaves(tool, mark) for tool in tools])
    trace.is_marking = False
    assert isinstance(marked, list)
    return marked


def message_strings(message: Message) -> list[str]:
    """The strings of a message in the order in which `marked_messages` marks them."""
    match message.parts:
        case (Text(text=text),) if message.name is None and message.tool_call_id is None:
            return [text]
    strings: list[str] = []

    def collect(value: Any, _field: str, _part: int | None, is_shape: bool) -> Any:
        if isinstance(value, str) and not is_shape:
            strings.append(value)
        return value

    _message(message, collect, PLAIN)
    return strings


def _marker(trace: Trace, index: int, is_own: bool) -> Mark:
    def mark(value: Any, field: str, part: int | None, is_shape: bool) -> Any:
        if _is_ours(value, field):
            return own_text(value, trace)
        owner = trace.number(Owner(message=index, field=field, part=part))
        return _marked(value, owner, trace, is_shape=is_shape or not is_own)

    return mark


def _is_ours(value: Any, field: str) -> bool:
    """Whether a value is no row's: the name of a known role, what is written into a text for a picture."""
    return field == "inline" or (field == "role" and value in ROLES)


def _marked(value: Any, owner: str, trace: Trace, *, is_shape: bool) -> Any:
    """A value of a row as the template gets it."""
    match value:
        case str():
            text = trace.swaps.get(value if is_shape else len(trace.strings), value)
            return Tracked(text, trace.add_constant(text) if is_shape else trace.add_string(text), owner, trace)
        case bool() | int() | float() | None:
            return row_value(value, owner)
        case _:
            trace.container_owners[id(value)] = owner
            return value


def _message(message: Message, mark: Mark, form: MessageForm) -> dict[str, Any]:
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
    result: dict[str, Any] = {"role": role, "content": _content(content, form.content)}
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


def _content(content: list[str | dict[str, Any]], form: ContentForm) -> Any:
    texts = [item for item in content if isinstance(item, str)]
    if len(texts) == len(content):
        match form:
            case ContentForm.TEXT:
                return _joined(texts)
            case ContentForm.PARTS:
                return [{"type": "text", "text": _joined(texts)}] if texts else []
    parts: list[dict[str, Any]] = []  # media stand between texts, whatever the template wants where there are none
    for _, run in groupby(content, key=lambda item: isinstance(item, str)):
        items = list(run)
        texts = [item for item in items if isinstance(item, str)]
        parts += [{"type": "text", "text": _joined(texts)}] if texts else [i for i in items if isinstance(i, dict)]
    return parts


def _joined(texts: list[str]) -> str:
    tracked = next((text for text in texts if isinstance(text, Tracked)), None)
    return "".join(texts) if tracked is None else concatenate(texts, tracked._trace)


def _call(call: ToolCall, part: int, mark: Mark) -> dict[str, Any]:
    def mark_call(value: Any, is_shape: bool = False) -> Any:
        return mark(value, "tool_calls", part, is_shape)

    result: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        result["id"] = mark_call(call.id)
    result["function"] = {"name": mark_call(call.name), "arguments": _leaves(call.arguments, mark_call)}
    return result


def _leaves(value: Any, mark: Callable[[Any, bool], Any]) -> Any:
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
