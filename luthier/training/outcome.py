"""A run that is ready for its first step, and what is reported of it when it has ended."""

from __future__ import annotations

import functools
import platform
import resource
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from peft import PeftModel

from luthier.config.objective import OBJECTIVES
from luthier.loader.settings import eval_settings
from luthier.packing.epoch import plan_epoch, shares_of
from luthier.training.assemble import RunSetup
from luthier.training.callbacks import EarlyStopping
from luthier.training.data import summary_of
from luthier.training.folder import run_folder
from luthier.training.folder.checkpoint import broken_checkpoints
from luthier.training.folder.run_folder import ledger_of_run
from luthier.training.folder.state import plain_optimizer
from luthier.training.numerics import optimizer_facts
from luthier.training.report.events import read_log
from luthier.training.report.result import LOG_FILE, DataSummary, Ended, ModelSummary, RunResult, SourceSummary
from luthier.training.rollouts.answer_groups import ledger_of_answers
from luthier.training.trainer import Trainer

REPORTED_VERSIONS = ("luthier", "torch", "transformers", "peft", "accelerate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is ready for its first step."""

    setup: RunSetup
    trainer: Trainer
    summary: ModelSummary  # made now: merging takes the adapter off


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
        peak_memory_bytes=_peak_memory(),
        ledger=_ledger(run.setup, state.global_step),
        answers=ledger_of_answers(output, state.global_step) if OBJECTIVES[config.objective.name].on_policy else {},
        versions={"python": platform.python_version(), **_package_versions()},
        config=config.model_dump(mode="json"),
    )


@functools.cache
def _package_versions() -> dict[str, str]:
    return {name: version(name) for name in REPORTED_VERSIONS}


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


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
