"""The formats that rows come in: one table (`table`), one converter per kind of row. Here is what they share: where
things stand in the rows of one source (its format, its columns' names, its tags).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from luthier.config.choices import MAX_WEIGHT, SameRole
from luthier.errors import PluginError, RowError, UserError
from luthier.plugins import refuse_text
from luthier.records import (
    Audio,
    Conversation,
    Document,
    Feedback,
    Image,
    Message,
    Part,
    Preference,
    TargetRule,
    Text,
    Thinking,
    Tokenized,
    ToolCall,
    Video,
)
from luthier.sources import decode_text, json_kind
from luthier.writing import counted

FUNCTION_CALL = "function_call"  # ShareGPT's role for an assistant's message whose value is a tool call
ROLES = ("system", "user", "assistant", "tool")

# What the field's data sets call our roles. A tag of the user replaces the names of its role.
_ROLE_NAMES: Mapping[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "bard", "bing"),
    "tool": ("tool", "observation", "function", "tool_response"),
    FUNCTION_CALL: (FUNCTION_CALL, "tool_call"),
}
_ROLE_TAGS = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": FUNCTION_CALL,
}
TAG_NAMES = ("role_tag", "content_tag", "train_tag", *_ROLE_TAGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """How a message is written: the keys of role and content, and the file's role names with our role for each.

    ``train`` is the one key that says whether a message is learned; None: all the usual ones do.
    ``thinking`` are the tags around a thought in an assistant's text; None: there are none, text is text.
    """

    role: str
    content: str
    roles: Mapping[str, str]
    train: str | None = None
    thinking: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All that converting a row needs to know of its source. Small and picklable.

    ``columns`` maps our column names to the file's; a name that is not there has no column in this source.
    ``train_on`` and ``rules`` are the source's own say on what is learned. ``media_root`` is what relative media paths
    are joined with; None: the folder of the row's file. ``rendered``: texts hold control tokens on purpose.
    ``drop_system``: system messages are left out. ``prompt_format``: patterns of the text before a plain text.
    ``text_limit``: texts of so many characters or more are refused; None: none is. ``version`` is that of a plugin's
    format; it is part of the key of each row in the store.
    """

    format: str
    columns: Mapping[str, str]
    tags: Tags
    train_on: str | None = None
    rules: tuple[TargetRule, ...] = ()
    media_root: str | None = None
    rendered: bool = False
    same_role: SameRole = SameRole.KEEP
    drop_system: bool = False
    prompt_format: tuple[str, ...] = ()
    text_limit: int | None = None
    version: str = ""


def build_tags(overrides: Mapping[str, str], *, role: str, content: str, thinking: tuple[str, str] | None) -> Tags:
    """The default tags with the user's in their places: ``{user_tag: customer}`` changes no other role's names."""
    names = dict(_ROLE_NAMES)
    for tag, our_role in _ROLE_TAGS.items():
        if tag in overrides:
            names[our_role] = (overrides[tag],)
    replaced = {overrides[tag] for tag in _ROLE_TAGS if tag in overrides}
    roles = {name: our_role for our_role, aliases in names.items() for name in aliases if name not in replaced}
    roles |= {overrides[tag]: our_role for tag, our_role in _ROLE_TAGS.items() if tag in overrides}
    return Tags(
        role=overrides.get("role_tag", role),
        content=overrides.get("content_tag", content),
        roles=roles,
        train=overrides.get("train_tag"),
        thinking=thinking,
    )


def check_columns(kind: str, columns: Mapping[str, Sequence[str]], needs: Iterable[Sequence[str]]) -> None:
    """Raises `PluginError` where the columns of a format are no tuples of names, or where it needs one it has not."""
    refuse_text(f"the format {kind!r}", *columns.values(), *needs, besides="; needs is a tuple of such tuples")
    for wanted in (one for names in needs for one in names if one not in columns):
        raise undeclared(kind, wanted, "needs", columns)


def check_record(what: str, row: object) -> None:
    """Raises `PluginError` where a plugin's format, ``what``, has made something else of a row than a record."""
    match row:
        case Conversation():
            messages: Sequence[Any] = row.messages
        case Preference():
            messages = (*row.prompt, *row.chosen, *row.rejected)
        case Feedback():
            messages = (*row.prompt, *row.completion)
        case Document() | Tokenized():
            messages = ()
        case _:
            hint = "return what reading.conversation, document, preference or feedback gives"
            raise PluginError(f"{what} gives a {type(row).__name__}, which is no record of a row", hint=hint)
    for message in messages:
        if not isinstance(message, Message) or message.role not in ROLES:
            hint = f"give a luthier.Message, whose role is one of: {', '.join(ROLES)}"
            raise PluginError(f"{what} gives the message {str(message)[:80]}", hint=hint)
    of_document: Sequence[Any] = row.parts if isinstance(row, Document) else ()
    for part in (*of_document, *(part for message in messages for part in message.parts)):
        if not isinstance(part, Part):
            hint = "give a list of luthier.Text and others; reading.media.split(text) makes one of a text"
            raise PluginError(f"{what} gives the part {str(part)[:40]!r}, which is a {type(part).__name__}", hint=hint)


def undeclared(kind: str, name: str, how: str, columns: Iterable[str]) -> PluginError:
    """The error for a column that is none of the format's."""
    known = sorted(columns)
    ask = "".join(f"did you mean {close}? " for close in get_close_matches(name, known, n=1))
    what = f"the format {kind!r} {how} a column {name!r}, which is none of its columns"
    return PluginError(what, hint=f"{ask}its columns are: {', '.join(known)}")


# ----------------------------------------------------------------------------------------------------------------------
# What rows say of their own loss: of themselves, their messages, parts of messages, and stretches of text.


MAX_SPANS = 10_000  # in one text; marking them takes seconds where all of them overlap
_TRAIN_KEYS = ("train", "training", "loss")  # ours and axolotl's, axolotl's, ms-swift's
_WEIGHT_KEYS = ("weight", "loss_weight")  # OpenAI's, LLaMA-Factory v1's
_DETAIL_KEYS = ("train_detail", "training_detail")  # axolotl's spans
FLAG_KEYS = frozenset({*_TRAIN_KEYS, *_WEIGHT_KEYS})
SPAN_KEYS = ("spans", *_DETAIL_KEYS)
_MARKER_LENGTH = len("<image>")  # of all markers: <image>, <video>, <audio>


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The characters ``[start, end)`` of a text, and what its row says of them."""

    start: int
    end: int
    train: bool | None = None
    weight: float = 1.0


def read_flags(item: dict[str, object]) -> tuple[bool | None, float]:
    """What a message, part or call says of its loss: ``(train, weight)``. Raises `RowError` (``bad_weight``).

    A weight of 0 means that it is not trained. ``loss_weight`` is written on every message of LLaMA-Factory's v1 rows,
    so a positive one says that this message is trained, whoever speaks.
    """
    if FLAG_KEYS.isdisjoint(item):  # most say nothing
        return None, 1.0
    train = read_train(item)
    weight = 1.0
    for key in _WEIGHT_KEYS:
        value = item.get(key)
        if value is None:
            continue
        number = read_weight(value, field=key)
        if number == 0:
            return False, 1.0
        weight = number
        if key == "loss_weight" and train is None:
            train = True
    return train, weight


def read_train(item: dict[str, object]) -> bool | None:
    """True or false (or 1 or 0) under one of the names that data sets have for it; None if nothing is said."""
    said = {key: mark for key in _TRAIN_KEYS if (mark := read_mark(item, key)) is not None}
    if len(set(said.values())) > 1:
        raise RowError("bad_weight", " and ".join(f"{key} is {value}" for key, value in said.items()))
    return next(iter(said.values()), None)


def read_mark(item: dict[str, object], key: str) -> bool | None:
    """True or false (or 1 or 0) under this one key; None where it says nothing. Raises `RowError` (``bad_weight``)."""
    value = item.get(key)
    if value is None:
        return None
    if type(value) not in (bool, int, float) or value not in (0, 1):
        shown = f"the number {value}" if type(value) in (int, float) else json_kind(value)
        raise RowError("bad_weight", f"{key} is true or false, not {shown}", field=key)
    return bool(value)


def read_weight(value: object, *, field: str) -> float:
    """A number from 0 to `MAX_WEIGHT`; raises `RowError` (``bad_weight``)."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_WEIGHT:
        raise RowError("bad_weight", f"{field} is from 0 to {MAX_WEIGHT:g}, not {str(value)[:20]!r}", field=field)
    return float(value)


def read_spans(item: dict[str, object], text: object) -> tuple[bool | None, list[Span]]:
    """What ``spans`` of a message or part say of it and of stretches of its ``text``, ``[]`` if there are none.

    Each is ``{"start", "end", "train", "weight"}``; ``start`` and ``end`` count characters as Python does, the end is
    not in it. axolotl's ``train_detail`` is read as axolotl means it: its ends are in, the message is trained if the
    list is not empty, and what no entry names is not. Raises `RowError` (``bad_span``).
    """
    keys = [key for key in SPAN_KEYS if item.get(key) is not None]
    if not keys:
        return None, []
    if len(keys) > 1:
        raise RowError("bad_span", f"say it once: the message has {' and '.join(keys)}", field=keys[1])
    key = keys[0]
    if type(text) is not str:
        detail = f"{key} counts characters of a text, and there is none; a part of a list can have its own"
        raise RowError("bad_span", detail, field=key)
    entries = item[key]
    if not isinstance(entries, list):
        raise RowError("bad_span", f"{key} is a list, not {json_kind(entries)}", field=key)
    if len(entries) > MAX_SPANS:
        raise RowError("bad_span", f"{counted(len(entries), 'entry', 'entries')}, {MAX_SPANS} are allowed", field=key)
    read = _read_span if key == "spans" else _read_detail
    spans = [read(entry, len(text), f"{key}[{index}]") for index, entry in enumerate(entries)]
    if key == "spans":
        return None, spans
    if not spans or read_train(item) is False:
        return False, []
    return True, [Span(start=0, end=len(text), train=False), *spans]


def mark_spans(parts: Sequence[Part], spans: Sequence[Span]) -> list[Part]:
    """The parts that a text was read as, cut at the spans of that text. Where spans overlap the later one wins.

    Tags of thinking belong to the thought: a span that holds only letters of a tag marks nothing.
    """
    if not spans:
        return list(parts)
    marked: list[Part] = []
    position = 0
    for part in parts:
        match part:
            case Text():
                marked += _mark(part, position, spans)
                position += len(part.text)
            case Thinking():
                marked += _mark(part, position + part.written_start, spans)
                position += len(part.text if part.written is None else part.written)
            case Image() | Video() | Audio() if part.slots is not None:
                marked.append(part)
                position += len(part.slots)
            case _:
                marked.append(part)
                position += _MARKER_LENGTH
    return marked


def _read_span(entry: object, length: int, field: str) -> Span:
    if type(entry) is not dict:
        raise RowError("bad_span", f"a span is an object with start and end, not {json_kind(entry)}", field=field)
    start, end = (_place(entry, key, field) for key in ("start", "end"))
    try:
        train, weight = read_flags(entry)
    except RowError as error:
        raise error.inside(field) from None
    if train is None and all(entry.get(key) is None for key in _WEIGHT_KEYS):
        raise RowError("bad_span", "the span says neither train nor weight", field=field)
    return _checked(Span(start=start, end=end, train=train, weight=weight), length, field)


def _read_detail(entry: object, length: int, field: str) -> Span:
    if type(entry) is not dict or read_train(entry) is None:
        detail = "an entry is an object with begin_offset, end_offset and train"
        raise RowError("bad_span", detail, field=field)
    start, last = (_place(entry, key, field) for key in ("begin_offset", "end_offset"))
    return _checked(Span(start=start, end=last + 1, train=read_train(entry)), length, field)


def _place(entry: dict[str, object], key: str, field: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        shown = "missing" if value is None else json_kind(value)
        raise RowError("bad_span", f"{key} is a number of characters, this is {shown}", field=f"{field}.{key}")
    return value


def _checked(span: Span, length: int, field: str) -> Span:
    if span.start >= span.end:
        raise RowError("bad_span", f"it ends at {span.end}, not after its start {span.start}", field=field)
    if span.start < 0 or span.end > length:
        detail = f"it is from {span.start} to {span.end}, the text has {counted(length, 'character')}"
        raise RowError("bad_span", detail, field=field)
    return span


def _mark(part: Text | Thinking, start: int, spans: Sequence[Span]) -> list[Part]:
    """A part whose text begins at ``start`` of what the spans count, cut where they begin and end."""
    length = len(part.text)
    inside = [
        replace(span, start=max(span.start - start, 0), end=min(span.end - start, length))
        for span in spans
        if span.start < start + length and span.end > start
    ]
    if not inside:
        return [part]
    edges = sorted({0, length}.union(*((span.start, span.end) for span in inside)))
    flags: list[tuple[bool | None, float]] = [(part.train, 1.0)] * (len(edges) - 1)
    for span in inside:
        for place in range(bisect_left(edges, span.start), bisect_left(edges, span.end)):
            train, weight = flags[place]
            flags[place] = (train if span.train is None else span.train, weight if span.weight == 1 else span.weight)
    return [
        replace(part.cut(first, last), train=train, weight=part.weight * weight)
        for (first, last), (train, weight) in zip(pairwise(edges), flags, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Tools: what a row declares and calls.


_OF_CALLS = frozenset({*FLAG_KEYS, "type", "index", "id", "name", "function"})
_ARGUMENTS = ("arguments", "parameters", "args", "input")  # OpenAI's name, and those of others
_SCHEMAS = ("input_schema", "inputSchema")  # Anthropic's name for the parameters of a declaration, and MCP's


def read_tools(value: object) -> tuple[Mapping[str, object], ...]:
    """Tool declarations in the form that chat templates take: ``{"type": "function", "function": {"name": …}}``.

    ``value`` is a list of declarations, one declaration, or JSON text of either; a bare ``{"name": …}`` is wrapped.
    Raises `RowError` (``bad_tools``).
    """
    if type(value) is tuple:  # from Python
        value = list(value)
    if value is None or value == "":
        return ()
    if type(value) is str:
        value = decode_text(value, reason="bad_tools", field="tools")
    declarations = value if type(value) is list else [] if value is None else [value]
    return tuple(_declaration(item, index) for index, item in enumerate(declarations))


def offered_tools(value: object) -> tuple[Mapping[str, object], ...]:
    """`read_tools` for what no row holds, but a caller offers. Raises `UserError`."""
    try:
        return read_tools(value)
    except RowError as error:
        hint = 'declare them as [{"type": "function", "function": {"name": …}}]'
        raise UserError(f"the tools cannot be read: {error.detail}", hint=hint) from None


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

    ``arguments`` (or ``parameters``, ``args``, ``input``) is an object or JSON text of one; absent or empty means
    none, if there is nothing else that may hold them. ``train`` and ``weight`` stand beside ``name`` or ``function``.
    Raises `RowError` (``bad_tool_call``, ``bad_weight``).
    """
    if type(call) is not dict:
        raise RowError("bad_tool_call", f"a call is an object with name and arguments, not {json_kind(call)}")
    function = call.get("function")
    body = call
    if type(function) is dict:  # what it leaves empty may stand beside it
        body = call | {key: its for key, its in function.items() if says_something(its) or key not in call}
    name = body.get("name")
    if type(name) is not str or not name:
        raise RowError("bad_tool_call", f"a call needs a name, it has {sorted(map(str, body))}")
    call_id = body.get("id")
    if call_id is not None and type(call_id) is not str:
        raise RowError("bad_tool_call", f"the id of a call is text, not {json_kind(call_id)}")
    train, weight = read_flags(body)
    return ToolCall(name=name, arguments=_read_arguments(body, name), id=call_id, train=train, weight=weight)


def says_something(value: object) -> bool:
    """Whether it is more than null, or an empty text, list or object."""
    return not (value is None or (type(value) in (str, list, dict) and not value))


def _read_arguments(body: Mapping[str, object], name: str) -> Mapping[str, object]:
    key = next((key for key in _ARGUMENTS if says_something(body.get(key)) or body.get(key) == []), None)
    if key is None:
        left = [key for key, value in body.items() if key not in _OF_CALLS and says_something(value)]
        if left and body.keys().isdisjoint(_ARGUMENTS):
            what = f"the call of {name} has no arguments, but {' and '.join(left)}"
            raise RowError("bad_tool_call", f"{what}: call the key that holds them arguments, or add arguments: {{}}")
        return {}
    arguments = body[key]
    if type(arguments) is str:
        arguments = decode_text(arguments, reason="bad_tool_call")
    if type(arguments) is not dict:
        raise RowError("bad_tool_call", f"{key} of {name} are an object, not {json_kind(arguments)}")
    return arguments


def _declaration(item: object, index: int) -> Mapping[str, object]:
    if type(item) is str:  # a list of JSON texts
        item = decode_text(item, reason="bad_tools", field="tools")
    if type(item) is dict:
        function = item.get("function")
        if type(function) is dict and type(function.get("name")) is str:
            declared = item if "type" in item else {"type": "function", **item}
            return {**declared, "function": _described(function)}
        if type(item.get("name")) is str:
            return {"type": "function", "function": _described(item, but="type")}
    raise RowError("bad_tools", f"declaration {index} has no function name", field="tools")


def _described(function: dict[str, object], *, but: str = "") -> dict[str, object]:
    """A declared function, its schema under the name that templates read."""
    if says_something(function.get("parameters")):
        return {key: value for key, value in function.items() if key != but}
    renamed = next((key for key in _SCHEMAS if says_something(function.get(key))), None)
    left = {but, "parameters"} if renamed else {but}
    return {("parameters" if key == renamed else key): value for key, value in function.items() if key not in left}
