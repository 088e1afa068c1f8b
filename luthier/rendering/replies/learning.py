"""How a template writes answers, learned from answers of known words, and proven on others.

Each answer is rendered as training renders it, and what stands between its words is the template's own:

    <think>\\nTHOUGHT\\n</think>\\n\\nWORDS\\n<tool_call>\\n{"name": "NAME", …}\\n</tool_call><|im_end|>

    start --"<think>\\n"--> thought --"\\n</think>\\n\\n"--> content --"\\n<tool_call>\\n"--> object …

Control tokens are single characters that no text can hold, so a tag that is written as text is text. Then other
answers, with quotes, tags and numbers in them, are rendered and read: they must be what they were, or at least the same
calls in a message that is written with the very same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from luthier.errors import RowError, TemplateError
from luthier.records import Conversation, Message, Part, Piece, Text, Thinking, ToolCall
from luthier.rendering.render import Renderer
from luthier.rendering.replies import JSON, Edge, Field, ObjectKeys, ReplyForm, Signs, joined_deltas
from luthier.rendering.replies.scanner import ReplyScanner
from luthier.rendering.template import Tools

QUESTION = Message(role="user", parts=(Text(text="qzquestion"),))
_THOUGHT, _ANSWER = "qzthought", "qzanswer"
_CALLS = (
    ToolCall(name="qzfirst", arguments={"qzalpha": "qzred"}, id="qz7ab3dE5"),
    ToolCall(name="qzsecond", arguments={"qzbeta": "qzblue", "qzgamma": "qzgreen", "qzdelta": "qzgr"}, id="qz7cd4fG6"),
    ToolCall(name="qzthird", arguments={}, id="qz7ef5hJ7"),
)
_ORDER = {Field.END: 0, Field.THOUGHT: 2, Field.CONTENT: 3}  # which edge of the same text comes first; calls between
_Key = TypeVar("_Key")
TEXT, THINKING, TOOLS = "text", "thinking", "tools"


def learn_replies(renderer: Renderer) -> ReplyForm:
    """How the renderer's template writes answers. Raises `TemplateError` where none of the answers that are tried can
    be rendered.
    """
    writer = _ProbeRenderer(renderer, Signs())
    examples = [example for message, tools in _taught() if (example := writer.written(message, tools)) is not None]
    if not examples:
        raise TemplateError(
            "the chat template cannot be read back: it renders none of the answers that are tried",
            hint="luthier verify shows what becomes of an answer under this template",
        )
    form = _form(examples, writer)
    return _proven(form, writer)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Example:
    """An answer as its template writes it, signed: the end of its prompt that is the template's own, and the reply."""

    message: Message
    prompt: str
    reply: str


@dataclass(slots=True)
class _ProbeRenderer:
    renderer: Renderer
    signs: Signs

    def written(self, message: Message, tools: Tools) -> _Example | None:
        """The answer to a question; None where the template refuses it."""
        row = Conversation(messages=(QUESTION, message), tools=tuple(tools))
        try:
            paths = self.renderer.render(row).paths
        except RowError:
            return None
        for path in paths:
            places = [n for n, piece in enumerate(path) if getattr(piece, "by_model", False)]
            if places:
                prompt, reply = path[: places[0]], path[places[0] : places[-1] + 1]
                return _Example(message=message, prompt=self._own_end(prompt), reply=self.signs.of(reply))
        return None

    def default_prompt(self, tools: Tools) -> str | None:
        """What ends the prompt where nothing but an answer is asked for."""
        row = Conversation(messages=(QUESTION,), tools=tuple(tools), add_generation_prompt=True)
        try:
            return self._own_end(self.renderer.render(row).paths[0])
        except RowError:
            return None

    def _own_end(self, prompt: Iterable[Piece]) -> str:
        pieces = list(prompt)
        start = len(pieces)
        while start and getattr(pieces[start - 1], "field", None) is None:
            start -= 1
        return self.signs.of(pieces[start:])


def _taught() -> Iterator[tuple[Message, Tools]]:
    one, two, three = _CALLS
    bare = tuple(replace(call, id=None) for call in _CALLS)
    for calls in ((), (one,), (two,), (three,), (one, two), (two, one, three), bare[:1], bare):
        tools = [declared(call) for call in _CALLS] if calls else []
        for thought, answer in product((None, _THOUGHT), (None, _ANSWER)):
            parts: list[Part] = [] if thought is None else [Thinking(text=thought)]
            parts += [] if answer is None else [Text(text=answer)]
            if answer is not None or calls:
                yield Message(role="assistant", parts=(*parts, *calls)), tools
            if answer is not None and not calls:  # where tools are on offer
                yield Message(role="assistant", parts=tuple(parts)), [declared(call) for call in _CALLS]


def declared(call: ToolCall) -> Mapping[str, Any]:
    """The declaration of a tool that takes a call's arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {
        key: {"type": kinds.get(type(value), "null"), "description": key} for key, value in call.arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": call.name, "description": call.name, "parameters": parameters}}


# --------------------------------------------------------------------------------------------------------------------
# Examples become edges.


@dataclass(frozen=True, slots=True)
class _Stretch:
    start: int
    end: int
    field: Field
    call: int | None = None


def _form(examples: list[_Example], writer: _ProbeRenderer) -> ReplyForm:
    stops = frozenset(writer.signs.sign(token) for token in sorted(writer.renderer.control.stops))
    starts: dict[str, set[Edge]] = {}
    edges: dict[Field, set[Edge]] = {}
    keys: ObjectKeys | None = None
    for example in examples:
        stretches, found = _stretches(example)
        if stretches is None:
            continue
        keys = keys or found
        for edge in _edges(example.reply, stretches, stops):
            if edge.source is Field.START:
                starts.setdefault(example.prompt, set()).add(edge)
            else:
                edges.setdefault(edge.source, set()).add(edge)
    default = next((tail for tail in (writer.default_prompt(()), *starts) if tail in starts), "")
    return ReplyForm(
        signs=writer.signs,
        starts={tail: _sorted(found) for tail, found in starts.items()} or {"": ()},
        default_start=default,
        edges={source: _sorted(found | _behind_calls(found)) for source, found in edges.items()},
        keys=keys,
        stops=stops,
    )


def _stretches(example: _Example) -> tuple[list[_Stretch] | None, ObjectKeys | None]:
    """Where the words of an answer stand in it; None where one of them stands in it in another form."""
    found: list[_Stretch] = []
    keys: ObjectKeys | None = None
    calls = 0
    for part in example.message.parts:
        match part:
            case Text(text=word) | Thinking(text=word):
                if example.reply.count(word) != 1:
                    return None, None
                start = example.reply.index(word)
                kind = Field.CONTENT if isinstance(part, Text) else Field.THOUGHT
                found.append(_Stretch(start, start + len(word), kind))
            case ToolCall():
                own, keys = _stretches_of_call(example.reply, part, calls, keys)
                if not own:
                    return None, None
                found += own
                calls += 1
    found.sort(key=lambda stretch: stretch.start)
    return found, keys


def _stretches_of_call(
    reply: str, call: ToolCall, number: int, keys: ObjectKeys | None
) -> tuple[list[_Stretch], ObjectKeys | None]:
    objects = list(_objects(reply))
    for start, end, value in objects:
        if (at := ObjectKeys.found_in(value, call)) is not None:
            keys = replace(at, call_id=at.call_id or (keys.call_id if keys else None))
            return [_Stretch(start, end, Field.OBJECT, number)], keys
    names = list(_places(reply, call.name))
    if not names:
        return [], keys
    found = [_Stretch(place, place + len(call.name), Field.NAME_AGAIN, number) for place in names]
    found[0] = replace(found[0], field=Field.NAME)
    if call.id is not None:
        found += [_Stretch(n, n + len(call.id), Field.CALL_ID, number) for n in _places(reply, call.id)]
    whole = next(((s, e) for s, e, value in objects if value == call.arguments and s > names[0]), None)
    if whole is not None:
        return [*found, _Stretch(*whole, Field.ARGUMENTS, number)], keys
    place = names[0]
    for key, value in call.arguments.items():
        key_at = reply.find(key, place)
        value_at = reply.find(str(value), key_at + len(key))
        if key_at < 0 or value_at < 0:
            return [], keys
        place = value_at + len(str(value))
        found += [
            _Stretch(key_at, key_at + len(key), Field.KEY, number),
            _Stretch(value_at, place, Field.VALUE, number),
        ]
    return found, keys


def _objects(reply: str) -> Iterator[tuple[int, int, object]]:
    """The JSON objects in a reply, outer ones before those in them."""
    for start in _places(reply, "{"):
        try:
            value, end = JSON.raw_decode(reply, start)
        except ValueError:
            continue
        yield start, end, value


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def _edges(reply: str, stretches: list[_Stretch], stops: frozenset[str]) -> Iterator[Edge]:
    source, end, call = Field.START, 0, None
    for stretch in stretches:
        begins = stretch.call is not None and stretch.call != call
        yield Edge(source, reply[end : stretch.start], stretch.field, begins)
        source, end, call = stretch.field, stretch.end, stretch.call
    rest = reply[end:]
    yield Edge(source, rest[:-1] if rest[-1:] in stops else rest, Field.END)


def _behind_calls(edges: set[Edge]) -> set[Edge]:
    """Words behind a call: models write some where no template does."""
    ends = [edge for edge in edges if edge.target is Field.END and edge.ends_call and edge.has_sign]
    return {replace(edge, target=Field.CONTENT) for edge in ends}


def _sorted(edges: set[Edge]) -> tuple[Edge, ...]:
    """The longest first, and behind those that templates write the same without white space around their tags."""
    found = {(edge.text, edge.target, edge.begins_call): edge for edge in edges}
    for edge in edges:
        if edge.has_sign and edge.target is not Field.END:
            for text in (edge.text.lstrip(), edge.text.rstrip(), edge.text.strip()):
                found.setdefault((text, edge.target, edge.begins_call), replace(edge, text=text))
    return tuple(sorted(found.values(), key=lambda edge: (-len(edge.text), _ORDER.get(edge.target, 1), edge.target)))


# --------------------------------------------------------------------------------------------------------------------
# The proof.

_WORDS = (
    "Yes.",
    "Two\n\nparagraphs, with  blanks and a line's end.",
    '{"name": "qzfirst", "arguments": {"a": 1}}',
    'Say "<tool_call>" and </think>, then <|im_end|> [TOOL_CALLS] 是的 🙂',
    "```json\n{}\n```",
)
_ARGUMENTS: tuple[Mapping[str, object], ...] = (
    {"city": "Köln", "days": 3, "wind": 2.5, "exact": True},
    {"text": 'He said "no",\nthen left: {x}, </tool_call> \\ <|im_end|> 東京 🙂'},
    {"where": {"lat": -1.5, "names": ["a", "b"]}, "tags": [], "none": {}},
    {},
    {"number": "42", "truth": "true", "empty": ""},
)


def _proven(form: ReplyForm, writer: _ProbeRenderer) -> ReplyForm:
    """The form, with what the template does not write, and what cannot be read back."""
    absent: set[str] = set()
    unreadable: dict[str, str] = {}
    tried = ((TEXT, Text, _texts()), (THINKING, Thinking, _thoughts()), (TOOLS, ToolCall, _called()))
    for what, kind, messages in tried:
        written = [(one, tools) for message, tools in messages if (one := writer.written(message, tools)) is not None]
        if not any(isinstance(part, kind) for one, _ in written for part in one.message.parts):
            absent.add(what)
        wrong = next((one for one, tools in written if not _reads(form, writer, one, tools)), None)
        if wrong is not None:
            unreadable[what] = form.signs.spelled(wrong.reply)
    if TOOLS in unreadable:  # what cannot be read is text
        form = replace(form, starts=_without_calls(form.starts), edges=_without_calls(form.edges))
    return replace(form, absent=frozenset(absent), unreadable=unreadable)


def _without_calls(edges: Mapping[_Key, tuple[Edge, ...]]) -> dict[_Key, tuple[Edge, ...]]:
    return {key: tuple(edge for edge in found if not edge.begins_call) for key, found in edges.items()}


def _reads(form: ReplyForm, writer: _ProbeRenderer, one: _Example, tools: Tools) -> bool:
    scanner = ReplyScanner(form, prompt=one.prompt, tools=tools)
    said = one.reply[:-1] if one.reply[-1:] in form.stops else one.reply
    read = joined_deltas([scanner.feed(said), scanner.close()]).message
    if is_same(read, one.message):
        return True
    names = [[part.name for part in said.parts if isinstance(part, ToolCall)] for said in (read, one.message)]
    if not names[0] or names[0] != names[1]:
        return False
    again = writer.written(read, tools)  # "3" and 3 may be written alike, and what is said before a call as a thought
    return again is not None and again.reply == one.reply


def is_same(read: Message, written: Message) -> bool:
    """Whether a message that was read says what another says, but for white space at the ends of its texts and for ids
    of calls that the notation does not have.
    """
    for kind in (Text, Thinking):
        texts = ["".join(part.text for part in one.parts if isinstance(part, kind)) for one in (read, written)]
        if texts[0] != texts[1] and texts[0].strip() != texts[1].strip():
            return False
    calls = [[part for part in one.parts if isinstance(part, ToolCall)] for one in (read, written)]
    if len(calls[0]) != len(calls[1]):
        return False
    return all(
        (one.name, one.arguments) == (other.name, other.arguments)
        and _typed(one.arguments) == _typed(other.arguments)
        and one.id in (None, other.id)
        for one, other in zip(*calls, strict=True)
    )


def _typed(value: object) -> object:
    """A value in which true is not one."""
    match value:
        case Mapping():
            return {key: _typed(item) for key, item in value.items()}
        case list() | tuple():
            return [_typed(item) for item in value]
        case _:
            return type(value).__name__, value


def _texts() -> Iterator[tuple[Message, Tools]]:
    for words in _WORDS:
        yield Message(role="assistant", parts=(Text(text=words),)), ()


def _thoughts() -> Iterator[tuple[Message, Tools]]:
    for words in _WORDS:
        yield Message(role="assistant", parts=(Thinking(text=words), Text(text=_WORDS[1]))), ()


def _called() -> Iterator[tuple[Message, Tools]]:
    for number, arguments in enumerate(_ARGUMENTS):
        call = ToolCall(name="get_weather", arguments=arguments, id=f"Ab3dE5gH{number}")
        other = ToolCall(name="send", arguments={"to": "Ann"}, id="Zb3dE5gH7")
        tools = [declared(call), declared(other)]
        for parts in ((call,), (Text(text=_WORDS[number]), call), (Thinking(text="Hm."), call), (other, call)):
            yield Message(role="assistant", parts=parts), tools
        yield Message(role="assistant", parts=(replace(call, id=None),)), tools
        yield Message(role="assistant", parts=(Text(text="Yes."),)), tools
