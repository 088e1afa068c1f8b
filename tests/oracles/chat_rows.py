"""Rows as the oracles take them (plain dicts), and as Luthier does (records), made apart from Luthier's own readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from luthier.records import Conversation, Message, Part, Text, Thinking, ToolCall

Chat = list[dict[str, Any]]


def as_conversation(chat: Chat, tools: Sequence[dict[str, Any]] = ()) -> Conversation:
    """The records of a chat in OpenAI's form."""
    return Conversation(messages=tuple(map(_message, chat)), tools=tuple(tools))


def _message(message: dict[str, Any]) -> Message:
    parts: list[Part] = []
    if "reasoning_content" in message:
        parts.append(Thinking(text=message["reasoning_content"]))
    if message["content"] or not message.get("tool_calls"):
        parts.append(Text(text=message["content"]))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(ToolCall(name=function["name"], arguments=function["arguments"], id=call.get("id")))
    return Message(
        role=message["role"],
        parts=tuple(parts),
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
    )


@cache
def hugging_face_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """The library's own tokenizer with its chat template; one for all tests, which only ask it."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def hugging_face_render(source: str, chat: Chat, tools: Sequence[dict[str, Any]] = (), **kwargs: Any) -> str:
    """What transformers renders. Oracles ask for the same text again and again; each is rendered once."""
    return _rendered(source, json.dumps([chat, list(tools), kwargs]))


@lru_cache(maxsize=2048)
def _rendered(source: str, given: str) -> str:
    chat, tools, kwargs = json.loads(given)
    ([text], _) = render_jinja_template([chat], tools=tools or None, chat_template=source, **kwargs)
    return str(text)


def hugging_face_spans(
    source: str, chat: Chat, tools: Sequence[dict[str, Any]] = (), **kwargs: Any
) -> tuple[str, list[tuple[int, int]]]:
    """What transformers renders, and the spans of characters that ``{% generation %}`` encloses."""
    ([text], [spans]) = render_jinja_template(
        [chat], tools=list(tools) or None, chat_template=source, return_assistant_tokens_mask=True, **kwargs
    )
    return str(text), [(start, end) for start, end in spans]


def with_parts(chat: Chat) -> Chat:
    """The chat with contents as lists of parts; a message that only calls tools has none."""
    return [{**message, "content": _parts(message)} for message in chat]


def _parts(message: dict[str, Any]) -> list[dict[str, str]]:
    is_absent = not message["content"] and message.get("tool_calls")
    return [] if is_absent else [{"type": "text", "text": message["content"]}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, *, thought: str | None = None, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def result(text: str, *, name: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": name, "tool_call_id": f"call{number:05d}"}


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool("get_weather", "The weather in a place.", place="Name of the place")
CLOCK = tool("get_time", "The time of day in a zone.", zone="Name of the zone")

ASKED = [user("What is the weather in Cremona?"), assistant("", calls=[call("get_weather", 1, place="Cremona")])]
ANSWERED = [*ASKED, result("14 degrees, mist", name="get_weather", number=1)]
BOTH = [call("get_weather", 1, place="Cremona"), call("get_time", 2, zone="CET")]
BOTH_DONE = [result("mist", name="get_weather", number=1), result("07:45", name="get_time", number=2)]

# name -> (chat, tools). The last message is the answer that is compared, and every earlier answer after it.
CHATS: dict[str, tuple[Chat, tuple[dict[str, Any], ...]]] = {
    "single": ([user("Name a wood."), assistant("Spruce, from the Val di Fiemme.")], ()),
    "multi": (
        [user("Name a wood."), assistant("Spruce."), user("And one for the back?"),
         assistant("Maple.\n\nFlamed maple."), user("Glue?"), assistant("Hide glue, 60 °C.")],
        (),
    ),
    "system": ([system("You build violins."), user("What do you do?"), assistant("I build violins.")], ()),
    "tool call": (ASKED, (WEATHER,)),
    "tool answer": ([*ANSWERED, assistant("Mist at 14 degrees.")], (WEATHER, CLOCK)),
    "parallel calls": (
        [user("Weather and time?"), assistant("", calls=BOTH), *BOTH_DONE, assistant("Mist, and it is 07:45.")],
        (WEATHER, CLOCK),
    ),
    "words and a call": (
        [user("Weather?"), assistant("I will look.", calls=[call("get_weather", 1, place="Cremona")])], (WEATHER,),
    ),
    "thinking": ([user("2 + 2?"), assistant("4", thought="Two and two make four.")], ()),
    "thinking, multi": (
        [user("2 + 2?"), assistant("4", thought="Two and two."),
         user("3 + 3?"), assistant("6", thought="Three and three.")],
        (),
    ),
    "thinking and a call": (
        [user("Weather?"), assistant("", thought="I must look.", calls=[call("get_weather", 1, place="Cremona")]),
         result("mist", name="get_weather", number=1), assistant("Mist.", thought="It says mist.")],
        (WEATHER,),
    ),
}  # fmt: skip
