"""All recordings of one template: each is made once and replayed for every row that fits it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from luthier.records import Conversation, Message, Text, Thinking
from luthier.rendering.guards import Guard, compile_guards
from luthier.rendering.messages import message_strings
from luthier.rendering.references import Alphabet, Fixed, Operation, Reference, Slot, references_in, value_of
from luthier.rendering.shape import MessageShape, message_shape, tools_shape
from luthier.rendering.template import ChatTemplate, Recording
from luthier.rendering.trace import Written

MOST_RECORDINGS = 20_000  # kept at a time; then all are forgotten and begun anew
MOST_VARIANTS = 16  # of one shape that are compared before it is recorded again
KEEPING = frozenset(
    {"strip", "lstrip", "rstrip", "json"}
)  # operations that leave something of any text but white space


@dataclass(slots=True, eq=False)
class RowHistory:
    """One row before its template: its shape, its strings, and what was asked about them so far."""

    template: ChatTemplate
    row: Conversation
    shapes: tuple[MessageShape, ...]
    strings: list[str]
    recordings: Recordings
    guards: dict[Guard, None] = field(default_factory=dict)
    written: Written = field(default_factory=dict)

    def recording(self, num_messages: int, *, generation_prompt: bool = False, **kwargs: Any) -> Recording:
        """The recording for ``messages[:num_messages]``. Raises `RowError` if the template refuses them."""
        return self._take(
            (self.shapes[:num_messages], generation_prompt),
            self.row.messages[:num_messages],
            generation_prompt=generation_prompt,
            kwargs=kwargs,
        )

    def recording_with(self, num_messages: int, following: Message, **kwargs: Any) -> Recording:
        """The recording for ``messages[:num_messages]`` and one more message."""
        messages = (*self.row.messages[:num_messages], following)
        key = (self.shapes[:num_messages], message_shape(following), *message_strings(following))
        return self._take(key, messages, generation_prompt=False, kwargs=kwargs, num_own=num_messages)

    def value(self, char: str) -> str:
        """What a character of a sketch stands for in this row."""
        reference = self.recordings.alphabet.reference(char)
        return char if reference is None else value_of(reference, self.strings)

    def keeps(self, char: str) -> bool:
        """Whether a character of a sketch stands for some text in every row whose string is not blank."""
        match self.recordings.alphabet.reference(char):
            case Slot(_, operations):
                return all(name in KEEPING for name, *_ in operations)
            case Fixed(text):
                return bool(text)
            case _:
                return True

    def may_lose(self, recording: Recording, start: int, end: int) -> bool:
        """Whether characters ``[start, end)`` of a recording stand for less than all of some row's text.

        White space at the ends of a text is no loss; nor is how JSON writes the strings of a call.
        """
        for position in range(start, end):
            reference = self.recordings.alphabet.reference(recording.sketch[position])
            if not isinstance(reference, Slot):
                continue
            in_call = recording.owner(position).field == "tool_calls"
            if not all(_keeps_words(operation, in_call) for operation in reference.operations):
                return True
        return False

    def slot(self, message: int, part: int) -> str:
        """The character that stands for the whole text of one part of a message."""
        before, within = self.row.messages[:message], self.row.messages[message]
        within = replace(within, parts=within.parts[:part], name=None, tool_call_id=None)
        number = sum(len(message_strings(earlier)) for earlier in (*before, within))
        return self.recordings.alphabet.char(Slot(number))

    def thoughts(self, message: int) -> list[int]:
        """Which parts of a message are thoughts."""
        return [number for number, part in enumerate(self.row.messages[message].parts) if isinstance(part, Thinking)]

    def texts(self, message: int) -> list[int]:
        """Which parts of a message are texts."""
        return [number for number, part in enumerate(self.row.messages[message].parts) if isinstance(part, Text)]

    def note(self, guard: Guard) -> None:
        """Note an answer that depends on the row's strings."""
        self.guards[guard] = None

    def references(self, *sketches: str) -> dict[str, Reference]:
        """The references in some sketches and in all guards so far, by their characters."""
        asked = (sketch for guard in self.guards for sketch in guard.sketches)
        found = {char: self.recordings.alphabet.reference(char) for char in references_in(*sketches, *asked)}
        return {char: reference for char, reference in found.items() if reference is not None}

    def _take(
        self,
        key: Hashable,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        kwargs: Mapping[str, Any],
        num_own: int | None = None,
    ) -> Recording:
        variants = self.recordings.variants((key, tools_shape(self.row.tools), tuple(sorted(kwargs.items()))))
        recording = next((known for known in variants if self._fits(known)), None)
        if recording is None:
            recording = self.template.record(
                messages,
                self.row.tools,
                alphabet=self.recordings.alphabet,
                generation_prompt=generation_prompt,
                kwargs=kwargs,
                num_own=num_own,
                written=self.written,
            )
            if len(variants) >= MOST_VARIANTS:
                variants.clear()
            variants.append(recording)
        for guard in recording.guards:
            self.guards[guard] = None
        return recording

    def _fits(self, recording: Recording) -> bool:
        chars = references_in(*(sketch for guard in recording.guards for sketch in guard.sketches))
        index_of = {char: index for index, char in enumerate(chars)}
        values = [self.value(char) for char in index_of]
        return all(check(values) for check in compile_guards(recording.guards, index_of))


@dataclass(slots=True, eq=False)
class Recordings:
    """The recordings of one template, by what they were made of."""

    alphabet: Alphabet = field(default_factory=Alphabet.empty)
    known: dict[Hashable, list[Recording]] = field(default_factory=dict)

    def variants(self, key: Hashable) -> list[Recording]:
        """Recordings of one shape, which differ in their guards."""
        return self.known.setdefault(key, [])

    @property
    def is_full(self) -> bool:
        """Whether it is time to forget all and begin anew."""
        return len(self.known) > MOST_RECORDINGS or self.alphabet.is_nearly_full


def _keeps_words(operation: Operation, in_call: bool) -> bool:
    name, *arguments = operation
    if name in ("strip", "lstrip", "rstrip"):
        return arguments[0] is None or not arguments[0].strip()
    return in_call and name == "json"
