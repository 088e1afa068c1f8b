"""Expected turns against a sample's runs: is each learned, all of it, after the right context, and nothing else?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify import Check, Token, Violation
from luthier.check.verify.expected import ExpectedTurn
from luthier.check.verify.policy import LearnedText, TurnPolicy, missing_of_part
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer, first_difference
from luthier.records import Segment
from luthier.writing import counted

Mask = NDArray[np.bool_]
PASSED_TRIED = 4  # answers for which the next targets may be; they come in order, but for one that is not learned
TOKENS_BEFORE = 8  # of a prompt's end, in which a template may begin the answer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """A sample's root-to-leaf runs, and what is needed to speak of their tokens.

    ``loosely``: the template reads control strings in the row's text, and may lay out the text around them anew.
    """

    segments: Sequence[Segment]
    address: str
    tokenizer: ReferenceTokenizer
    loosely: bool = False

    def fault(
        self,
        check: Check,
        what: str,
        *,
        message: int | None = None,
        run: int | None = None,
        index: int | None = None,
        expected: Ids | None = None,
    ) -> Violation:
        """A violation; with ``index``, the token there and the one that ``expected`` has there."""
        found = None if run is None else self.segments[run].input_ids
        return Violation(
            check=check,
            address=self.address,
            what=what,
            message=message,
            run=run,
            index=index,
            expected=self._token(expected, index),
            found=self._token(found, index),
        )

    def _token(self, ids: Ids | None, index: int | None) -> Token | None:
        if ids is None or index is None or index >= len(ids):
            return None
        return Token(id=int(ids[index]), text=self.tokenizer.decode(ids[index : index + 1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """The run in which a turn is found best: ``agree`` tokens of prompt and completion are the same there."""

    run: int
    agree: int


def find_home(turn: ExpectedTurn, runs: Runs) -> Home:
    """Where the longest beginning of prompt and completion stands; among equals, where it is learned."""
    ids, start, stop = turn.ids, len(turn.prompt), len(turn.ids)
    homes = [Home(run=number, agree=first_difference(ids, s.input_ids)) for number, s in enumerate(runs.segments)]
    return max(homes, key=lambda home: (home.agree, int(runs.segments[home.run].target[start:stop].sum()), -home.run))


def turn_faults(turn: ExpectedTurn, home: Home, runs: Runs, *, train_stop: bool) -> Iterator[Violation]:
    """Context, completion, stop, weights and words of one turn."""
    start, stop, ids = len(turn.prompt), len(turn.ids), turn.ids
    in_body = home.agree < stop - turn.num_stop
    if home.agree < start:
        what = f"the context of this answer differs from inference's at token {home.agree} of {start}"
        yield runs.fault(Check.PROMPT_TOKENS, what, **_place(turn, home), expected=ids)
    elif in_body and not turn.open_end:
        what = f"the answer differs from what inference would emit, at its token {home.agree - start}"
        yield runs.fault(Check.COMPLETION_TOKENS, what, **_place(turn, home), expected=ids)
    elif home.agree < stop and not turn.open_end:
        for check in (Check.COMPLETION_TOKENS, Check.STOP_TRAINED):
            yield runs.fault(check, "the answer's stop token is not there", **_place(turn, home), expected=ids)
    elif turn.policy.learned:
        yield from _mask_faults(turn, home, runs, train_stop=train_stop and turn.policy.scaffold > 0)
    if turn.policy.learned:
        for check, what in turn.findings:
            yield runs.fault(check, what, message=turn.message, run=home.run, index=start)
        yield from _stop_faults(turn, home, runs, train_stop=train_stop)
        yield from _word_faults(turn, home, runs)


def supplied_faults(
    turns: Sequence[ExpectedTurn],
    homes: Sequence[Home],
    runs: Runs,
    allowed: Sequence[Mask],
    passed: Mapping[int, TurnPolicy],
) -> Iterator[Violation]:
    """Targets that belong to no expected turn and to nothing that the row or the run asks to learn besides.

    The answers ``passed`` over were not rendered. They are read: each has to be learned somewhere, in order and whole.
    """
    left = [segment.target & ~mask for segment, mask in zip(runs.segments, allowed, strict=True)]
    for turn, home in zip(turns, homes, strict=True):
        if turn.policy.learned:
            run, start, stop = _learned_place(turn, home, left, runs)
            left[run][start:stop] = False
    for turn, home in zip(turns, homes, strict=True):
        yield from _twice(turn, home, runs, left)
    yield from _passed_faults(passed, runs, left)
    for run, mask in enumerate(left):
        if mask.any():
            first = int(mask.argmax())
            text = runs.tokenizer.decode(runs.segments[run].input_ids[mask][:12])
            what = counted(int(mask.sum()), "supplied token is learned", "supplied tokens are learned") + f": {text!r}"
            yield runs.fault(Check.NOTHING_SUPPLIED_TRAINED, what, run=run, index=first)


def _passed_faults(passed: Mapping[int, TurnPolicy], runs: Runs, left: Sequence[Mask]) -> Iterator[Violation]:
    """Answers that were not rendered, each looked for in the next targets that nobody has claimed, which it claims."""
    groups = ((run, start) for run in range(len(left)) for start in _group_starts(left[run])) if passed else iter(())
    waiting = {index: policy for index, policy in passed.items() if policy.learned}
    for run, start in groups:
        rest = left[run][start:]
        stop = len(left[run]) if rest.all() else start + int((~rest).argmax())
        text = LearnedText(before="", learned=runs.tokenizer.decode(runs.segments[run].input_ids[start:stop]))
        for index in list(waiting)[:PASSED_TRIED]:
            if not any(missing_of_part(p, text, runs.tokenizer, loosely=runs.loosely) for p in waiting[index].parts):
                del waiting[index]
                left[run][start:stop] = False
                break
    for index in waiting:
        yield runs.fault(Check.ANSWER_DECODES, "this answer is learned nowhere, or not whole", message=index)


def _mask_faults(turn: ExpectedTurn, home: Home, runs: Runs, *, train_stop: bool) -> Iterator[Violation]:
    segment, start, stop = runs.segments[home.run], len(turn.prompt), len(turn.ids)
    body = slice(start, stop - turn.num_stop)
    learned, weights = segment.target[body], turn.weights[: stop - turn.num_stop - start]
    missing = (weights > 0) & ~learned
    if turn.open_end:
        missing[1:] = False
    for mask, what in ((missing, "are not learned"), ((weights == 0) & learned, "are learned, though taken out")):
        if mask.any():
            first = start + int(mask.argmax())
            what = f"{counted(int(mask.sum()), 'token')} of the answer {what}"
            yield runs.fault(Check.COMPLETION_TOKENS, what, message=turn.message, run=home.run, index=first)
    learned_stop = bool(segment.target[stop - turn.num_stop : stop].all())
    if turn.num_stop and learned_stop is not train_stop:
        what = "the stop token is not learned" if train_stop else "the stop token is learned, and nothing asks for it"
        yield runs.fault(Check.STOP_TRAINED, what, message=turn.message, run=home.run, index=stop - 1)
    yield from _weight_faults(turn, home, runs)


def _weight_faults(turn: ExpectedTurn, home: Home, runs: Runs) -> Iterator[Violation]:
    segment, span = runs.segments[home.run], slice(len(turn.prompt), len(turn.ids))
    told = segment.target[span] & (turn.weights > 0)
    found = np.ones(len(turn.weights), dtype=np.float32) if segment.weight is None else segment.weight[span]
    wrong = told & ~np.isclose(found, turn.weights, rtol=1e-4)
    if wrong.any():
        place = int(wrong.argmax())
        what = (
            f"{counted(int(wrong.sum()), 'target has', 'targets have')} another weight than the "
            f"row and the run give them: "
        )
        what += f"the first {found[place]:g}, not {turn.weights[place]:g}"
        index = len(turn.prompt) + place
        yield runs.fault(Check.FINITE_WEIGHTS, what, message=turn.message, run=home.run, index=index)


def _stop_faults(turn: ExpectedTurn, home: Home, runs: Runs, *, train_stop: bool) -> Iterator[Violation]:
    if not train_stop or not turn.policy.scaffold or turn.unfinished:
        return
    is_named = turn.message is None and runs.tokenizer.document_end != "eos"  # data.document_end names what ends texts
    if turn.open_end:
        yield runs.fault(Check.STOP_TRAINED, "the template ends this turn with no stop token", message=turn.message)
    elif turn.num_stop and not is_named and int(turn.completion[-1]) not in runs.tokenizer.stop_ids:
        stops = ", ".join(sorted(runs.tokenizer.stops)) or "none"
        token = runs.tokenizer.decode(turn.completion[-turn.num_stop :])
        what = f"the turn ends with {token!r}; inference stops on {stops} (eos_token, generation_config.json)"
        yield runs.fault(Check.STOP_TRAINED, what, message=turn.message, run=home.run)


def _word_faults(turn: ExpectedTurn, home: Home, runs: Runs) -> Iterator[Violation]:
    start, stop = len(turn.prompt), len(turn.ids)
    if home.agree >= start:
        segment = runs.segments[home.run]
        end = stop if home.agree >= stop else len(segment)
        before = runs.tokenizer.decode(turn.prompt[-TOKENS_BEFORE:])
        ids = segment.input_ids[start:end][segment.target[start:end]]
        learned = [LearnedText(before=before, learned=runs.tokenizer.decode(ids))]
    else:  # its place is not known: it may be learned anywhere in the row
        targets = [segment.input_ids[segment.target] for segment in runs.segments]
        learned = [LearnedText(before="", learned=runs.tokenizer.decode(ids)) for ids in targets]
    for part in turn.policy.parts:
        missing = [missing_of_part(part, text, runs.tokenizer, loosely=runs.loosely) for text in learned]
        if all(missing):
            yield runs.fault(Check.ANSWER_DECODES, str(missing[0]), message=turn.message, run=home.run)


def _place(turn: ExpectedTurn, home: Home) -> dict[str, int | None]:
    return {"message": turn.message, "run": home.run, "index": home.agree}


def _learned_place(turn: ExpectedTurn, home: Home, left: Sequence[Mask], runs: Runs) -> tuple[int, int, int]:
    """``(run, start, stop)`` of the targets that are this turn's, be its context or its words wrong."""
    start, stop = len(turn.prompt), len(turn.ids)
    if home.agree >= stop and not turn.open_end:
        return home.run, start, stop
    if home.agree < start:
        for run, segment in enumerate(runs.segments):
            for place in _group_starts(left[run]):
                found = segment.input_ids[place : place + len(turn.completion)]
                if np.array_equal(found, turn.completion):
                    return run, place, place + len(turn.completion)
        return home.run, 0, 0
    rest = left[home.run][start:]
    return home.run, start, start + (int((~rest).argmax()) if not rest.all() else len(rest))


def _group_starts(mask: Mask) -> list[int]:
    before = np.concatenate([[False], mask[:-1]])
    return [int(i) for i in np.flatnonzero(mask & ~before)]


def _twice(turn: ExpectedTurn, home: Home, runs: Runs, left: Sequence[Mask]) -> Iterator[Violation]:
    start, stop = len(turn.prompt), len(turn.ids)
    for run, segment in enumerate(runs.segments):
        again = left[run][start:stop]
        if run != home.run and again.any() and first_difference(turn.ids, segment.input_ids) == stop:
            again[:] = False
            yield runs.fault(Check.BRANCHES, "this turn is learned twice", message=turn.message, run=run, index=start)
