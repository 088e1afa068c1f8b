"""Messages as chat templates take them: plain dicts, in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luthier.errors import RowError
from luthier.records import Audio, Image, Message, Text, Thinking, ToolCall, Video
from luthier.rendering.trace import Owner, Trace
from luthier.rendering.tracked import Tracked

# How one string of a message enters the template: (text, field, part) -> the string that stands there.
Mark = Callable[[str, str, int | None], str]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as dicts of ordinary strings, what ``apply_chat_template`` would be given."""
    return [_message(message, lambda text, _field, _part: text) for message in messages]


def marked_messages(messages: Sequence[Message], trace: Trace) -> list[dict[str, Any]]:
    """The same with every string tracked back to its message, field and part; the trace knows each dict."""
    dicts = []
    for index, message in enumerate(messages):
        dicts.append(_message(message, _marker(trace, index)))
        trace.message_of[id(dicts[-1])] = index
    return dicts


def marked_tools(tools: Sequence[Mapping[str, Any]], trace: Trace) -> list[Any] | None:
    """Tool declarations with every string tracked: they are content too, and may hold no control token."""
    if not tools:
        return None
    number = trace.number(Owner(field="tools"))
    return [_leaves(tool, lambda text: Tracked(text, number * len(text))) for tool in tools]


def _marker(trace: Trace, index: int) -> Mark:
    def mark(text: str, field: str, part: int | None) -> str:
        return Tracked(text, trace.number(Owner(message=index, field=field, part=part)) * len(text))

    return mark


def _message(message: Message, mark: Mark) -> dict[str, Any]:
    content = thinking = ""
    has_thinking = False
    calls = []
    for index, part in enumerate(message.parts):
        match part:
            case Text():
                content += mark(part.text, "content", index)
            case Thinking():
                thinking += mark(part.text, "reasoning_content", index)
                has_thinking = True
            case ToolCall():
                calls.append(_call(part, index, mark))
            case Image() | Video() | Audio():
                raise RowError("media", f"{type(part).__name__.lower()} parts cannot be encoded yet", field="messages")
            case _:
                raise AssertionError(f"unknown part {part!r}")
    result: dict[str, Any] = {"role": message.role, "content": content}
    if has_thinking:  # gpt-oss reads `thinking`, all others `reasoning_content`
        result |= {"thinking": thinking, "reasoning_content": thinking}
    if calls:
        result["tool_calls"] = calls
    if message.name is not None:
        result["name"] = mark(message.name, "name", None)
    if message.tool_call_id is not None:
        result["tool_call_id"] = mark(message.tool_call_id, "tool_call_id", None)
    return result


def _call(call: ToolCall, part: int, mark: Mark) -> dict[str, Any]:
    def mark_call(text: str) -> str:
        return mark(text, "tool_calls", part)

    result: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        result["id"] = mark_call(call.id)
    result["function"] = {"name": mark_call(call.name), "arguments": _leaves(call.arguments, mark_call)}
    return result


def _leaves(value: Any, mark: Callable[[str], str]) -> Any:
    match value:
        case str():
            return mark(value)
        case Mapping():
            return {mark(key) if isinstance(key, str) else key: _leaves(item, mark) for key, item in value.items()}
        case list() | tuple():
            return [_leaves(item, mark) for item in value]
        case _:
            return value
