"""Other words for a row's strings: what a recording says of other rows is tried out before it is believed.

A recording claims that every row whose strings give the same answers to its guards is printed as its sketch says. So
each string is exchanged for a word that stands nowhere else and gives the same answers, and the template is run over
that row. A string of the row that is printed as the template's own text, or a question that nobody noted, shows.

What a template is given for a row, plain, marked and with other words, is made once for all recordings of the row
(`Given`): templates cannot change what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from luthier.records import Message
from luthier.rendering import (
    MessageForm,
    marked_messages,
    marked_tools,
    message_strings,
    other_message,
    other_tools,
    plain_messages,
)
from luthier.rendering.text_references import Constant, Fixed, NumberText, RowString, filled_in, operated, references_in
from luthier.rendering.trace import QUESTIONS, Guard, Trace

# Whatever some way of writing a text writes otherwise: HTML, JSON, a format, a path, capitals.
MARKS = "<&>\\%s{0}\t/é"
QUOTES = "\"'"
WordSource = int | str  # the number of a string of the row, or a text of its shape


@dataclass(slots=True, eq=False)
class OtherWords:
    """The texts of a row by their sources, each exchanged for another where the guards allow it.

    ``pinned`` are the sources that keep their text because the template looked at the whole of it (`Tracked._pinned`).
    Sources that were not asked about have their words of ``fresh``.
    """

    trace: Trace
    texts: dict[WordSource, str]
    guards: dict[WordSource, list[Guard]]
    pinned: list[WordSource]

    @classmethod
    def of(cls, trace: Trace, fresh: Mapping[WordSource, str]) -> OtherWords:
        """Words for a template's run that is over. ``fresh`` has one for each source."""
        guards: dict[WordSource, list[Guard]] = {}
        words = cls(trace, dict(fresh), guards, [])
        for guard in trace.guards:
            for source in {words._source(char): None for char in sorted(references_in(*guard.sketches))}:
                if source is not None:
                    guards.setdefault(source, []).append(guard)
        words.texts |= {source: words._before(source) for source in guards}
        stubborn: dict[str, list[WordSource]] = {}
        for source in (source for source in fresh if source in guards):
            before = words._before(source)
            if not words._exchange([source], before, fresh[source]):
                stubborn.setdefault(before, []).append(source)
        for number, (text, sources) in enumerate(stubborn.items()):  # equal ones that a template found to be equal
            if not words._exchange(sources, text, _word(2 * len(fresh) + number)) and text.strip():
                words.pinned += filter(words._is_pinned, sources)
        return words

    def swaps(self) -> dict[WordSource, tuple[str, str]]:
        """For each pinned source its text with a word behind it, and that word."""
        marks = {source: _word(3 * len(self.texts) + number) for number, source in enumerate(self.pinned)}
        return {source: (self.texts[source] + word, word) for source, word in marks.items()}

    @property
    def constants(self) -> dict[str, str]:
        """The texts of its shape, by what they were."""
        return {source: text for source, text in self.texts.items() if isinstance(source, str)}

    def value(self, char: str) -> str:
        """What a character of a sketch stands for with these words."""
        match self.trace.alphabet.reference(char):
            case RowString(source, operations) | Constant(source, operations):
                return operated(self.texts[source], operations)
            case _:
                return self.trace.value(char)

    def _before(self, source: WordSource) -> str:
        return source if isinstance(source, str) else self.trace.strings[source]

    def _exchange(self, sources: list[WordSource], text: str, word: str) -> bool:
        for other in _others(text, word):
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

    def _is_pinned(self, source: WordSource) -> bool:
        return any(
            guard.question == "equal" and isinstance(self.trace.alphabet.reference(guard.sketches[1][:1] or " "), Fixed)
            for guard in self.guards.get(source, ())
        )

    def _source(self, char: str) -> WordSource | None:
        match self.trace.alphabet.reference(char):
            case RowString(source, _) | Constant(source, _):
                return source
            case _:
                return None


@dataclass(slots=True, eq=False)
class Given:
    """What a template is given for one row: its messages and tools as they are, marked, and with other words."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]]
    form: MessageForm
    trace: Trace
    dicts: list[dict[str, object]] = field(init=False)  # the messages as they are
    marked: list[dict[str, object]] = field(init=False)
    marked_tools: list[object] | None = field(init=False)
    offsets: list[int] = field(init=False)  # the number of each message's first string
    fresh: dict[WordSource, str] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)  # dicts that the trace knows by identity
    others: dict[int, dict[str, object]] = field(default_factory=dict)
    other_tools: list[object] | None = None

    def __post_init__(self) -> None:
        self.dicts = plain_messages(self.messages, self.form)
        self.marked = marked_messages(self.messages, self.trace, self.form)
        self.marked_tools = marked_tools(self.tools, self.trace)
        self.offsets = list(accumulate((len(message_strings(one)) for one in self.messages), initial=0))

    def plain(self, messages: Sequence[Message], num_own: int) -> list[dict[str, object]]:
        """The first ``num_own`` messages and such as are no row's, as they are."""
        return [*self.dicts[:num_own], *plain_messages(messages[num_own:], self.form)]

    def begin(self, messages: Sequence[Message], num_own: int) -> list[dict[str, object]]:
        """A run over the first ``num_own`` messages and such as are no row's begins; all of them marked."""
        self.trace.begin()
        following = marked_messages(messages[num_own:], self.trace, self.form, first=num_own, are_own=False)
        self.kept += following
        return [*self.marked[:num_own], *following]

    def words(self) -> OtherWords:
        """Other words for the run that is over."""
        strings, constants = self.trace.strings, self.trace.constants
        if len(self.fresh) < len(strings) + len(constants):
            own = len(strings) - len(self.trace.tool_texts)
            self.fresh = {
                number: _word(2 * number) + MARKS + QUOTES
                if not isinstance(text, NumberText)
                else _other_number(2 * number, text)
                if self.trace.follows_numbers
                else text
                for number, text in enumerate(strings[:own])
            }
            self.fresh |= {-1 - place: _other_tool(place) for place in range(len(self.trace.tool_texts))}
            self.fresh |= {text: _word(2 * number + 1) + MARKS + QUOTES for number, text in enumerate(constants)}
        return OtherWords.of(self.trace, self.fresh)

    def exchanged(
        self, messages: Sequence[Message], num_own: int, words: OtherWords
    ) -> tuple[list[dict[str, object]], list[object] | None]:
        """The messages and the tools with other words, those with fresh words only made but once."""
        changed = {source for source in words.guards if words.texts[source] != self.fresh[source]}
        constants = words.constants
        in_shape = any(isinstance(source, str) for source in changed)
        dicts = []
        for number, message in enumerate(messages):
            numbers = range(*self.offsets[number : number + 2]) if number < num_own else range(0)
            is_fresh = number < num_own and not in_shape and changed.isdisjoint(numbers)
            other = self.others.get(number) if is_fresh else None
            if other is None:
                strings = (words.texts[string] for string in numbers)
                other = other_message(message, self.form, strings if number < num_own else None, constants)
            if is_fresh:
                self.others[number] = other
            dicts.append(other)
        if self.trace.tool_texts:
            return dicts, [json.loads(words.texts[-1 - place]) for place in range(len(self.tools))]
        if in_shape:
            return dicts, other_tools(self.tools, constants)
        if self.other_tools is None:
            self.other_tools = other_tools(self.tools, constants)
        return dicts, self.other_tools


def other_strings(strings: Sequence[str], *, has_numbers: bool) -> Iterator[list[str]]:
    """Words in the places of a row's strings, ever more like these: for each its own, then for equal ones the same;
    bare, then between the white space at the string's ends, then with blank strings left.

    They are two, as one in brackets would look like a tag. ``has_numbers``: numbers are exchanged for others.
    """
    numbers = {text: number for number, text in enumerate(dict.fromkeys(strings))}
    ends = [
        (text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :] * bool(text.strip())) for text in strings
    ]
    for keeps_space, keeps_blank in ((False, False), (True, False), (True, True)):
        for chosen in (range(len(strings)), [numbers[text] for text in strings]):
            words = [f"{_word(number)} so" for number in chosen]
            if keeps_space:
                words = [f"{lead}{word}{trail}" for word, (lead, trail) in zip(words, ends, strict=True)]
            if keeps_blank:
                words = [word if text.strip() else text for word, text in zip(words, strings, strict=True)]
            for place, (text, number) in enumerate(zip(strings, chosen, strict=True)):
                if isinstance(text, NumberText):
                    words[place] = _other_number(number, text) if has_numbers else text
            yield words


def _word(number: int) -> str:
    """A word that no other number gives, and that no row will have."""
    letters = "".join("bcdfghjklmnprstv"[number >> shift & 15] for shift in (0, 4, 8, 12, 16))
    return f"Zu{letters}q"


def _other_number(number: int, text: NumberText) -> str:
    """A number of the same type that no other number gives, and that no row will have."""
    return f"{81_402_739 + number}" + ("" if isinstance(text.value, int) else ".5")


def _other_tool(number: int) -> str:
    """A tool that no other number gives, and that no row will have, as JSON."""
    name, word = _word(500_000 + 2 * number), _word(500_001 + 2 * number) + MARKS + QUOTES
    tool = {"type": "function", "function": {name: word, word: [word, number, 2.5, None, True]}, word: {}}
    return json.dumps(tool, ensure_ascii=False)


def _others(text: str, word: str) -> Iterator[str]:
    """Texts to try in the place of one: the less they have in common with it, the more they show."""
    word = word.removesuffix(QUOTES).removesuffix(MARKS)
    yield from (word + MARKS + QUOTES, word + MARKS, word)
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
