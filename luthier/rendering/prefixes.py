"""What a template prints for the first messages of a long row, put together from two recordings.

A turn's inference context is the text of the messages before it. To render each context whole would be work that grows
with the square of the row. So the template runs over the whole row once, and over a short conversation for each turn:
the row's head and the last few messages before the turn (the *window*). Nearly always the context is the beginning of
the whole row's text and, behind it, the end of the window's text:

    whole row       head  m2  m3  …  m96  m97  m98  m99  m100 …
    window          head                  m97  m98  m99  prompt
    context of 100  head  m2  m3  …  m96  m97  m98  m99  prompt

That is believed only where both recordings print the head alike and the window's first messages alike, and where the
plain template prints the same text for the whole context. Plain renderings are quick, so every context of a row is
compared in this way as long as they are no more than `MOST_PROVEN` messages together: rows of some 240. Of longer
rows it is the first ones, the last ones and a sample. Otherwise the window grows, and then every context is
rendered whole.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from luthier.errors import RowError
from luthier.records import Conversation
from luthier.rendering.template import ChatTemplate, MessageSpan, Recording
from luthier.rendering.text_references import Alphabet, RowString, exchanged, filled_in, is_reference
from luthier.rendering.trace import Owner
from luthier.writing import counted

LONG = 128  # messages; the contexts of shorter rows are always rendered whole, once for all rows of their shape
MOST_NEW = 500_000  # objects that long rows leave, garbage or not: some 50 MB
WINDOWS = (6, 12, 24, 48, 96)  # messages before a turn
FIRST_PROBES, LAST_PROBES, KIND_PROBES = 22, 3, 8
MOST_PROVEN = 30_000  # messages in the plain renderings that the contexts of one row are compared with: 0.3 seconds
MOST_WHOLE = 250_000  # messages that may be rendered for the contexts of one long row that are rendered whole


class NotLocal(Exception):
    """A context that was put together is not what the template prints: its contexts have to be rendered whole."""


_num_new = 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is not looked for: nearly all that is made of a long row is kept, and to look at it again and again would
    take a fifth of the time. Templates leave garbage all the same, and it is looked for after `MOST_NEW` objects."""
    global _num_new
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what was made counts as old, and is not gone through at the next occasion
                _num_new += gc.get_count()[0]
                gc.freeze()
                gc.unfreeze()
                if _num_new > MOST_NEW:  # Python does not count what has become old so
                    _num_new = 0
                    gc.collect()
            gc.enable()


RenderWindow = Callable[[int, int, int, bool, Mapping[str, object]], Recording]


@dataclass(slots=True, eq=False)
class WholeRender:
    """The recording of a whole row, with its owners in a table that grows."""

    recording: Recording
    owners: list[Owner]
    numbers: dict[Owner, int]

    @classmethod
    def of(cls, recording: Recording) -> WholeRender:
        owners = list(recording.owner_table)
        return cls(recording, owners, {owner: number for number, owner in enumerate(owners)})

    def number(self, owner: Owner) -> int:
        """The number of an owner in the table."""
        if owner not in self.numbers:
            self.numbers[owner] = len(self.owners)
            self.owners.append(owner)
        return self.numbers[owner]


@dataclass(frozen=True, slots=True)
class Stretches(Mapping[int, MessageSpan]):
    """Where the messages of a context lie: its ``own`` ones, and those of the trunk up to message ``last`` that end in
    its first ``shared`` characters."""

    own: Mapping[int, MessageSpan]
    trunk: Mapping[int, MessageSpan]
    last: int
    shared: int

    def __getitem__(self, message: int) -> MessageSpan:
        if message in self.own:
            return self.own[message]
        stretch = self.trunk[message]
        if message > self.last or stretch.end > self.shared:
            raise KeyError(message)
        return stretch

    def __iter__(self) -> Iterator[int]:
        known = (number for number, one in self.trunk.items() if number <= self.last and one.end <= self.shared)
        return iter({**dict.fromkeys(known), **dict.fromkeys(self.own)})

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWindow:
    """A window as it is put behind a trunk.

    begins       where its first messages behind the head begin
    owners       of what it prints from the second of them on, by their characters
    strings      the references to strings of its messages behind the head, which stand for later ones in the row
    guards_move  for each guard, whether it asks about one of these
    """

    begins: list[int]
    owners: Mapping[str, Owner]
    strings: Mapping[str, RowString]
    guards_move: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """A context that was put together: ``trunk.sketch[:shared] + rest`` is claimed to be what the template prints."""

    trunk: Recording
    shared: int
    rest: str
    num_messages: int
    generation_prompt: bool
    kwargs: Mapping[str, object]


class Judge:
    """Compares the contexts of one row with what the plain template prints.

    ``value`` says what a character of a sketch stands for in this row.
    """

    def __init__(self, template: ChatTemplate, row: Conversation, value: Callable[[str], str]) -> None:
        self._print, self._value = template.printer(row.messages, row.tools), value
        self._trunks: dict[int, tuple[Recording, str, list[int]]] = {}

    def agrees(self, joint: Joint) -> bool:
        """Whether the template prints this context. Raises `RowError` if it refuses the messages."""
        printed = self._print(joint.num_messages, generation_prompt=joint.generation_prompt, **joint.kwargs)
        _, text, lengths = self._trunks.get(id(joint.trunk)) or self._filled(joint.trunk)
        shared = lengths[joint.shared]
        return printed[:shared] == text[:shared] and printed[shared:] == filled_in(joint.rest, self._value)

    def _filled(self, trunk: Recording) -> tuple[Recording, str, list[int]]:
        """A trunk's text, and how long it is after each character of the sketch."""
        texts = {char: self._value(char) for char in set(trunk.sketch)}
        lengths = list(accumulate((len(texts[char]) for char in trunk.sketch), initial=0))
        found = self._trunks[id(trunk)] = (trunk, filled_in(trunk.sketch, self._value), lengths)
        return found


@dataclass(slots=True, eq=False)
class Prefixes:
    """The contexts of one long row. ``offsets`` are the numbers of each message's first string.

    ``window(head, start, end, prompt, kwargs)`` gives the recording of ``messages[:head] + messages[start:end]``.
    """

    template: ChatTemplate
    row: Conversation
    offsets: list[int]
    alphabet: Alphabet
    value: Callable[[str], str]
    whole_of: Callable[[Mapping[str, object]], Recording]
    window: RenderWindow
    num_whole: int = 0
    wholes: dict[tuple[tuple[str, object], ...], WholeRender] = field(default_factory=dict)
    probes: frozenset[int] = frozenset()
    kinds: set[int] = field(default_factory=set)
    seen: dict[int, tuple[Recording, PlacedWindow | None]] = field(default_factory=dict)  # by the window's id
    joints: dict[tuple[int, bool, tuple[tuple[str, object], ...]], Joint] = field(default_factory=dict)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        num = len(self.row.messages)
        self.judge = Judge(self.template, self.row, self.value)
        drawn = random.Random(num).sample(range(num), min(num, round(2 * MOST_PROVEN / num)))
        self.probes = frozenset((*range(FIRST_PROBES + self.head), *drawn, *range(num - LAST_PROBES, num)))

    @property
    def head(self) -> int:
        """How many messages are at the front of each window: the system message, a question and its answer."""
        return 3 if self.row.messages[0].role in ("system", "developer") else 2

    def recording(self, num: int, *, generation_prompt: bool, kwargs: Mapping[str, object]) -> Recording | None:
        """The recording for ``messages[:num]``; None where the template's print of them is not put together so.

        Raises `NotLocal` where a plain rendering shows that it is not what the template prints.
        """
        key = tuple(sorted(kwargs.items()))
        try:
            whole = self.wholes.get(key) or WholeRender.of(self.whole_of(kwargs))
        except RowError:
            return None
        self.wholes[key] = whole
        for size in WINDOWS:
            start = self._start(num, size)
            if start is None:
                continue
            try:
                window = self.window(self.head, start, num, generation_prompt, kwargs)
            except RowError:  # the template takes no such conversation
                return None
            joined = self._joined(whole, window, start)
            if joined is None:
                continue
            self._prove(joined, num, generation_prompt, key, id(window))
            return joined
        return None

    def count_whole(self, num: int) -> None:
        """Note that a context is rendered whole. Raises `RowError` where that becomes too much for one row."""
        self.num_whole += num
        if self.num_whole > MOST_WHOLE:
            raise RowError(
                "too_many_messages",
                f"{counted(len(self.row.messages), 'message')}: the chat template prints earlier messages in another "
                f"way for each answer, so that every prompt has to be rendered whole, and {MOST_WHOLE:,} rendered "
                "messages are allowed for one row: cut the conversation into several, or learn fewer answers "
                "(train_on: last_assistant)",
                field="messages",
            )

    def _start(self, num: int, size: int) -> int | None:
        """Where a window begins: at a message that follows the head as its own next message does."""
        messages, head = self.row.messages, self.head
        for start in range(num - size, max(head + 1, num - 2 * size - 2), -1):
            follows = (
                messages[start].role == messages[head].role and messages[start - 1].role == messages[head - 1].role
            )
            if follows and (start - head) % 2 == 0:
                return start
        return None

    def _joined(self, whole: WholeRender, window: Recording, start: int) -> Recording | None:
        """The whole row's text up to message ``start + 1``, and the window's from there on."""
        head, shift, trunk = self.head, start - self.head, whole.recording
        here, seen = _begins(trunk, head, start, start + 1, start + 2), self._seen(window)
        if here is None or seen is None or here[0] != seen.begins[0]:
            return None
        there, cut = seen.begins, seen.begins[1]
        if not trunk.sketch.startswith(window.sketch[: there[0]]):
            return None
        by = self.offsets[head + shift] - self.offsets[head]
        table = {
            char: self.alphabet.char(RowString(one.number + by, one.operations)) for char, one in seen.strings.items()
        }
        if trunk.sketch[here[1] : here[3]] != exchanged(window.sketch[there[0] : there[2]], table):
            return None
        numbers = {ord(char): chr(whole.number(_shifted(owner, head, shift))) for char, owner in seen.owners.items()}
        joined = Recording(
            sketch=trunk.sketch[: here[2]] + exchanged(window.sketch[cut:], table),
            owners=window.owners[cut:].translate(numbers),
            owner_table=whole.owners,
            guards=tuple(
                guard._replace(sketches=tuple(exchanged(one, table) for one in guard.sketches)) if moves else guard
                for guard, moves in zip(window.guards, seen.guards_move, strict=True)
            ),
            base=trunk,
            shared=here[2],
        )
        later = here[2] - cut
        own = {
            message if message < head else message + shift: MessageSpan(
                begin=one.begin + later,
                end=one.end + later,
                content_end=one.content_end + later,
                is_owned=one.is_owned,
            )
            for message, one in window.stretches.items()
            if one.begin >= cut
        }
        joined.__dict__["stretches"] = Stretches(own, trunk.stretches, start, here[2])
        return joined

    def _seen(self, window: Recording) -> PlacedWindow | None:
        """What is asked of a window, which is the same wherever it stands; None where nothing can be put behind it."""
        known = self.seen.get(id(window))
        if known is not None:
            return known[1]
        self.seen[id(window)] = window, None  # which keeps it, so that no other has its id
        there = _begins(window, self.head, self.head + 1, self.head + 2)
        if there is None:
            return None
        owners = {char: window.owner_table[ord(char)] for char in set(window.owners[there[1] :])}
        system = self.head - 2  # a system message may be printed anywhere, but nothing else of the head behind it
        if any(one.message is not None and system <= one.message < self.head for one in owners.values()):
            return None
        asked = [{char for one in guard.sketches for char in one} for guard in window.guards]
        chars = sorted({*window.sketch[there[0] :], *(char for one in asked for char in one)})
        found = {char: self.alphabet.reference(char) for char in chars if is_reference(char)}
        first = self.offsets[self.head]
        strings = {char: one for char, one in found.items() if isinstance(one, RowString) and one.number >= first}
        moves = tuple(not one.isdisjoint(strings) for one in asked)
        seen = PlacedWindow(begins=there, owners=owners, strings=strings, guards_move=moves)
        self.seen[id(window)] = window, seen
        return seen

    def _prove(
        self, joined: Recording, num: int, generation_prompt: bool, kwargs: tuple[tuple[str, object], ...], window: int
    ) -> None:
        """Raise `NotLocal` where the plain template prints something else. ``window`` says which one was taken."""
        if (num, generation_prompt, kwargs) in self.joints or joined.base is None:
            return
        rest = joined.sketch[joined.shared :]
        joint = Joint(joined.base, joined.shared, rest, num, generation_prompt, dict(kwargs))
        is_new = window not in self.kinds and len(self.kinds) < KIND_PROBES
        if num in self.probes or is_new:
            self.kinds.add(window)
            if not self.judge.agrees(joint):
                raise NotLocal
        self.joints[num, generation_prompt, kwargs] = joint


def _begins(recording: Recording, *messages: int) -> list[int] | None:
    """Where some messages begin in a recording; None unless the template's loop stood at them, in this order."""
    found = [recording.stretches.get(message) for message in messages]
    begins = [stretch.begin for stretch in found if stretch is not None and not stretch.is_owned]
    return begins if len(begins) == len(messages) and begins == sorted(begins) else None


def _shifted(owner: Owner, head: int, shift: int) -> Owner:
    scope, message = owner.scope, owner.message
    if scope is not None and scope >= head:
        scope += shift
    if message is not None and message >= head:
        message += shift
    return Owner(scope, message, owner.field, owner.part)
