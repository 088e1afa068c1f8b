"""A run, from prepared data to the saved model."""

from __future__ import annotations

import platform
import resource
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers.utils import logging as transformers_logging

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.prepared import Prepared
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import UserError
from luthier.train import adapters, artifacts, run_folder
from luthier.train.assemble import (
    Hooks,
    RunModel,
    StopAgreement,
    World,
    eval_settings,
    loader_state,
    make_model,
    make_schedule,
    make_trainer,
    summarise_model,
)
from luthier.train.callbacks import EarlyStopping
from luthier.train.checkpoint import checkpoint_step
from luthier.train.data import RunData, open_run_data, summarise
from luthier.train.events import Event, Finished, Listener, Note, tell_all
from luthier.train.generate import Question, answer_all, choose_questions
from luthier.train.isolation import check_isolation
from luthier.train.journal import LogFile, read_log
from luthier.train.loader import LoaderState
from luthier.train.model import run_device
from luthier.train.progress import ProgressBar, make_view
from luthier.train.result import LOG_FILE, Ended, ModelSummary, RunResult
from luthier.train.schedule import Schedule
from luthier.train.signals import StopSignals
from luthier.train.trainer import LuthierTrainer

REPORTED_VERSIONS = ("luthier", "torch", "transformers", "peft", "accelerate")


def fit(config: RunConfig, encoder: Encoder, prepared: Prepared, *, on_event: Listener | None = None) -> RunResult:
    """Train as ``config`` says, and leave model, checkpoints, log and ``result.json`` in ``output.dir``.

    ``on_event`` gets every `luthier.train.events.Event`, on the main process. On SIGTERM or SIGINT the step is
    finished, a checkpoint is saved, and the result says ``ended: interrupted``: exit with its ``exit_code`` (143 or
    130). A second signal ends the process at once with the same code.

    Raises `ModelError`, `CheckpointError`, `BudgetError`, `ConfigError`, and `TrainingError` when the loss is no number
    any more; the checkpoints saved before stay.
    """
    data = open_run_data(config, prepared, encoder_fingerprint=encoder.fingerprint)
    return fit_data(config, encoder.tokenizer, data, on_event=on_event)


def fit_data(config: RunConfig, tokenizer: Tokenizer, data: RunData, *, on_event: Listener | None = None) -> RunResult:
    """`fit` for segments from anywhere."""
    begun, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    _set_up_process(config)
    world = World.from_environment()
    view = make_view(wanted=config.tracking.progress)
    listeners: list[Listener] = [view] if on_event is None else [view, on_event]
    tell = tell_all(listeners) if world.is_main else _silent
    try:
        with StopSignals() as signals:
            run = _set_up(config, tokenizer, data, Hooks(tell=tell, stop=StopAgreement(signals, world)), listeners)
            _train(run)
            result = _result(run, started_at)
    finally:
        if isinstance(view, ProgressBar):
            view.close()
    result = replace(result, seconds=time.perf_counter() - begun)
    if world.is_main:
        result.save()
        if result.model_dir is not None:
            artifacts.write_model_card(result, config, result.path / result.model_dir)
    run.trainer.accelerator.wait_for_everyone()
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Everything of a run that is set up before its first step."""

    config: RunConfig
    tokenizer: Tokenizer
    data: RunData
    hooks: Hooks
    schedule: Schedule
    resume: Path | None
    run_model: RunModel
    trainer: LuthierTrainer
    summary: ModelSummary  # made now: merging takes the adapter off

    @property
    def is_main(self) -> bool:
        return self.hooks.stop.world.is_main


def _set_up_process(config: RunConfig) -> None:
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # of weights being loaded
    PartialState(cpu=run_device(config) == "cpu")  # joins the other ranks, under torchrun


def _set_up(config: RunConfig, tokenizer: Tokenizer, data: RunData, hooks: Hooks, listeners: list[Listener]) -> _Run:
    world = hooks.stop.world
    schedule = make_schedule(config, data, world)
    resume = _open_folder(config, loader_state(schedule, data, 0), hooks)
    if world.is_main:
        step = -1 if resume is None else checkpoint_step(resume)  # -1: drop even the evaluation before training
        listeners.append(LogFile(config.output.dir / LOG_FILE, step=step))
    run_model = make_model(config, tokenizer, world, hooks.tell)
    trainer = make_trainer(config, tokenizer, data, run_model, schedule, resumed=resume is not None, hooks=hooks)
    if trainer.parts.stream.how.packed:
        check_isolation(run_model.model, data.train, trainer.parts.stream.how, device=trainer.args.device)
    return _Run(
        config=config,
        tokenizer=tokenizer,
        data=data,
        hooks=hooks,
        schedule=schedule,
        resume=resume,
        run_model=run_model,
        trainer=trainer,
        summary=summarise_model(config, run_model, trainer),
    )


def _open_folder(config: RunConfig, here: LoaderState, hooks: Hooks) -> Path | None:
    """The checkpoint to go on from, the same on all ranks, checked against this run's stream."""
    world = hooks.stop.world
    chosen: list[str | None] = [None]
    if world.is_main:
        found = run_folder.open_run_folder(config, lambda text: hooks.tell(Note(text=text)))
        chosen = [None if found is None else str(found)]
    if world.size > 1:
        broadcast_object_list(chosen)
    if chosen[0] is None:
        return None
    checkpoint = Path(chosen[0])
    there = LoaderState.load(checkpoint)
    there.check(here, checkpoint)
    hooks.tell(Note(text=f"going on from {checkpoint.name}: step {there.step}"))
    return checkpoint


def _train(run: _Run) -> None:
    """Training, with what comes before and after it."""
    questions = _questions(run)
    if run.resume is None:
        _answer(run, questions)
    run.trainer.train(resume_from_checkpoint=None if run.resume is None else str(run.resume))
    run.hooks.tell(Finished(step=run.trainer.state.global_step))
    if run.hooks.stop.signal is not None:
        return
    if run.config.eval.load_best_model_at_end and run.trainer.load_best():
        best = Path(run.trainer.state.best_model_checkpoint).name
        run.hooks.tell(Note(text=f"the weights are those of the best checkpoint, {best}"))
    _answer(run, questions)
    if run.is_main:
        _save(run)
    run.trainer.accelerator.wait_for_everyone()


def _questions(run: _Run) -> list[Question]:
    wanted = run.config.eval.generate_rows
    if not wanted:
        return []
    if run.data.eval is None:
        raise UserError(
            f"eval.generate_rows is {wanted}, but there are no held-out rows", hint="set data.eval or data.eval_split"
        )
    found = choose_questions(run.data.eval, wanted, frozenset(run.tokenizer.stop_token_ids))
    if len(found) < wanted:
        run.hooks.tell(Note(text=f"{len(found)} held-out rows can be answered, eval.generate_rows asks for {wanted}"))
    return found


def _answer(run: _Run, questions: list[Question]) -> None:
    """Answer the questions on the main process; the others wait at the next step they share."""
    if questions and run.is_main:
        answers = answer_all(
            run.run_model.model,
            questions,
            run.tokenizer,
            step=run.trainer.state.global_step,
            batch_size=run.config.eval.per_device_eval_batch_size,
            max_new_tokens=run.config.eval.max_new_tokens,
        )
        run.hooks.tell(answers)
    run.trainer.accelerator.wait_for_everyone()


def _save(run: _Run) -> None:
    """The final model, and the merged one if asked for."""
    folder = run.config.output.dir
    run.run_model.save(folder / run_folder.MODEL_FOLDER, run.tokenizer)
    if run.config.adapter.merge and isinstance(run.run_model.model, PeftModel):
        merged = adapters.merge_adapter(run.run_model.model)
        merged.config.use_cache = run.run_model.use_cache
        artifacts.save_model(merged, folder / run_folder.MERGED_FOLDER, run.tokenizer)


def _result(run: _Run, started_at: str) -> RunResult:
    config, state, output = run.config, run.trainer.state, run.config.output.dir
    steps, evals, generations = read_log(output / LOG_FILE)
    signal = run.hooks.stop.signal
    stopped_early = any(isinstance(c, EarlyStopping) and c.stopped for c in run.trainer.callback_handler.callbacks)
    world = run.hooks.stop.world
    merged = run.config.adapter.merge and isinstance(run.run_model.model, PeftModel)
    return RunResult(
        output_dir=str(output),
        model_dir=run_folder.MODEL_FOLDER if signal is None else None,
        merged_dir=run_folder.MERGED_FOLDER if merged and signal is None else None,
        adapter=config.adapter.type.value,
        ended=Ended.INTERRUPTED if signal is not None else Ended.EARLY_STOPPED if stopped_early else Ended.COMPLETED,
        signal=signal,
        started_at=started_at,
        seconds=0.0,
        epochs=run.schedule.epoch_after(state.global_step),
        global_step=state.global_step,
        max_steps=run.schedule.total_steps,
        world_size=world.size,
        resumed_from=None if run.resume is None else run.resume.name,
        steps=steps,
        evals=evals,
        # a finished run that is started again answers again
        generations=tuple({done.step: done for done in generations}.values()),
        best_checkpoint=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
        best_metric=state.best_metric,
        train_data=summarise(run.data.train_table, run.schedule.settings),
        eval_data=None if run.data.eval_table is None else summarise(run.data.eval_table, eval_settings(config, world)),
        model=run.summary,
        peak_memory_bytes=_peak_memory(),
        ledger=run.data.ledger,
        versions={"python": platform.python_version(), **{name: version(name) for name in REPORTED_VERSIONS}},
        config=config.model_dump(mode="json"),
    )


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _silent(_: Event) -> None:
    """What ranks other than the first have to say."""
