"""A reply read from left to right, as it comes, along the edges of its form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from luthier.records import ToolCall
from luthier.rendering.replies import (
    JSON,
    SPOKEN,
    WHOLE,
    ArgumentsWalk,
    CallPiece,
    Edge,
    Field,
    ReplyDelta,
    ReplyForm,
    as_json,
    inside_json,
    loaded,
)
from luthier.rendering.template import Tools

LONGEST_NAME = 256  # characters of a tool's name, of an argument's, of the id of a call
_BLANK = re.compile(r"\s*")
_SIGN = re.compile("[\ud800-\udfff]")
_PYTHON = {"True": True, "False": False, "None": None}  # as templates print them that write no JSON


class NotKnownYet:
    """Whether an edge is at hand is not known before more of the reply is."""


NOT_KNOWN_YET = NotKnownYet()


@dataclass(slots=True)
class _Begun:
    """A call that is being read. ``place`` and ``source`` are where it began; ``is_signed``: with a control token."""

    place: int
    source: Field
    edge: Edge
    is_signed: bool
    name: str | None = None
    call_id: str | None = None
    key: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    value: object = None  # of a call that is one object
    is_whole: bool = False  # its JSON has been read
    has_sign: bool = False  # a control token has come in it
    walk: ArgumentsWalk | None = None  # of JSON that is told as it is drawn
    is_told: bool = False  # pieces of it have been told, so it is no text any more
    is_broken: bool = False  # it was told, and is none
    num_told: int = 0  # characters of the present value
    separator: str = "{"  # before the next argument that is written apart


class ReplyScanner:
    """Reads one reply. What it gives depends on the text that it is given, not on how that is divided.

    ``prompt`` is the signed end of the prompt that the reply stands behind; None: the one that the template writes
    where nothing else is asked for. ``tools`` are those on offer. A call whose notation begins with a control token is
    read whatever is on offer; one that begins with letters (``{"name": …}``) only if it names one of the tools.

    With ``in_pieces`` calls are told as they are drawn: one with a control token before its arguments from where these
    begin, any other once it is complete. What was told is not taken back: if such a call is cut off or is no JSON, its
    arguments have come as far as they were drawn, and are not in the content.
    """

    def __init__(
        self, form: ReplyForm, *, prompt: str | None = None, tools: Tools | None = None, in_pieces: bool = False
    ) -> None:
        self.form, self.signs, self.in_pieces = form, form.signs.copy(), in_pieces
        self._edges: dict[Field, tuple[Edge, ...]] = {**form.edges, Field.START: form.start(prompt)}
        self._schemas = _schemas(tools or ())
        self._buffer, self._place, self._seen = "", 0, 0
        self._state, self._barred = Field.START, 0
        self._begun: _Begun | None = None
        self._told: dict[Field, list[str]] = {name: [] for name in SPOKEN}
        self._calls: list[ToolCall] = []
        self._pieces: list[CallPiece] = []
        self._num_calls = self._num_malformed = 0
        self._has_ids = any(e.target is Field.CALL_ID for found in self._edges.values() for e in found)

    def feed(self, signed: str) -> ReplyDelta:
        """What some more of the reply adds to it, as far as that is certain."""
        self._buffer += signed
        return self._advanced(is_final=False)

    def close(self) -> ReplyDelta:
        """What is left when the reply has ended."""
        if self._buffer[-1:] in self.form.stops:
            self._buffer = self._buffer[:-1]
        return self._advanced(is_final=True)

    def _advanced(self, *, is_final: bool) -> ReplyDelta:
        while self._step(is_final):
            pass
        kept = self._place if self._begun is None else self._begun.place
        self._buffer, self._place, self._seen = self._buffer[kept:], self._place - kept, max(0, self._seen - kept)
        self._barred = max(0, self._barred - kept)
        if self._begun is not None:
            self._begun.place = 0
        delta = ReplyDelta(
            content="".join(self._told[Field.CONTENT]),
            reasoning="".join(self._told[Field.THOUGHT]),
            calls=tuple(self._calls),
            num_malformed=self._num_malformed,
            call_pieces=tuple(self._pieces),
        )
        self._told = {name: [] for name in SPOKEN}
        self._calls, self._pieces, self._num_malformed = [], [], 0
        return delta

    def _step(self, is_final: bool) -> bool:
        """Read on by one edge or stretch; False once nothing more can be told."""
        match self._state:
            case Field.END:
                return False
            case Field.START:
                return self._at_start(is_final)
            case Field.THOUGHT | Field.CONTENT:
                return self._spoken(is_final)
            case Field.OBJECT | Field.ARGUMENTS:
                return self._json(is_final)
            case _:
                return self._word(is_final)

    def _at_start(self, is_final: bool) -> bool:
        match self._edge_at(self._place, is_final):
            case Edge() as edge:
                self._take(edge)
            case NotKnownYet():
                return False
            case None:
                if self._place == len(self._buffer) and not is_final:
                    return False
                self._state = Field.CONTENT
        return True

    def _spoken(self, is_final: bool) -> bool:
        end = self._next_edge(is_final)
        self._tell(end)
        match self._edge_at(end, is_final) if end < len(self._buffer) or is_final else None:
            case Edge() as edge:
                self._take(edge)
                return True
            case _:
                return False

    def _next_edge(self, is_final: bool) -> int:
        """Where the first edge begins that is there, or may be once more is known; else the end of the buffer."""
        firsts = _firsts("".join(sorted({edge.text[0] for edge in self._edges.get(self._state, ()) if edge.text})))
        start = max(self._place, self._seen)
        while found := firsts.search(self._buffer, start):
            if self._edge_at(found.start(), is_final) is not None:
                self._seen = found.start()
                return found.start()
            start = found.start() + 1
        self._seen = len(self._buffer)
        return len(self._buffer)

    def _tell(self, end: int) -> None:
        if end > self._place:
            self._told[self._state].append(self.signs.spelled(self._buffer[self._place : end]))
            self._place = end

    def _word(self, is_final: bool) -> bool:
        """A name, an id, a key or a value, which ends where an edge begins."""
        assert self._begun is not None
        end = self._next_edge(is_final)
        text = self._buffer[self._place : end]
        if self._state is not Field.VALUE and (len(text) > LONGEST_NAME or _SIGN.search(text)):
            return self._fail()
        edge = self._edge_at(end, is_final)
        if self._state is Field.NAME and not self._may_be_name(text, is_whole=isinstance(edge, Edge)):
            return self._fail()
        if self._state is Field.VALUE and self._begun.is_told:
            self._tell_value(self._begun, text, is_whole=isinstance(edge, Edge), is_cut=is_final)
        match edge:
            case Edge():
                self._place = end
                return self._took_word(text, edge)
            case _:
                return self._fail() if is_final else False

    def _may_be_name(self, text: str, *, is_whole: bool) -> bool:
        assert self._begun is not None
        if self._begun.is_signed:
            return True
        return any(name == text or (not is_whole and name.startswith(text)) for name in self._schemas)

    def _took_word(self, text: str, edge: Edge) -> bool:
        begun, text = self._begun, self.signs.spelled(text)
        assert begun is not None
        match self._state:
            case Field.NAME:
                begun.name = text
            case Field.NAME_AGAIN if text != begun.name:
                return self._fail()
            case Field.CALL_ID:
                begun.call_id = text
            case Field.KEY:
                begun.key = text
            case Field.VALUE:
                begun.arguments[begun.key] = self._value(begun, text)
        if edge.target is Field.VALUE and not edge.begins_call and self._may_tell(begun):
            self._tell_of(begun, f"{begun.separator}{as_json(begun.key)}: ")
            begun.separator, begun.num_told = ", ", 0
        self._take(edge)
        return True

    def _is_text(self, begun: _Begun) -> bool:
        """Whether the present argument is a text by its schema."""
        return self._schemas.get(begun.name or "", {}).get(begun.key, frozenset()) == {"string"}

    def _value(self, begun: _Begun, text: str) -> object:
        """An argument that is written apart: a text, or JSON where its schema or its look says so."""
        if self._is_text(begun):
            return text
        value = loaded(text)
        if value is None and text in _PYTHON:
            return _PYTHON[text]
        return text if (value is None and text != "null") or isinstance(value, str) else value

    def _json(self, is_final: bool) -> bool:
        begun = self._begun
        assert begun is not None
        if begun.is_whole:
            return self._behind_json(begun, is_final)
        if self._place < len(self._buffer) and self._buffer[self._place] != "{":
            return self._fail()
        fresh = self._buffer[max(self._place, self._seen) :]
        sign = _SIGN.search(fresh)
        self._walk(begun, len(self._buffer) - len(fresh) + sign.start() if sign else len(self._buffer))
        if "}" in fresh:
            try:
                value, end = JSON.raw_decode(self._buffer, self._place)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                begun.value, begun.is_whole = value, True
                self._place = self._seen = end
                return True
        self._seen = len(self._buffer)
        if not is_final and not sign:
            return False
        if not begun.is_told:
            return self._fail()
        begun.is_broken = begun.is_whole = True
        self._place = self._seen = len(self._buffer) - (len(fresh) - sign.start() if sign else 0)
        return True

    def _behind_json(self, begun: _Begun, is_final: bool) -> bool:
        for place in dict.fromkeys((self._place, _after_blank(self._buffer, self._place))):
            if place == len(self._buffer) and not is_final:
                return False
            match self._edge_at(place, is_final):
                case Edge() as edge:
                    self._place = place
                    self._take(edge)
                    return True
                case NotKnownYet():
                    return False
        if not begun.is_signed and not begun.is_told:
            return self._fail()
        if is_final and _after_blank(self._buffer, self._place) == len(self._buffer):
            self._place = len(self._buffer)  # the reply was cut off before what ends a call
        self._take(Edge(self._state, "", Field.CONTENT))  # words that no template writes behind a call
        return True

    def _edge_at(self, place: int, is_final: bool) -> Edge | NotKnownYet | None:
        """The longest edge from the field that begins at a place."""
        rest = len(self._buffer) - place
        for edge in self._edges.get(self._state, ()):
            if edge.begins_call and (place < self._barred or not (bool(self._schemas) or self._is_signed(edge))):
                continue
            if edge.target is Field.END:
                if is_final and self._ends(edge, place):
                    return edge
                if not is_final and rest and edge.text.startswith(self._buffer[place:]):
                    return NOT_KNOWN_YET
            elif self._buffer.startswith(edge.text, place):
                return edge
            elif not is_final and rest < len(edge.text) and edge.text.startswith(self._buffer[place:]):
                return NOT_KNOWN_YET
        return None

    def _ends(self, edge: Edge, place: int) -> bool:
        rest = self._buffer[place:]
        return rest == edge.text or (edge.source not in SPOKEN and rest.rstrip() == edge.text.rstrip())

    def _is_signed(self, edge: Edge) -> bool:
        """Whether a call is marked as one by a control token before it, or before those that it follows."""
        return edge.has_sign or (edge.ends_call and self._begun is not None and self._begun.is_signed)

    def _take(self, edge: Edge) -> None:
        """Go along an edge that begins at the present place."""
        is_signed = self._is_signed(edge) if edge.begins_call else False
        if edge.ends_call and not self._complete():
            return
        if edge.begins_call:
            self._begun = _Begun(self._place, edge.source, edge, is_signed)
        if self._begun is not None:
            self._begun.has_sign |= edge.has_sign
        self._place += len(edge.text)
        self._seen, self._state = self._place, edge.target
        if edge.target is Field.END:
            self._place = len(self._buffer)

    def _complete(self) -> bool:
        """Tell of the call that was read; False if it is none."""
        begun = self._begun
        assert begun is not None
        call = None if begun.is_broken else self._call(begun)
        if call is None and begun.is_told:
            self._num_malformed += 1
        elif call is None or (not begun.is_signed and call.name not in self._schemas):
            self._fail()
            return False
        else:
            self._tell_call(begun, call)
        self._begun = None
        return True

    def _call(self, begun: _Begun) -> ToolCall | None:
        match self._state:
            case Field.OBJECT:
                return None if self.form.keys is None else self.form.keys.call(begun.value)
            case Field.ARGUMENTS:
                assert isinstance(begun.value, dict)
                begun.arguments = begun.value
        return None if not begun.name else ToolCall(name=begun.name, arguments=begun.arguments, id=begun.call_id)

    def _fail(self) -> bool:
        """What began as a call is none: it is read once more, as text."""
        begun = self._begun
        assert begun is not None
        if begun.is_told:  # what was told is not taken back: what follows is text
            begun.is_broken = True
            self._take(Edge(self._state, "", Field.CONTENT))
            return True
        self._begun, self._num_malformed = None, self._num_malformed + begun.is_signed
        self._place = self._seen = begun.place
        self._barred = begun.place + max(1, len(begun.edge.text))
        self._state = begun.source
        if begun.edge.ends_call:
            self._state = Field.CONTENT
            closing = [e.text for e in self._edges[begun.source] if e.target is Field.END]
            whole = next((text for text in closing if text and self._buffer.startswith(text, self._place)), "")
            self._place = self._seen = self._place + len(whole)
        return True

    # ----------------------------------------------------------------------------------- calls as they are drawn

    def _may_tell(self, begun: _Begun) -> bool:
        """Whether a call may be told before it is complete: it is no text, as a control token has begun it or is
        behind the name of a tool, and nothing that comes first is missing."""
        is_call = begun.is_signed or (begun.has_sign and begun.name in self._schemas)
        is_known = bool(begun.name) and (begun.call_id is not None or not self._has_ids)
        return self.in_pieces and is_call and is_known

    def _tell_of(self, begun: _Begun, arguments: str) -> None:
        """More of the arguments of a call, behind its name where nothing of it has been told."""
        if not begun.is_told:
            begun.is_told = True
            self._pieces.append(CallPiece(number=self._num_calls, name=begun.name, id=begun.call_id))
            self._num_calls += 1
        if arguments:
            self._pieces.append(CallPiece(number=self._num_calls - 1, arguments=arguments))

    def _walk(self, begun: _Begun, end: int) -> None:
        """Tell of the arguments in a call's JSON up to a place."""
        is_object = self._state is Field.OBJECT
        if not (self.in_pieces and begun.is_signed if is_object else self._may_tell(begun)):
            return
        walk = begun.walk = begun.walk or ArgumentsWalk(self.form.keys if is_object else WHOLE)
        arguments = walk.read(self._buffer[self._place + walk.num_read : end])
        if walk.has_begun:
            if is_object:
                begun.name, begun.call_id = walk.name, walk.call_id
            self._tell_of(begun, arguments)

    def _tell_value(self, begun: _Begun, text: str, *, is_whole: bool, is_cut: bool) -> None:
        """More of an argument that is written apart: a text as it is drawn, another once it is complete. What may be
        the beginning of an edge is not told of one that is cut off."""
        if is_cut and not is_whole:
            self._seen = self._place
            text = self._buffer[self._place : self._next_edge(is_final=False)]
        if self._is_text(begun):
            opened = '"' if not begun.num_told and (text or is_whole) else ""
            new = inside_json(self.signs.spelled(text[begun.num_told :]))
            self._tell_of(begun, opened + new + ('"' if is_whole else ""))
            begun.num_told = len(text)
        elif is_whole:
            self._tell_of(begun, as_json(self._value(begun, self.signs.spelled(text))))
        elif is_cut:
            self._tell_of(begun, self.signs.spelled(text))
        if is_cut and not is_whole:
            self._place = len(self._buffer)

    def _tell_call(self, begun: _Begun, call: ToolCall) -> None:
        """A call that is complete: whole, or what is left of it."""
        self._calls.append(call)
        if not self.in_pieces:
            return
        if not begun.is_told:
            begun.name, begun.call_id = call.name, call.id
            self._tell_of(begun, as_json(call.arguments))
        elif begun.walk is None:  # its arguments are written apart
            self._tell_of(begun, "}")


@lru_cache(maxsize=256)
def _firsts(chars: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(chars)}]" if chars else r"(?!)")


def _after_blank(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _schemas(tools: Tools) -> dict[str, dict[str, frozenset[str]]]:
    """By the names of tools, the types that their arguments may have."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        declared = tool.get("function", tool)
        if not isinstance(declared, Mapping) or not isinstance(declared.get("name"), str):
            continue
        parameters = declared.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        types = {key: _types(schema) for key, schema in properties.items()} if isinstance(properties, Mapping) else {}
        found[declared["name"]] = types
    return found


def _types(schema: object) -> frozenset[str]:
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    names = declared if isinstance(declared, list) else [declared]
    return frozenset(name for name in names if isinstance(name, str))
