"""Replies of a model read back: what a template writes is learned (`learning`), replies are read by it (`scanner`).

Here is what is learned of it: edges between fields; and the characters that stand for control tokens.
"""

from __future__ import annotations

import json
import re
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


def joined_deltas(deltas: Iterable[ReplyDelta]) -> ReplyDelta:
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
        arguments = [
            (path, isinstance(item, str))
            for path, item in paths
            if path and (item == call.arguments or (isinstance(item, str) and loaded(item) == call.arguments))
        ]
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


# ---- The arguments of a call as they are drawn: where they begin in a JSON object, and which text they add to it.
#
# {"name": "send", "arguments": {"to": "Ann", …        a call as one object: the walk reads up to "arguments"
# {"to": "Ann", …                                      the arguments alone

_TOKEN = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+(?=[\s"{}\[\],:])', re.DOTALL)
WHOLE = ObjectKeys(name=(), arguments=())  # of an object that is the arguments
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_json(value: object) -> str:
    """A value as JSON that can be sent as UTF-8, which half of a surrogate pair cannot but by its number."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def inside_json(text: str) -> str:
    """Some of a text, as it is written between the quotes of a JSON string."""
    return as_json(text)[1:-1]


class ArgumentsWalk:
    """Reads a call's JSON from left to right. ``keys`` are where it has its parts, `WHOLE` of arguments alone; None
    where that is not known.

    Once ``has_begun``, what `read` gives is the arguments' own text, however what it reads is divided. Line ends in
    strings, which models write and JSON does not allow, are written as JSON writes them.
    """

    def __init__(self, keys: ObjectKeys | None) -> None:
        self.keys = keys
        self.name: str | None = None
        self.call_id: str | None = None
        self.has_begun = self.is_over = False
        self.num_read = 0  # characters of the object
        self._path: list[str | None] = []  # of the objects and lists that are open, the key that was read last
        self._is_list: list[bool] = []
        self._is_key_next = False
        self._depth = 0  # of objects and lists that are open in the arguments
        self._is_string = self._is_escape = False

    def read(self, text: str) -> str:
        """What the next characters of the object add to the arguments. ``text`` is all of it behind ``num_read``."""
        place = 0
        while place < len(text) and not self.has_begun and not self.is_over:
            found = _TOKEN.match(text, place)
            if found is None:
                break
            if not self._begins(found.group()):
                place = found.end()
        self.num_read += place
        return self._arguments(text[place:]) if self.has_begun and not self.is_over else ""

    def _begins(self, token: str) -> bool:
        """Go over one token of what stands before the arguments; whether they begin with it."""
        match token[0]:
            case "{" | "[":
                if token == "{" and self.keys is not None and self._are_here(self.keys):
                    self.has_begun = True
                    return True
                self._path.append(None)
                self._is_list.append(token == "[")
                self._is_key_next = token == "{"
            case "}" | "]":
                self._path[-1:], self._is_list[-1:] = [], []
                self.is_over = not self._path
            case ",":
                self._is_key_next = bool(self._is_list) and not self._is_list[-1]
            case ":":
                self._is_key_next = False
            case '"':
                self._take(loaded(token))
        return False

    def _take(self, word: object) -> None:
        """A key, or a text that may be the name or the id of the call."""
        if not isinstance(word, str) or not self._path:
            return
        if self._is_key_next:
            self._path[-1] = word
        elif self.keys is not None and self._is_at(self.keys.name):
            self.name = word
        elif self.keys is not None and self.keys.call_id is not None and self._is_at(self.keys.call_id):
            self.call_id = word

    def _is_at(self, path: Sequence[str]) -> bool:
        return self._path == list(path) and not any(self._is_list)

    def _are_here(self, keys: ObjectKeys) -> bool:
        """Whether an object at this place is the arguments, and all is read that is told before them."""
        has_id = keys.call_id is None or self.call_id is not None
        return self._is_at(keys.arguments) and (keys is WHOLE or (bool(self.name) and has_id))

    def _arguments(self, text: str) -> str:
        told: list[str] = []
        for char in text:
            self.num_read += 1
            if self._is_string:
                if self._is_escape:
                    self._is_escape = False
                elif char < " ":
                    char = inside_json(char)
                else:
                    self._is_escape, self._is_string = char == "\\", char != '"'
            else:
                self._is_string = char == '"'
                self._depth += (char in "{[") - (char in "}]")
            told.append(char)
            if not self._depth:
                self.is_over = True
                break
        return "".join(told)
