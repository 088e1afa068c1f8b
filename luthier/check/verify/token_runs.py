"""A sample's runs as wholes: do they read as the template renders, with the template's control tokens and no others?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

import numpy as np

from luthier.check.verify import Check, Violation
from luthier.check.verify.completions import strings_of
from luthier.check.verify.expected import AskedTurn, ExpectedRow, ExpectedTurn
from luthier.check.verify.learned import Home, Mask, Runs, find_home
from luthier.check.verify.plain_template import HuggingFace, PlainTemplate, Printer
from luthier.check.verify.policy import LearnedText, Spoken, missing_of_part, printed_forms
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer, first_difference
from luthier.check.verify.weights import answer_weights
from luthier.errors import RowError
from luthier.records import Conversation, Message, Sample, Text, Thinking, ToolCall, media_within
from luthier.writing import counted


def run_faults(expected: ExpectedRow, homes: Sequence[Home], runs: Runs) -> Iterator[Violation]:
    """Each run is the conversation, or ends with one of its turns: in text, and in control tokens.

    Of a long row whose turns were drawn, runs are compared up to the last turn in them that was rendered.
    """
    candidates: list[Ids] = []
    control = np.array(sorted(runs.tokenizer.control_ids.values()), dtype=np.int32)
    last = {home.run: turn for turn, home in zip(expected.turns, homes, strict=True)}
    passed_over = expected.policy is not None and bool(expected.policy.passed)
    for number, segment in enumerate(runs.segments):
        ids = segment.input_ids
        if np.array_equal(expected.text_ids, ids) or (passed_over and number not in last):
            continue
        if passed_over and segment.target[len(last[number].ids) :].any():  # it goes on to a turn that was not rendered
            ids = ids[: len(last[number].ids)]
        candidates = candidates or list(_candidates(expected))
        nearest = max(candidates, key=lambda ids_: (first_difference(ids_, ids), -len(ids_)))
        if np.array_equal(nearest, ids):
            continue
        wanted, found = nearest[np.isin(nearest, control)], ids[np.isin(ids, control)]
        if not np.array_equal(wanted, found):
            place = first_difference(wanted, found)
            where = np.flatnonzero(np.isin(ids, control))
            what = f"control token {place} of the sequence is not the template's ({len(found)}, expected {len(wanted)})"
            index = int(where[place]) if place < len(where) else len(ids)
            yield runs.fault(Check.NO_FORGED_CONTROL, what, run=number, index=index)
        if runs.tokenizer.decode(nearest) != runs.tokenizer.decode(ids):
            index = first_difference(nearest, ids)
            what = f"the sequence reads differently from what the template renders, from token {index} on"
            yield runs.fault(Check.DECODES, what, run=number, index=index, expected=nearest)


def whole_text_faults(expected: ExpectedRow, homes: Sequence[Home], runs: Runs) -> Iterator[Violation | str]:
    """Whether the run of the last trained turn equals the text encoded as one; yields ``"seam"`` for an expected merge.

    A tokenizer may merge the end of a prompt with the beginning of an answer. Inference cannot: it is given the one and
    emits the other. Nothing is said of an answer that the whole text shows in another way than inference does.
    """
    turn, home = expected.turns[-1], homes[-1]
    if turn.is_derived:
        return
    ids = runs.segments[home.run].input_ids
    whole = turn.whole() if len(ids) <= len(turn.ids) or turn.after is None else expected.text_ids
    if np.array_equal(ids, whole):
        return
    index = first_difference(whole, ids)
    apart = turn.ids if turn.after is None else np.concatenate([turn.ids, turn.after()])
    if (
        len(ids) >= len(turn.ids)
        and np.array_equal(ids, apart[: len(ids)])
        and not np.array_equal(turn.whole(), turn.ids)
    ):
        yield "seam"
        return
    what = f"encoded as one text this conversation has {counted(len(whole), 'token')}, the sample {len(ids)}"
    yield runs.fault(Check.WHOLE_TEXT, what, message=turn.message, run=home.run, index=index, expected=whole)


def judged_faults(
    judge: HuggingFace, template: PlainTemplate, expected: ExpectedRow, homes: Sequence[Home], runs: Runs
) -> Iterator[Violation]:
    """Whether transformers renders every prompt, and encodes the last answer's conversation, as the sample has them."""
    neutral, last = expected.neutral, expected.turns[-1]
    assert neutral is not None, "a conversation"
    has_whole = not (last.is_derived or last.unfinished or last.kwargs or last.after is None)
    is_merged = has_whole and not np.array_equal(last.whole(), last.ids)  # over the seam (`whole_text_faults` counts)
    for turn, home in zip(expected.turns, homes, strict=True):
        history = neutral.messages[: turn.message]
        if not history or turn.elsewhere:  # it renders no empty conversation, and its prompts are inference's
            continue
        try:
            text = judge.text(template, history, neutral.tools, prompt=True, **turn.kwargs)
        except RowError as error:
            yield runs.fault(Check.HUGGING_FACE, error.detail, message=turn.message, run=home.run)
            continue
        # transformers encodes the whole conversation below, or the last prompt, which is its beginning
        is_encoded = turn is not last or (has_whole and not is_merged)
        ids = turn.prompt if text == turn.text and is_encoded else judge.ids(text)
        found = runs.segments[home.run].input_ids[: len(ids)]
        if not np.array_equal(ids, found):
            wanted = np.array(ids, dtype=np.int32)
            index = first_difference(wanted, found)
            what = (
                f"apply_chat_template gives a prompt of {counted(len(ids), 'token')}, and the "
                f"sample differs at token {index}"
            )
            yield runs.fault(Check.HUGGING_FACE, what, message=turn.message, run=home.run, index=index, expected=wanted)
    segment = runs.segments[homes[-1].run]
    if not has_whole or last.after is None:
        return
    ids = judge.ids(judge.text(template, neutral.messages, neutral.tools, prompt=False))
    apart = np.concatenate([last.ids, last.after()])
    whole = apart if is_merged else np.array(ids[: len(segment)], dtype=np.int32)
    if not np.array_equal(whole[: len(segment)], segment.input_ids):
        index = first_difference(whole, segment.input_ids)
        what = (
            f"apply_chat_template gives {counted(len(ids), 'token')} for this conversation, the "
            f"sample has {len(segment)}"
        )
        yield runs.fault(Check.HUGGING_FACE, what, message=last.message, run=homes[-1].run, index=index, expected=whole)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Besides:
    """What is to be learned besides answers. ``masks``: where, a mask per run; None where that cannot be told.

    ``regions``: for each message that is asked for, ``(tokens before it, ids up to its end)``.
    """

    masks: list[Mask] | None
    regions: Mapping[int, tuple[int, Ids]]


def asked_besides(expected: ExpectedRow, runs: Runs) -> Besides:
    """Where the row or the run asks to learn more than answers."""
    masks = [np.zeros(len(segment), dtype=np.bool_) for segment in runs.segments]
    policy, template = expected.policy, expected.template
    if policy is None or template is None:
        return Besides(masks=masks, regions={})
    wanted = {index: _region(expected, index, template, runs.tokenizer) for index in policy.asked}
    regions = {index: region for index, region in wanted.items() if region is not None}
    if policy.everything:
        masks = [~mask for mask in masks]
        unwanted = [_region(expected, index, template, runs.tokenizer) for index in sorted(policy.taken_out)]
        marked = [region for region in unwanted if region is not None]
        is_told = len(marked) == len(unwanted)
    else:
        marked, is_told = list(regions.values()), len(regions) == len(wanted)
    for before, ids in marked:
        for mask, segment in zip(masks, runs.segments, strict=True):
            if first_difference(ids, segment.input_ids) >= len(ids):
                mask[before : len(ids)] = not policy.everything
    return Besides(masks=masks if is_told else None, regions=regions)


def besides_faults(expected: ExpectedRow, runs: Runs, besides: Besides) -> Iterator[Violation]:
    """Whether each message that is asked for besides answers is learned, in words."""
    policy = expected.policy
    for index, (before, ids) in besides.regions.items():
        assert policy is not None, "a conversation"
        masks = [
            segment.target[before : len(ids)]
            for segment in runs.segments
            if first_difference(ids, segment.input_ids) >= len(ids)
        ]
        learned = [LearnedText(before="", learned=runs.tokenizer.decode(ids[before:][mask])) for mask in masks]
        for part in policy.asked[index].parts:
            missing = [missing_of_part(part, text, runs.tokenizer, loosely=True) for text in learned]
            if missing and not any(text.learned for text in learned):  # context there, for it is learned in another run
                everywhere = (runs.tokenizer.decode(segment.input_ids[segment.target]) for segment in runs.segments)
                texts = [LearnedText(before="", learned=text) for text in everywhere]
                missing += [missing_of_part(part, text, runs.tokenizer, loosely=True) for text in texts]
            shared = (_ends_within_a_token(part, ids[before:], mask, runs.tokenizer) for mask in masks)
            if missing and all(missing) and not any(shared):
                yield runs.fault(Check.ANSWER_DECODES, str(missing[0]), message=index)


def _ends_within_a_token(part: Spoken, ids: Ids, target: Mask, tokenizer: ReferenceTokenizer) -> bool:
    """Whether a text is learned but for its last characters, which share a token with what the template prints behind
    them: that token is the template's."""
    places = np.flatnonzero(target)
    if not isinstance(part, Text) or not len(places) or places[-1] + 1 == len(ids):
        return False
    if len(places) <= places[-1] - places[0]:
        return False  # something within it is not learned
    words = tokenizer.normalised(part.text).strip()
    learned, longer = (tokenizer.decode(ids[places[0] : places[-1] + more]) for more in (1, 2))
    return words in longer and len(learned) < longer.find(words) + len(words) < len(longer)


def _candidates(expected: ExpectedRow) -> Iterator[Ids]:
    yield expected.text_ids
    for turn in expected.turns:
        yield turn.ids
        if turn.after is not None:
            yield np.concatenate([turn.ids, turn.after()])


def _region(
    expected: ExpectedRow, index: int, template: Printer, tokenizer: ReferenceTokenizer
) -> tuple[int, Ids] | None:
    """``(tokens before a message, ids up to its end)``, where the one text begins the other and the message is printed
    between them: Gemma prints a system message with the question that follows."""
    neutral = expected.neutral
    assert neutral is not None, "a conversation"
    try:
        before = template.render(neutral.messages[:index], neutral.tools) if index else ""
        upto = template.render(neutral.messages[: index + 1], neutral.tools)
    except RowError:
        return None
    forms = [form.strip() for text in strings_of(neutral.messages[index]) for form in printed_forms(text)]
    if not upto.startswith(before) or not any(form in upto[len(before) :] for form in forms if form):
        return None
    texts = neutral.readable([before, upto], tokenizer)
    first, second = tokenizer.encode(texts, forged=neutral.forged)
    return first_difference(first, second), second


# --------------------------------------------------------------------------------------------------------------------
# Turns whose completion no rendering has, read from the sample itself.
#
# A prompt may open a thought that history drops, or write an empty one that history never shows. What the model must
# emit after that prompt is then not the rest of any text that the template prints. So it is judged by reading: the
# context has to be the prompt, token for token; what follows, up to the first stop, has to be the tokenizer's own ids
# for its text; and prompt and text together have to read as exactly this row's thought, answer and calls.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Where a prompt stands: ``run`` begins with ``prompts[prompt]`` and has a completion behind it."""

    run: int
    prompt: int
    completion: Ids
    num_stop: int


def derived_turns(asked: Sequence[AskedTurn], runs: Runs) -> Iterator[ExpectedTurn | Violation]:
    """What `derived_turn` says of each; nothing of an answer before any question that is not learned."""
    for one in asked:
        turn = derived_turn(one, runs)
        if one.is_unasked and (isinstance(turn, Violation) or not is_begun(turn, find_home(turn, runs).run, runs)):
            continue
        yield turn


def derived_turn(asked: AskedTurn, runs: Runs) -> ExpectedTurn | Violation:
    """The turn as the sample has it, with what is wrong with it; or that its context is nowhere in the sample."""
    found = list(_places(asked, runs))
    if not found:
        return _no_context(asked, runs)
    turns = [_turn(asked, place, runs) for place in found]
    # where two positions of a switch lead to it, the one whose prompt ends where learning begins
    begun = [is_begun(turn, place.run, runs) for turn, place in zip(turns, found, strict=True)]
    return min(zip(turns, begun, strict=True), key=lambda pair: (len(pair[0].findings), not pair[1]))[0]


def best_position(turn: ExpectedTurn, runs: Runs) -> ExpectedTurn:
    """The turn under the position of the thinking switch that the sample has, if it has one that leads to this turn."""
    home = find_home(turn, runs)
    if home.agree >= len(turn.ids) and is_begun(turn, home.run, runs):
        return turn  # else it may be what history shows, or behind the longer prompt of another position
    if turn.asked is not None:
        derived = derived_turn(turn.asked(), runs)
        if isinstance(derived, ExpectedTurn) and not derived.findings:
            return derived
    if home.agree >= len(turn.prompt):
        return turn
    others = (other for other in turn.otherwise() if find_home(other, runs).agree >= len(other.prompt))
    return next(others, turn)


def is_begun(turn: ExpectedTurn, run: int, runs: Runs) -> bool:
    """Whether the first token of the answer that is to be learned is learned in this run."""
    wanted = turn.weights > 0
    first = len(turn.prompt) + (int(wanted.argmax()) if wanted.any() else 0)
    target = runs.segments[run].target
    return first < len(target) and bool(target[first])


def _places(asked: AskedTurn, runs: Runs) -> Iterator[_Found]:
    stops = np.array(sorted(runs.tokenizer.stop_ids), dtype=np.int32)
    for number, prompt in enumerate(asked.prompts):
        for run, segment in enumerate(runs.segments):
            if first_difference(prompt, segment.input_ids) < len(prompt) or len(segment) == len(prompt):
                continue
            rest = segment.input_ids[len(prompt) :]
            ends = np.flatnonzero(np.isin(rest, stops))
            if asked.unfinished or not len(ends):
                yield _Found(run=run, prompt=number, completion=rest, num_stop=0)
            else:
                yield _Found(run=run, prompt=number, completion=rest[: ends[0] + 1], num_stop=1)


def _turn(asked: AskedTurn, place: _Found, runs: Runs) -> ExpectedTurn:
    tokenizer, ids = runs.tokenizer, place.completion
    text = tokenizer.read(ids)
    body = tokenizer.read(ids[: len(ids) - place.num_stop])
    (again,) = tokenizer.continue_text([text], asked.prompts[place.prompt], forged=True)
    findings = list(replace(asked.readings[place.prompt], completion=body).faults())
    if not np.array_equal(again, ids):
        what = (
            f"the answer's {counted(len(ids), 'token is', 'tokens are')} not those that the "
            f"tokenizer gives to their text ({len(again)})"
        )
        findings.append((Check.COMPLETION_TOKENS, what))
    prompt = asked.prompts[place.prompt]
    weights = answer_weights(asked.policy, ids, text, tokenizer, forged=True, behind=prompt)
    return ExpectedTurn(
        message=asked.message,
        prompt=prompt,
        completion=ids,
        num_stop=place.num_stop,
        text=asked.texts[place.prompt],
        whole=lambda: np.concatenate([prompt, ids]),
        after=lambda: tokenizer.continue_text([asked.ending])[0],
        kwargs=asked.kwargs[place.prompt],
        policy=asked.policy,
        unfinished=asked.unfinished,
        weights=weights if len(weights) == len(ids) else np.full(len(ids), np.nan, dtype=np.float32),
        findings=tuple(findings),
        is_derived=True,
    )


def _no_context(asked: AskedTurn, runs: Runs) -> Violation:
    prompt = asked.prompts[0]
    agree = [first_difference(prompt, segment.input_ids) for segment in runs.segments]
    run = int(np.argmax(agree))
    what = f"the context of this answer differs from inference's at token {agree[run]} of {len(prompt)}"
    place = {"message": asked.message, "run": run, "index": agree[run]}
    return runs.fault(Check.PROMPT_TOKENS, what, **place, expected=prompt)


# --------------------------------------------------------------------------------------- ``data.overflow: keep_answer``


Expect = Callable[[Conversation], ExpectedRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthJudge:
    """Says how long a conversation is to the model. ``runs`` are the sample's: where history renders an answer
    otherwise than inference does, how it is emitted is read there. ``train_stop``: stops are learned."""

    expect: Expect
    max_length: int
    train_stop: bool
    runs: Runs

    def fits(self, row: Conversation, *, whole: bool = False) -> bool:
        """Whether all that is learned of a conversation fits, and the template takes it; ``whole``: with what follows
        a turn, which is cut off where it is too long."""
        try:
            expected = self.expect(row)
        except RowError:
            return False
        lengths = [self._length(turn, whole=whole) for turn in expected.turns]
        for asked in expected.asked:
            turn = derived_turn(asked, self.runs)
            if isinstance(turn, Violation) and asked.is_unasked:
                continue
            if isinstance(turn, Violation):
                return False
            lengths.append(self._length(turn, whole=whole))
        return max(lengths, default=0) <= self.max_length

    def _length(self, turn: ExpectedTurn, *, whole: bool) -> int:
        """Tokens of a turn with its prompt, up to the last that is learned or may be."""
        if whole:
            return len(turn.ids) + (0 if turn.after is None else len(turn.after()))
        weights = turn.weights if self.train_stop else turn.weights[: len(turn.weights) - turn.num_stop]
        return len(turn.prompt) + int(np.max(np.flatnonzero(weights), initial=-1)) + 1

    def shorter_conversations(self, row: Conversation, answers: Sequence[int]) -> list[Conversation]:
        """The conversations that ``answers`` of a row should be learned in, those with the same first turn together."""
        head, starts = _turns(row.messages)
        chosen = []
        for answer in answers:
            last = max((turn for turn, start in enumerate(starts) if start <= answer), default=0)
            rows = ((turn, _from_turn(row, head, starts[turn], [answer])) for turn in range(last, -1, -1))
            fitting = [turn for turn, _ in takewhile(lambda each: self.fits(each[1]), rows)]
            chosen += [(fitting[-1], answer)] if fitting else []
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
        row.messages[place] if place in answers else as_context(row.messages[place])
        for place in (*range(head), *range(start, end))
    ]
    goes_on = row.continue_final_message and end == len(row.messages)
    return replace(row, messages=tuple(messages), continue_final_message=goes_on)


def as_context(message: Message) -> Message:
    """A message of which nothing is learned."""
    parts = tuple(replace(p, train=None) if isinstance(p, Text | Thinking | ToolCall) else p for p in message.parts)
    return replace(message, train=False, parts=parts)
