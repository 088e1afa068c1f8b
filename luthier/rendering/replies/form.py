"""How a template writes answers, as edges between fields; and the characters that stand for control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from luthier.records import Message, Part, Piece, Text, TextPiece, Thinking, ToolCall

FIRST_SIGN, NUM_SIGNS = 0xD800, 2_048  # surrogates: no decoded text holds one alone
JSON = json.JSONDecoder(strict=False)


class Field(StrEnum):
    """What a stretch of a reply is."""

    START = "start"
    THOUGHT = "thought"
    CONTENT = "content"
    OBJECT = "object"  # a call as one JSON object
    NAME = "name"
    NAME_AGAIN = "name again"
    CALL_ID = "id"
    ARGUMENTS = "arguments"  # as one JSON object
    KEY = "key"  # of one argument
    VALUE = "value"
    END = "end"


SPOKEN = (Field.THOUGHT, Field.CONTENT)
JSON_FIELDS = (Field.OBJECT, Field.ARGUMENTS)
_OUTSIDE_CALLS = (Field.START, Field.THOUGHT, Field.CONTENT, Field.END)


@dataclass(frozen=True, slots=True)
class Edge:
    """What a template writes between two fields; ``begins_call``: the second one is the first of a call."""

    source: Field
    text: str
    target: Field
    begins_call: bool = False

    @property
    def ends_call(self) -> bool:
        """Whether the first field is the last of a call."""
        return self.source not in _OUTSIDE_CALLS and (self.begins_call or self.target in _OUTSIDE_CALLS)

    @property
    def has_sign(self) -> bool:
        """Whether it holds a control token, so that no text can be taken for it."""
        return any(map(is_sign, self.text))


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPiece:
    """Some of a call as it is drawn. ``number`` counts the calls of a reply from 0. The first piece of a call has its
    ``name``, and its ``id`` where the notation has one. ``arguments`` is JSON, which follows that of earlier pieces."""

    number: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyDelta:
    """What the next tokens of a reply added to it, or the whole of it. A call comes in ``calls`` once it is complete,
    and in ``call_pieces`` as it is drawn, where that was asked for.

    ``num_malformed`` counts calls that were begun and are none (cut off, no JSON). Their text is in the content, unless
    pieces of them were told.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0
    call_pieces: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.num_malformed or self.call_pieces)

    @property
    def message(self) -> Message:
        """The assistant's message: thought, text, calls."""
        parts: list[Part] = [Thinking(text=self.reasoning)] if self.reasoning else []
        if self.content or not self.calls:
            parts.append(Text(text=self.content))
        return Message(role="assistant", parts=(*parts, *self.calls))


def joined(deltas: Iterable[ReplyDelta]) -> ReplyDelta:
    known = list(deltas)
    return ReplyDelta(
        content="".join(delta.content for delta in known),
        reasoning="".join(delta.reasoning for delta in known),
        calls=tuple(call for delta in known for call in delta.calls),
        num_malformed=sum(delta.num_malformed for delta in known),
        call_pieces=joined_pieces(piece for delta in known for piece in delta.call_pieces),
    )


def joined_pieces(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """One for each call."""
    found: dict[int, CallPiece] = {}
    for piece in pieces:
        first = found.get(piece.number)
        found[piece.number] = piece if first is None else replace(first, arguments=first.arguments + piece.arguments)
    return tuple(found.values())


def is_sign(char: str) -> bool:
    """Whether a character stands for a control token."""
    return 0 <= ord(char) - FIRST_SIGN < NUM_SIGNS


@dataclass(slots=True)
class Signs:
    """A character for each control token that was met."""

    known: dict[str, str] = field(default_factory=dict)

    def sign(self, token: str) -> str:
        """The character of a control token; its own text once all characters are taken."""
        if token not in self.known:
            if len(self.known) >= NUM_SIGNS:
                return token
            self.known[token] = chr(FIRST_SIGN + len(self.known))
        return self.known[token]

    def spelled(self, signed: str) -> str:
        """A text with its control tokens spelled out."""
        return signed.translate({ord(sign): token for token, sign in self.known.items()})

    def copy(self) -> Signs:
        """The same, which may meet tokens of its own."""
        return Signs(dict(self.known))

    def of(self, pieces: Iterable[Piece]) -> str:
        return "".join(piece.text if isinstance(piece, TextPiece) else self.sign(piece.token) for piece in pieces)


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """Where in a call's JSON object its parts are: paths of keys. ``is_text``: the arguments are a text of JSON."""

    name: tuple[str, ...]
    arguments: tuple[str, ...]
    call_id: tuple[str, ...] | None = None
    is_text: bool = False

    @classmethod
    def found_in(cls, value: object, call: ToolCall) -> ObjectKeys | None:
        """Where an object holds the parts of a call, if it does."""
        paths = list(_paths(value))
        names = [path for path, item in paths if path and item == call.name]
        arguments = [(path, isinstance(item, str)) for path, item in paths if path and _is_of(item, call.arguments)]
        ids = [path for path, item in paths if path and call.id is not None and item == call.id]
        if not names or not arguments:
            return None
        return cls(names[0], arguments[0][0], ids[0] if ids else None, arguments[0][1])

    def call(self, value: object) -> ToolCall | None:
        """The call that an object says, if it says one."""
        name, arguments = _at(value, self.name), _at(value, self.arguments)
        if self.is_text and isinstance(arguments, str):
            arguments = loaded(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        call_id = None if self.call_id is None else _at(value, self.call_id)
        return ToolCall(name=name, arguments=arguments, id=call_id if isinstance(call_id, str) else None)


def loaded(text: str) -> object:
    """What a text says as JSON; None where it is none."""
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def _is_of(item: object, arguments: Mapping[str, object]) -> bool:
    return item == arguments or (isinstance(item, str) and loaded(item) == arguments)


def _at(value: object, path: Sequence[str]) -> object:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _paths(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplyForm:
    """How a template writes answers.

    starts         by what a generation prompt ends with, the edges from the beginning of a reply behind it
    default_start  what the generation prompt ends with where nothing else is asked for
    edges          those between fields, the longest first
    stops          signs of the tokens that end a reply
    keys           of calls that are JSON objects
    absent         what the template never writes: of ``text``, ``thinking``, ``tools``
    unreadable     what of these it writes and cannot be read back, with a reply that was read as another
    """

    signs: Signs
    starts: Mapping[str, tuple[Edge, ...]]
    default_start: str
    edges: Mapping[Field, tuple[Edge, ...]]
    keys: ObjectKeys | None
    stops: frozenset[str]
    absent: frozenset[str] = frozenset()
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def start(self, prompt: str | None) -> tuple[Edge, ...]:
        """The edges from the beginning of a reply behind a prompt: those of the known one that ends most alike."""
        if prompt is None:
            return self.starts[self.default_start]
        alike = {tail: _common_end(prompt, tail) for tail in self.starts}
        return self.starts[max(self.starts, key=lambda tail: (alike[tail], alike[tail] == len(tail),
                                                              tail == self.default_start))]  # fmt: skip

    def ends_with(self, sign: str) -> bool:
        """Whether a control token ends a reply wherever it stands."""
        return sign in self.stops and not any(sign in edge.text for edge in self._all())

    def _all(self) -> Iterator[Edge]:
        for edges in (*self.starts.values(), *self.edges.values()):
            yield from edges


def _common_end(one: str, other: str) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length
