"""Tools: the declarations on offer in a row, and the calls in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from luthier.errors import RowError
from luthier.records import Message, Part, Text, Thinking, ToolCall
from luthier.sources.formats.targets import read_flags
from luthier.sources.rows import decode_text, json_kind


def read_tools(value: object) -> tuple[Mapping[str, object], ...]:
    """Tool declarations in the form that chat templates take: ``{"type": "function", "function": {"name": …}}``.

    ``value`` is a list of declarations, one declaration, or JSON text of either; a bare ``{"name": …}`` is wrapped.
    Raises `RowError` (``bad_tools``).
    """
    if value is None or value == "":
        return ()
    if type(value) is str:
        value = decode_text(value, reason="bad_tools", field="tools")
    declarations = value if type(value) is list else [] if value is None else [value]
    return tuple(_declaration(item, index) for index, item in enumerate(declarations))


def read_calls(value: object) -> list[ToolCall]:
    """The calls in a ShareGPT ``function_call`` value or a ``tool_call`` part: JSON (text) of one call or a list."""
    if type(value) is str:
        value = decode_text(value, reason="bad_tool_call")
    calls = value if type(value) is list else [value]
    if not calls:
        raise RowError("bad_tool_call", "an empty list of calls")
    return [read_call(call) for call in calls]


def read_call(call: object) -> ToolCall:
    """One call: ``{"name", "arguments"}``, bare or under ``function`` (OpenAI's), with an optional ``id``.

    ``arguments`` is an object or JSON text of one; absent means none. ``train`` and ``weight`` stand beside ``name`` or
    ``function``. Raises `RowError` (``bad_tool_call``, ``bad_weight``).
    """
    if type(call) is not dict:
        raise RowError("bad_tool_call", f"a call is an object with name and arguments, not {json_kind(call)}")
    function = call.get("function")
    body = function if type(function) is dict else call
    name = body.get("name")
    if type(name) is not str or not name:
        raise RowError("bad_tool_call", f"a call needs a name, it has {sorted(map(str, body))}")
    call_id = call.get("id")
    if call_id is not None and type(call_id) is not str:
        raise RowError("bad_tool_call", f"the id of a call is text, not {json_kind(call_id)}")
    train, weight = read_flags(call)
    return ToolCall(name=name, arguments=_read_arguments(body, name), id=call_id, train=train, weight=weight)


def check_tool_results(messages: Sequence[Message]) -> None:
    """Every tool result answers something: it follows an assistant's message, and its id is the id of a call.

    The message need not hold a `ToolCall`: in many data sets the call is written in the text. Raises `RowError`.
    """
    if all(message.role != "tool" for message in messages):
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


def _read_arguments(body: Mapping[str, object], name: str) -> Mapping[str, object]:
    arguments = body.get("arguments")
    if arguments is None:
        return {}
    if type(arguments) is str:
        arguments = decode_text(arguments, reason="bad_tool_call")
    if type(arguments) is not dict:
        raise RowError("bad_tool_call", f"arguments of {name} are an object, not {json_kind(arguments)}")
    return arguments


def _declaration(item: object, index: int) -> Mapping[str, object]:
    if type(item) is str:  # a list of JSON texts
        item = decode_text(item, reason="bad_tools")
    if type(item) is dict:
        function = item.get("function")
        if type(function) is dict and type(function.get("name")) is str:
            return item if "type" in item else {"type": "function", **item}
        if type(item.get("name")) is str:
            return {"type": "function", "function": {key: value for key, value in item.items() if key != "type"}}
    raise RowError("bad_tools", f"declaration {index} has no function name", field="tools")


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
