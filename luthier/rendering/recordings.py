"""All recordings of one template: each is made once and replayed for every row that fits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from luthier.records import Conversation, Message, Text, Thinking
from luthier.rendering import media_of, message_strings, text_references
from luthier.rendering.prefixes import LONG, Prefixes
from luthier.rendering.substitution import Given
from luthier.rendering.template import ChatTemplate, Recording
from luthier.rendering.trace import Guard, Trace, Written

MOST_RECORDINGS = 20_000  # kept at a time; then all are forgotten and begun anew
MOST_CHARS = 30_000_000  # of their sketches, each of which takes some ten bytes with all that is kept beside it
MOST_VARIANTS = 16  # of one shape that are compared before it is recorded again
MOST_ALIKE = 8  # rows with the same tools; to record them anew takes as long as to encode their text some ten times
MOST_SEEN = 100_000  # tools that are counted
KEEPING = frozenset(
    {"strip", "lstrip", "rstrip", "json", "html"}
)  # operations that leave something of any text but white space


class RowTools(NamedTuple):
    """A row's tools as its shape has them: all of them, or how many they are where they are followed.

    Then ``texts`` are they as JSON, the last one first, which stand behind the row's strings.
    """

    shape: Hashable = b""
    texts: Sequence[str] = ()


NO_TOOLS = RowTools()


@dataclass(slots=True, eq=False)
class RowHistory:
    """One row before its template: its shape, its strings, and what was asked about them so far."""

    template: ChatTemplate
    row: Conversation
    shapes: tuple[text_references.MessageShape, ...]
    strings: list[str]
    recordings: Recordings
    guards: dict[Guard, None] = field(default_factory=dict)
    written: Written = field(default_factory=dict)
    given: Given | None = None
    joins: bool = True  # whether the contexts of a long row are put together (`prefixes`)
    prefixes: Prefixes | None = None
    offsets: list[int] = field(default_factory=list)  # the number of each message's first string
    has_media: bool = False
    tools: RowTools = NO_TOOLS

    def __post_init__(self) -> None:
        if self.offsets:
            return
        self.offsets = list(accumulate((len(message_strings(one)) for one in self.row.messages), initial=0))
        self.has_media = bool(media_of(self.row.messages))
        if len(self.row.messages) > LONG:
            self.prefixes = Prefixes(
                self.template,
                self.row,
                self.offsets,
                self.recordings.alphabet,
                self.value,
                lambda kwargs: self._recorded(len(self.row.messages), False, kwargs),
                self._window,
            )

    def close(self) -> None:
        """Let go of what refers back to it, so that its memory is free at once and not when garbage is looked for."""
        self.prefixes = None
        if self.given is not None:
            self.given.trace.forget()

    def recording(self, num_messages: int, *, generation_prompt: bool = False, **kwargs: Any) -> Recording:
        """The recording for ``messages[:num_messages]``. Raises `RowError` if the template refuses them."""
        if self.prefixes is None or num_messages == len(self.row.messages):
            return self._recorded(num_messages, generation_prompt, kwargs)
        if self.joins:
            joined = self.prefixes.recording(num_messages, generation_prompt=generation_prompt, kwargs=kwargs)
            if joined is not None:
                self.guards.update(dict.fromkeys(joined.guards))
                return joined
        self.prefixes.count_whole(num_messages)
        return self._recorded(num_messages, generation_prompt, kwargs)

    def _recorded(self, num_messages: int, generation_prompt: bool, kwargs: Mapping[str, object]) -> Recording:
        return self._take(
            (self.shapes[:num_messages], generation_prompt),
            self.row.messages[:num_messages],
            generation_prompt=generation_prompt,
            kwargs=kwargs,
        )

    def _window(
        self, head: int, start: int, end: int, generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> Recording:
        """The recording of a short conversation: the first ``head`` messages and ``messages[start:end]``."""
        messages = (*self.row.messages[:head], *self.row.messages[start:end])
        own = slice(0, self.offsets[head]), slice(self.offsets[start], self.offsets[end])
        strings = [*self.strings[own[0]], *self.strings[own[1]], *self.tools.texts]
        shapes = (*self.shapes[:head], *self.shapes[start:end])
        skipped = self.offsets[start] - self.offsets[head]
        short = RowHistory(
            self.template,
            replace(self.row, messages=messages),
            shapes,
            strings,
            self.recordings,
            joins=False,
            written=self.written,
            offsets=[*self.offsets[:head], *(each - skipped for each in self.offsets[start : end + 1])],
            tools=self.tools,
        )
        try:
            return short._recorded(len(messages), generation_prompt, kwargs)
        finally:
            short.close()

    def recording_with(self, num_messages: int, following: Message, **kwargs: object) -> Recording:
        """The recording for ``messages[:num_messages]`` and one more message."""
        if self.prefixes is not None:
            self.prefixes.count_whole(num_messages)
        messages = (*self.row.messages[:num_messages], following)
        key = (self.shapes[:num_messages], text_references.message_shape(following), *message_strings(following))
        return self._take(key, messages, generation_prompt=False, kwargs=kwargs, num_own=num_messages)

    def follows_result(self, index: int) -> bool:
        """Whether a message comes right behind the result of a tool."""
        return index > 0 and self.row.messages[index - 1].role == "tool"

    def value(self, char: str) -> str:
        """What a character of a sketch stands for in this row."""
        return self.recordings.alphabet.value(char, self.strings)

    def keeps(self, char: str) -> bool:
        """Whether a character of a sketch stands for some text in every row whose string is not blank."""
        match self.recordings.alphabet.reference(char):
            case text_references.RowString(_, operations):
                return all(name in KEEPING for name, *_ in operations)
            case text_references.Fixed(text):
                return bool(text)
            case _:
                return True

    def may_lose(self, recording: Recording, start: int, end: int) -> bool:
        """Whether characters ``[start, end)`` of a recording stand for less than all of some row's text.

        White space at the ends of a text is no loss; nor is how JSON writes the strings of a call.
        """
        for position in range(start, end):
            reference = self.recordings.alphabet.reference(recording.sketch[position])
            if not isinstance(reference, text_references.RowString):
                continue
            if reference.number < 0:  # a tool, which may have no words
                return True
            in_call = recording.owner(position).field == "tool_calls"
            if not all(_keeps_words(operation, in_call) for operation in reference.operations):
                return True
        return False

    def character_of(self, message: int, part: int) -> str:
        """The character that stands for the whole text of one part of a message."""
        within = self.row.messages[message]
        within = replace(within, parts=within.parts[:part], name=None, tool_call_id=None)
        return self.recordings.alphabet.char(
            text_references.RowString(self.offsets[message] + len(message_strings(within)))
        )

    def parts_of(self, message: int, kind: type[Text] | type[Thinking]) -> list[int]:
        """Which parts of a message are texts, or thoughts."""
        return [number for number, part in enumerate(self.row.messages[message].parts) if isinstance(part, kind)]

    def note(self, guard: Guard) -> None:
        """Note an answer that depends on the row's strings."""
        self.guards[guard] = None

    def references(self, *sketches: str) -> dict[str, text_references.TextReference]:
        """The references in some sketches and in all guards so far, by their characters."""
        asked = (sketch for guard in self.guards for sketch in guard.sketches)
        found = {
            char: self.recordings.alphabet.reference(char) for char in text_references.references_in(*sketches, *asked)
        }
        return {char: reference for char, reference in found.items() if reference is not None}

    def _take(
        self,
        key: Hashable,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        kwargs: Mapping[str, object],
        num_own: int | None = None,
    ) -> Recording:
        full_key = (key, self.tools.shape, tuple(sorted(kwargs.items())))
        variants = self.recordings.known.setdefault(full_key, [])  # which differ in their guards
        recording = next((known for known in variants if self._fits(known)), None)
        if recording is None:
            recording = self.template.record(
                messages,
                self.row.tools,
                alphabet=self.recordings.alphabet,
                generation_prompt=generation_prompt,
                kwargs=kwargs,
                num_own=num_own,
                given=self._given(),
            )
            if len(variants) >= MOST_VARIANTS:
                variants.clear()
            variants.append(recording)
            self.recordings.num_chars += len(recording.sketch)
        self.guards.update(dict.fromkeys(recording.guards))
        return recording

    def _given(self) -> Given:
        if self.given is None:
            follows = self.recordings.follows_numbers
            trace = Trace(alphabet=self.recordings.alphabet, written=self.written, follows_numbers=follows)
            trace.tool_texts = self.tools.texts
            self.given = self.template.given(self.row.messages, self.row.tools, trace)
        return self.given

    def _fits(self, recording: Recording) -> bool:
        chars, checks = recording.checks
        values = list(map(self.value, chars))
        return all(check(values) for check in checks)


@dataclass(slots=True, eq=False)
class Recordings:
    """The recordings of one template, by what they were made of.

    ``follows_numbers``: the template is taken to print the numbers of tool arguments and to ask nothing about them.
    ``follows_tools``: it is taken to write tools as JSON, and to do nothing else with them. Those that many rows have
    are not followed: their text is encoded but once. ``num_chars`` are those of all sketches that are kept.
    """

    alphabet: text_references.Alphabet = field(default_factory=text_references.Alphabet)
    known: dict[Hashable, list[Recording]] = field(default_factory=dict)
    follows_numbers: bool = True
    follows_tools: bool = True
    seen: Counter[int] = field(default_factory=Counter)  # how many rows had the same tools
    num_chars: int = 0

    def follows_numbers_of(self, strings: Sequence[str]) -> bool:
        """Whether there are numbers among some strings, and they are followed."""
        return self.follows_numbers and any(isinstance(each, text_references.NumberText) for each in strings)

    def tools_of(self, tools: Sequence[Mapping[str, object]]) -> RowTools:
        """What a row's tools are to its shape."""
        if not tools:
            return NO_TOOLS
        shape = text_references.tools_shape(tools)
        if not self.follows_tools:
            return RowTools(shape)
        number = hash(shape)  # a few bytes instead of all tools
        if len(self.seen) >= MOST_SEEN and number not in self.seen:
            self.seen.clear()
        self.seen[number] += 1
        texts = text_references.tool_texts(tools) if self.seen[number] <= MOST_ALIKE else None
        return RowTools(shape) if texts is None else RowTools(len(texts), texts)

    def anew(self) -> Recordings:
        """None of them, and what is known of the template."""
        return Recordings(follows_numbers=self.follows_numbers, follows_tools=self.follows_tools, seen=self.seen)

    @property
    def is_full(self) -> bool:
        """Whether it is time to forget all and begin anew."""
        is_much = len(self.known) > MOST_RECORDINGS or self.num_chars > MOST_CHARS
        return is_much or self.alphabet.is_nearly_full


def unshared(recordings: Iterable[Recording]) -> Iterator[str]:
    """The sketches of some recordings, what they begin with in common with their bases but once."""
    bases: dict[int, Recording] = {}
    for recording in recordings:
        yield recording.sketch[recording.shared :]
        if recording.base is not None:
            bases[id(recording.base)] = recording.base
    yield from (base.sketch for base in bases.values())


def _keeps_words(operation: text_references.Operation, in_call: bool) -> bool:
    name, *arguments = operation
    if name in ("strip", "lstrip", "rstrip"):
        return arguments[0] is None or not arguments[0].strip()
    return in_call and name == "json"
