"""``luthier verify``: an independent proof, on the user's own rows, that training sees what inference sees.

Rows are read, converted and encoded as training does it; each sample is then compared with what plain renders and whole
encodes of the same row give. What is kept of a row is counts, so memory does not grow with the data.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from luthier.check.show.view import RowView, show_sample
from luthier.check.verify import (
    MAX_EXAMPLES,
    Check,
    CheckResult,
    FailedRow,
    Method,
    RowVerdict,
    VerifyReport,
    Violation,
)
from luthier.check.verify.batches import BatchJudge, cut_faults, plan_faults
from luthier.check.verify.fetched import (
    RunBatches,
    SampleMaker,
    SourceRow,
    StoredSamples,
    TrainingAccount,
    choose_rows,
    open_split,
    read_rows,
)
from luthier.check.verify.plain_template import PlainTemplate
from luthier.check.verify.reference_tokenizer import NOT_PROVEN, TokenServer, learned_text, same_sample, tree_faults
from luthier.check.verify.row import RowVerifier, answers_of
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError, RowForbidden, UserError
from luthier.ledger import Ledger
from luthier.loader.settings import Loaded, cut_rows
from luthier.preparation import Prepared, Quarantine, info_of, remarks_on
from luthier.preparation.prepare import PREVIEW_FILE, prepare
from luthier.records import Conversation, Document, Row, Sample, Tokenized
from luthier.templating import TemplateSettings
from luthier.writing import counted

ROWS_PER_REPORT = 50  # between two reports of progress
ROWS_TOGETHER = 16  # encoded at once, as training encodes many
MOST_PLANNED = 100_000  # micro-batches, after which no further epoch is looked through


class Side(StrEnum):
    """Which side of the data."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What is verified.

    sample        this many rows, chosen by the run's seed; None: all
    stored        the prepared samples, and not only what encoding gives now
    against       address of a server whose tokens are compared too
    token         bearer token for that server
    max_failures  stop after so many rows of which something is not true; None: never
    num_shown     failing rows of which the report keeps the tokens
    num_decoded   of the rows with media, how many are decoded and given to the model's processor; after these ever
                  fewer are, over the whole of the data. Headers are compared for all rows
    num_batches   with ``stored``, how many of the first micro-batches are compared with the samples of their rows;
                  those with media only until ``num_decoded`` segments with media were
    """

    split: Side = Side.TRAIN
    sample: int | None = None
    stored: bool = False
    against: str | None = None
    token: str | None = field(default=None, repr=False)
    max_failures: int | None = None
    num_shown: int = 3
    num_decoded: int = 16
    num_batches: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyProgress:
    """How far verification is, in rows. ``verified + lost == read``; ``failed`` rows are among the verified."""

    read: int
    verified: int
    failed: int
    lost: int


def verify(
    config: RunConfig,
    options: VerifyOptions | None = None,
    *,
    encoder: SampleMaker | None = None,
    on_progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyReport:
    """Verify the rows of one split. ``encoder`` is what is put to the test; by default the run's own.

    Raises `UserError` if there is no data, the tokenizer or template cannot be used, or the server cannot be reached.
    A row that training would refuse is counted in the report's ledger, under the same reason.
    """
    options, started = options or VerifyOptions(), time.perf_counter()
    reference = Encoder.from_config(_at_one_time(config))
    server = None if options.against is None else TokenServer(options.against, token=options.token)
    sources = open_split(config, options.split)
    choice = choose_rows(sources, options.sample, seed=config.runtime.seed)
    prepared, own = None, Encoder.from_config(config)  # a stopped clock is an option and would have its own store
    if options.stored:
        with closing(Quarantine(config.output.dir / PREVIEW_FILE)) as lost:
            prepared = prepare(config, own, quarantine=lost)
    stored = None if prepared is None else StoredSamples.of_split(prepared, config, options.split)
    account = _Account(
        verifier=RowVerifier(
            reference,
            server=server,
            num_decoded=options.num_decoded,
            keep_answer_within=reference.keep_answer_within,
            document_end=reference.document_end,
        ),
        encoder=encoder or reference,
        reference=reference,
        config=config,
        num_shown=options.num_shown,
    )
    stopped_early = False
    held = ((row, None if stored is None else stored.at(row.address)) for row in read_rows(sources))
    chosen = (item for number, item in enumerate(held) if number in choice)
    while not stopped_early and (together := list(islice(chosen, ROWS_TOGETHER))):
        for (row, sample), made in zip(together, account.encoded([row for row, _ in together]), strict=True):
            account.add(row, made, sample, wants_stored=stored is not None)
            if on_progress is not None and account.ledger.read % ROWS_PER_REPORT == 0:
                on_progress(account.progress)
            stopped_early = options.max_failures is not None and account.num_failed >= options.max_failures
            if stopped_early:
                break
    if prepared is not None and not stopped_early:
        account.judge_batches(prepared, own, options)
    return account.report(
        split=options.split.value,
        num_rows=choice.num_rows,
        stopped_early=stopped_early,
        seconds=time.perf_counter() - started,
        remarks=remarks_on([info_of(source, config) for source in sources]),
    )


def _at_one_time(config: RunConfig) -> RunConfig:
    """The run with its clock stopped now, if it has one: what is judged and what judges are told the same time."""
    if config.template.now is not None:
        return config
    template = config.template.model_copy(update={"now": datetime.now().isoformat()})
    return config.model_copy(update={"template": template})


@dataclass(kw_only=True, slots=True)
class _CheckTally:
    """One check over the rows so far."""

    rows_checked: int = 0
    rows_failed: int = 0
    violations: int = 0
    examples: list[Violation] = field(default_factory=list)


class _Account:
    """Verifies rows one by one and adds up what is found."""

    def __init__(
        self, *, verifier: RowVerifier, encoder: SampleMaker, reference: Encoder, config: RunConfig, num_shown: int
    ) -> None:
        self.verifier, self.encoder, self.reference, self.num_shown = verifier, encoder, reference, num_shown
        self.config, self.max_length = config, config.data.max_length
        self.training = TrainingAccount(config)
        self.kwargs_use = KwargsUse(verifier.template, TemplateSettings.of(config.template.now, {}))
        self.ledger = Ledger()
        self.tallies = {check: _CheckTally() for check in Check}
        self.failed_rows: list[FailedRow] = []
        self.num_failed = self.num_turns = self.num_targets = self.longest_run = 0
        self.methods: Counter[Method] = Counter()
        self.control_strings: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.failed_at: set[str] = set()
        self.given: list[str] = []  # what the first rows of token ids teach

    @property
    def progress(self) -> VerifyProgress:
        return VerifyProgress(
            read=self.ledger.read, verified=self.ledger.prepared, failed=self.num_failed, lost=self.ledger.lost
        )

    def encoded(self, rows: Sequence[SourceRow]) -> Iterator[_Made]:
        """The rows as training encodes them, side by side."""
        read = list(map(_converted, rows))
        if isinstance(self.encoder, Encoder):
            yield from zip(read, self.encoder.encode_many(read), strict=True)
        else:
            yield from ((row, row if isinstance(row, RowError) else self._alone(row)) for row in read)

    def _alone(self, row: Row) -> Sample | RowError:
        try:
            return self.encoder.encode(row)
        except RowError as error:
            return error

    def add(self, source_row: SourceRow, made: _Made, stored: Sample | None, *, wants_stored: bool) -> None:
        """Verify one row; one that training would refuse goes into the ledger.

        Raises `UserError` for a row that training would not begin with.
        """
        row, encoded = made
        if isinstance(encoded, RowForbidden):
            raise encoded.at(encoded.address or source_row.address).stop() from encoded
        if isinstance(row, RowError) or isinstance(encoded, RowError):
            error = row if isinstance(row, RowError) else encoded
            assert isinstance(error, RowError), "one of the two is"
            lost = error.at(error.address or source_row.address)
            self.ledger.lose(lost)
            self.training.lose(lost)
            if stored is None:
                return
            what = f"the store holds a sample of this row, and encoding refuses it now: {error}"
            self._count(_verdict(Check.DETERMINISTIC, what, source_row), stored)
            return
        self.ledger.keep()
        if (reason := self.training.keep(encoded)) is not None:
            self.ledger.note(reason)
        self.kwargs_use.see(row)
        if wants_stored and stored is None:
            what = "the store holds no sample of this row"
            self._count(_verdict(Check.DETERMINISTIC, what, source_row), encoded)
            return
        try:
            verdict = self.verifier.verify(row, encoded if stored is None else stored)
        except RowError as error:
            what = f"training has a sample of this row, and the plain template refuses it: {error}"
            verdict = _verdict(Check.PROMPT_TOKENS, what, source_row)
        again = self._alone(row)
        difference = f"it is refused: {again}" if isinstance(again, RowError) else same_sample(encoded, again)
        difference = difference or (None if stored is None else same_sample(stored, encoded))
        self._count(_with_repetition(verdict, difference, source_row), encoded if stored is None else stored)

    def judge_batches(self, prepared: Prepared, encoder: Encoder, options: VerifyOptions) -> None:
        """Compare the first batches with their rows' samples, and an epoch with what it is to take; nothing of rows
        that are questions, or that training would not begin with."""
        config, held_out = self.config, options.split is Side.EVAL
        try:
            train, evaluation = cut_rows(config, prepared)
        except UserError:
            return
        index = evaluation if held_out else train
        if not index or self.training.refusal is not None or (config.objective.kind.on_policy and not held_out):
            return
        loaded = Loaded(config=config, encoder=encoder, prepared=prepared, train=train, held_out=evaluation, seconds=0)
        batches = RunBatches(loaded, held_out=held_out)
        judge = BatchJudge(batches.rules, batches.samples_at, batches.features_of)
        faults, once = list[Violation](), batches.takes_all_once
        seen, count, decoded, epoch = set[str](), 0, 0, 0
        parts: list[NDArray[np.void]] = []  # of the present epoch
        for number, planned in enumerate(batches.planned()):
            if batches.epoch > epoch:
                faults += plan_faults(np.concatenate(parts), batches.meant, batches.address, once=once, epoch=epoch)
                parts, epoch = [], batches.epoch
                if number > MOST_PLANNED:
                    break
            parts.append(batches.parts(planned))
            if number >= options.num_batches or (decoded >= options.num_decoded and planned.places["encoder"].any()):
                continue
            batch = batches.read(planned)
            count, decoded = count + 1, decoded + int((planned.places["encoder"] > 0).sum())
            seen.update(map(str, batch.addresses))
            faults += judge.faults(batch)
        self.notes["batches compared with their rows"] = count
        if batches.takes_all:
            faults += plan_faults(np.concatenate(parts), batches.meant, batches.address, once=once, epoch=epoch)
        faults += cut_faults(batches.meant, *batches.leaves(), batches.address)
        self._count_batches(seen, faults)

    def _count_batches(self, seen: set[str], faults: Sequence[Violation]) -> None:
        tally, failed = self.tallies[Check.BATCHES], dict[str, list[Violation]]()
        for violation in faults:
            failed.setdefault(violation.address, []).append(violation)
        tally.rows_checked, tally.rows_failed, tally.violations = len(seen | failed.keys()), len(failed), len(faults)
        tally.examples += faults[:MAX_EXAMPLES]
        new = failed.keys() - self.failed_at
        self.num_failed += len(new)
        for address in sorted(new)[: max(0, self.num_shown - len(self.failed_rows))]:
            self.failed_rows.append(FailedRow(address=address, violations=tuple(failed[address]), views=()))

    def report(
        self,
        *,
        split: str,
        num_rows: int | None,
        stopped_early: bool,
        seconds: float,
        remarks: Sequence[str],
    ) -> VerifyReport:
        """All that was found."""
        warnings = self.kwargs_use.warnings
        if not self.ledger.prepared:
            warnings.append(
                f"nothing was verified: "
                f"{counted(self.ledger.read, 'row was', 'rows were')} read, none of them can be trained on"
            )
        doubt = None if stopped_early else self.training.close(num_rows=num_rows)
        warnings += [doubt] if doubt else []
        if self.given:
            warnings.append(f"{self.methods[Method.GIVEN]:,} {NOT_PROVEN}; they teach {', '.join(self.given)}, …")
        if self.training.refusal is not None:
            warnings.append(f"training would not begin: {self.training.refusal}")
        return VerifyReport(
            split=split,
            max_length=self.max_length,
            checks=tuple(
                CheckResult(
                    check=check,
                    rows_checked=tally.rows_checked,
                    rows_failed=tally.rows_failed,
                    violations=tally.violations,
                    examples=tuple(tally.examples),
                )
                for check, tally in self.tallies.items()
            ),
            failed_rows=tuple(self.failed_rows),
            num_failed_rows=self.num_failed,
            ledger=self.ledger,
            methods=self.methods,
            control_strings=self.control_strings,
            notes=self.notes,
            warnings=tuple(warnings),
            num_turns=self.num_turns,
            num_targets=self.num_targets,
            longest_run=self.longest_run,
            num_rows=num_rows,
            stopped_early=stopped_early,
            seconds=seconds,
            judge=self.verifier.judge_name,
            refusal=self.training.refusal,
            remarks=tuple(remarks),
        )

    def _count(self, verdict: RowVerdict, sample: Sample) -> None:
        self.methods[verdict.method] += 1
        if verdict.method is Method.GIVEN and verdict.num_turns and len(self.given) < MAX_EXAMPLES:
            self.given.append(learned_text(sample, self.verifier.tokenizer))
        self.control_strings.update(verdict.control_strings)
        self.notes.update(verdict.notes)
        self.num_turns += verdict.num_turns
        self.num_targets += verdict.num_targets
        self.longest_run = max(self.longest_run, verdict.longest_run)
        for check in verdict.applied:
            self.tallies[check].rows_checked += 1
        for check in {violation.check for violation in verdict.violations}:
            self.tallies[check].rows_failed += 1
        for violation in verdict.violations:
            tally = self.tallies[violation.check]
            tally.violations += 1
            if len(tally.examples) < MAX_EXAMPLES:
                tally.examples.append(violation)
        if verdict.violations:
            self.num_failed += 1
            self.failed_at.add(verdict.violations[0].address)
            if len(self.failed_rows) < self.num_shown:
                address = verdict.violations[0].address
                views = self._views(verdict, sample)
                self.failed_rows.append(FailedRow(address=address, violations=verdict.violations, views=views))

    def _views(self, verdict: RowVerdict, sample: Sample) -> tuple[RowView, ...]:
        unknown_ids = any(violation.check is Check.IDS_IN_VOCABULARY for violation in verdict.violations)
        if unknown_ids or any(tree_faults(sample)):  # there may be no runs to show, or no text to show of them
            return ()
        tokenizer = self.reference.tokenizer
        return tuple(show_sample(sample, tokenizer, control=tokenizer.control_ids))


_Made = tuple[Row | RowError, Sample | RowError]
"""A row and its sample, or why there is none."""


def _converted(row: SourceRow) -> Row | RowError:
    try:
        return row.convert()
    except RowError as error:
        return error


def _verdict(check: Check, what: str, row: SourceRow) -> RowVerdict:
    violation = Violation(check=check, address=str(row.address), what=what)
    return RowVerdict(method=Method.STRUCTURE_ONLY, applied=frozenset([check]), violations=(violation,))


def _with_repetition(verdict: RowVerdict, difference: str | None, row: SourceRow) -> RowVerdict:
    violations = verdict.violations
    if difference is not None:
        what = f"encoding the row again, by itself, gives something else: {difference}"
        violations += (Violation(check=Check.DETERMINISTIC, address=str(row.address), what=what),)
    return replace(verdict, applied=verdict.applied | {Check.DETERMINISTIC}, violations=violations)


# --------------------------------------------------------------------------------------------------------------------
# Whether what ``template.kwargs`` says has any effect on the rows.


MAX_ROWS_SEEN = 1000  # a variable that changes none of so many conversations is reported


class KwargsUse:
    """Watches rows go by until each variable was seen to change the text, or the generation prompt, of one."""

    def __init__(self, template: PlainTemplate | None, settings: TemplateSettings) -> None:
        """One template for each variable, that lacks it. ``settings`` are those that the run itself gives."""
        self._template, self._settings = template, settings
        self._num_seen = 0
        self._without: dict[str, PlainTemplate] = {}
        if template is not None:
            for name in template.kwargs:
                rest = {other: value for other, value in template.kwargs.items() if other != name}
                self._without[name] = PlainTemplate(
                    template.source, special_tokens=template.special_tokens, kwargs=rest, settings=template.settings
                )

    def see(self, row: Row) -> None:
        """Look at one more row."""
        if not self._without or isinstance(row, Document | Tokenized) or self._num_seen >= MAX_ROWS_SEEN:
            return
        if not isinstance(row, Conversation):
            row = Conversation(messages=(*row.prompt, *answers_of(row)[0]), tools=row.tools)
        self._num_seen += 1
        assert self._template is not None, "there are variables, so there is a template"
        with_all = _texts(self._template, row)
        for name in [name for name, template in self._without.items() if _texts(template, row) != with_all]:
            del self._without[name]

    @property
    def warnings(self) -> list[str]:
        """A sentence for each variable that changed nothing, and one for a template with a clock."""
        template = self._template
        clock = (
            None
            if template is None
            else self._settings.clock_note(template.source, template.variables, template.kwargs.keys())
        )
        return [
            *([clock] if clock else []),
            *(
                f"template.kwargs.{name} changes the text of none of {counted(self._num_seen, 'conversation')}: "
                "it says what the template does anyway, or the template does not use it here"
                for name in self._without
                if self._num_seen
            ),
        ]


def _texts(template: PlainTemplate, row: Conversation) -> tuple[str, str] | str:
    try:
        text = template.render(row.messages, row.tools)
        return text, template.render(row.messages, row.tools, generation_prompt=True)
    except RowError as error:
        return str(error)
