"""References: what a recorded text holds in place of a row's own strings.

A template is run once for rows of one shape, and what it printed is kept as a *sketch*: the template's own text, with a
private-use character wherever a string of the row stood. Each such character stands for a reference, which says how to
get the text from another row's strings:

    "<|user|>" + content.strip() + "
"     ->   "<|user|>󰀀
",   U+F0000 = RowString(3, (("strip", None),))
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, NamedTuple, TypeGuard

import msgspec
from markupsafe import escape

from luthier.records import Message, Text, Thinking, ToolCall

FIRST_CHAR = 0xF0000  # the private planes 15 and 16
LAST_CHAR = 0x10FFFF
LONGEST_TOOLS = 100_000  # characters; the meters of templates look at longer ones in each row
DEEPEST_TOOL = 100
MOST_BITS = 10_000  # Python writes no whole number of more than 4,300 digits

Operation = tuple[Any, ...]  # a name of OPERATIONS and its further arguments


class RowString(NamedTuple):
    """The row's string number ``number``, after some operations, each applied to what the one before gave.

    Tools that are followed count from the end: -1 is the row's first one.
    """

    number: int
    operations: tuple[Operation, ...] = ()


class Constant(NamedTuple):
    """A text that belongs to the shape of a row (a key of tool arguments, a tool), after some operations.

    It is the same in every row that a recording stands for, so a finished recording has it as `Fixed`. While the
    template runs it is followed like a `RowString`, so that the recording can be proven with another text in its place.
    """

    text: str
    operations: tuple[Operation, ...] = ()


class NumberText(str):
    """A number of a row's tool arguments, as JSON and Python write it."""

    __slots__ = ()

    @property
    def value(self) -> int | float:
        return int(self) if self.lstrip("-").isdigit() else float(self)


def tool_texts(tools: Sequence[Mapping[str, object]]) -> list[str] | None:
    """Tools as JSON, the last one first; None if one of them is no dict that could be read back, or is too long."""
    if not all(isinstance(tool, dict) and _is_json(tool) for tool in tools):
        return None
    texts = [json.dumps(tool, ensure_ascii=False) for tool in reversed(tools)]
    return texts if sum(map(len, texts)) <= LONGEST_TOOLS else None


def _is_json(value: object, depth: int = 0) -> bool:
    match value:
        case str() | bool() | None:
            return True
        case _ if depth > DEEPEST_TOOL:
            return False
        case dict():
            return all(type(key) is str for key in value) and all(_is_json(item, depth + 1) for item in value.values())
        case list():
            return all(_is_json(item, depth + 1) for item in value)
        case _:
            return is_number(value)


def rewritten(text: str, ensure_ascii: bool, step: str | None, item: str, key: str, newline: str) -> str:
    """JSON in another style, which begins in a line that ``newline`` begins."""
    made = json.dumps(json.loads(text), ensure_ascii=ensure_ascii, indent=step, separators=(item, key))
    return made.replace("\n", newline)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that can be read back from its text."""
    match value:
        case bool():
            return False
        case int():
            return value.bit_length() < MOST_BITS
        case float():
            return math.isfinite(value)
        case _:
            return False


class Fixed(NamedTuple):
    """Text of a row that is the same in every row the recording stands for."""

    text: str


TextReference = RowString | Constant | Fixed


def value_of(reference: TextReference, strings: Sequence[str]) -> str:
    """The text that a reference stands for in a row with these strings."""
    match reference:
        case RowString(number, operations):
            return operated(strings[number], operations)
        case Constant(text, operations):
            return operated(text, operations)
        case Fixed(text):
            return text


def operated(text: str, operations: Sequence[Operation]) -> str:
    """What some operations make of a text."""
    for name, *arguments in operations:
        text = OPERATIONS[name](text, *arguments)
    return text


def quote_of(text: str) -> str:
    """The quote that Python's ``repr`` puts around a text."""
    return '"' if "'" in text and '"' not in text else "'"


def between_quotes(text: str, quote: str) -> str:
    """A text as Python's ``repr`` writes it between these quotes: ``"it's"``, ``"'"`` -> ``it\\'s``."""
    if quote == '"':  # Python takes it where a text holds the other one and not this one
        return repr("'" + text.replace('"', ""))[2:-1]
    return repr('"' + text)[2:-1]


def _part(parts: Sequence[str], index: int) -> str:
    # A recording is replayed only for rows with as many parts; for the others any answer will do.
    return parts[index] if index < len(parts) else ""


OPERATIONS: dict[str, Callable[..., str]] = {
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "slice": lambda text, start, stop, step: text[start:stop:step],
    "split": lambda text, sep, maxsplit, index: _part(text.split(sep, maxsplit), index),
    "rsplit": lambda text, sep, maxsplit, index: _part(text.rsplit(sep, maxsplit), index),
    "partition": lambda text, sep, index: text.partition(sep)[index],
    "rpartition": lambda text, sep, index: text.rpartition(sep)[index],
    "json": lambda text, ensure_ascii: (encode_basestring_ascii if ensure_ascii else encode_basestring)(text)[1:-1],
    "repr": between_quotes,
    "ascii": lambda text, quote: between_quotes(text, quote).encode("ascii", "backslashreplace").decode("ascii"),
    "html": lambda text: str(escape(text)),
    "rewrite": rewritten,
}


@dataclass(slots=True, eq=False)
class Alphabet:
    """Gives every reference a character of its own, the same one each time.

    ``texts`` are those of references that are the same in every row, ``fixed`` the characters of constants as fixed
    text, and ``derived`` those of what operations make of a character: each as soon as it has been asked for.
    """

    references: list[TextReference] = field(default_factory=list)
    chars: dict[TextReference, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    derived: dict[tuple[str, Operation], str] = field(default_factory=dict)

    def char(self, reference: TextReference) -> str:
        """The character of a reference. Raises `AlphabetFull` when there is none left."""
        char = self.chars.get(reference)
        if char is None:
            number = FIRST_CHAR + len(self.references)
            if number > LAST_CHAR:
                raise AlphabetFull
            char = self.chars[reference] = chr(number)
            self.references.append(reference)
        return char

    @property
    def is_nearly_full(self) -> bool:
        """Whether less than a quarter of the characters is left, which is more than one row may need."""
        return len(self.references) > (LAST_CHAR - FIRST_CHAR) * 3 // 4

    def reference(self, char: str) -> TextReference | None:
        """What a character of a sketch stands for; None for a character of the template's own."""
        number = ord(char) - FIRST_CHAR
        return self.references[number] if number >= 0 else None

    def value(self, char: str, strings: Sequence[str]) -> str:
        """What a character of a sketch stands for in a row with these strings."""
        known = self.texts.get(char)
        if known is not None:
            return known
        reference = self.reference(char)
        if reference is None:
            return char
        text = value_of(reference, strings)
        if not isinstance(reference, RowString):
            self.texts[char] = text
        return text

    def derive(self, char: str, operation: Operation) -> str:
        """The character for what an operation makes of a reference."""
        known = self.derived.get((char, operation))
        if known is None:
            match self.reference(char):
                case RowString(number, operations):
                    known = self.char(RowString(number, (*operations, operation)))
                case Constant(text, operations):
                    known = self.char(Constant(text, (*operations, operation)))
                case Fixed(text):
                    known = self.char(Fixed(operated(text, (operation,))))
                case _:
                    raise AssertionError("only references are derived from")
            self.derived[char, operation] = known
        return known

    def settled(self, char: str) -> str:
        """The character for the text of a constant as `Fixed`."""
        known = self.fixed.get(char)
        if known is None:
            known = self.fixed[char] = self.char(Fixed(self.value(char, ())))
        return known


class AlphabetFull(Exception):
    """All private-use characters are taken: it is time to begin again with an empty alphabet."""


def is_reference(char: str) -> bool:
    """Whether a character of a sketch stands for a reference."""
    return ord(char) >= FIRST_CHAR


def filled_in(sketch: str, value: Callable[[str], str]) -> str:
    """A sketch with the text of each of its references in its place."""
    if sketch.isascii():
        return sketch
    if len(sketch) == 1:  # what guards ask about, most often
        return value(sketch) if is_reference(sketch) else sketch
    return exchanged(sketch, {char: value(char) for char in references_in(sketch)})


def common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def exchanged(sketch: str, texts: Mapping[str, str]) -> str:
    """A sketch with texts in the places of some of its references."""
    if not texts or sketch.isascii():
        return sketch
    # `str.translate` would look every letter up, which takes ten times as long
    pieces = _BESIDE_REFERENCES.split(sketch)
    pieces[1::2] = [texts.get(char, char) for char in pieces[1::2]]
    return "".join(pieces)


def references_in(*sketches: str) -> list[str]:
    """The characters of sketches that stand for references, each once, in their order."""
    return list(dict.fromkeys(_REFERENCE.findall("".join(sketches))))


def has_reference(sketch: str) -> bool:
    """Whether a sketch depends on a row's strings."""
    return not sketch.isascii() and _REFERENCE.search(sketch) is not None


_REFERENCE = re.compile(f"[{chr(FIRST_CHAR)}-{chr(LAST_CHAR)}]")
_BESIDE_REFERENCES = re.compile(f"({_REFERENCE.pattern})")


# --------------------------------------------------------------------------------------------------------------------
# The shape of a row: everything about it but its strings. Rows of one shape may share one recording.


MessageShape = Hashable


def message_shape(message: Message, *, has_numbers: bool = True) -> MessageShape:
    """Equal for messages that differ in their strings only; the keys of tool arguments count as shape.

    ``has_numbers``: so do the numbers in them; else they count as strings.
    """
    if message.train is None and message.weight == 1 and message.name is None and message.tool_call_id is None:
        match message.parts:
            case (Text(train=None, weight=1.0),):
                return message.role  # by far the most frequent one
    return (
        message.role,
        message.train,
        message.weight,
        message.name is None,
        message.tool_call_id is None,
        tuple([_part_shape(part, has_numbers) for part in message.parts]),
    )


def tools_shape(tools: Sequence[Mapping[str, object]]) -> Hashable:
    """Tools that are the same for many rows: all of them is shape. A tuple counts as the list that JSON makes of it."""
    try:
        return msgspec.msgpack.encode(tools) if tools else b""  # unlike JSON it tells NaN from null, and 1 from "1"
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):  # half of a pair of surrogates, a key `true`
        pass
    try:
        return repr(tools)
    except RecursionError:  # such a row is refused
        return None


def _part_shape(part: object, has_numbers: bool) -> Hashable:
    match part:
        case Text() | Thinking():
            return type(part).__name__, part.train, part.weight
        case ToolCall():
            return "ToolCall", part.train, part.weight, part.id is None, _structure(part.arguments, has_numbers)
        case _:
            return type(part).__name__


def _structure(value: object, has_numbers: bool) -> Hashable:
    match value:
        case str():
            return str
        case Mapping():
            return tuple([(key, _structure(item, has_numbers)) for key, item in value.items()])
        case list() | tuple():
            return list, *[_structure(item, has_numbers) for item in value]
        case _ if not has_numbers and is_number(value):
            return type(value).__name__
        case _:
            return type(value).__name__, repr(value)  # repr: 1.0, 1 and True differ, NaN equals itself
