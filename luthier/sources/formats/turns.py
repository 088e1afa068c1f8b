"""Lists of messages, in all the ways that data sets write them.

One reader serves ShareGPT (``from``/``value``), OpenAI (``role``/``content``, parts, ``tool_calls``) and LLaMA-Factory
v1 (``{"type", "value"}`` parts, ``loss_weight``): they differ in the names of two keys and of the roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from luthier.errors import RowError
from luthier.records import Audio, Conversation, Image, Message, Part, Text, Thinking, ToolCall, Video
from luthier.sources import decode_text, json_kind
from luthier.sources.formats import (
    FUNCTION_CALL,
    Tags,
    mark_spans,
    read_call,
    read_calls,
    read_flags,
    read_mark,
    read_spans,
    says_something,
)
from luthier.sources.formats.media import COLUMN_OF_KIND, MediaQueue, names_media, read_media

_STYLES = (("role", "content"), ("from", "value"))
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
CALL_KINDS = ("tool_call", "function", "tool_use")  # LLaMA-Factory's name of a part, OpenAI's and Anthropic's
_OTHER_KEYS = " (if two of these keys hold the role and the text, name them: tags: {role_tag: …, content_tag: …})"
RATES = ("fps", "sample_fps")  # of a part with the frames of a video: ours, and that of Qwen's utilities


def read_messages(value: object, *, field: str, tags: Tags, media: MediaQueue) -> list[Message]:
    """A list of messages (or one message, or JSON text of a list, as CSV files have it).

    Two user messages in a row, a conversation that an assistant opens, and one that a user ends are accepted as they
    stand: whether a model can take them is for its template to say. Raises `RowError` with the path into the row.
    """
    if type(value) is str and value.lstrip()[:1] == "[":
        value = decode_text(value, reason="not_messages", field=field)
    if type(value) is dict:
        way_out = ": put it into a list" if tags.role in value else ""
        raise RowError("not_messages", f"messages are a list, this is one {json_kind(value)}{way_out}", field=field)
    if type(value) is not list:
        raise RowError("not_messages", f"messages are a list, this is {json_kind(value)}", field=field)
    if not value:
        raise RowError("empty_messages", "the list has no message", field=field)
    messages = []
    for index, item in enumerate(value):
        try:
            messages += read_message(item, tags=tags, media=media)
        except RowError as error:
            raise error.inside(f"{field}[{index}]") from None
    return messages


def read_message(message: object, *, tags: Tags, media: MediaQueue) -> list[Message]:
    """One message, in Anthropic's form one for each result of a tool that it holds; raises `RowError` whose field is
    relative to the message."""
    if type(message) is not dict:
        raise RowError("not_messages", f"a message is an object, this is {json_kind(message)}")
    name = message.get(tags.role)
    role = tags.roles.get(name) if type(name) is str else None
    if role is None:
        raise _bad_role(message, tags)
    content = message.get(tags.content)
    if len(message) == 2 and type(content) is str and role != FUNCTION_CALL:  # most messages there are
        parts = split_thinking(content, tags.thinking) if role == "assistant" else media.split(content)
        return [Message(role=role, parts=tuple(parts))]
    return _read_full_message(message, role, tags=tags, media=media)


def _read_full_message(message: dict[str, object], role: str, *, tags: Tags, media: MediaQueue) -> list[Message]:
    for kind, column in COLUMN_OF_KIND.items():
        if key := next((key for key in (column, kind) if key != tags.content and says_something(message.get(key))), ""):
            what = f"the message has {key}, and nothing says where: make each a part of its content, {{type: {kind}, "
            what += f"{kind}: …}}, or put them into the row's column {column}, with <{kind}> in the text for each"
            raise RowError("bad_media", what, field=key)
    parts = _reasoning(message, role)
    thinking = None if parts else tags.thinking  # where it stands apart, what tags there are in the text are text
    content = message.get(tags.content)
    train, spans = read_spans(message, content if role != FUNCTION_CALL else None)
    said, weight = read_flags(message) if tags.train is None else (read_mark(message, tags.train), 1.0)
    read = Message(
        role="assistant" if role == FUNCTION_CALL else role,
        parts=(),
        train=train if said is None else said,
        weight=weight,
        name=_optional_text(message, "name"),
        tool_call_id=_optional_text(message, "tool_call_id"),
    )
    if role == "user" and type(content) is list and any(map(_is_result, content)):
        return _read_results(content, read, media, field=tags.content)
    if role == FUNCTION_CALL:
        parts += read_calls(content)
    elif content is not None:
        parts += mark_spans(read_content(content, role, thinking, media, field=tags.content), spans)
    parts += _tool_calls(message, read.role)
    if not parts:
        detail = f"the message has no content; its keys are {sorted(message)}{_OTHER_KEYS}"
        if tags.content in message:
            detail = f"the {tags.content} of this message is null or has no part, and no tool calls stand beside it"
        raise RowError("missing_content", detail, field=tags.content)
    return [replace(read, parts=tuple(parts))]


def _is_result(item: object) -> TypeGuard[dict[str, object]]:
    return type(item) is dict and item.get("type") == "tool_result"


def _read_results(content: list[object], said: Message, media: MediaQueue, *, field: str) -> list[Message]:
    """Anthropic's form: what tools have found stands among what the user says."""
    read: list[Message] = []
    for index, item in enumerate(content):
        try:
            parts = tuple(_read_part(item, "tool" if _is_result(item) else "user", None, media))
            if _is_result(item):
                call = _optional_text(item, "tool_use_id")
                read.append(replace(said, role="tool", parts=parts, name=None, tool_call_id=call))
            elif read and read[-1].role == "user":
                read[-1] = replace(said, parts=read[-1].parts + parts)
            else:
                read.append(replace(said, parts=parts))
        except RowError as error:
            raise error.inside(f"{field}[{index}]") from None
    return read


def _bad_role(message: dict[str, object], tags: Tags) -> RowError:
    if tags.role not in message:
        detail = f"the message has no {tags.role!r}; its keys are {sorted(message)}"
        return RowError("missing_role", detail + _other_style(message, tags), field=tags.role)
    detail = f"{str(message[tags.role])[:40]!r} is not a role; known roles: {', '.join(sorted(tags.roles))}"
    detail += "; other names are given by the source's tags (user_tag, assistant_tag, observation_tag, function_tag …)"
    return RowError("unknown_role", detail, field=tags.role)


def _other_style(message: dict[str, object], tags: Tags) -> str:
    """The way out where a message is written in the other of the two ways: a source has one, that of its first rows."""
    other = next((pair for pair in _STYLES if pair[0] in message and pair[0] != tags.role), None)
    if other is None:
        return _OTHER_KEYS if message else ""
    ours, theirs = "/".join((tags.role, tags.content)), "/".join(other)
    return (
        f": it is written as {theirs}, and this source as {ours}; put rows of either kind in a source of their own, or "
        f"rename its keys (if all rows are so: tags: {{role_tag: {other[0]}, content_tag: {other[1]}}})"
    )


def read_content(
    content: object, role: str, thinking: tuple[str, str] | None, media: MediaQueue, *, field: str
) -> list[Part]:
    """What a message says, text or a list of parts; raises `RowError`."""
    if type(content) is str:
        return _split(content, role, thinking, media)
    if type(content) is dict:
        content = [content]
    if type(content) is not list:
        raise RowError("bad_content", f"content is text or a list of parts, not {json_kind(content)}", field=field)
    parts: list[Part] = []
    for index, item in enumerate(content):
        try:
            parts += _read_part(item, role, None if parts else thinking, media)
        except RowError as error:
            raise error.inside(f"{field}[{index}]") from None
    return parts


def _split(text: str, role: str, thinking: tuple[str, str] | None, media: MediaQueue) -> list[Part]:
    """What an assistant writes is text after its thinking, to the last character, also where it looks like a marker."""
    return split_thinking(text, thinking) if role == "assistant" else media.split(text)


def _read_part(item: object, role: str, thinking: tuple[str, str] | None, media: MediaQueue) -> list[Part]:
    if type(item) is str:
        return _split(item, role, thinking, media)
    if type(item) is not dict:
        raise RowError("bad_part", f"a part is an object with a type, not {json_kind(item)}")
    kind = item.get("type")
    if type(kind) is str and kind in _MEDIA_KINDS:
        return [_read_media_part(item, kind, media)]
    match kind:
        case "text" | "input_text" | "output_text":
            text = _part_text(item, ("text", "value"))
            return _flagged(item, text, _split(text, role, thinking, media))
        case "thinking" | "reasoning":
            if role != "assistant":
                raise RowError("bad_part", f"only an assistant thinks, this is a {role} message")
            text = _part_text(item, ("thinking", "reasoning", "text", "value"))
            return _flagged(item, text, [Thinking(text=text)])
        case _ if kind in CALL_KINDS:
            if role != "assistant":
                raise RowError("bad_part", f"only an assistant calls tools, this is a {role} message")
            value = item.get("value")
            calls: list[Part] = [*read_calls(item if value is None else value)]
            return calls if value is None else _flagged(item, None, calls)
        case "tool_result":
            if role != "tool":
                raise RowError("bad_part", f"a tool's result is a message of the role tool, this is a {role} message")
            if type(item.get("content")) is list:
                return read_content(item["content"], role, thinking, media, field="content")
            if all(item.get(key) is None for key in ("value", "text", "content")):
                return [Text(text="")]
            text = _part_text(item, ("value", "text", "content"))
            return _flagged(item, text, [Text(text=text)])
        case _:
            known = ", ".join(("text", "thinking", "reasoning", *CALL_KINDS, "tool_result", *_MEDIA_KINDS))
            if kind is None:
                keys = ", ".join(map(str, item))[:60] or "nothing"
                what = f"a part has a type, this has {keys}: write the object as JSON text, or give it a type"
                raise RowError("bad_part", f"{what}: {known}")
            raise RowError("bad_part", f"{str(kind)[:40]!r} is not a type of part; known types: {known}")


def _flagged(item: dict[str, object], text: str | None, parts: list[Part]) -> list[Part]:
    """The parts that an item was read as, with what it says of its loss, and of stretches of its text."""
    train, weight = read_flags(item)
    in_detail, spans = read_spans(item, text)
    if train is None:
        train = in_detail
    if train is not None or weight != 1:
        parts = [
            replace(part, train=train if part.train is None else part.train, weight=part.weight * weight)
            if isinstance(part, Text | Thinking | ToolCall)
            else part
            for part in parts
        ]
    return mark_spans(parts, spans)


def _read_media_part(item: dict[str, object], kind: str, media: MediaQueue) -> Part:
    media_kind = _MEDIA_KINDS[kind]
    for key in (kind, "value", media_kind):
        if (value := item.get(key)) is not None:
            if type(value) is list and media_kind == "video":  # its frames; how many a second, the part says
                value = {"frames": value, "fps": next((item[name] for name in RATES if item.get(name)), None)}
            return read_media(media_kind, value, media.root)
    if type(source := item.get("source")) is dict:  # Anthropic's form
        return read_media(media_kind, source, media.root)
    if names_media(item):
        return read_media(media_kind, item, media.root)
    return media.take(media_kind)  # {"type": "image"}: the next one of the row's column


def _part_text(item: dict[str, object], keys: tuple[str, ...]) -> str:
    for key in keys:
        if item.get(key) is not None:
            if type(item[key]) is not str:
                raise RowError("bad_content", f"{key} is text, not {json_kind(item[key])}")
            return str(item[key])
    raise RowError("missing_content", f"the part has none of {', '.join(keys)}; its keys are {sorted(item)}")


def _reasoning(message: dict[str, object], role: str) -> list[Part]:
    told = {key: value for key in _REASONING_KEYS if (value := message.get(key)) not in (None, "")}
    for key, value in told.items():
        if type(value) is not str or role not in ("assistant", FUNCTION_CALL):
            detail = f"{key} is text of an assistant's message, this is {json_kind(value)} of a {role} message"
            raise RowError("bad_content", detail, field=key)
    thoughts = list(dict.fromkeys(told.values()))
    if len(thoughts) > 1:
        raise RowError("bad_content", f"{' and '.join(told)} say two things: leave one", field=next(iter(told)))
    return [Thinking(text=str(thought)) for thought in thoughts]


def _tool_calls(message: dict[str, object], role: str) -> list[Part]:
    told: dict[str, object] = {}
    for key in ("tool_calls", "function_call"):  # the latter is OpenAI's form before tool_calls
        value = message.get(key)
        if type(value) is str and value:
            value = decode_text(value, reason="bad_tool_call", field=key)
        if says_something(value):
            told[key] = value
    if not told:
        return []
    if len(told) > 1:
        raise RowError("bad_tool_call", "the message has tool_calls and a function_call: leave one", field="tool_calls")
    [(key, calls)] = told.items()
    if role != "assistant":
        raise RowError("bad_tool_call", f"only an assistant calls tools, this is a {role} message", field=key)
    try:
        if key == "function_call":
            return [read_call(calls)]
        if type(calls) is not list:
            raise RowError("bad_tool_call", f"tool_calls is a list, not {json_kind(calls)}")
        return [read_call(call) for call in calls]
    except RowError as error:
        raise error.inside(key) from None


def _optional_text(message: dict[str, object], key: str) -> str | None:
    value = message.get(key)
    if value is not None and type(value) is not str:
        raise RowError("bad_content", f"{key} is text, not {json_kind(value)}", field=key)
    return value or None


# ------------------------------------------------------------------------------- conversations as rows of OpenAI's form


MEDIA: Mapping[str, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


def as_row(conversation: Conversation) -> dict[str, object]:
    """A conversation as a row of a data set in OpenAI's form."""
    unlearned = {"train": False}
    messages = [message_row(one) | (unlearned if one.train is False else {}) for one in conversation.messages]
    row: dict[str, object] = {"messages": messages}
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


def check_tool_results(messages: Sequence[Message]) -> None:
    """Every tool result answers something: it follows an assistant's message, and its id is the id of a call.

    The message need not hold a `ToolCall`: in many data sets the call is written in the text. Raises `RowError`.
    """
    if "tool" not in [message.role for message in messages]:
        return
    previous = ""
    ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool":
            if previous not in ("assistant", "tool"):
                detail = f"a tool result must follow an assistant's message, this follows {previous or 'nothing'}"
                raise RowError("tool_result_without_call", detail, field=f"messages[{index}]")
            if message.tool_call_id and message.tool_call_id not in ids:
                detail = f"no call before it has the id {message.tool_call_id!r}; there are {sorted(ids)}"
                raise RowError("tool_result_without_call", detail, field=f"messages[{index}].tool_call_id")
        elif message.role == "assistant":
            ids.update(part.id for part in message.parts if type(part) is ToolCall and part.id is not None)
        previous = message.role


# --------------------------------------------------------------------------------------------------------------------
# Thinking that is written into an assistant's text, between tags.
#
#     "<think>\nHm.\n</think>\n\nYes."  ->  Thinking("Hm."), Text("Yes.")
#
# The thought keeps how it was written, so that ``written`` and the text after it are the whole text, to the
# character.


def split_thinking(text: str, tags: tuple[str, str] | None) -> list[Part]:
    """An assistant's text as its thinking and its answer; as one text where it does not begin with a whole thought.

    One line break inside each tag, and up to two after the closing one, belong to the tags, as chat templates write
    them. Only the first thought is taken: what follows it is the answer, also where it has tags again. A closing tag
    without an opening one ends the thought that a prompt opened, if it is the only one and has a line of its own.
    """
    if tags is None or tags[1] not in text:
        return [Text(text=text)]
    opening, closing = tags
    blank = len(text) - len(text.lstrip())
    if text.startswith(opening, blank):
        begin = blank + len(opening)
        end = text.find(closing, begin)
        begin += text.startswith("\n", begin)
    else:
        begin, end = 0, _lone_closing(text, opening, closing)
    if end < 0:
        return [Text(text=text)]
    answer = end + len(closing)
    answer += min(2, len(text) - answer - len(text[answer:].lstrip("\n")))
    last = end - 1 if end > begin and text[end - 1] == "\n" else end
    thought = Thinking(text=text[begin:last], written=text[:answer], written_start=begin)
    return [thought, Text(text=text[answer:])] if answer < len(text) else [thought]


def _lone_closing(text: str, opening: str, closing: str) -> int:
    """Where the only tag of a text stands, on a line of its own; -1 if there are others, or it is part of a line."""
    place = text.index(closing)
    after = place + len(closing)
    is_only = opening not in text and closing not in text[after:]
    begins_line = place == 0 or text[place - 1] == "\n"
    return place if is_only and begins_line and text[after : after + 1] in ("", "\n") else -1


# --------------------------------------------------------------------------------------------------------------------
# Dialogues in one text, as HH-RLHF has them: ``"\n\nHuman: Hi\n\nAssistant: Hello!"``.


_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def read_transcript(text: str) -> list[tuple[str, str]]:
    """``(role, text)`` of each turn; empty for a text that does not begin with what a human says.

    White space around a turn's text belongs to the form and is left out.
    """
    marks = list(_TURN.finditer(text))
    if not marks or marks[0].start() > 0 or marks[0][1] != "Human":
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [(_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]


def is_message_list(value: object) -> bool:
    """Whether a text is a JSON list of objects, as CSV files hold messages; ``"[[1, 2]]"`` is an answer."""
    return (
        type(value) is str
        and value.startswith("[{")
        and value.endswith("}]")
        and ('"role"' in value or '"from"' in value)
    )
