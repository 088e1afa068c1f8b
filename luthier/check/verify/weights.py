"""What each token of an answer counts in the loss, where parts of the answer count differently.

Whose the characters of an answer are is asked of the template: it renders the answer once more with a mark on either
side of each of its strings, and with other numbers in the place of its numbers. What stands between two marks is the
row's, and the rest is the template's. A token's characters are the tokenizer's own offsets, and a token that lies
across two parts goes with the one that it ends in. What cannot be told is NaN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify.completions import LETTERS, NeutralRow
from luthier.check.verify.policy import Spoken, TurnPolicy, changed_leaves, leaves
from luthier.check.verify.reference_tokenizer import NO_IDS, Ids, ReferenceTokenizer
from luthier.errors import RowError
from luthier.records import Message, Part, Text, Thinking, ToolCall

WeightArray = NDArray[np.float32]
Render = Callable[[Message], str]
WeighedStrings = Sequence[tuple[str, float]]
MARKS = re.compile(r"zq([be])([a-j]{5})qz|7391(\d{5})")
SPACE = re.compile(r"(\s*)(.*?)(\s*)", re.DOTALL)


def answer_weights(
    policy: TurnPolicy,
    ids: Ids,
    text: str,
    tokenizer: ReferenceTokenizer,
    *,
    forged: bool,
    owned: Owned | None = None,
    behind: Ids = NO_IDS,
) -> WeightArray:
    """What each of ``ids`` counts, which are ``text`` as the model emits it ``behind`` a prompt; float32[T].

    ``owned``: whose its characters are; without it, the parts are looked for in the text.
    """
    if policy.uniform:
        return np.full(len(ids), policy.scaffold, dtype=np.float32)
    return token_weights(text, tokenizer.continued_spans(text, behind, forged=forged), policy, owned)


def token_weights(
    text: str, spans: Sequence[tuple[int, int]], policy: TurnPolicy, owned: Owned | None = None
) -> WeightArray:
    """The weight of each token, float32[T]; token ``i`` covers the characters ``spans[i]`` of ``text``."""
    weights = np.full(len(text), policy.scaffold, dtype=np.float32)
    for start, end in _written_calls(text, policy):
        weights[start:end] = np.nan
    if owned is not None and owned.text == text:
        owned.write(weights)
    elif not _search(text, policy, weights):
        weights[:] = np.nan
    ends = np.array([end - 1 for _, end in spans], dtype=np.int64)
    return weights[ends]


def _written_calls(text: str, policy: TurnPolicy) -> Iterator[tuple[int, int]]:
    """Where tool calls stand as JSON, whole, their arguments or something in them.

    What a template's ``tojson`` writes (quotes, brackets, commas) belongs to the call; what the template writes itself
    belongs to the message. The text is the same, so what these characters count cannot be told from it.
    """
    for part, _ in policy.pieces:
        if not isinstance(part, ToolCall):
            continue
        values = [{"name": part.name, "arguments": part.arguments}, *_values(part.arguments)]
        for value, in_ascii, separators in product(values, (False, True), (None, (",", ":"))):
            written = json.dumps(value, ensure_ascii=in_ascii, separators=separators)
            yield from ((found.start(), found.end()) for found in re.finditer(re.escape(written), text))


def _values(value: object) -> Iterator[object]:
    """A value and all that it holds, but numbers, whose writing is theirs alone."""
    if isinstance(value, str | Mapping | list | tuple):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _values(item)


# --------------------------------------------------------------------------------------------------------------------
# Without a rendering to ask: the parts are looked for.


def _search(text: str, policy: TurnPolicy, weights: WeightArray) -> bool:
    """Give the characters of each part its weight; False if some part stands nowhere, or in several places."""
    end = 0
    for pieces in _stretches(policy):
        whole = "".join(piece for piece, _ in pieces)
        lead, core, trail = _trimmed(whole)
        place = text.find(core, end)
        if not core or place < 0 or text.count(core) > 1:
            return False
        start, end = place - len(lead), place + len(core)
        for piece, weight in pieces:
            weights[max(start, place) : min(start + len(piece), end)] = weight
            start += len(piece)
        _doubt(weights, text, place, end, len(lead), len(trail))
    return True


def _stretches(policy: TurnPolicy) -> Iterator[WeighedStrings]:
    """What templates print in one go, in the order in which they do: thoughts, texts, each string of a tool call."""
    thoughts = [(part.text, weight) for part, weight in policy.pieces if isinstance(part, Thinking)]
    texts = [(part.text, weight) for part, weight in policy.pieces if isinstance(part, Text)]
    yield from (pieces for pieces in (thoughts, texts) if pieces)
    for part, weight in policy.pieces:
        if isinstance(part, ToolCall):
            said = [part.name, *(leaf for leaf in leaves(part.arguments) if isinstance(leaf, str))]
            yield from ([(leaf, weight)] for leaf in said)


def _trimmed(text: str) -> tuple[str, str, str]:
    found = SPACE.fullmatch(text)
    assert found is not None
    return found[1], found[2], found[3]


def _doubt(weights: WeightArray, text: str, start: int, end: int, lead: int, trail: int) -> None:
    """Of white space beside a string that has such at its ends, it cannot be told whether it is the string's."""
    for place in range(start - 1, max(start - lead, 0) - 1, -1):
        if not text[place].isspace():
            break
        weights[place] = np.nan
    for place in range(end, min(end + trail, len(text))):
        if not text[place].isspace():
            break
        weights[place] = np.nan


# --------------------------------------------------------------------------------------------------------------------
# With a rendering to ask.


@dataclass(frozen=True, slots=True)
class _OwnedString:
    """A string or a number of the answer: what its characters count, and the white space that it was marked without."""

    pieces: WeighedStrings
    lead: str = ""
    trail: str = ""


@dataclass(frozen=True, slots=True)
class Owned:
    """A text in runs, each with the slot whose it is; None: the template's own.

    ``has_blanks``: some string of the row is white space alone, and where it stands in the text is not known.
    """

    runs: tuple[tuple[str, _OwnedString | None], ...]
    has_blanks: bool = False

    @property
    def text(self) -> str:
        return "".join(run for run, _ in self.runs)

    def write(self, weights: WeightArray) -> None:
        """Give the characters of each run what they count."""
        text, place = self.text, 0
        for run, slot in self.runs:
            end = place + len(run)
            if slot is not None:
                whole = sum(len(piece) for piece, _ in slot.pieces)
                start = place - len(slot.lead)
                if whole == len(slot.lead) + len(run) + len(slot.trail):
                    for piece, weight in slot.pieces:
                        weights[max(start, place) : min(start + len(piece), end)] = weight
                        start += len(piece)
                elif len({weight for _, weight in slot.pieces}) == 1:  # written with escapes
                    weights[place:end] = slot.pieces[0][1]
                else:
                    weights[place:end] = np.nan
                _doubt(weights, text, place, end, len(slot.lead), len(slot.trail))
            place = end
        if self.has_blanks:
            weights[[char.isspace() for char in text]] = np.nan


def owned_text(
    policy: TurnPolicy,
    message: Message,
    render: Render,
    cut: tuple[str, str],
    row: NeutralRow,
    tokenizer: ReferenceTokenizer,
) -> Owned | None:
    """Whose the characters of an answer are; None if unclear, or if all of them count the same.

    ``cut`` is the prompt and the completion that ``render(message)`` has behind it, where ``render`` prints the
    conversation of ``row`` with another message in the place of this one. A template that trims strings is asked with
    marks inside their white space.
    """
    prompt, completion = cut
    for inside in (False, True) if not policy.uniform else ():
        marking = _Marking(policy, row.restored, inside=inside)
        marked = marking.message(message)
        if marked is None or MARKS.search(prompt + completion):
            return None
        try:
            text = render(marked)
        except RowError:
            continue
        runs = marking.read(text[len(prompt) :], completion) if text.startswith(prompt) else None
        if runs is None and marking.is_cut:
            runs = [(completion, _OwnedString([("", np.nan)]))]
        if runs is not None:
            readable = row.readable([run for run, _ in runs], tokenizer)
            owned = tuple((text, slot) for text, (_, slot) in zip(readable, runs, strict=True))
            return Owned(owned, marking.has_blanks)
    return None


class _Marking:
    """The strings of a message between marks, and its numbers exchanged."""

    def __init__(self, policy: TurnPolicy, restored: Callable[[str], str], *, inside: bool) -> None:
        self._left = list(policy.pieces)
        self._restored, self._inside = restored, inside
        self._slots: list[_OwnedString] = []
        self._numbers: list[object] = []
        self.has_blanks = False
        self.is_cut = False  # the template cuts a string, at a tag, so that one of its two marks is lost

    def message(self, message: Message) -> Message | None:
        """The message with its marks; None if its parts are not those of the policy."""
        parts: list[Part] = []
        for part in message.parts:
            if not isinstance(part, Spoken):
                parts.append(part)
                continue
            taken = self._taken(part)
            if taken is None:
                return None
            match part:
                case Text() | Thinking():
                    pieces = [(own.text, weight) for own, weight in taken if not isinstance(own, ToolCall)]
                    parts.append(replace(part, text=self._mark(part.text, pieces)))
                case ToolCall():
                    parts.append(self._call(part, taken[0][1]))
        return None if self._left else replace(message, parts=tuple(parts))

    def _taken(self, part: Spoken) -> list[tuple[Spoken, float]] | None:
        """The policy's pieces that this part is: of a text, as many as it was put together from."""
        kind, taken, length = type(part), list[tuple[Spoken, float]](), 0
        wanted = 0 if isinstance(part, ToolCall) else len(self._restored(part.text))
        while not taken or length < wanted:
            at = next((at for at, (own, _) in enumerate(self._left) if type(own) is kind), None)
            if at is None:
                return None
            taken.append(self._left.pop(at))
            own = taken[-1][0]
            length += 0 if isinstance(own, ToolCall) else len(own.text)
        return taken if length == wanted else None

    def _call(self, call: ToolCall, weight: float) -> ToolCall:
        def mark(leaf: str) -> str:
            return self._mark(leaf, [(self._restored(leaf), weight)])

        def number(value: object) -> object:
            self._numbers.append(value)
            self._slots.append(_OwnedString([("", weight)]))
            return int(f"7391{len(self._slots) - 1:05d}")

        return replace(call, name=mark(call.name), arguments=changed_leaves(call.arguments, mark, number))

    def _mark(self, text: str, pieces: WeighedStrings) -> str:
        lead, core, trail = _trimmed(text) if self._inside else ("", text, "")
        if not core:
            self.has_blanks |= bool(text)
            return text
        name = f"{len(self._slots):05d}".translate(LETTERS)
        self._slots.append(_OwnedString(pieces, lead, trail))
        self._numbers.append(None)
        return f"{lead}zqb{name}qz{core}zqe{name}qz{trail}"

    def read(self, marked: str, plain: str) -> list[tuple[str, _OwnedString | None]] | None:
        """``plain`` in runs, as the marks stand in ``marked``; None if they are not the same text but for the marks.

        What ``plain`` has behind the end of ``marked`` (a stop that the template writes later) is the template's.
        """
        runs: list[tuple[str, _OwnedString | None]] = []
        place, end, slot = 0, 0, None
        for found in [*MARKS.finditer(marked), None]:
            run = marked[end : len(marked) if found is None else found.start()]
            if not plain.startswith(run, place):
                run = plain[place:]  # it ends earlier: at the stop, or where the row's last answer goes on
                if not run or not marked.startswith(run, end):
                    return None if run else runs
            runs.append((run, slot))
            place += len(run)
            if place == len(plain):
                break
            if found is None:
                self.is_cut = slot is not None
                return None if self.is_cut else [*runs, (plain[place:], None)]
            end = found.end()
            number = int(found[3] or "".join(str("abcdefghij".index(letter)) for letter in found[2]))
            if number >= len(self._slots):
                return None
            if found[3] is None:
                own = self._slots[number]
                if slot is not (None if found[1] == "b" else own):
                    self.is_cut = True
                    return None
                slot = own if found[1] == "b" else None
                continue
            value = self._numbers[number]
            written = next((form for form in (json.dumps(value), str(value)) if plain.startswith(form, place)), None)
            if written is None:
                return None
            runs.append((written, replace(self._slots[number], pieces=[(written, self._slots[number].pieces[0][1])])))
            place += len(written)
        return [*runs, (plain[place:], None)]
