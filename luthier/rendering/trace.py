"""What is noted down while a template runs: who owns what it prints, and what it asks about a row's strings."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Self

from jinja2 import Environment

from luthier.rendering.text_references import (
    Alphabet,
    Constant,
    Fixed,
    NumberText,
    RowString,
    exchanged,
    has_reference,
    is_reference,
    quote_of,
    references_in,
)

# --------------------------------------------------------------------------------------------------------------------
# Guards: what a template asked about the row's strings while it was recorded.
#
#     {% if '</think>' in message.content %}     ->   Guard("contains", (U+F0000, "</think>"), (), False)
#
# A recording stands for every row whose strings give the same answers.


class Guard(NamedTuple):
    """A question (a name of QUESTIONS), the sketches and further arguments it was asked with, and the answer."""

    question: str
    sketches: tuple[str, ...]
    arguments: tuple[object, ...]
    answer: Any


def _leading(text: str) -> str:
    return "nothing" if not text else "space" if text[0].isspace() else "other"


QUESTIONS: dict[str, Callable[..., Any]] = {
    "equal": operator.eq,
    "less": operator.lt,
    "contains": operator.contains,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "true": bool,
    "length": len,
    "parts": lambda text, sep, maxsplit: len(text.split(sep, maxsplit)),
    "rparts": lambda text, sep, maxsplit: len(text.rsplit(sep, maxsplit)),
    "blank": lambda text: not text.strip(),
    "leading": _leading,
    "quote": quote_of,
}

GuardCheck = Callable[[Sequence[str]], bool]


def compile_guards(guards: Iterable[Guard], index_of: Mapping[str, int]) -> list[GuardCheck]:
    """Checks to be run on the values of a row; ``index_of`` says where the value of each reference stands."""
    return [_check(guard, index_of) for guard in guards]


def _check(guard: Guard, index_of: Mapping[str, int]) -> GuardCheck:
    ask, arguments, answer = QUESTIONS[guard.question], guard.arguments, guard.answer
    first = guard.sketches[0]
    if len(first) == 1 and is_reference(first) and not any(map(has_reference, guard.sketches[1:])):
        index, constants = index_of[first], (*guard.sketches[1:], *arguments)
        match constants:
            case ():
                return lambda values: ask(values[index]) == answer
            case (constant,):
                return lambda values: ask(values[index], constant) == answer
        return lambda values: ask(values[index], *constants) == answer
    operands = [[index_of[char] if is_reference(char) else char for char in sketch] for sketch in guard.sketches]

    def check(values: Sequence[str]) -> bool:
        texts = ["".join(item if isinstance(item, str) else values[item] for item in operand) for operand in operands]
        return bool(ask(*texts, *arguments) == answer)

    return check


SCAFFOLD = "\0"
Written = dict[tuple[object, ...], tuple[str, str]]  # a row's tool and how it is written as JSON -> its text and sketch


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a character is: the message being rendered when it was printed, and the message's part it came from.

    ``scope`` is None outside any message (a generation prompt, a preamble). ``message``, ``field`` and ``part`` are
    None for the template's own text.
    """

    scope: int | None = None
    message: int | None = None
    field: str | None = None
    part: int | None = None


@dataclass(slots=True)
class Trace:
    """What is known of one row's strings, and the state of the run of a template over it that goes on now."""

    alphabet: Alphabet = field(default_factory=Alphabet)
    strings: list[str] = field(default_factory=list)  # those of the row, in the order in which they were marked
    message_of: dict[int, int] = field(default_factory=dict)  # id(message dict) -> index
    owners: list[Owner] = field(default_factory=lambda: [Owner()])
    numbers: dict[Owner, str] = field(default_factory=lambda: {Owner(): SCAFFOLD})
    guards: dict[Guard, None] = field(default_factory=dict)  # in the order in which they were asked
    scope: int | None = None
    loops: list[Loop] = field(default_factory=list)
    stamps: dict[int | None, dict[int, str]] = field(default_factory=dict)
    constants: dict[str, None] = field(default_factory=dict)  # texts of the row that belong to its shape
    swaps: Mapping[int | str, str] = field(default_factory=dict)  # other texts for strings, by number, or for constants
    is_marking: bool = False  # the row's strings are being put together: what is asked of them now is no template's
    container_owners: dict[int, str] = field(default_factory=dict)  # id(list or dict of the row) -> whose it is
    tools: dict[int, int] = field(default_factory=dict)  # id(list or dict of the row's tools) -> its number
    written: Written = field(default_factory=dict)  # of the row's tools; shared by its recordings
    literals: dict[str, object] = field(default_factory=dict)  # the template's own texts, as tracked strings
    prints: list[tuple[int, str]] = field(default_factory=list)  # what was printed at which line of the template
    follows_numbers: bool = False  # the row's numbers are followed as its strings are; else they belong to its shape
    tool_texts: Sequence[str] = ()  # of the row's tools, the last one first, where these are followed
    uses_followed: bool = False  # something was done with a number or a tool that is followed, other than to print it

    def begin(self) -> None:
        """A run of the template begins: nothing has been asked or printed."""
        self.scope, self.loops, self.guards, self.prints, self.uses_followed = None, [], {}, [], False

    def forget(self) -> None:
        """Let go of the texts that refer back to it; nothing more is to be followed."""
        self.prints, self.literals = [], {}

    def number(self, owner: Owner) -> str:
        """The character that stands for an owner."""
        char = self.numbers.get(owner)
        if char is None:
            char = self.numbers[owner] = chr(len(self.owners))
            self.owners.append(owner)
        return char

    def add_string(self, text: str) -> str:
        """Take in the row's next string; the character that stands for it."""
        self.strings.append(text)
        return self.alphabet.char(RowString(len(self.strings) - 1))

    def add_constant(self, text: str) -> str:
        """Take in a text that belongs to the row's shape; the character that stands for it."""
        self.constants[text] = None
        return self.alphabet.char(Constant(text))

    def value(self, char: str) -> str:
        """What a character of a sketch stands for in this row."""
        return self.alphabet.value(char, self.strings)

    def derive(self, char: str, *operation: object) -> str:
        """The character for what an operation makes of a reference."""
        return self.alphabet.derive(char, operation)

    def fix(self, text: str) -> str:
        """The character for text that must be the same in every row this recording stands for."""
        return self.alphabet.char(Fixed(text))

    def ask(self, question: str, *sketches: str, arguments: Sequence[object] = (), answer: object) -> None:
        """Note an answer that the template was given, if it depends on the row's strings."""
        assert question in QUESTIONS, question
        if self.is_marking or not any(map(has_reference, sketches)):
            return
        if any(isinstance(self.alphabet.reference(char), RowString | Constant) for char in references_in(*sketches)):
            self.guards[Guard(question, sketches, tuple(arguments), answer)] = None

    @property
    def asks_followed(self) -> bool:
        """Whether what was printed may depend on which numbers or tools the row has."""
        if self.uses_followed or not (self.follows_numbers or self.tool_texts):
            return self.uses_followed
        asked = references_in(*(sketch for guard in self.guards for sketch in guard.sketches))
        strings = (reference for char in asked if isinstance(reference := self.alphabet.reference(char), RowString))
        followed = (one.number < 0 or isinstance(self.strings[one.number], NumberText) for one in strings)
        return any(followed)

    def closed(self, sketch: str) -> tuple[str, tuple[Guard, ...]]:
        """A sketch, and the guards, with the constants of the shape as fixed text."""
        chars = references_in(sketch, *(one for guard in self.guards for one in guard.sketches))
        constant = [char for char in chars if isinstance(self.alphabet.reference(char), Constant)]
        table = {char: self.alphabet.settled(char) for char in constant}
        guards: dict[Guard, None] = {}
        for guard in self.guards:
            if any(isinstance(self.alphabet.reference(char), RowString) for char in references_in(*guard.sketches)):
                guards[guard._replace(sketches=tuple(exchanged(one, table) for one in guard.sketches))] = None
        return exchanged(sketch, table), tuple(guards)

    def is_own(self, owners: str) -> bool:
        """Whether text with these owners is the template's own."""
        return all(self.owners[ord(owner)].field is None for owner in set(owners))

    def stamp(self, owners: str) -> str:
        """The owners of text that is printed now: whatever has no scope yet gets the present one."""
        if self.scope is None:
            return owners
        table = self.stamps.setdefault(self.scope, {})
        present = set(owners)
        for char in present:
            if ord(char) not in table:
                owner = self.owners[ord(char)]
                stamped = (
                    owner if owner.scope is not None else Owner(self.scope, owner.message, owner.field, owner.part)
                )
                table[ord(char)] = self.number(stamped)
        return table[ord(owners[0])] * len(owners) if len(present) == 1 else owners.translate(table)


@dataclass(slots=True)
class Loop:
    """One loop of the template: the scope around it, and whether it runs over messages."""

    outer_scope: int | None
    at_message: bool = False
    assigned: bool = False


def owner_runs(owners: str) -> Iterator[tuple[int, int]]:
    """Spans of one owner: ``"aab"`` -> ``(0, 2), (2, 3)``."""
    if owners and owners.count(owners[0]) == len(owners):  # a text has one owner more often than not
        return iter(((0, len(owners)),))
    return (match.span() for match in _RUN.finditer(owners))


_RUN = re.compile(r"(.)\1*", re.DOTALL)


# --------------------------------------------------------------------------------------------------------------------
# Where in a chat template something happened: its line, and the expression that stands there.


LONGEST_SHOWN = 160


def expression_at(source: str, line: int, names: Sequence[str]) -> str:
    """``line 3: {{ message.content | urlencode }}: ``, the expression being the one that has most of the names."""
    found: list[tuple[int, str]] = []
    for start, text in _expressions(source):
        if start <= line <= start + text.count("\n"):
            found.append((-sum(name in re.findall(r"\w+|%", text[2:-2]) for name in names), text))
    if not found:
        return f"line {line}: "
    shown = " ".join(min(found, key=lambda pair: pair[0])[1].split())
    return f"line {line}: {shown if len(shown) <= LONGEST_SHOWN else shown[: LONGEST_SHOWN - 1] + '…'}: "


@functools.lru_cache(maxsize=8)
def _expressions(source: str) -> tuple[tuple[int, str], ...]:
    """All that stands between braces in a template, each with the line that it begins in."""
    found: list[tuple[int, str]] = []
    for line, token, text in Environment(trim_blocks=True, lstrip_blocks=True).lex(source):
        if token in ("variable_begin", "block_begin"):
            found.append((line, text))
        elif found and token not in ("data", "comment_begin", "comment", "comment_end"):
            found[-1] = (found[-1][0], found[-1][1] + text)
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------------
# `Questioned`: a string that tells a trace whatever is asked of it, so that no answer goes unnoticed.


class Questioned(str):
    """Text with a sketch and owners. Compares, hashes and tests like the plain string it is."""

    __slots__ = ("_owners", "_sketch", "_trace")
    _sketch: str
    _owners: str
    _trace: Trace

    def __new__(cls, text: str, sketch: str, owners: str, trace: Trace) -> Self:
        """Raise AssertionError if sketch and owners differ in length."""
        self = str.__new__(cls, text)
        assert len(sketch) == len(owners), "every character of a sketch has an owner"
        self._sketch, self._owners, self._trace = sketch, owners, trace
        return self

    def __str__(self) -> str:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("tracked strings stay inside one render")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return False
        return bool(self._ask("equal", other, answer=str.__eq__(self, other)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self._pinned())

    def __lt__(self, other: str) -> bool:
        return bool(self._ask("less", other, answer=str.__lt__(self, other)))

    def __gt__(self, other: str) -> bool:
        answer = str.__gt__(self, other)
        self._trace.ask("less", sketch_and_owners(other, self._trace)[0], self._sketch, answer=answer)
        return answer

    def __le__(self, other: str) -> bool:
        return not self > other

    def __ge__(self, other: str) -> bool:
        return not self < other

    def __contains__(self, text: object) -> bool:
        if not isinstance(text, str):
            raise TypeError(f"a text holds no {type(text).__name__}")
        return bool(self._ask("contains", text, answer=str.__contains__(self, text)))

    def __bool__(self) -> bool:
        return bool(self._ask("true", answer=str.__len__(self) > 0))

    def __len__(self) -> int:
        return int(self._ask("length", answer=str.__len__(self)))

    def startswith(self, prefix: object, *bounds: object) -> bool:
        return self._starts("startswith", prefix, bounds)

    def endswith(self, suffix: object, *bounds: object) -> bool:
        return self._starts("endswith", suffix, bounds)

    def _starts(self, question: str, affixes: object, bounds: tuple[object, ...]) -> bool:
        choices = affixes if isinstance(affixes, tuple) else (affixes,)
        if bounds:
            texts = tuple(plain(choice) for choice in choices)
            return bool(getattr(str, question)(self._pinned(), texts, *bounds))
        return any(self._ask(question, affix, answer=getattr(str, question)(self, affix)) for affix in choices)

    @property
    def _is_own(self) -> bool:
        """Whether it is the template's own text, with nothing of a row."""
        return not has_reference(self._sketch) or self._trace.is_own(self._owners)

    def _ask(self, question: str, *others: str, answer: Any) -> Any:
        self._trace.ask(
            question, self._sketch, *(sketch_and_owners(other, self._trace)[0] for other in others), answer=answer
        )
        return answer

    def _pinned(self) -> Self:
        for char in filter(is_reference, dict.fromkeys(self._sketch)):
            self._trace.ask("equal", char, self._trace.fix(self._trace.value(char)), answer=True)
        return self


def sketch_and_owners(text: str, trace: Trace) -> tuple[str, str]:
    """Those of any string: its own, or the template's own text."""
    if isinstance(text, Questioned):
        return text._sketch, text._owners
    if has_reference(text):  # private-use characters of its own
        text = trace.fix(text)
    return text, SCAFFOLD * len(text)


def plain(text: str | None) -> str | None:
    """The text of an argument; where it is a row's, it is pinned."""
    return str.__str__(text._pinned()) if isinstance(text, Questioned) else text


def _looking(name: str) -> Callable[..., object]:
    def look(self: Questioned, *arguments: Any) -> Any:
        for argument in arguments:
            plain(argument)
        return getattr(str, name)(self._pinned(), *arguments)

    return look


for _name in ("find", "rfind", "index", "rindex", "count", "isalpha", "isalnum", "isascii", "isdecimal",
              "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
              "isupper"):  # fmt: skip
    setattr(Questioned, _name, _looking(_name))
