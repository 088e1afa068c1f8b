"""Other words for a row's strings: what a recording says of other rows is tried out before it is believed.

A recording claims that every row whose strings give the same answers to its guards is printed as its sketch says. So
each string is exchanged for a word that stands nowhere else and gives the same answers, and the template is run over
that row. A string of the row that is printed as the template's own text, or a question that nobody noted, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from luthier.rendering.guards import QUESTIONS, Guard
from luthier.rendering.references import Constant, Fixed, Slot, filled_in, operated, references_in
from luthier.rendering.trace import Trace

Source = int | str  # the number of a string of the row, or a text of its shape


@dataclass(slots=True, eq=False)
class OtherWords:
    """The texts of a row by their sources, each exchanged for another where the guards allow it.

    ``pinned`` are the sources that keep their text because the template looked at the whole of it (`Tracked._pinned`).
    """

    trace: Trace
    texts: dict[Source, str]
    guards: dict[Source, list[Guard]]
    pinned: list[Source]

    @classmethod
    def of(cls, trace: Trace) -> OtherWords:
        """Words for a template's run that is over."""
        texts: dict[Source, str] = {**dict(enumerate(trace.strings)), **{text: text for text in trace.constants}}
        guards: dict[Source, list[Guard]] = {}
        words = cls(trace, texts, guards, [])
        for guard in trace.guards:
            for source in {words._source(char): None for char in sorted(references_in(*guard.sketches))}:
                if source is not None:
                    guards.setdefault(source, []).append(guard)
        stubborn: dict[str, list[Source]] = {}
        for number, source in enumerate(texts):
            before = texts[source]
            if not words._exchange([source], before, number):
                stubborn.setdefault(before, []).append(source)
        for number, (text, sources) in enumerate(stubborn.items()):  # equal ones that a template found to be equal
            if not words._exchange(sources, text, len(texts) + number) and text.strip():
                words.pinned += filter(words._is_pinned, sources)
        return words

    def swaps(self) -> dict[Source, tuple[str, str]]:
        """For each pinned source its text with a word behind it, and that word."""
        marks = {source: _word(2 * len(self.texts) + number) for number, source in enumerate(self.pinned)}
        return {source: (self.texts[source] + word, word) for source, word in marks.items()}

    @property
    def strings(self) -> list[str]:
        """The row's strings, by number."""
        return [self.texts[number] for number in range(len(self.trace.strings))]

    @property
    def constants(self) -> dict[str, str]:
        """The texts of its shape, by what they were."""
        return {source: text for source, text in self.texts.items() if isinstance(source, str)}

    def value(self, char: str) -> str:
        """What a character of a sketch stands for with these words."""
        match self.trace.alphabet.reference(char):
            case Slot(source, operations) | Constant(source, operations):
                return operated(self.texts[source], operations)
            case _:
                return self.trace.value(char)

    def _exchange(self, sources: list[Source], text: str, number: int) -> bool:
        for other in _others(text, _word(number)):
            for source in sources:
                self.texts[source] = other
            if all(self._holds(guard) for source in sources for guard in self.guards.get(source, ())):
                return True
        for source in sources:
            self.texts[source] = text
        return False

    def _holds(self, guard: Guard) -> bool:
        operands = [filled_in(sketch, self.value) for sketch in guard.sketches]
        return bool(QUESTIONS[guard.question](*operands, *guard.arguments) == guard.answer)

    def _is_pinned(self, source: Source) -> bool:
        return any(
            guard.question == "equal" and isinstance(self.trace.alphabet.reference(guard.sketches[1][:1] or " "), Fixed)
            for guard in self.guards.get(source, ())
        )

    def _source(self, char: str) -> Source | None:
        match self.trace.alphabet.reference(char):
            case Slot(source, _) | Constant(source, _):
                return source
            case _:
                return None


def _word(number: int) -> str:
    """A word that no other number gives, and that no row will have."""
    letters = "".join("bcdfghjklmnprstv"[number >> shift & 15] for shift in (0, 4, 8, 12, 16))
    return f"Zu{letters}q"


def _others(text: str, word: str) -> Iterator[str]:
    """Texts to try in the place of one: the less they have in common with it, the more they show."""
    yield word
    if not text:
        return
    core = text.strip()
    start = text.find(core) if core else len(text)
    head, tail, middle = text[:start], text[start + len(core) :], len(core) // 2
    for other in (word, core + word, word + core, core[:middle] + word + core[middle:]):
        yield head + other + tail
    yield text[:1] + word + text[1:]
    yield text[:-1] + word + text[-1:]
    shifted = "".join(map(_next, text))  # as long, as many words, the same kind of every character
    yield shifted
    yield text[: len(text) // 2] + shifted[len(text) // 2 :]
    yield shifted[: len(text) // 2] + text[len(text) // 2 :]


def _next(char: str) -> str:
    for first, last in ("az", "AZ", "09"):
        if first <= char <= last:
            return first if char == last else chr(ord(char) + 1)
    return char
