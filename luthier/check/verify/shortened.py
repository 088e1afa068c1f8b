"""``data.overflow: keep_answer``, judged: which turns of a prompt each answer should have lost.

It is decided here once more from plain renders and whole encodes: of all ways to leave out the oldest turns, the one
that leaves out the fewest and is not too long. What training made of the row is then verified as the conversations
that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from luthier.check.verify.expected import ExpectedRow
from luthier.check.verify.findings import Check, Violation
from luthier.check.verify.learned import Runs
from luthier.check.verify.token_runs import derived_turn
from luthier.errors import RowError
from luthier.records import Conversation, Message, Sample, Text, Thinking, ToolCall, media_within
from luthier.writing import counted

Expect = Callable[[Conversation], ExpectedRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthJudge:
    """Says how long a conversation is to the model. ``runs`` are the sample's: where history renders an answer
    otherwise than inference does, how it is emitted is read there."""

    expect: Expect
    max_length: int
    runs: Runs

    def fits(self, row: Conversation) -> bool:
        """Whether all that is learned of a conversation fits, and the template takes it."""
        try:
            expected = self.expect(row)
        except RowError:
            return False
        lengths = [len(turn.ids) + (0 if turn.after is None else len(turn.after())) for turn in expected.turns]
        for asked in expected.asked:
            turn = derived_turn(asked, self.runs)
            if isinstance(turn, Violation):
                return False
            lengths.append(len(turn.ids) + len(self.runs.tokenizer.continue_text([asked.ending])[0]))
        return max(lengths, default=0) <= self.max_length

    def shorter_conversations(self, row: Conversation, answers: Sequence[int]) -> list[Conversation]:
        """The conversations that ``answers`` of a row should be learned in, those with the same first turn together."""
        head, starts = _turns(row.messages)
        place, chosen = 0, []
        for answer in answers:
            last = max((turn for turn, start in enumerate(starts) if start <= answer), default=0)
            fitting = (t for t in range(place, last + 1) if self.fits(_from_turn(row, head, starts[t], [answer])))
            found = next(fitting, None)
            if found is not None:
                place = found
                chosen.append((found, answer))
        return [
            _from_turn(row, head, starts[turn], [answer for _, answer in some])
            for turn, some in groupby(chosen, key=lambda pair: pair[0])
        ]


def shorter_prompts(prompt: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """A prompt whole, without its first turn, without its first two, up to its last turn alone."""
    head, starts = _turns(prompt)
    yield from ((*prompt[:head], *prompt[start:]) for start in starts)


def trees_of(sample: Sample) -> list[Sample]:
    """The trees that stand side by side in a sample, each as a sample of its own."""
    ends = np.cumsum([branch.length for branch in sample.branches]).tolist()
    roots = [number for number, branch in enumerate(sample.branches) if branch.parent < 0]
    trees = []
    for first, after in zip(roots, [*roots[1:], len(ends)], strict=True):
        span = slice(ends[first - 1] if first else 0, ends[after - 1])
        parents = (replace(b, parent=max(b.parent - first, -1)) for b in sample.branches[first:after])
        tree = replace(
            sample,
            input_ids=sample.input_ids[span],
            target=sample.target[span],
            weight=None if sample.weight is None else sample.weight[span],
            branches=tuple(parents),
            media=media_within(sample.media, [span]),
        )
        trees.append(tree)
    return trees


def number_fault(row: Conversation, wanted: int, found: int) -> Violation:
    """A row that was shortened into another number of conversations than it should have been."""
    what = (
        f"with data.overflow: keep_answer the row should become "
        f"{counted(wanted, 'shorter conversation')}, and became {found}"
    )
    return Violation(check=Check.BRANCHES, address=str(row.address), what=what)


def only(row: Conversation, answers: Sequence[int]) -> Conversation:
    """The conversation up to the last of ``answers``, which alone are learned."""
    return _from_turn(row, 0, 0, answers)


def _turns(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many system messages come first, and the places at which somebody asks after somebody has answered."""
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    starts = [head] if head < len(messages) else []
    for place in range(head + 1, len(messages)):
        if messages[place].role in ("user", "system") and messages[place - 1].role in ("assistant", "tool"):
            starts.append(place)
    return head, starts


def _from_turn(row: Conversation, head: int, start: int, answers: Sequence[int]) -> Conversation:
    end = answers[-1] + 1
    messages = [
        row.messages[place] if place in answers else _context(row.messages[place])
        for place in (*range(head), *range(start, end))
    ]
    goes_on = row.continue_final_message and end == len(row.messages)
    return replace(row, messages=tuple(messages), continue_final_message=goes_on)


def _context(message: Message) -> Message:
    parts = tuple(replace(p, train=None) if isinstance(p, Text | Thinking | ToolCall) else p for p in message.parts)
    return replace(message, train=False, parts=parts)
