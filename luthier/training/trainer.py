"""transformers' Trainer with our stream, our loss, our evaluation and our checkpoints. W ranks."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DefaultFlowCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from luthier.errors import TrainingError, UserError
from luthier.loader.plan import StreamPlan
from luthier.models import sharding
from luthier.models.adapters import split_loraplus_groups
from luthier.models.sharding import restore_weights
from luthier.records import Address, Batch
from luthier.training.callbacks import Meter
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.state import (
    UNREADABLE,
    check_alike,
    evaluation_point,
    go_to_evaluation_point,
    has_state,
    optimizer_state,
    put_optimizer_state,
    random_state,
    read_state,
    set_random_state,
    write_state,
)
from luthier.training.losses.mean_losses import LossSums, MeanLosses
from luthier.training.losses.router_balance import RouterBalance
from luthier.training.losses.step_losses import ACCURACY, StepLosses, in_turns, learned_from
from luthier.training.report.result import ACCURACIES
from luthier.training.streams import EvalStream, TrainStream


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What our trainer needs beside the model and transformers' arguments.

    sources       names of the data sets, by number; where there are several, losses are told apart
    losses        what is minimised; ``eval_losses``: what is measured on held-out rows
    save_model    writes weights, config and tokenizer into a folder (main process only); of a sharded model the whole
                  weights come along
    save_state    adds the loader's state and the run description to a checkpoint's folder
    """

    stream: TrainStream
    eval_stream: EvalStream | None
    sources: tuple[str, ...]
    eval_sources: tuple[str, ...]
    losses: StepLosses
    eval_losses: StepLosses
    loraplus_lr_ratio: float | None
    save_total_limit: int | None
    keep_best: bool
    meter: Meter
    save_model: Callable[[Path, dict[str, torch.Tensor] | None], None]
    save_state: Callable[[Path, int], None]


class LuthierTrainer(Trainer):  # type: ignore[misc]  # transformers publishes no types
    """One run. The loss of a step is the sum over its targets (or pairs, or rows) on all ranks, divided by their
    number."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, parts: TrainerParts, callbacks: list[TrainerCallback]
    ) -> None:
        self.parts = parts
        self._step_losses: list[tuple[torch.Tensor, tuple[Address, ...]]] = []
        self._interval = LossSums(parts.sources, parts.losses.measured, args.device)
        self.balance = RouterBalance(parts.losses)
        super().__init__(
            model=model,
            args=args,
            train_dataset=parts.stream,
            eval_dataset=parts.eval_stream,
            data_collator=lambda batch: batch,
        )
        # ours come first: trackers are to see the epoch that `Flow` counts
        for added in (DefaultFlowCallback, PrinterCallback):
            self.remove_callback(added)
        self.callback_handler.callbacks[:0] = callbacks
        # transformers' name for a model that is not to be wrapped, as it adds up gradients by itself
        self.is_distributed_loading_by_transformers = sharding.is_sharded(model)
        self.loss_is_scaled_for_ga = True

    # ------------------------------------------------------------------------------------------------- batches

    def get_train_dataloader(self) -> TrainStream:
        """This rank's micro-batches from here on; they are shared out already, so accelerate must not."""
        return self.parts.stream

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The micro-batches of one step on this rank, and what its loss is divided by, counted on all ranks."""
        step = self.state.global_step
        batches = [next(epoch_iterator) for _ in range(self.parts.stream.schedule.turns(step))]
        counts = [(self.parts.losses.num_units(batch), batch.num_targets) for batch in batches]
        counts_T2 = self.accelerator.reduce(torch.tensor(counts, device=device), reduction="sum")
        units, targets = counts_T2.sum(dim=0)
        self.parts.meter.tokens += self.parts.stream.schedule.num_tokens(step)
        self.parts.meter.targets += int(targets)
        self._step_losses.clear()
        learned = learned_from(batches, counts_T2)
        self.parts.losses.begin_step(self.model, learned, self._sum_of_ranks)
        self.balance.begin_step(self.model, learned, self._sum_of_ranks)
        return [{"batches": turn} for turn in in_turns(learned, num_batches)], units  # the loop wants mappings

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, list[Batch]],
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward and backward of a turn's micro-batches; ranks add up gradients after the last of a step."""
        micro_batch: Callable[..., torch.Tensor] = super().training_step
        loss = torch.zeros((), device=self.args.device)
        *first, last = inputs["batches"] or (None,)
        with self.accelerator.no_sync(model) if first else nullcontext():
            for batch in first:
                loss += micro_batch(model, {"batch": batch}, num_items_in_batch)
        return loss if last is None else loss + micro_batch(model, {"batch": last}, num_items_in_batch)

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        """Not deferred: until the last micro-batch of a step each rank would hold the gradients of the whole model."""
        return nullcontext()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: transformers' formula counts padding and no attention."""
        return 0

    # ---------------------------------------------------------------------------------------------------- loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Batch],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This micro-batch's part of the step's loss, times W, since DDP averages gradients over W ranks."""
        assert num_items_in_batch is not None and not return_outputs
        batch = inputs["batch"]
        with self.balance.counting():
            sums = self.parts.losses.loss(model, batch)
        self._interval.add(sums)
        ranks = self.accelerator.num_processes
        loss: torch.Tensor = sums.loss_sum * (ranks / num_items_in_batch.clamp(min=1)) + self.balance.loss() * ranks
        self._step_losses.append((loss.detach(), batch.addresses))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers does; the loss of an interval is the one per unit, in all and of each data set."""
        if "loss" in logs:  # the end of an interval, on all ranks
            found = self._interval.drain(self._sum_of_ranks)
            balance = self.balance.drain()
            logs = {**logs, **found.to_logs("loss", "targets"), **found.measures, **balance}
        super().log(logs, start_time)

    def _sum_of_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(sums, reduction="sum")
        return total

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> Any:
        """The gradient's norm; raises `TrainingError` before the update if it or a loss is not finite."""
        norm = sharding.whole_gradient_norm(super()._get_grad_norm(model, grad_norm=grad_norm))
        # under fp16 the loss scaler skips steps whose gradients overflow, which is no fault
        checked = norm if self.accelerator.scaler is None else None
        check_finite(self._step_losses, checked, step=self.state.global_step + 1)
        self.parts.losses.end_step(self._sum_of_ranks)
        return norm

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Transformers' optimizer, with LoRA+ groups if asked for."""
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if fresh and self.parts.loraplus_lr_ratio is not None:
            split_loraplus_groups(optimizer, self.model, self.parts.loraplus_lr_ratio)
        if fresh and sharding.is_sharded(self.model):
            sharding.load_in_parts(optimizer)
        return optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Transformers' schedule; on the run's progress where the number of steps is an estimate."""
        fresh = self.lr_scheduler is None
        scheduler: torch.optim.lr_scheduler.LRScheduler = super().create_scheduler(num_training_steps, optimizer)
        steps = self.parts.stream.schedule
        if fresh and not steps.is_exact and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            put_on_progress(scheduler, steps)
        return scheduler

    # ---------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss per unit and all measures over the held-out rows, by sums over all ranks."""
        assert eval_dataset is None and self.parts.eval_stream is not None
        begun = time.perf_counter()
        with evaluation_point(self.optimizer):
            found = self._eval_losses(self.parts.eval_stream)
        metrics = {
            **found.to_logs("eval_loss", "eval_num_targets"),
            **{f"eval_{name}": value for name, value in found.measures.items()},
            "eval_num_targets": found.num_units,
            "eval_seconds": time.perf_counter() - begun,
        }
        if ACCURACY in found.measures:  # the loss is that of tokens
            metrics["eval_perplexity"] = math.exp(min(found.loss, 700.0))  # a float ends at e^709
        if ACCURACIES in found.measures:
            metrics["eval_accuracy"] = found.measures[ACCURACIES]
        self.log(metrics)
        # switches `should_evaluate` off in place
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.parts.meter.paused += time.perf_counter() - begun
        return metrics

    def _eval_losses(self, stream: EvalStream) -> MeanLosses:
        losses = self.parts.eval_losses
        sums = LossSums(self.parts.eval_sources, losses.measured, self.args.device)
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            losses.begin_step(self.model, stream, self._sum_of_ranks)
            for batch in stream:
                sums.add(losses.loss(self.model, batch))
        sharding.give_up_gathered(self.model)
        self.model.train(training)
        return sums.drain(self._sum_of_ranks)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As transformers does; a new best is saved at once if it is to be loaded at the end."""
        best = bool(super()._determine_best_metric(metrics=metrics, trial=trial))
        if best and self.parts.keep_best:
            self.control.should_save = True
        return best

    # --------------------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside, seal it, and delete the ones over the limit. Raises `CheckpointError`."""
        begun = time.perf_counter()
        run, step = Path(self.args.output_dir), self.state.global_step
        staging = checkpoints.staging_folder(run, step)
        best = run / f"checkpoint-{self.state.best_global_step}"
        with checkpoints.saving(staging), evaluation_point(self.optimizer) as trained:
            self._write_checkpoint(staging, best, trained)
            if self.args.should_save:
                checkpoints.seal(staging)
        if self.args.should_save:
            checkpoints.rotate(run, self.parts.save_total_limit, best)
        self.accelerator.wait_for_everyone()
        self.parts.meter.paused += time.perf_counter() - begun

    def _write_checkpoint(self, staging: Path, best: Path, trained: list[torch.Tensor] | None) -> None:
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.save_model(str(staging), _internal_call=True)
        if not self.args.save_only_model:
            self._save_training_state(staging, trained)
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step == self.state.global_step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.parts.save_state(staging, self.state.global_step)
            self.state.save_to_json(str(staging / checkpoints.TRAINER_STATE))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Weights, config, tokenizer; no pickle of the arguments."""
        assert output_dir is not None
        keep = self.args.should_save
        weights = sharding.whole_weights(self.model, keep=keep) if sharding.is_sharded(self.model) else None
        if keep:
            self.parts.save_model(Path(output_dir), weights)

    def _save_training_state(self, staging: Path, trained: list[torch.Tensor] | None) -> None:
        """Optimizer, schedule, scaler of fp16, and the random numbers of each rank, as data. No pickle is written."""
        keep, sharded = self.args.should_save, sharding.is_sharded(self.model)
        state = optimizer_state(self.optimizer, trained, sharded=sharded, keep=keep)
        if keep:
            write_state(staging, checkpoints.OPTIMIZER_STATE, state)
            write_state(staging, checkpoints.SCHEDULER_STATE, self.lr_scheduler.state_dict())
            if self.accelerator.scaler is not None:
                write_state(staging, checkpoints.SCALER_STATE, self.accelerator.scaler.state_dict())
        write_state(staging, checkpoints.RANDOM_STATE.format(rank=self.args.process_index), random_state())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on with the optimizer and the schedule of a checkpoint. Raises `UnusableCheckpoint`."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        with taking_over(folder, checkpoints.OPTIMIZER_STATE):
            put_optimizer_state(self.optimizer, read_state(folder, checkpoints.OPTIMIZER_STATE))
        with taking_over(folder, checkpoints.SCHEDULER_STATE):
            schedule = read_state(folder, checkpoints.SCHEDULER_STATE)
            check_alike(schedule, self.lr_scheduler.state_dict(), "schedule")
            self.lr_scheduler.load_state_dict(schedule)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Go on with the loss scaler of a run in fp16. Raises `UnusableCheckpoint`."""
        scaler = self.accelerator.scaler
        if checkpoint is None or scaler is None or not has_state(Path(checkpoint), checkpoints.SCALER_STATE):
            return
        with taking_over(Path(checkpoint), checkpoints.SCALER_STATE):
            state = read_state(Path(checkpoint), checkpoints.SCALER_STATE)
            check_alike(state, scaler.state_dict(), "scaler")
            scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with this rank's random numbers; with another number of ranks there may be none for it."""
        name = checkpoints.RANDOM_STATE.format(rank=self.args.process_index)
        if checkpoint is not None and has_state(Path(checkpoint), name):
            with taking_over(Path(checkpoint), name):
                set_random_state(read_state(Path(checkpoint), name))

    def finish(self) -> None:
        """No step comes any more: the weights are from here on those that were learned."""
        go_to_evaluation_point(self.optimizer)

    def load_best(self) -> bool:
        """Put the best checkpoint's weights into the model, if there is one."""
        best = self.state.best_model_checkpoint
        if best is None or not Path(best).is_dir():
            return False
        self._load_from_checkpoint(best)
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        with taking_over(folder, "weights"):
            restore_weights(self.model, folder)


@contextmanager
def taking_over(checkpoint: Path, name: str) -> Iterator[None]:
    """Tell what a checkpoint holds and this run cannot take over as one `UnusableCheckpoint`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE as error:
        reason = error.message if isinstance(error, UserError) else str(error) or type(error).__name__
        raise checkpoints.UnusableCheckpoint(
            f"{checkpoint}: its {name} cannot be taken over: {reason[:500]}",
            hint="go on from another checkpoint, with output.resume, or begin anew, with output.overwrite: true",
        ) from error


# --------------------------------------------------------------------------------------------------------------------
# A step whose loss or gradient is no number ends the run before it spoils the weights.


MAX_ROWS_NAMED = 8


def check_finite(
    losses: Sequence[tuple[torch.Tensor, tuple[Address, ...]]], norm: torch.Tensor | float | None, *, step: int
) -> None:
    """Raise `TrainingError`, with the rows, if the loss of one of a step's micro-batches, or the ``norm`` of the step's
    gradient (None: not to be looked at), is not finite."""
    values = [loss for loss, _ in losses]
    if norm is not None:
        values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
    if torch.isfinite(torch.stack(values)).all():  # one look at the device a step
        return
    guilty = [addresses for loss, addresses in losses if not torch.isfinite(loss)]
    rows = [str(row) for addresses in guilty or [a for _, a in losses] for row in addresses]
    named = ", ".join(rows[:MAX_ROWS_NAMED]) + (
        f" and {len(rows) - MAX_ROWS_NAMED} more" if len(rows) > MAX_ROWS_NAMED else ""
    )
    what = "the loss" if guilty else f"the gradient's norm ({norm if norm is None else float(norm)})"
    raise TrainingError(
        f"step {step}: {what} is not a finite number; the weights are those of step {step - 1}\n"
        f"  rows of the batch: {named}",
        hint="lower train.learning_rate, raise train.warmup_steps, use train.precision bf16 or fp32, or look at "
        "those rows",
    )


# --------------------------------------------------------------------------------------------------------------------
# The learning rate's schedule where the number of steps is an estimate.


def put_on_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: StreamPlan) -> None:
    """Ask the schedule not for the number of steps done, but for as many of ``horizon`` as the run's progress is."""

    def on_progress(multiplier: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda steps_done: multiplier(steps.progress(steps_done) * steps.horizon)

    scheduler.lr_lambdas = [on_progress(multiplier) for multiplier in scheduler.lr_lambdas]
