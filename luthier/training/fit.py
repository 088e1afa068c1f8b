"""A run, from prepared data to the saved model, and what is reported of it when it has ended."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from luthier.config.choices import Packing
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.json_client import AnswerScorer
from luthier.errors import SamplerLost, UserError
from luthier.loader.settings import eval_settings, lost_documents, media_of, plan_of_run
from luthier.loader.stream_state import LoaderState
from luthier.media.families import PackingSupport
from luthier.metrics import JUDGE, metrics_of_answers
from luthier.models import adapter_files, set_caching, sharding, ungenerated
from luthier.models.model import run_device
from luthier.packing.epoch import plan_epoch, shares_of
from luthier.preparation import Prepared
from luthier.preparation.segments import SegmentIndex
from luthier.training import streams
from luthier.training.assemble import RunSetup, make_model, make_trainer, summarise_model
from luthier.training.callbacks import AnsweringBetween, EarlyStopping, Hooks, StopAgreement, StopSignals
from luthier.training.data import RunData, digest_of_rows, open_run_data, summary_of, tell_of_others
from luthier.training.folder import artifacts, run_folder
from luthier.training.folder.checkpoint import (
    OBJECTIVE_STATE,
    UnusableCheckpoint,
    broken_checkpoints,
    checkpoint_step,
    hold_run_folder,
    read_json,
    replacing,
    set_aside_broken,
    taking_over,
)
from luthier.training.folder.run_folder import ledger_of_run
from luthier.training.folder.state import plain_optimizer
from luthier.training.generate import AnswerMeasures, Question, answer_all, answering, choose_questions, passed_over_by
from luthier.training.processes import ended_trackers, naming_lost_ranks, optimizer_facts, own_numerics, peak_memory
from luthier.training.report import LOG_FILE, DataSummary, Ended, ModelSummary, RunResult, SourceSummary, events
from luthier.training.report.events import read_log
from luthier.training.rollouts import ledger_of_answers
from luthier.training.rollouts.drawing import Rollouts
from luthier.training.rollouts.held_out import HeldOutTalks, held_out_talks, with_rewards
from luthier.training.trainer import Trainer
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is ready for its first step."""

    setup: RunSetup
    trainer: Trainer
    summary: ModelSummary  # made now: merging takes the adapter off


def fit(
    config: RunConfig,
    encoder: Encoder,
    prepared: Prepared,
    *,
    cut: tuple[SegmentIndex, SegmentIndex | None] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    on_event: events.EventListener | None = None,
) -> RunResult:
    """Train as ``config`` says, and leave model, checkpoints, log and ``result.json`` in ``output.dir``.

    ``cut``: the segments of the prepared rows, if they are cut already (`loader.settings.cut_rows`). ``callbacks`` are
    transformers', called behind ours. ``on_event`` gets every event (`training.report.events`), on the main process. On
    SIGTERM, SIGINT or SIGHUP the step is finished, a checkpoint is saved, and the result says ``ended: interrupted``:
    exit with its ``exit_code`` (143, 130 or 129). A second signal ends the process at once with that code.

    Raises `ModelError`, `CheckpointError`, `BudgetError`, `ConfigError`, and `TrainingError` when the loss is no number
    any more; the checkpoints saved before stay.
    """
    data = open_run_data(config, prepared, encoder_fingerprint=encoder.fingerprint, cut=cut)
    return fit_data(config, encoder.tokenizer, data, callbacks=callbacks, on_event=on_event)


def fit_data(
    config: RunConfig,
    tokenizer: Tokenizer,
    data: RunData | Callable[[], RunData],
    *,
    callbacks: Sequence[TrainerCallback] = (),
    on_event: events.EventListener | None = None,
) -> RunResult:
    """`fit` for segments from anywhere. Data that is still on its way is asked for when the ranks have met."""
    sharding.refuse_other_ways(os.environ)
    with ExitStack() as holding, own_numerics() as not_followed, ended_trackers(config.tracking.report_to):
        return _fit(config, tokenizer, data, tuple(callbacks), on_event, not_followed, holding)


def idle_gpus(num_processes: int, num_gpus: int) -> Iterator[str]:
    """That a single process uses one GPU of several, and how to use all."""
    if num_processes == 1 and num_gpus > 1:
        yield (
            f"one GPU of {num_gpus} is used, as one process was started; all are with "
            f"torchrun --nproc-per-node {num_gpus} -m luthier train …"
        )


def _fit(
    config: RunConfig,
    tokenizer: Tokenizer,
    data: RunData | Callable[[], RunData],
    callbacks: tuple[TrainerCallback, ...],
    on_event: events.EventListener | None,
    not_followed: list[str],
    holding: ExitStack,
) -> RunResult:
    begun, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    _set_up_process(config)
    world = streams.World.from_environment()
    view = events.make_view(wanted=config.tracking.progress)
    listeners: list[events.EventListener] = [view] if on_event is None else [view, on_event]
    tell = events.tell_all(listeners) if world.is_main else events.silent
    try:
        if not_followed:
            tell(events.Note(text=f"ignored, because the run description decides: {', '.join(not_followed)}"))
        num_gpus = torch.cuda.device_count() if run_device(config) == "cuda" else 0
        for note in idle_gpus(world.size, num_gpus):
            tell(events.Note(text=note))
        config = as_packed(config, tokenizer, tell)
        with StopSignals() as signals, naming_lost_ranks(config.output.dir, world), ExitStack() as closing:
            _by_main(world, lambda: hold_run_folder(config.output.dir, holding))
            found = data if isinstance(data, RunData) else _open(data)
            hooks = Hooks(tell=tell, stop=StopAgreement(signals, world), closing=closing, callbacks=callbacks)
            run = _begun(lambda: _set_up(config, tokenizer, found, hooks, listeners))
            result = result_of(run, started_at)
    finally:
        if isinstance(view, events.ProgressBar):
            view.close()
    result = replace(result, seconds=time.perf_counter() - begun)
    if world.is_main:
        result.save()
        if result.model_dir is not None:
            (result.path / result.model_dir / "README.md").write_text(
                artifacts.model_card(result, config), encoding="utf-8"
            )
    run.trainer.accelerator.wait_for_everyone()
    return result


def as_packed(config: RunConfig, tokenizer: Tokenizer, tell: events.EventListener) -> RunConfig:
    """The run with rows of one segment, where its family of models cannot have several in a row."""
    media = media_of(config, tokenizer.files.folder)
    if media is None or not config.train.packing.is_packed:
        return config
    family = media.processor.family
    if family.packing is PackingSupport.PACKED:
        return config
    tell(
        events.Note(text=f"train.packing is none instead of {config.train.packing} for {family.name}: {family.reason}")
    )
    padded = {"packing": Packing.NONE, "shared_prompts": "auto"}  # such rows share nothing
    return config.model_copy(update={"train": config.train.model_copy(update=padded)})


def _open(data: Callable[[], RunData]) -> RunData:
    PartialState().wait_for_everyone()  # the main process has emptied the feed's folder by then
    return data()


def _set_up_process(config: RunConfig) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # of weights being loaded
    # joins the other ranks, under torchrun; nobody waits longer for another, on any device
    PartialState(cpu=run_device(config) == "cpu", timeout=timedelta(seconds=config.runtime.rank_timeout))
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)  # after accelerate, which gives each rank a share of the cores


def _set_up(
    config: RunConfig, tokenizer: Tokenizer, data: RunData, hooks: Hooks, listeners: list[events.EventListener]
) -> Run:
    world, state = hooks.stop.world, None
    here = streams.state_at_start(config, data, world)
    resume = _by_main(world, lambda: run_folder.open_run_folder(config, hooks.note))
    if resume is not None:
        state = LoaderState.load(resume)
        state.check(here, where=str(resume))
        hooks.note(f"training goes on from {resume.name}, step {state.step}")
    schedule = plan_of_run(config, data.rows, num_ranks=world.size, state=state)
    assert schedule.horizon > 0  # waits for the rows that decide the first step
    if not data.rows.all_here:  # else the plan has told it
        if schedule.horizon < streams.FEW_STEPS:
            hooks.note(f"about {counted(schedule.horizon, 'step')} teach the model next to nothing; {_longer(config)}")
        documents = lost_documents(config.train.packing, config.data.overflow)
        for note in (*([] if documents is None else [documents]), *streams.length_notes(config, schedule.horizon)):
            hooks.note(note)
    if world.is_main:
        step = -1 if resume is None else checkpoint_step(resume)  # -1: drop even the evaluation before training
        listeners[:] = [listener for listener in listeners if not isinstance(listener, events.LogFile)]
        listeners.append(events.LogFile(config.output.dir / LOG_FILE, step=step, tell=hooks.tell))
    if tokenizer.added_tokens:
        artifacts.transformers_tokenizer(tokenizer)  # raises now what saving would raise after hours
    setup = RunSetup(
        config=config,
        tokenizer=tokenizer,
        data=data,
        run_model=make_model(config, tokenizer, world, hooks.note, resume=resume),
        schedule=schedule,
        hooks=hooks,
        resume=resume,
    )
    if resume is not None and state is not None:
        run_folder.refuse_other_models(resume, config, tokenizer.files.folder, hooks.note)
        streams.check_rows(state, streams.loader_state(schedule, data, state.step), resume)
        tell_of_others(resume, data, hooks.note)
    trainer = make_trainer(setup)
    return Run(setup=setup, trainer=trainer, summary=summarise_model(setup, trainer))


def _longer(config: RunConfig) -> str:
    return "raise " + ("train.num_train_epochs" if config.train.max_steps is None else "train.max_steps")


def _by_main(world: streams.World, find: Callable[[], Path | None]) -> Path | None:
    """What the main process finds, on all ranks. They raise what it raises: else they wait for a rank that is gone."""
    found: list[Path | UserError | None] = [None]
    if world.is_main:
        try:
            found = [find()]
        except UserError as error:
            found = [error]
    if world.size > 1:
        broadcast_object_list(found)
    if isinstance(found[0], UserError):
        raise found[0]
    return found[0]


def _begun(set_up: Callable[[], Run]) -> Run:
    """Set up a run and train it. A checkpoint that it cannot take over is set aside, and the run is set up anew: it
    goes on from the one before, or from the beginning. A checkpoint that the user named is refused."""
    while True:
        run = set_up()
        try:
            _train(run)
            return run
        except UnusableCheckpoint as error:
            if run.setup.resume is None or run.setup.config.output.resume != "auto":
                raise
            if run.setup.world.is_main:
                run.setup.hooks.note(f"{error.message}; set aside as {set_aside_broken(run.setup.resume).name}")
            run.trainer.accelerator.wait_for_everyone()
        del run  # two models at once may be too many


def _train(run: Run) -> None:
    """Training, with what comes before and after it."""
    questions = _questions(run)
    trainer, resume, hooks = run.trainer, run.setup.resume, run.setup.hooks
    if resume is None:
        _answer(run, questions)
    else:
        trainer.parts.stream.load(resume)
        if (resume / OBJECTIVE_STATE).is_file():
            with taking_over(resume, OBJECTIVE_STATE):
                trainer.parts.losses.load_state(read_json(resume / OBJECTIVE_STATE))
    if trainer.parts.stream.rollouts is not None:
        between = AnsweringBetween(lambda: _answer(run, questions), run.setup.schedule.is_over)
        trainer.callback_handler.add_callback(between)
    try:
        if trainer.parts.stream.is_over:
            done = counted(trainer.parts.stream.first_step, "step")
            ways = f"{_longer(run.setup.config)} for more; output.overwrite: true starts it anew"
            hooks.note(f"nothing was left to do: all {done} of this run are taken; {ways}")
        trainer.train(resume, lambda: _leave_weights(run))
    except SamplerLost as lost:
        raise _saved_before(run, lost) from lost
    if hooks.stop.signal is not None:
        return
    _answer(run, questions)
    _save(run)
    trainer.accelerator.wait_for_everyone()


def _leave_weights(run: Run) -> None:
    """Training is over: the model has the weights that are saved, those of the best checkpoint where that is asked."""
    trainer, hooks = run.trainer, run.setup.hooks
    trainer.finish()
    hooks.tell(events.Finished(step=trainer.state.global_step))
    wants_best = run.setup.config.eval.load_best_model_at_end and hooks.stop.signal is None
    if wants_best and trainer.load_best():
        best = Path(trainer.state.best_model_checkpoint).name
        hooks.note(f"the weights are those of the best checkpoint, {best}")


def _saved_before(run: Run, lost: SamplerLost) -> SamplerLost:
    """What ends a run that has nobody to draw its answers; the steps that are done are saved, if any are new."""
    step, folder = run.trainer.state.global_step, run.setup.config.output.dir
    if step and not (folder / f"checkpoint-{step}").is_dir():
        run.trainer.save_checkpoint()
    saved = f"; checkpoint-{step} has the steps that are done, and the same command goes on from there" if step else ""
    return SamplerLost(f"{lost.message}{saved}", hint=lost.hint)


def _questions(run: Run) -> list[Question] | HeldOutTalks:
    config, data, model = run.setup.config, run.setup.data, run.setup.run_model
    wanted = config.eval.generate_rows
    if not wanted:
        return []
    metrics_of_answers(config.eval.metrics)  # raises before any answer is generated
    if (reason := ungenerated(model.loaded.model.config)) is not None:
        hint = "set eval.generate_rows: 0; held-out rows are still measured by their loss"
        raise UserError(f"eval.generate_rows is {wanted}, and {reason}", hint=hint)
    if data.eval is None:
        hint = "set data.eval or data.eval_split"
        raise UserError(f"eval.generate_rows is {wanted}, but there are no held-out rows", hint=hint)
    talks = held_out_talks(run.trainer.parts.stream.rollouts, config, data.eval, run.setup.hooks.note)
    stops = frozenset(run.setup.tokenizer.stop_token_ids)
    found = choose_questions(data.eval, wanted, stops) if talks is None else []
    number = len(found if talks is None else talks.questions)
    if number < wanted:
        answerable = counted(number, "held-out row")
        run.setup.hooks.note(f"{answerable} can be answered, eval.generate_rows asks for {wanted}")
    if passed_over := passed_over_by(model.model):
        run.setup.hooks.note(f"answers are generated as generate.* says, not the model's {passed_over}")
    return talks if talks is not None and talks.questions else found


def _answer(run: Run, questions: list[Question] | HeldOutTalks) -> None:
    """Answer the questions on the main process; the others wait at the next step they share. A sharded model has to run
    on all of them at once, so that all answer the same."""
    config, run_model, hooks = run.setup.config, run.setup.run_model, run.setup.hooks
    is_main = run.setup.world.is_main
    if questions and (is_main or sharding.is_sharded(run_model.model)):
        step, names = run.trainer.state.global_step, config.eval.metrics
        judge = AnswerScorer(config.judge) if is_main and JUDGE in names else None
        measures = AnswerMeasures(metrics=metrics_of_answers(names), judge=judge)
        rollouts = run.trainer.parts.stream.rollouts
        if rollouts is not None:  # what tools and rewards say may differ between ranks, and with it what is drawn
            sharding.gather_all(run_model.model)
        if isinstance(questions, HeldOutTalks):
            assert isinstance(rollouts, Rollouts), "they are what leads conversations"
            answers = questions.answer_all(step, rollouts, measures.metrics)
        else:
            answers = answer_all(
                run_model.model,
                questions,
                run.setup.tokenizer,
                step=step,
                batch_size=config.eval.per_device_eval_batch_size,
                settings=answering(config),
                media=run_model.media,
                measures=measures,
            )
            if isinstance(rollouts, Rollouts):
                answers = with_rewards(answers, questions, rollouts, answering(config), measures.drawn)
        sharding.give_up_gathered(run_model.model)
        hooks.tell(answers)
        if unjudged := answers.unjudged:
            told = "; ".join(f"{reason}: {count}" for reason, count in unjudged.items())
            hooks.note(f"{counted(sum(unjudged.values()), 'answer has', 'answers have')} no score of the judge: {told}")
    run.trainer.accelerator.wait_for_everyone()


def _save(run: Run) -> None:
    """The final model, and the merged one if asked for: the main process writes, all gather what is sharded."""
    run_model, tokenizer, config = run.setup.run_model, run.setup.tokenizer, run.setup.config
    is_main, folder = run.setup.world.is_main, config.output.dir
    weights = sharding.whole_weights(run_model.model, keep=is_main) if sharding.is_sharded(run_model.model) else None
    if not is_main:
        return
    with replacing(folder / run_folder.MODEL_FOLDER) as staging:
        run_model.save(staging, tokenizer, weights)
    if config.adapter.merge and isinstance(run_model.model, PeftModel):
        merged = adapter_files.merge_adapter(run_model.model)
        set_caching(merged, run_model.use_cache)
        with replacing(folder / run_folder.MERGED_FOLDER) as staging:
            artifacts.save_model(merged, staging, tokenizer, processor=run_model.processor)


# ----------------------------------------------------------------------------------------------------------------------
# What is reported of a run.


REPORTED_VERSIONS = ("luthier", "torch", "transformers", "peft", "accelerate")


def result_of(run: Run, started_at: str) -> RunResult:
    """What the run leaves to be reported, but for how long it took."""
    config, data, hooks, resume = run.setup.config, run.setup.data, run.setup.hooks, run.setup.resume
    state, output = run.trainer.state, config.output.dir
    steps, evals, generations = read_log(output / LOG_FILE, hooks.tell)
    signal = hooks.stop.signal
    stopped_early = any(isinstance(c, EarlyStopping) and c.stopped for c in run.trainer.callback_handler.callbacks)
    merged = config.adapter.merge and isinstance(run.setup.run_model.model, PeftModel)
    eval_data = None
    if data.eval_rows is not None:
        eval_plan = eval_settings(config, num_ranks=run.setup.world.size)
        eval_data = summary_of(plan_epoch(data.eval_rows, eval_plan, epoch=0), data.eval_rows)
    return RunResult(
        output_dir=str(output),
        model_dir=run_folder.MODEL_FOLDER if signal is None else None,
        merged_dir=run_folder.MERGED_FOLDER if merged and signal is None else None,
        adapter=config.adapter.type.value,
        ended=Ended.INTERRUPTED if signal is not None else Ended.EARLY_STOPPED if stopped_early else Ended.COMPLETED,
        signal=signal,
        started_at=started_at,
        seconds=0.0,
        epochs=run.setup.schedule.epoch_after(state.global_step),
        global_step=state.global_step,
        max_steps=run.setup.schedule.total_steps,
        world_size=run.setup.world.size,
        resumed_from=None if resume is None else resume.name,
        set_aside=tuple(broken_checkpoints(output)),
        steps=steps,
        evals=evals,
        # a finished run that is started again answers again
        generations=tuple({done.step: done for done in generations}.values()),
        best_checkpoint=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
        best_metric=state.best_metric,
        train_data=_train_summary(run.setup),
        eval_data=eval_data,
        mixture=_mixture(run.setup, state.global_step),
        model=run.summary,
        optimizer=optimizer_facts(plain_optimizer(run.trainer.optimizer)),
        peak_memory_bytes=peak_memory(),
        ledger=_ledger(run.setup, state.global_step),
        answers=ledger_of_answers(output, state.global_step) if config.objective.kind.on_policy else {},
        versions={"python": platform.python_version(), **{name: version(name) for name in REPORTED_VERSIONS}},
        config=config.model_dump(mode="json"),
        base_files=dict(run.setup.run_model.base_files),
        held_out="" if data.eval is None or not config.data.eval_split else digest_of_rows(data.eval),
    )


def _ledger(setup: RunSetup, steps: int) -> dict[str, object]:
    """What became of every row that was read; segments in memory have no ledger."""
    if not setup.data.ledger:
        return {}
    trained = [setup.data.rows.address(int(first)) for first in setup.schedule.trained_rows(steps)]
    return ledger_of_run(setup.data.ledger, setup.config.output.dir, trained)


def _mixture(setup: RunSetup, steps: int) -> tuple[SourceSummary, ...]:
    """What all steps of the run took, from its plan."""
    shares = shares_of(setup.schedule.source_counts(steps))
    return tuple(
        SourceSummary(
            name=name,
            rows=share.rows,
            segments=share.segments,
            tokens=share.tokens,
            targets=share.targets,
            share_of_tokens=share.share_of_tokens,
        )
        for name, share in zip(setup.data.sources, shares, strict=True)
    )


def _train_summary(setup: RunSetup) -> DataSummary:
    """The first epoch: all of it, or what was planned of rows that arrive."""
    if setup.data.rows.all_here:
        return summary_of(setup.schedule.epoch(0), setup.data.rows)
    found = setup.schedule.first_epoch()
    return DataSummary(
        segments=found["segments"],
        tokens=found["tokens"],
        target_tokens=found["targets"],
        micro_batches=found["micro_batches"],
        fill=found["tokens"] / max(found["packs"] * setup.config.data.max_length, 1),
    )
