"""Conversations as rows of OpenAI's form: what is saved of them, and what users' functions are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from luthier.records import Audio, Conversation, Image, Message, Part, Text, Thinking, ToolCall, Video

MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def as_row(conversation: Conversation) -> dict[str, object]:
    """A conversation as a row of a data set in OpenAI's form."""
    row: dict[str, object] = {"messages": [message_row(message) for message in conversation.messages]}
    return row | ({"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {})


def message_row(message: Message) -> dict[str, object]:
    """A message in OpenAI's form."""
    found: dict[str, object] = {"role": message.role, "content": _content(message.parts)}
    if thought := "".join(part.text for part in message.parts if isinstance(part, Thinking)):
        found["reasoning_content"] = thought
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in message.parts
        if isinstance(call, ToolCall)
    ]
    found |= {"tool_calls": calls} if calls else {}
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return found | {key: value for key, value in named.items() if value is not None}


def _content(parts: Sequence[Part]) -> object:
    kinds = {of: name for name, of in MEDIA.items()}
    shown: list[dict[str, object]] = []
    for part in parts:
        match part:
            case Text():
                shown.append({"type": "text", "text": part.text})
            case Image() | Audio() | Video():
                shown.append({"type": kinds[type(part)], kinds[type(part)]: part.source})
    if all(one["type"] == "text" for one in shown):
        return "".join(str(one["text"]) for one in shown)
    return shown
