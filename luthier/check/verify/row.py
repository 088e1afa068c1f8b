"""One row and its sample: everything that is checked of the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from luthier import records
from luthier.check.verify import Check, Method, RowVerdict, Violation, reference_tokenizer, token_runs
from luthier.check.verify.expected import ExpectedRow, ExpectedTurn, expected_prompt, expected_row
from luthier.check.verify.learned import Home, Runs, find_home, supplied_faults, turn_faults
from luthier.check.verify.media_items import expected_document, media_faults, processor_faults
from luthier.check.verify.media_slots import MediaReader, media_of, media_of_messages
from luthier.check.verify.plain_template import HuggingFace, PlainTemplate, ReferenceFiles, RunSections, hugging_face
from luthier.check.verify.policy import RunPolicy, as_rendered, as_ruled, row_policy, ruled_conversation
from luthier.check.verify.reference_tokenizer import TokenServer
from luthier.config.inputs import LongAudio
from luthier.media import MediaSource, split_long_sounds
from luthier.media.files import MediaAccess
from luthier.templating import TemplateSettings
from luthier.writing import counted

ALWAYS = (Check.HAS_TARGETS, Check.FINITE_WEIGHTS, Check.IDS_IN_VOCABULARY, Check.BRANCHES)
OF_STRUCTURE = (Check.BRANCHES, Check.MEDIA_PLACES)  # where these fail, nothing else can be asked of a sample
OF_TURNS = (Check.PROMPT_TOKENS, Check.COMPLETION_TOKENS)


class RowVerifier:
    """Recomputes rows with plain renders and whole encodes, and compares samples with them."""

    def __init__(
        self,
        encoder: RunSections,
        *,
        server: TokenServer | None = None,
        num_decoded: int = 0,
        keep_answer_within: int | None = None,
        document_end: str = "eos",
    ) -> None:
        """Of ``encoder`` the files, the template and the options are used, never what it encodes.

        With a ``server``, each turn's context is also compared with the tokens that the server makes of it. The media
        of ``num_decoded`` rows, and of ever fewer after these, are decoded and given to the model's processor.
        ``keep_answer_within``: prompts were shortened to so many tokens; ``document_end``: what ends plain texts.
        """
        self.keep_answer_within = keep_answer_within
        self.server = server
        self.num_decoded = num_decoded
        self.files = ReferenceFiles.of_run(encoder)
        self.tokenizer = reference_tokenizer.ReferenceTokenizer(self.files, document_end=document_end)
        self.policy = RunPolicy.of_files(self.files)
        self.kwargs = encoder.options.kwargs
        self._run = encoder
        self._num_with_media = 0

    @cached_property
    def template(self) -> PlainTemplate | None:
        """The run's chat template, as rows without media are printed; None if there is none."""
        return None if self.files.template is None else self._template({}, {})

    @cached_property
    def judge(self) -> HuggingFace | str:
        """transformers with the same files, or why it is not the judge."""
        model = self.files.model
        return hugging_face(self.files.folder, tuple(model.add_tokens), tuple(model.add_special_tokens))

    @property
    def judge_name(self) -> str:
        """Who rendered the rows a second time, or why nobody did."""
        if not isinstance(self.judge, HuggingFace):
            return f"plain jinja2 alone: {self.judge}"
        told = "" if self.template is None else self.template.clock_told
        return self.judge.name + (f", whose clock is set to {told}" if told else "")

    def expected(self, row: records.Conversation | records.Document, policy: RunPolicy) -> ExpectedRow:
        """What the row's sample should hold. Raises `RowError` if the template refuses the row."""
        match row:
            case records.Conversation():
                if not media_of_messages(row.messages):
                    return expected_row(row, self._need_template(), self.tokenizer, policy)
                return expected_row(row, self._media_template, self.tokenizer, policy, self._reader)
            case records.Document():
                reader = self._reader if media_of(row.parts) else None
                return expected_document(row, self.tokenizer, policy, reader)

    def verify(self, row: records.Row, sample: records.Sample) -> RowVerdict:
        """Compare a sample with its row. Raises `RowError` if the template refuses the row."""
        if self._run.media.long_audio is LongAudio.SPLIT and any(
            isinstance(one.media, records.Audio) for one in sample.media
        ):
            row = split_long_sounds(row, self._reader.processor, self._reader.access)
        if self.keep_answer_within is not None and not any(reference_tokenizer.tree_faults(sample)):
            shorter = self._verify_shorter(row, sample, self.keep_answer_within)
            if shorter is not None:
                return replace(shorter, notes={**shorter.notes, "shortened_rows": 1})
        match row:
            case records.Conversation() if sample.for_rewards and row.messages[-1].role in ("user", "tool"):
                return self._verify_question(row, sample)
            case records.Conversation() | records.Document():
                return self._verify(row, sample, self.policy)
            case records.Preference() | records.Feedback():
                return self._verify_compared(row, sample)
            case records.Tokenized():
                return reference_tokenizer.verify_given(row, sample, self.tokenizer)

    def _verify_shorter(self, row: records.Row, sample: records.Sample, max_length: int) -> RowVerdict | None:
        """A row whose prompts had to be shortened, as what is left of it; None if it fits as it is."""
        runs = Runs(segments=sample.segments(), address=str(row.address), tokenizer=self.tokenizer, loosely=False)
        ruled = replace(self.policy, rules=(), default_system=None)
        judge = token_runs.LengthJudge(
            expect=lambda one: self.expected(one, ruled),
            max_length=max_length,
            train_stop=self.policy.train_stop,
            runs=runs,
        )
        match row:
            case records.Preference() | records.Feedback():
                whole = as_rendered(
                    records.Conversation(messages=row.prompt), self._need_template(), self.policy
                ).messages
                prompt = (*whole[: -len(row.prompt)], *row.prompt)
                for number, one in enumerate(token_runs.shorter_prompts(prompt)):
                    left = replace(row, prompt=one)
                    sides = (as_conversation(left, a, self._need_template(), self.policy) for a in answers_of(row))
                    if all(map(judge.fits, sides)):
                        return self._verify_compared(left, sample) if number else None
                return None
            case records.Conversation():
                said = row_policy(row, self._need_template(), self.policy)
                answers = sorted({*said.turns, *said.passed})
                conversation = as_ruled(row, self._need_template(), self.policy)
                alone = (token_runs.only(conversation, [answer]) for answer in answers)
                # What follows the last answer that is learned may be what is too long.
                if said.everything or said.asked or all(judge.fits(one, whole=True) for one in (conversation, *alone)):
                    return None
                shorter, trees = judge.shorter_conversations(conversation, answers), token_runs.trees_of(sample)
                if len(shorter) != len(trees):
                    fault = token_runs.number_fault(row, len(shorter), len(trees))
                    return RowVerdict(
                        method=Method.STRUCTURE_ONLY, applied=frozenset(OF_STRUCTURE), violations=(fault,)
                    )
                found = [self._verify(one, tree, ruled) for one, tree in zip(shorter, trees, strict=True)]
                return _together(found, (), frozenset([Check.BRANCHES]), sample)
            case _:
                return None

    @cached_property
    def _reader(self) -> MediaReader:
        source = MediaSource.of_model(self.files.folder, self._run.model, self._run.media)
        processor = source.load()
        assert processor is not None, "the row has a sample, so the model takes media"
        return MediaReader(processor=processor, access=MediaAccess(self._run.media))

    @cached_property
    def _media_template(self) -> PlainTemplate:
        return self._template(self._reader.slots.tokens, self._reader.slots.inline)

    def _template(self, tokens: Mapping[str, str], inline: Mapping[str, str]) -> PlainTemplate:
        assert self.files.template is not None, "asked only where there is a template"
        return PlainTemplate(
            self.files.template,
            special_tokens=self.files.special_tokens,
            kwargs=self.kwargs,
            opening=self.files.prompt_opening(self.tokenizer.opening),
            tokens=tokens,
            inline=inline,
            settings=TemplateSettings.of(self._run.options.now, self._run.options.limits.model_dump()),
        )

    def _need_template(self) -> PlainTemplate:
        assert self.template is not None, "the row has a sample, so there is a template"
        return self.template

    def _verify_question(self, row: records.Conversation, sample: records.Sample) -> RowVerdict:
        """A row that the model answers in the run: its prompt, of which nothing is learned."""
        faults = list(reference_tokenizer.tree_faults(sample))
        if faults:
            return RowVerdict(
                method=Method.STRUCTURE_ONLY, applied=frozenset([Check.BRANCHES]), violations=tuple(faults)
            )
        has_media = bool(media_of_messages(row.messages))
        template, reader = (self._media_template, self._reader) if has_media else (self._need_template(), None)
        expected, neutral = expected_prompt(row, template, self.tokenizer, self.policy, reader)
        ids, address = sample.input_ids, str(row.address)
        known = [
            one
            for one in reference_tokenizer.token_faults(sample, self.tokenizer)
            if one.check is not Check.HAS_TARGETS
        ]
        if sample.target.any():
            what = f"{int(sample.target.sum())} tokens of a prompt are learned"
            known.append(Violation(check=Check.NOTHING_SUPPLIED_TRAINED, address=address, what=what))
        if not np.array_equal(expected, ids):
            what = f"the prompt has {counted(len(ids), 'token')}, inference shows {len(expected)}"
            at = reference_tokenizer.first_difference(expected, ids)
            known.append(Violation(check=Check.PROMPT_TOKENS, address=address, what=what, run=0, index=at))
        applied = {Check.FINITE_WEIGHTS, Check.IDS_IN_VOCABULARY, Check.BRANCHES}
        if isinstance(self.judge, HuggingFace) and neutral.method is Method.WHOLE and not has_media:
            applied.add(Check.HUGGING_FACE)
            text = self.judge.text(template, neutral.messages, neutral.tools, prompt=True)
            if not np.array_equal(wanted := np.array(self.judge.ids(text), dtype=np.int32), ids):
                what = (
                    f"apply_chat_template gives a prompt of {counted(len(wanted), 'token')}, the sample has {len(ids)}"
                )
                at = reference_tokenizer.first_difference(wanted, ids)
                known.append(Violation(check=Check.HUGGING_FACE, address=address, what=what, run=0, index=at))
        return RowVerdict(
            method=neutral.method,
            applied=frozenset(applied | {Check.NOTHING_SUPPLIED_TRAINED, Check.PROMPT_TOKENS}),
            violations=tuple(known),
            longest_run=len(ids),
        )

    def _verify_compared(self, row: records.Preference | records.Feedback, sample: records.Sample) -> RowVerdict:
        """Each continuation as an answer to the whole prompt, on the leaf that it should be."""
        faults = list(reference_tokenizer.tree_faults(sample))
        faults += [] if faults else comparison_faults(row, sample)
        applied = frozenset([Check.BRANCHES, Check.VERDICT, Check.NOTHING_SUPPLIED_TRAINED])
        if any(fault.check in OF_STRUCTURE for fault in faults):
            return RowVerdict(method=Method.STRUCTURE_ONLY, applied=applied, violations=tuple(faults))
        ruled = replace(self.policy, rules=())  # what rules say is said by the conversation itself
        found: list[RowVerdict] = []
        for run, (answer, leaf) in enumerate(zip(answers_of(row), sample.segments(), strict=True)):
            conversation = as_conversation(row, answer, self._need_template(), self.policy)
            # A leaf's run as a sample of its own.
            verdict = self._verify(
                conversation,
                records.Sample(
                    input_ids=leaf.input_ids,
                    target=leaf.target,
                    weight=leaf.weight,
                    media=leaf.media,
                    branches=(records.Branch(parent=-1, length=len(leaf)),),
                    address=leaf.address,
                ),
                ruled,
            )
            of_leaf = (replace(fault, run=run) for fault in verdict.violations)
            found.append(replace(verdict, violations=tuple(of_leaf)))
        return _together(found, faults, applied, sample)

    def _verify(
        self, row: records.Conversation | records.Document, sample: records.Sample, policy: RunPolicy
    ) -> RowVerdict:
        faults = list(reference_tokenizer.tree_faults(sample))
        if faults:
            applied_only = frozenset([Check.BRANCHES, *(fault.check for fault in faults)])
            return RowVerdict(method=Method.STRUCTURE_ONLY, applied=applied_only, violations=tuple(faults))
        faults += reference_tokenizer.token_faults(sample, self.tokenizer)
        expected = self.expected(row, policy)
        runs = Runs(
            segments=sample.segments(),
            address=str(row.address),
            tokenizer=self.tokenizer,
            loosely=expected.method is Method.READ_BY_TEMPLATE,
        )
        applied, notes = set(ALWAYS), Counter[str]()
        faults += self._against(expected, sample, runs, applied, notes)
        return RowVerdict(
            method=expected.method,
            applied=frozenset(applied),
            violations=tuple(faults),
            num_turns=len(expected.turns),
            num_targets=int(sample.target.sum()),
            longest_run=max(len(segment) for segment in runs.segments),
            control_strings=expected.control_strings,
            notes=notes,
        )

    def _against(
        self, expected: ExpectedRow, sample: records.Sample, runs: Runs, applied: set[Check], notes: Counter[str]
    ) -> list[Violation]:
        faults: list[Violation] = []
        train_stop = self.policy.train_stop or expected.neutral is None
        derived = list(token_runs.derived_turns(expected.asked, runs))
        faults += [turn for turn in derived if isinstance(turn, Violation)]
        turns = [*expected.turns, *(turn for turn in derived if isinstance(turn, ExpectedTurn))]
        expected = replace(expected, turns=tuple(sorted(turns, key=lambda turn: turn.message or 0)))
        expected = replace(expected, turns=tuple(token_runs.best_position(turn, runs) for turn in expected.turns))
        notes.update(_counts(expected))
        passed = {} if expected.policy is None else expected.policy.passed
        homes = [find_home(turn, runs) for turn in expected.turns]
        for turn, home in zip(expected.turns, homes, strict=True):
            faults += turn_faults(turn, home, runs, train_stop=train_stop)
        if expected.turns or expected.asked:
            applied.update(OF_TURNS)
        if any(turn.policy.learned for turn in expected.turns):
            applied.update([Check.STOP_TRAINED, Check.ANSWER_DECODES])
        besides = token_runs.asked_besides(expected, runs)
        faults += token_runs.besides_faults(expected, runs, besides)
        if besides.masks is not None:
            applied.add(Check.NOTHING_SUPPLIED_TRAINED)
            faults += supplied_faults(expected.turns, homes, runs, besides.masks, passed)
        applied.update([Check.NO_FORGED_CONTROL, Check.DECODES])
        faults += token_runs.run_faults(expected, homes, runs)
        faults += media_faults(expected.media, runs)
        if expected.media is not None:
            applied.update([Check.MEDIA_PLACES, Check.MEDIA_TOKENS])
            dropped = expected.media.reader.processor.dropped_by_vllm.values()  # the processor itself leaves them
            if any(marks in expected.media.printed for marks in dropped):
                notes["marks_vllm_drops"] += 1
            faults += self._processed(expected, runs, applied, notes)
        if self.tokenizer.bos_id is not None:
            applied.add(Check.SINGLE_BOS)
            opening = bool(len(expected.text_ids)) and int(expected.text_ids[0]) == self.tokenizer.bos_id
            faults += reference_tokenizer.begin_faults(sample, opening, self.tokenizer)
        if expected.method is Method.WHOLE and expected.turns:
            if not expected.turns[-1].is_derived:
                applied.add(Check.WHOLE_TEXT)
            for found in token_runs.whole_text_faults(expected, homes, runs):
                if isinstance(found, Violation):
                    faults.append(found)
                else:
                    notes[found] += 1
            if isinstance(self.judge, HuggingFace) and expected.media is None:
                applied.add(Check.HUGGING_FACE)
                faults += token_runs.judged_faults(self.judge, self._need_template(), expected, homes, runs)
        if self.server is not None and expected.neutral is not None:
            if expected.media is not None:  # how servers are given pixels is another interface
                notes["media_not_asked"] += 1
            elif expected.method is Method.WHOLE:
                applied.add(Check.SERVED_TOKENS)
                faults += self._served(self.server, expected, homes, runs, notes)
            else:  # a server cannot tell the row's control strings from the template's
                notes["not_asked"] += 1
        return faults

    def _processed(
        self, expected: ExpectedRow, runs: Runs, applied: set[Check], notes: Counter[str]
    ) -> Iterator[Violation]:
        """What the processor itself makes of the row, if it is one of those that are decoded."""
        neutral, turns = expected.neutral, expected.turns
        if neutral is None or expected.method is not Method.WHOLE or any(turn.unfinished for turn in turns):
            return
        self._num_with_media += 1
        if not _is_drawn(self._num_with_media, self.num_decoded):
            return
        applied.add(Check.PROCESSOR_TOKENS)
        notes["decoded"] += 1
        yield from processor_faults(expected, runs, self._media_template.render(neutral.messages, neutral.tools))

    def _served(
        self, server: TokenServer, expected: ExpectedRow, homes: Sequence[Home], runs: Runs, notes: Counter[str]
    ) -> Iterator[Violation]:
        neutral = expected.neutral
        assert neutral is not None, "a conversation"
        for turn, home in zip(expected.turns, homes, strict=True):
            if turn.elsewhere:
                continue
            kwargs = {**self.kwargs, **turn.kwargs}
            served = server.prompt_ids(neutral.messages[: turn.message], neutral.tools, kwargs)
            notes["prompts_asked"] += 1
            ours = runs.segments[home.run].input_ids[: len(turn.prompt)]
            if not np.array_equal(served, ours):
                index = reference_tokenizer.first_difference(served, ours)
                what = (
                    f"the server's prompt has {counted(len(served), 'token')}, training's "
                    f"{len(ours)}; token {index} differs"
                )
                yield runs.fault(
                    Check.SERVED_TOKENS, what, message=turn.message, run=home.run, index=index, expected=served
                )


def _counts(expected: ExpectedRow) -> Counter[str]:
    """What is worth counting of a row's turns, none of it a fault."""
    counts = Counter[str](derived=sum(turn.is_derived for turn in expected.turns))
    if expected.policy is not None and expected.policy.passed:
        counts.update(long_rows=1, drawn_answers=len(expected.turns), passed_answers=len(expected.policy.passed))
    elsewhere = [turn for turn in expected.turns if turn.elsewhere]
    if elsewhere:
        tokens = sum(int((turn.weights > 0).sum()) for turn in elsewhere)
        counts.update(elsewhere_rows=1, elsewhere_answers=len(elsewhere), elsewhere_tokens=tokens)
    return +counts  # those above zero


def _is_drawn(number: int, first: int) -> bool:
    """Whether the ``number``-th row is one of the ``first``, or of those after them: the 2nd, 4th, 8th … times so far.

    With 3: 1, 2, 3, then 6, 12, 24 …
    """
    if number <= first:
        return True
    times, rest = divmod(number, first) if first else (0, 1)
    return not rest and times & (times - 1) == 0


def _together(
    found: Sequence[RowVerdict], faults: Sequence[Violation], applied: frozenset[Check], sample: records.Sample
) -> RowVerdict:
    """One verdict on a row from those on its continuations; what both hold (the prompt's text) is counted once."""
    notes = Counter[str]()
    for verdict in found:
        notes.update(verdict.notes)
    return RowVerdict(
        method=found[0].method,
        applied=applied.union(*(verdict.applied for verdict in found)),
        violations=(*faults, *(fault for verdict in found for fault in verdict.violations)),
        num_turns=sum(verdict.num_turns for verdict in found),
        num_targets=int(sample.target.sum()),
        longest_run=max(verdict.longest_run for verdict in found),
        control_strings=max((verdict.control_strings for verdict in found), key=lambda counts: sum(counts.values())),
        notes=notes,
    )


# --------------------------------------------------------------------------------------------------------------------
# Rows that are compared, verified as what each continuation is at inference: an answer to the whole prompt.
#
# Each continuation and its leaf of the sample are verified as a conversation of which only that answer is learned.
# What the prompt holds of the assistant's words is given, so nothing of it may be a target.


ComparedRow = records.Preference | records.Feedback


def answers_of(row: ComparedRow) -> tuple[tuple[records.Message, ...], ...]:
    """The continuations, in the order of the leaves that they should be."""
    return (row.chosen, row.rejected) if isinstance(row, records.Preference) else (row.completion,)


def as_conversation(
    row: ComparedRow, answer: tuple[records.Message, ...], template: PlainTemplate, policy: RunPolicy
) -> records.Conversation:
    """The prompt with one continuation, the run's system message and rules applied, and the prompt taken out."""
    whole = records.Conversation(
        messages=(*row.prompt, *answer), tools=row.tools, address=row.address, rules=row.rules, weight=row.weight
    )
    added = as_rendered(whole, template, policy).messages[: -len(whole.messages)]
    ruled = ruled_conversation(replace(whole, messages=(*added, *whole.messages)), policy.rules)
    first = len(ruled.messages) - len(answer)
    messages = tuple(
        message if index >= first and message.role == "assistant" else token_runs.as_context(message)
        for index, message in enumerate(ruled.messages)
    )
    return replace(ruled, messages=messages, rules=(), train_on="assistant")


def comparison_faults(row: ComparedRow, sample: records.Sample) -> Iterator[Violation]:
    """Whether the sample is a prompt with as many continuations as the row has, and keeps the row's verdict."""
    address, wanted = str(row.address), len(answers_of(row))
    parents, right = [branch.parent for branch in sample.branches], [-1] + [0] * wanted
    if parents != right:
        what = f"a prompt with {counted(wanted, 'continuation')} has branches with parents {right}, this {parents}"
        yield Violation(check=Check.BRANCHES, address=address, what=what)
        return
    prompt = sample.branches[0].length
    if sample.target[:prompt].any():
        learned = counted(int(sample.target[:prompt].sum()), "token")
        what = f"{learned} of the prompt that all continuations share are learned"
        yield Violation(check=Check.NOTHING_SUPPLIED_TRAINED, address=address, what=what)
    runs = [segment.input_ids for segment in sample.segments()]
    if len(runs) == 2 and np.array_equal(runs[0], runs[1]):
        yield Violation(check=Check.BRANCHES, address=address, what="both continuations are the same tokens")
    said = float(row.desirable) if isinstance(row, records.Feedback) else row.margin or 0.0
    if sample.verdict is None or not np.isclose(sample.verdict, said):
        what = f"the row says {said:g} (margin, or 1 for desirable), the sample {sample.verdict}"
        yield Violation(check=Check.VERDICT, address=address, what=what)
