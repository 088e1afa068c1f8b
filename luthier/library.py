"""What the commands do, for programs: `train`, `plan`, `show`, `stats`, `verify` and `prepare`, each a function.

Each takes a run description (the path of its file, a dict, or a `RunConfig`) and gives a record. ``overrides`` such as
``["train.max_steps=10"]`` win over it. ``on_event`` hears what happens on the way: first the `RunConfig` that was read,
then notes, progress, and each stage's record once it stands. The commands of ``luthier`` call them, and print that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from luthier.errors import ConfigError, ModelError, UserError

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from luthier.check.plan import RunPlan
    from luthier.check.plan.estimate import Estimate
    from luthier.check.plan.stats import Contamination, Stats
    from luthier.check.show.view import RowView
    from luthier.check.verify import VerifyReport
    from luthier.check.verify.run import VerifyOptions
    from luthier.config.draft import Draft
    from luthier.config.loading import RunDescription
    from luthier.config.schema import RunConfig
    from luthier.encoding.encoder import Encoder
    from luthier.loader.feed import FeedReader
    from luthier.loader.plan import StreamPlan
    from luthier.loader.settings import Loaded
    from luthier.preparation import Prepared
    from luthier.preparation.resolver import Progress
    from luthier.sources.source import RepeatedIds
    from luthier.training.data import RunData
    from luthier.training.report import RunResult
    from luthier.training.report.report import Report

Listener = Callable[[object], None]  # hears records of several kinds: `match event: case luthier.StepRecord(): …`


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """What is worth knowing of a run before it begins, in words."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstSample:
    """The first sample of the training data, as the model will see it."""

    rows: tuple[RowView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """The run is over and its report stands; ``files`` are where it was written."""

    report: Report
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Rows as the model sees them, and under which settings.

    ``findings`` are in how far a second rendering of the rows disagrees with what the store holds; none is as it
    should be.
    """

    title: str
    facts: Mapping[str, str]
    rows: tuple[RowView, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """Each once, in their order."""
        return tuple(dict.fromkeys(finding for row in self.rows for finding in row.findings))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStats:
    """The data of a run in numbers: what became of the rows, each side, and the ids that come twice."""

    ledger: Mapping[str, Any]
    train: Stats
    eval: Stats | None
    repeated_ids: tuple[RepeatedIds, ...]
    contamination: Contamination | None = None  # None: there are no held-out rows


def train(
    config: RunDescription,
    *,
    overrides: Sequence[str] = (),
    callbacks: Iterable[TrainerCallback] = (),
    on_event: Listener | None = None,
) -> RunResult:
    """Train as the run description says; what ``luthier train`` does.

    Leaves the model, checkpoints, ``report.html``, ``report.json`` and ``loss.png`` in ``output.dir``, and goes on from
    the newest checkpoint there. ``callbacks`` are transformers', added behind Luthier's own. The result's ``ended``
    says whether the run came to its end; after Ctrl-C, SIGTERM or SIGHUP it has saved a checkpoint.

    Raises `ConfigError` with all that is wrong with the description or would stop the run later, before a row is
    encoded; then what preparation and training raise: `SourceError`, `TokenizerError`, `TemplateError`, `StoreError`,
    `BudgetError`, `ModelError`, `CheckpointError`, `TrainingError`.
    """
    return train_and_report(config, overrides=overrides, callbacks=callbacks, on_event=on_event).result


def train_and_report(
    config: RunDescription,
    *,
    overrides: Sequence[str] = (),
    callbacks: Iterable[TrainerCallback] = (),
    on_event: Listener | None = None,
    quickstart: bool = False,
) -> Report:
    """`train`, with the report that was written. ``quickstart``: the report says how exact the answers were."""
    tell = on_event if on_event is not None and is_main_process() else _silent
    with _described(config, overrides, tell, "train") as run:
        from luthier.loader.feed import prepares_meanwhile

        if prepares_meanwhile(run):
            report = _train_meanwhile(run, tuple(callbacks), tell)
        else:
            report = _train_prepared(run, tuple(callbacks), tell)
        report = replace(report, quickstart=quickstart)
        if is_main_process():
            from luthier.training.report.report import write_report

            tell(Reported(report=report, files=tuple(write_report(report))))
            if report.result.merged_dir is not None:
                from luthier.export.model_folder import prove_merged

                tell(Remark(text=prove_merged(report.result.path)))
    return report


def verify(
    config: RunDescription,
    options: VerifyOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    on_event: Listener | None = None,
) -> VerifyReport:
    """Prove on the run's own rows that training sees what inference sees; what ``luthier verify`` does.

    ``report.ok`` is the answer. Raises `ConfigError`, and `UserError` if there is no data, the tokenizer or template
    cannot be used, or the server cannot be reached.
    """
    tell = on_event or _silent
    with _described(config, overrides, tell, "read") as run:
        from luthier.check.verify.run import verify as verify_rows

        return verify_rows(run, options, on_progress=tell)


def prepare(
    config: RunDescription,
    *,
    overrides: Sequence[str] = (),
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_event: Listener | None = None,
) -> Prepared:
    """Encode what a run's data has and the store has not, and say which samples the run will see.

    Only the sections ``model``, ``data``, ``template`` and ``media`` of the description matter here, ``objective`` for
    the kind of row, ``output.dir`` for the file of lost rows, and ``runtime.seed``. ``ray_address`` leaves the work to
    a Ray cluster: ``auto``, ``local`` or ``ray://host:10001``. ``on_progress`` hears of the progress alone.

    Raises `ConfigError` with all that is wrong with the description, and what ``luthier prepare`` ends with:
    `SourceError`, `TokenizerError`, `TemplateError`, `StoreError`, `BudgetError`.
    """
    tell = on_event or _silent

    def progressed(progress: Progress) -> None:
        tell(progress)
        if on_progress is not None:
            on_progress(progress)

    with _described(config, overrides, tell, "load") as run:
        return _load(run, tell, on_progress=progressed, ray_address=ray_address).prepared


def plan(
    config: RunDescription,
    *,
    overrides: Sequence[str] = (),
    device: str | None = None,
    utilisation: float | None = None,
    on_event: Listener | None = None,
) -> RunPlan:
    """Say exactly what a run will do, without a model: rows, tokens, targets, packs, steps; what ``luthier plan`` does.

    Time and memory are estimated for ``device`` (``h100``, ``a100`` …; by default the one that is here) at a share
    ``utilisation`` of its peak. What would stop the run on this machine is told as a `Remark`, and stops no plan.

    Raises `ConfigError`, `UserError` for an unknown device or data without a row, and what preparation raises.
    """
    from luthier.check.plan import drawing_of, with_media
    from luthier.check.plan.estimate import check_name

    tell = on_event or _silent
    with _described(config, overrides, tell, "plan") as run:
        check_name(device)  # before the data is prepared, which may take long
        loaded = _load(run, tell)
        schedule = schedule_of(loaded)
        model_config = loaded.encoder.media_source.model_config()
        found = with_media(plan_of(loaded, schedule), loaded.train, loaded.held_out, model_config=model_config)
        found = replace(found, drawing=drawing_of(loaded, num_ranks=found.num_ranks, device=device))
        try:
            return replace(found, estimate=_estimate(loaded, schedule, found, device, utilisation))
        except ModelError as error:
            return replace(found, no_estimate=str(error))


def stats(config: RunDescription, *, overrides: Sequence[str] = (), on_event: Listener | None = None) -> DataStats:
    """Describe the data: lengths, targets and the share that is learned, per source; what ``luthier stats`` does.

    Raises `ConfigError` and what preparation raises.
    """
    from luthier.check.plan.stats import contaminated
    from luthier.check.plan.stats import stats as stats_of
    from luthier.sources.origins import resolve_sources
    from luthier.sources.source import open_sources, repeated_ids

    with _described(config, overrides, on_event or _silent, "load") as run:
        loaded = _load(run, on_event or _silent)
        limit, held_out, tokenizer = run.data.max_length, loaded.prepared.eval, loaded.encoder.tokenizer
        files = [source for side in resolve_sources(run.data) for source in side if not source.streaming]
        return DataStats(
            ledger=loaded.train.ledger.to_json(),
            train=stats_of(loaded.prepared.train, split="train", max_length=limit),
            eval=None if held_out is None else stats_of(held_out, split="eval", max_length=limit),
            repeated_ids=tuple(filter(None, map(repeated_ids, open_sources(files, seed=run.runtime.seed)))),
            contamination=None if held_out is None else contaminated(loaded.prepared, tokenizer),
        )


def show(
    config: RunDescription,
    *,
    overrides: Sequence[str] = (),
    row: int | str | None = None,
    pack: int | None = None,
    batch: int | None = None,
    split: Literal["train", "eval"] = "train",
    html: Path | None = None,
    on_event: Listener | None = None,
) -> Shown:
    """Rows as the model sees them, token by token, each token with its owner; what ``luthier show`` does.

    ``row``, ``pack`` or ``batch`` says which, counted from 1: a row of the data, a pack or a micro-batch of the first
    epoch. Nothing given is row 1. A row is also found by its address (``"rows.jsonl:45"``), on either side of the data.
    ``html`` writes them as a page, too.

    Raises `ConfigError`, `UserError` where there is no such row, pack or batch, and what preparation raises.
    """
    from luthier.check.selection import Selection, run_facts, write_page

    tell = on_event or _silent
    if split not in ("train", "eval"):
        raise UserError(f"split is {split!r}", hint="choose train or eval")
    selection = Selection.of_options(row=row, pack=pack, batch=batch, held_out=split == "eval")
    with _described(config, overrides, tell, "load") as run:
        loaded = _load(run, tell)
        rows = selection.views(loaded)
        shown = Shown(title=selection.title, facts=run_facts(run, loaded.encoder), rows=tuple(rows))
        if html is not None:
            write_page(html, shown.rows, loaded, title=shown.title, facts=shown.facts)
        return shown


def schedule_of(loaded: Loaded) -> StreamPlan:
    """All steps of the run on all processes launched; raises `BudgetError` and `UserError` as training would."""
    from luthier.config import num_processes
    from luthier.loader.numbered_rows import NumberedRows
    from luthier.loader.settings import plan_of_run
    from luthier.training.data import check_sides

    check_sides(loaded.config, loaded.train, loaded.held_out)
    return plan_of_run(loaded.config, NumberedRows.of_index(loaded.train), num_ranks=num_processes())


def plan_of(loaded: Loaded, schedule: StreamPlan) -> RunPlan:
    """The run's plan, without an estimate."""
    from luthier.check.plan import history_cost, loss_notes, plan_run
    from luthier.loader.settings import warmup_steps
    from luthier.training.streams import FEW_STEPS, length_notes, ways_to_more_steps

    ranks, total_steps, first = schedule.settings.num_ranks, schedule.count_steps(), schedule.epoch(0)
    micro_batches = -(-len(first.planned) // ranks)
    ways = ways_to_more_steps(loaded.config, schedule.rows, num_ranks=ranks) if total_steps < FEW_STEPS else ()
    found = plan_run(
        loaded.config,
        loaded.train,
        loaded.held_out,
        total_steps=total_steps,
        num_ranks=ranks,
        first_epoch=first,
        history=history_cost(loaded.config, loaded.train, loaded.encoder.tokenizer.decode),
        more_steps=ways,
    )
    return replace(
        found,
        warmup_steps=warmup_steps(loaded.config.train, schedule.horizon),  # as training counts it
        clock=None if (template := loaded.encoder.tokenizer.template) is None else template.clock_note,
        unmet=(*loss_notes(schedule.order, found), *length_notes(loaded.config, total_steps, micro_batches)),
    )


def is_main_process() -> bool:
    """Whether this is the process that tells and reports."""
    return os.environ.get("RANK", "0") == "0"


def _silent(event: object) -> None:
    """A listener that hears nothing."""


@contextmanager
def _described(
    config: RunDescription, overrides: Sequence[str], tell: Listener, to: Literal["read", "load", "plan", "train"]
) -> Iterator[RunConfig]:
    """The run description; errors that are raised within are told with the line of their key.

    ``to`` train it is checked against this machine, the model, the optimizer and the folders that it names; all that
    would stop the run later is raised as one `ConfigError`. To plan it such things are told. To load its rows, which
    planning does too, what is wrong with its data sets is raised; and always what is wrong with rewards and metrics.
    """
    from luthier.config.loading import load_draft
    from luthier.plugins import refuse_in_workers

    refuse_in_workers()
    draft = load_draft(config, overrides, to_train=to == "train")
    with draft.placing():
        if not draft.config.train.enabled:
            what = "this description is of a model that answers: it trains nothing"
            hint = "luthier predict has it answer rows; to train, name data to train on"
            if draft.config.export.dir is not None:
                what = "this description merges and exports a model: it trains nothing"
                hint = "luthier export writes it"
            raise ConfigError([draft.problem("train.enabled", what, hint)])
        if to != "train":
            from luthier.loader.settings import answer_faults, data_faults

            if faults := [*(data_faults(draft) if to in ("load", "plan") else ()), *answer_faults(draft)]:
                raise ConfigError(faults)
        notes = _checked_to_train(draft) if to == "train" else list(_found_to_plan(draft)) if to == "plan" else []
        read = () if draft.translation is None else draft.translation.summary
        for event in (draft.config, *(Remark(text=text) for text in (*read, *notes))):
            tell(event)
        yield draft.config


def _checked_to_train(draft: Draft) -> list[str]:
    from luthier.config.machine import TRAINING, is_installed

    if not all(map(is_installed, TRAINING)):
        raise ConfigError(list(draft.machine))
    from luthier.training.preflight import check_run

    return check_run(draft)


def _found_to_plan(draft: Draft) -> Iterator[str]:
    from luthier.config.draft import unread_settings
    from luthier.config.losses import check_functions
    from luthier.config.machine import check_machine

    check_functions(draft.config.objective)
    yield from (f"training here would stop: {problem}" for problem in check_machine(draft))
    yield from unread_settings(draft)


def _load(
    run: RunConfig,
    tell: Listener,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    ray_address: str | None = None,
    trains: bool = False,
) -> Loaded:
    from luthier.loader.settings import load_rows

    loaded = load_rows(run, on_progress=on_progress or tell, ray_address=ray_address, trains=trains)
    tell(loaded)
    return loaded


def _train_prepared(run: RunConfig, callbacks: tuple[TrainerCallback, ...], tell: Listener) -> Report:
    """Prepare all rows, say what the run will do, and do it."""
    loaded = _load(run, tell, trains=True)
    import msgspec

    from luthier.check.selection import Selection
    from luthier.check.show.html import tokens_html
    from luthier.check.verify.fetched import fault_of_first_batches
    from luthier.training.fit import fit
    from luthier.training.report.report import Report

    schedule = schedule_of(loaded)
    found = plan_of(loaded, schedule)
    tell(found)
    if (fault := fault_of_first_batches(loaded, schedule)) is not None:
        tell(Remark(text=f"{fault}; luthier verify --stored tells more"))
    first = Selection.of_options(row=int(loaded.train.row_ids[0]) + 1, pack=None, batch=None, held_out=False)
    sample = first.views(loaded)
    tell(FirstSample(rows=tuple(sample)))
    cut = loaded.train, loaded.held_out
    result = fit(run, loaded.encoder, loaded.prepared, cut=cut, callbacks=callbacks, on_event=tell)
    return Report(
        result=result,
        plan=msgspec.to_builtins(found),
        sample=tokens_html(sample),
        fingerprints=_fingerprints(loaded.encoder),
    )


def _train_meanwhile(run: RunConfig, callbacks: tuple[TrainerCallback, ...], tell: Listener) -> Report:
    """Train while another process prepares the rows."""
    from luthier.loader.feed import Feed, FeedJob, FeedReader, feed_folder
    from luthier.training.folder.run_folder import place_to_feed

    job = FeedJob(config=run, folder=(folder := feed_folder(run)), after=place_to_feed(run))
    with Feed.start(job) if is_main_process() else nullcontext() as feed:
        reader = FeedReader(folder) if feed is None else feed.reader
        tell(Remark(text="rows are prepared while the model is trained, in the order in which they are needed"))

        from luthier.check.show.html import tokens_html
        from luthier.encoding.encoder import Encoder
        from luthier.training.data import open_live_data
        from luthier.training.fit import fit_data
        from luthier.training.report.report import Report

        encoder = Encoder.from_config(run)
        views: list[RowView] = []

        def open_data() -> RunData:
            data = open_live_data(run, reader)
            views.append(_first_to_arrive(data, reader, encoder, tell))
            tell(FirstSample(rows=tuple(views)))
            return data

        result = fit_data(run, encoder.tokenizer, open_data, callbacks=callbacks, on_event=tell)
    return Report(result=result, fingerprints=_fingerprints(encoder), sample=tokens_html(views))


def _first_to_arrive(data: RunData, reader: FeedReader, encoder: Encoder, tell: Listener) -> RowView:
    """The first row of the run that is not lost."""
    from luthier.check.show.view import show_pack
    from luthier.records import Pack

    for text in reader.facts().told:
        tell(Remark(text=text))
    data.rows.wait_for_any()
    if not len(data.train):
        hint = "what became of them is in quarantine.jsonl, in output.dir"
        raise UserError("no training row is left", hint=hint, key="data.train")
    segment, tokenizer = data.train[0], encoder.tokenizer
    return show_pack(Pack(segments=(segment,)), tokenizer, title=str(segment.address), control=tokenizer.control_ids)


def _fingerprints(encoder: Encoder) -> dict[str, str]:
    return {"encoder": encoder.fingerprint, "tokenizer": encoder.tokenizer.fingerprint}


def _estimate(
    loaded: Loaded, schedule: StreamPlan, found: RunPlan, device: str | None, utilisation: float | None
) -> Estimate:
    """What the planned run will take on ``device``, by default the one that is here.

    Raises `ModelError` if the model's config cannot be read or says too little, `UserError` for an unknown device.
    """
    from luthier.check.plan import estimate, work
    from luthier.models.model import run_device

    config = loaded.config
    kind = "cuda" if device is not None else run_device(config)
    in_16_bits = estimate.computes_in_16_bits(config, on_gpu=kind == "cuda")
    of_device = estimate.present_device if device is None else estimate.device_named
    return estimate.estimate_run(
        config,
        work.shape_of_run(config, loaded.encoder.tokenizer),
        work.EpochWork.of_plan(schedule.epoch(0), schedule.rows.whole()),
        of_device(device or kind, in_16_bits=in_16_bits),
        total_steps=found.total_steps,
        num_devices=found.num_ranks,
        straggler_factor=found.train.straggler_factor,
        utilisation=utilisation,
    )
