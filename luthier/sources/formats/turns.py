"""Lists of messages, in all the ways that data sets write them.

One reader serves ShareGPT (``from``/``value``), OpenAI (``role``/``content``, parts, ``tool_calls``) and LLaMA-Factory
v1 (``{"type", "value"}`` parts, ``loss_weight``): they differ in the names of two keys and of the roles.
"""

from __future__ import annotations

from typing import Any

from luthier.errors import RowError
from luthier.records import Message, Part, Text, Thinking
from luthier.sources.formats.layout import FUNCTION_CALL, Tags
from luthier.sources.formats.media import MediaQueue, read_media
from luthier.sources.formats.tools import read_call, read_calls
from luthier.sources.rows import json_kind
from luthier.sources.strict_json import decode_text

MAX_WEIGHT = 1e6  # more is a slip of the pen, and would drown every other row of its step
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip


def read_messages(value: Any, *, field: str, tags: Tags, media: MediaQueue) -> list[Message]:
    """A list of messages (or one message, or JSON text of a list, as CSV files have it).

    Two user messages in a row, a conversation that an assistant opens, and one that a user ends are accepted as they
    stand: whether a model can take them is for its template to say. Raises `RowError` with the path into the row.
    """
    if type(value) is str and value.lstrip()[:1] == "[":
        value = decode_text(value, reason="not_messages", field=field)
    if type(value) is dict:
        detail = "messages are a list, this is one object"
        if tags.role not in value:
            raise RowError("not_messages", detail, field=field)
        raise RowError("not_messages", f"{detail}: put it into a list", field=field)
    if type(value) is not list:
        raise RowError("not_messages", f"messages are a list, this is {json_kind(value)}", field=field)
    if not value:
        raise RowError("empty_messages", "the list has no message", field=field)
    messages = []
    for index, item in enumerate(value):
        try:
            messages.append(read_message(item, tags=tags, media=media))
        except RowError as error:
            path = f"{field}[{index}]" + (f".{error.field}" if error.field else "")
            raise RowError(error.reason, error.detail, field=path) from None
    return messages


def read_message(message: Any, *, tags: Tags, media: MediaQueue) -> Message:
    """One message; raises `RowError` whose field is relative to the message."""
    if type(message) is not dict:
        raise RowError("not_messages", f"a message is an object, this is {json_kind(message)}")
    name = message.get(tags.role)
    role = tags.roles.get(name) if type(name) is str else None
    if role is None:
        raise _bad_role(message, tags)
    content = message.get(tags.content)
    if len(message) == 2 and type(content) is str and role != FUNCTION_CALL:  # most messages there are
        parts = [Text(text=content)] if role == "assistant" else media.split(content)
        return Message(role=role, parts=tuple(parts))
    return _read_full_message(message, role, tags=tags, media=media)


def _read_full_message(message: dict[str, Any], role: str, *, tags: Tags, media: MediaQueue) -> Message:
    parts = _reasoning(message, role)
    content = message.get(tags.content)
    if role == FUNCTION_CALL:
        role = "assistant"
        parts += read_calls(content)
    elif content is not None:
        parts += _read_content(content, role, tags=tags, media=media)
    parts += _tool_calls(message, role)
    if not parts:
        raise RowError(
            "missing_content", f"the message has no content; its keys are {sorted(message)}", field=tags.content
        )
    train, weight = _loss(message)
    return Message(
        role=role,
        parts=tuple(parts),
        train=train,
        weight=weight,
        name=_optional_text(message, "name"),
        tool_call_id=_optional_text(message, "tool_call_id"),
    )


def _bad_role(message: dict[str, Any], tags: Tags) -> RowError:
    if tags.role not in message:
        detail = f"the message has no {tags.role!r}; its keys are {sorted(message)}"
        return RowError("missing_role", detail, field=tags.role)
    detail = f"{str(message[tags.role])[:40]!r} is none of {', '.join(sorted(tags.roles))}"
    return RowError("unknown_role", detail, field=tags.role)


def _read_content(content: Any, role: str, *, tags: Tags, media: MediaQueue) -> list[Part]:
    if type(content) is str:
        # What an assistant writes is text to the last character, also where it looks like a marker.
        return [Text(text=content)] if role == "assistant" else media.split(content)
    if type(content) is dict:
        content = [content]
    if type(content) is not list:
        raise RowError(
            "bad_content", f"content is text or a list of parts, not {json_kind(content)}", field=tags.content
        )
    parts: list[Part] = []
    for index, item in enumerate(content):
        try:
            parts += _read_part(item, role, media)
        except RowError as error:
            raise RowError(error.reason, error.detail, field=f"{tags.content}[{index}]") from None
    return parts


def _read_part(item: Any, role: str, media: MediaQueue) -> list[Part]:
    if type(item) is str:
        return [Text(text=item)] if role == "assistant" else media.split(item)
    if type(item) is not dict:
        raise RowError("bad_part", f"a part is an object with a type, not {json_kind(item)}")
    kind = item.get("type")
    if type(kind) is str and kind in _MEDIA_KINDS:
        return [_read_media_part(item, kind, media)]
    match kind:
        case "text" | "input_text" | "output_text":
            text = _part_text(item, ("text", "value"))
            train, weight = _loss(item)
            if train is None and weight == 1.0:
                return [Text(text=text)] if role == "assistant" else media.split(text)
            return [Text(text=text, train=train, weight=weight)]
        case "thinking" | "reasoning":
            if role != "assistant":
                raise RowError("bad_part", f"only an assistant thinks, this is a {role} message")
            train, weight = _loss(item)
            text = _part_text(item, ("thinking", "reasoning", "text", "value"))
            return [Thinking(text=text, train=train, weight=weight)]
        case "tool_call" | "function":
            if role != "assistant":
                raise RowError("bad_part", f"only an assistant calls tools, this is a {role} message")
            return [*read_calls(item.get("value", item))]
        case "tool_result":
            return [Text(text=_part_text(item, ("value", "text", "content")))]
        case _:
            known = ", ".join(("text", "thinking", "reasoning", "tool_call", "tool_result", *_MEDIA_KINDS))
            raise RowError("bad_part", f"part type {str(kind)[:40]!r} is none of {known}")


def _read_media_part(item: dict[str, Any], kind: str, media: MediaQueue) -> Part:
    media_kind = _MEDIA_KINDS[kind]
    for key in (kind, "value", media_kind):
        if item.get(key) is not None:
            return read_media(media_kind, item[key], media.root)
    if any(item.get(key) for key in ("url", "path", "bytes", "base64", "data")):
        return read_media(media_kind, item, media.root)
    return media.take(media_kind)  # {"type": "image"}: the next one of the row's column


def _part_text(item: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if item.get(key) is not None:
            if type(item[key]) is not str:
                raise RowError("bad_content", f"{key} is text, not {json_kind(item[key])}")
            return str(item[key])
    raise RowError("missing_content", f"the part has none of {', '.join(keys)}; its keys are {sorted(item)}")


def _reasoning(message: dict[str, Any], role: str) -> list[Part]:
    for key in _REASONING_KEYS:
        value = message.get(key)
        if value is None or value == "":
            continue
        if type(value) is not str or role not in ("assistant", FUNCTION_CALL):
            detail = f"{key} is text of an assistant's message, this is {json_kind(value)} of a {role} message"
            raise RowError("bad_content", detail, field=key)
        return [Thinking(text=value)]
    return []


def _tool_calls(message: dict[str, Any], role: str) -> list[Part]:
    calls = message.get("tool_calls")
    if type(calls) is str and calls:
        calls = decode_text(calls, reason="bad_tool_call", field="tool_calls")
    if not calls:
        legacy = message.get("function_call")  # OpenAI's form before tool_calls
        calls = [legacy] if type(legacy) is dict else None
    if not calls:
        return []
    if type(calls) is not list:
        raise RowError("bad_tool_call", f"tool_calls is a list, not {json_kind(calls)}", field="tool_calls")
    if role != "assistant":
        raise RowError("bad_tool_call", f"only an assistant calls tools, this is a {role} message", field="tool_calls")
    try:
        return [read_call(call) for call in calls]
    except RowError as error:
        raise RowError(error.reason, error.detail, field="tool_calls") from None


def _loss(item: dict[str, Any]) -> tuple[bool | None, float]:
    """What a message or part says of its loss: ``train``, ``weight`` (OpenAI), ``loss_weight`` (LLaMA-Factory v1).

    A weight of 0 means that it is not trained. ``loss_weight`` is written on every message of v1 rows, so a positive
    one says that this message is trained, whoever speaks.
    """
    train = item.get("train")
    if train is not None and type(train) is not bool:
        raise RowError("bad_weight", f"train is true or false, not {json_kind(train)}", field="train")
    weight = 1.0
    for key in ("weight", "loss_weight"):
        value = item.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= MAX_WEIGHT:
            raise RowError("bad_weight", f"{key} is from 0 to {MAX_WEIGHT:g}, not {str(value)[:20]!r}", field=key)
        if value == 0:
            return False, 1.0
        weight = float(value)
        if key == "loss_weight" and train is None:
            train = True
    return train, weight


def _optional_text(message: dict[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and type(value) is not str:
        raise RowError("bad_content", f"{key} is text, not {json_kind(value)}", field=key)
    return value or None
