"""``data.overflow: keep_answer``: rows that are too long lose the oldest turns of their prompts, and never an answer.

    system | q1 a1 | q2 a2 | q3 a3      of which a1, a2 and a3 are learned, and three turns are too long
    ->  system q1 a1 q2 a2              a1 and a2 fit as they are
        system q2 a2 q3 a3              a3 has lost the first question, with its answer; a2 is context here

Every learned answer has its own limit, and loses as few turns as will do. The conversation that is left is rendered and
encoded like any other, so that its tokens are what inference shows of *it*. The system message and the tools stay. A
turn is what the user says (with system messages that stand right before or behind it) and all that answers it, so no
tool's result stands without its call. Of rows that are compared both answers have the one, shortened, prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice

from luthier.config.choices import TrainOn
from luthier.errors import RowDropped, RowError
from luthier.layout import join_trees, tree_of_runs
from luthier.layout.cutting import learned_length
from luthier.records import Conversation, Feedback, Message, Piece, Preference, Rendered, Row, Sample
from luthier.rendering.other_rows import continuations, unlearned, with_system
from luthier.rendering.targets import TargetPolicy, Weights, apply_rules, trained_turns
from luthier.writing import counted

SHORTENED = "prompt shortened to keep the answer"  # notes on rows
TOKENS_LEFT_OUT = "prompt tokens left out to keep the answer"
END_LEFT_OUT = "end without a learned answer left out as it is too long"
ANSWERS_LEFT_OUT = "answers left out that are too long even with the shortest prompt"
STILL_TOO_LONG = "still_too_long"  # the reason for which a row is dropped
ROWS_AT_A_TIME = 1000

EncodeRows = Callable[[Iterable[Row], TargetPolicy], Iterator[Sample | RowError]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShorterRow:
    """A row without some of its messages. ``kept``: which of the messages are left, as they are numbered in the whole
    row, the run's system message included. ``policy``: what it is encoded under."""

    row: Conversation | Preference | Feedback
    kept: tuple[int, ...]
    policy: TargetPolicy

    @property
    def lost_turns(self) -> bool:
        """Whether turns of the prompt are left out, not only what stands behind the last answer."""
        return self.kept != tuple(range(len(self.kept)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortener:
    """Encodes rows such that no learned run has more than ``max_length`` tokens."""

    policy: TargetPolicy
    max_length: int
    encode: EncodeRows

    def encode_all(self, rows: Iterable[Row | RowError]) -> Iterator[Sample | RowError]:
        """One outcome per row, in order."""
        left = iter(rows)
        while some := list(islice(left, ROWS_AT_A_TIME)):
            good = (row for row in some if not isinstance(row, RowError))
            outcomes = iter(self.encode(good, self.policy))
            for row in some:
                outcome = row if isinstance(row, RowError) else next(outcomes)
                if isinstance(row, RowError) or isinstance(outcome, RowError) or self._fits(outcome):
                    yield outcome
                    continue
                try:
                    yield self._joined(self._shorter(row, outcome), outcome)
                except RowError as error:
                    yield error.at(row.address)

    def contexts(self, row: Row) -> list[ShorterRow]:
        """The shorter rows that a row is encoded as; none, where it is encoded as it is. Raises `RowError`."""
        whole = next(iter(self.encode([row], self.policy)))
        if isinstance(whole, RowError):
            raise whole
        return [] if self._fits(whole) else [shorter for shorter, _ in self._shorter(row, whole).found]

    def _fits(self, sample: Sample) -> bool:
        return len(sample.input_ids) <= self.max_length or longest_learned(sample, whole=True) <= self.max_length

    def _shorter(self, row: Row, whole: Sample) -> _ShorterSamples:
        """Raises `RowDropped` (``still_too_long``) where nothing of the row can be kept."""
        match row:
            case Conversation():
                return self._conversation(row)
            case Preference() | Feedback():
                return self._compared(row)
            case _:
                raise self._lost(longest_learned(whole), "it has no turns that could be left out")

    def _compared(self, row: Preference | Feedback) -> _ShorterSamples:
        if any(rule.turn == "first" for rule in (*self.policy.rules, *row.rules)):
            raise self._lost(None, "a targets rule speaks of its first turn")
        row = replace(row, prompt=with_system(row.prompt, self.policy.default_system))
        head, starts = turn_starts(row.prompt)
        end = len(row.prompt) + max(map(len, continuations(row).values()))

        def shorter(first: int) -> ShorterRow:
            kept = (*range(head), *range(starts[first], end))
            prompt = (*row.prompt[:head], *row.prompt[starts[first] :])
            return ShorterRow(row=replace(row, prompt=prompt), kept=kept, policy=self.policy)

        return _ShorterSamples(found=[self._longest_that_fits(shorter, 0, len(starts) - 1)[1]])

    def _conversation(self, row: Conversation) -> _ShorterSamples:
        train_on = self.policy.train_on if row.train_on is None else TrainOn(row.train_on)
        row = replace(row, messages=with_system(row.messages, self.policy.default_system))
        row = replace(apply_rules(row, self.policy.rules), rules=())
        weights = Weights(row.messages, self.policy, train_on=train_on, weight=row.weight)
        if weights.supplied or train_on is TrainOn.ALL:
            raise self._lost(None, "it teaches what inference supplies, which shortening would take away")
        said = [replace(one, train=number in weights.whole) for number, one in enumerate(row.messages)]
        row = replace(row, messages=tuple(said), train_on=TrainOn.ASSISTANT.value)
        policy = replace(self.policy, rules=(), default_system=None)
        head, starts = turn_starts(row.messages)
        first, lost, refusal = 0, 0, None
        chosen: list[tuple[int, int]] = []  # the first turn that is shown to an answer, and the answer
        for answer in trained_turns(row, TrainOn.ASSISTANT):
            own = max((turn for turn, start in enumerate(starts) if start <= answer), default=0)
            try:
                cut_at = partial(_cut, row, policy, head=head, answers=[answer], starts=starts)
                # A long thought may have cost the answer before turns that this one sees, for it sees no thought.
                sees_more = first > 0 and self._fitting(cut_at(first - 1)) is not None
                first, _ = self._longest_that_fits(cut_at, 0 if sees_more else first, first - 1 if sees_more else own)
                chosen.append((first, answer))
            except RowDropped as error:
                lost += error.reason == STILL_TOO_LONG  # else it is before any question, and nothing is learned of it
                refusal = error
        if not chosen:
            assert refusal is not None, "the row has a learned run that is too long"
            raise refusal
        found = []
        for turn, answers in groupby(chosen, key=lambda pair: pair[0]):
            shorter = _cut(row, policy, turn, head=head, answers=[answer for _, answer in answers], starts=starts)
            found.append((shorter, self._encoded(shorter)))
        return _ShorterSamples(found=found, answers_lost=lost)

    def _longest_that_fits(
        self, shorter: Callable[[int], ShorterRow], first: int, last: int
    ) -> tuple[int, tuple[ShorterRow, Sample]]:
        """The first turn from ``first`` to ``last`` from which the row fits, and the row from there, with its sample.

        Raises `RowError` where it does not fit from ``last`` either, or cannot be rendered.
        """
        least = shorter(last)
        best = (last, (least, self._encoded(least)))
        if (length := longest_learned(best[1][1])) > self.max_length:
            raise self._lost(length, "with the shortest prompt")
        low, high = first, last
        while low < high:  # a shorter prompt has fewer tokens
            middle = (low + high) // 2
            if (fitting := self._fitting(shorter(middle))) is not None:
                high, best = middle, (middle, fitting)
            else:
                low = middle + 1
        return best

    def _fitting(self, shorter: ShorterRow) -> tuple[ShorterRow, Sample] | None:
        try:
            sample = self._encoded(shorter)
        except RowError:  # the template does not take a conversation that begins there
            return None
        return (shorter, sample) if longest_learned(sample) <= self.max_length else None

    def _encoded(self, shorter: ShorterRow) -> Sample:
        outcome = next(iter(self.encode([shorter.row], shorter.policy)))
        if isinstance(outcome, RowError):
            raise outcome
        return outcome

    def _joined(self, shorter: _ShorterSamples, whole: Sample) -> Sample:
        """The samples of the shorter rows side by side, each a tree of its own."""
        samples = [sample for _, sample in shorter.found]
        shortened = any(row.lost_turns for row, _ in shorter.found)
        left_out = longest_learned(whole) - max(map(longest_learned, samples)) if shortened else 0
        counts = {SHORTENED: shortened, TOKENS_LEFT_OUT: left_out, ANSWERS_LEFT_OUT: shorter.answers_lost,
                  END_LEFT_OUT: not (shortened or shorter.answers_lost)}  # fmt: skip
        tokens = tree_of_runs(samples, [0] * len(samples))
        return replace(
            samples[0],
            input_ids=tokens.input_ids,
            target=tokens.target,
            weight=tokens.weight,
            media=tokens.media,
            branches=join_trees(sample.branches for sample in samples),
            notes=(*whole.notes, *((what, int(count)) for what, count in counts.items() if count > 0)),
            address=whole.address,
        )

    def _lost(self, length: int | None, why: str) -> RowDropped:
        tokens = "more tokens than that" if length is None else counted(length, "token")
        return RowDropped(STILL_TOO_LONG, f"{tokens}, data.max_length is {self.max_length}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShorterSamples:
    found: list[tuple[ShorterRow, Sample]]
    answers_lost: int = 0


def renumbered(rendered: Rendered, kept: Sequence[int]) -> Rendered:
    """A shorter row with its messages numbered as in the whole one."""
    paths = (tuple(_renumbered(piece, kept) for piece in path) for path in rendered.paths)
    return replace(rendered, paths=tuple(paths))


def _renumbered(piece: Piece, kept: Sequence[int]) -> Piece:
    return piece if piece.message is None else replace(piece, message=kept[piece.message])


def longest_learned(sample: Sample, *, whole: bool = False) -> int:
    """Tokens of the longest run of a sample in which something is learned, up to what is learned last; ``whole``: with
    what follows, which is cut off where it is too long."""
    learned = (segment.target for segment in sample.segments() if segment.target.any())
    return max((len(target) if whole else learned_length(target) for target in learned), default=0)


def turn_starts(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many system messages a conversation begins with, and where its turns begin: at each message of the user, or
    of the system, that stands behind an answer.

    ``system user assistant tool assistant user assistant -> 1, [1, 5]``
    """
    head = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    asks = [message.role in ("user", "system") for message in messages]
    return head, [n for n in range(head, len(messages)) if n == head or (asks[n] and not asks[n - 1])]


def _cut(
    row: Conversation, policy: TargetPolicy, turn: int, *, head: int, answers: Sequence[int], starts: Sequence[int]
) -> ShorterRow:
    """The conversation from a turn on, up to the last of ``answers``, which alone are learned."""
    kept = (*range(head), *range(starts[turn], answers[-1] + 1))
    messages = [row.messages[n] if n in answers else unlearned(row.messages[n]) for n in kept]
    is_last = answers[-1] == len(row.messages) - 1
    shorter = replace(
        row, messages=tuple(messages), continue_final_message=row.continue_final_message and is_last, notes=()
    )
    return ShorterRow(row=shorter, kept=kept, policy=policy)
