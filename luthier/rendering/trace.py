"""What is noted down while a template runs: who owns what it prints, and what it asks about a row's strings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luthier.rendering.guards import QUESTIONS, Guard
from luthier.rendering.references import (
    Alphabet,
    Constant,
    Fixed,
    Slot,
    exchanged,
    has_reference,
    references_in,
)

SCAFFOLD = "\0"
Written = dict[tuple[Any, ...], tuple[str, str]]  # a row's tool and how it is written as JSON -> its text and sketch


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

    alphabet: Alphabet = field(default_factory=Alphabet.empty)
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
    literals: dict[str, Any] = field(default_factory=dict)  # the template's own texts, as tracked strings
    prints: list[tuple[int, str]] = field(default_factory=list)  # what was printed at which line of the template

    def begin(self) -> None:
        """A run of the template begins: nothing has been asked or printed."""
        self.scope, self.loops, self.guards, self.prints = None, [], {}, []

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
        return self.alphabet.char(Slot(len(self.strings) - 1))

    def add_constant(self, text: str) -> str:
        """Take in a text that belongs to the row's shape; the character that stands for it."""
        self.constants[text] = None
        return self.alphabet.char(Constant(text))

    def value(self, char: str) -> str:
        """What a character of a sketch stands for in this row."""
        return self.alphabet.value(char, self.strings)

    def derive(self, char: str, *operation: Any) -> str:
        """The character for what an operation makes of a reference."""
        return self.alphabet.derive(char, operation)

    def fix(self, text: str) -> str:
        """The character for text that must be the same in every row this recording stands for."""
        return self.alphabet.char(Fixed(text))

    def ask(self, question: str, *sketches: str, arguments: Sequence[Any] = (), answer: Any) -> None:
        """Note an answer that the template was given, if it depends on the row's strings."""
        assert question in QUESTIONS, question
        if self.is_marking or not any(map(has_reference, sketches)):
            return
        if any(map(self._may_change, references_in(*sketches))):
            self.guards[Guard(question, sketches, tuple(arguments), answer)] = None

    def closed(self, sketch: str) -> tuple[str, tuple[Guard, ...]]:
        """A sketch, and the guards, with the constants of the shape as fixed text."""
        chars = references_in(sketch, *(one for guard in self.guards for one in guard.sketches))
        constant = [char for char in chars if isinstance(self.alphabet.reference(char), Constant)]
        table = {char: self.alphabet.settled(char) for char in constant}
        guards: dict[Guard, None] = {}
        for guard in self.guards:
            if any(isinstance(self.alphabet.reference(char), Slot) for char in references_in(*guard.sketches)):
                guards[guard._replace(sketches=tuple(exchanged(one, table) for one in guard.sketches))] = None
        return exchanged(sketch, table), tuple(guards)

    def is_own(self, owners: str) -> bool:
        """Whether text with these owners is the template's own."""
        return all(self.owners[ord(owner)].field is None for owner in set(owners))

    def _may_change(self, char: str) -> bool:
        return isinstance(self.alphabet.reference(char), Slot | Constant)

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
    return (match.span() for match in _RUN.finditer(owners))


_RUN = re.compile(r"(.)\1*", re.DOTALL)
