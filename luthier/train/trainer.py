"""transformers' Trainer with our stream, our loss, our evaluation and our checkpoints. W ranks."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DefaultFlowCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from luthier.errors import TrainingError
from luthier.records import Address, Batch
from luthier.train import checkpoint as checkpoints
from luthier.train.adapters import split_loraplus_groups
from luthier.train.callbacks import Meter
from luthier.train.losses import LossSums, MeanLosses
from luthier.train.restore import restore_weights
from luthier.train.result import ACCURACIES
from luthier.train.schedule import Steps
from luthier.train.step_losses import ACCURACY, StepLosses, in_turns, learned_from
from luthier.train.streams import EvalStream, TrainStream

MAX_ROWS_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What our trainer needs beside the model and transformers' arguments.

    sources       names of the data sets, by number; where there are several, losses are told apart
    losses        what is minimised; ``eval_losses``: what is measured on held-out rows
    save_model    writes weights, config and tokenizer into a folder (main process only)
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
    save_model: Callable[[Path], None]
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
        sums = self.parts.losses.loss(model, batch)
        self._interval.add(sums)
        loss: torch.Tensor = sums.loss_sum * (self.accelerator.num_processes / num_items_in_batch.clamp(min=1))
        self._step_losses.append((loss.detach(), batch.addresses))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers does; the loss of an interval is the one per unit, in all and of each data set."""
        if "loss" in logs:  # the end of an interval, on all ranks
            found = self._interval.drain(self._sum_of_ranks)
            logs = {**logs, **found.to_logs("loss", "targets"), **found.measures}
        super().log(logs, start_time)

    def _sum_of_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(sums, reduction="sum")
        return total

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> Any:
        """The gradient's norm; raises `TrainingError` before the update if it or a loss is not finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._check_finite(norm)
        self.parts.losses.end_step(self._sum_of_ranks)
        return norm

    def _check_finite(self, norm: Any) -> None:
        # under fp16 the loss scaler skips steps whose gradients overflow, which is no fault
        values = [loss for loss, _ in self._step_losses]
        if self.accelerator.scaler is None:
            values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
        if torch.isfinite(torch.stack(values)).all():  # one look at the device a step
            return
        guilty = [addresses for loss, addresses in self._step_losses if not torch.isfinite(loss)]
        rows = [str(row) for addresses in guilty or [a for _, a in self._step_losses] for row in addresses]
        named = ", ".join(rows[:MAX_ROWS_NAMED]) + (
            f" and {len(rows) - MAX_ROWS_NAMED} more" if len(rows) > MAX_ROWS_NAMED else ""
        )
        what = "the loss" if guilty else f"the gradient's norm ({float(norm)})"
        raise TrainingError(
            f"step {self.state.global_step + 1}: {what} is not a finite number; the weights are those of step "
            f"{self.state.global_step}\n  rows of the batch: {named}",
            hint="lower train.learning_rate, raise train.warmup_steps, use train.precision bf16 or fp32, or look at "
            "those rows",
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Transformers' optimizer, with LoRA+ groups if asked for."""
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if fresh and self.parts.loraplus_lr_ratio is not None:
            split_loraplus_groups(optimizer, self.model, self.parts.loraplus_lr_ratio)
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
        with checkpoints.saving(staging):
            self._write_checkpoint(staging, best)
            if self.args.should_save:
                checkpoints.seal(staging)
        if self.args.should_save:
            checkpoints.rotate(run, self.parts.save_total_limit, best)
        self.accelerator.wait_for_everyone()
        self.parts.meter.paused += time.perf_counter() - begun

    def _write_checkpoint(self, staging: Path, best: Path) -> None:
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.save_model(str(staging), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            self._save_rng_state(str(staging))  # one file for each rank
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step == self.state.global_step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.parts.save_state(staging, self.state.global_step)
            self.state.save_to_json(str(staging / "trainer_state.json"))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Weights, config, tokenizer; no pickle of the arguments."""
        assert output_dir is not None
        if self.args.should_save:
            self.parts.save_model(Path(output_dir))

    def load_best(self) -> bool:
        """Put the best checkpoint's weights into the model, if there is one."""
        best = self.state.best_model_checkpoint
        if best is None or not Path(best).is_dir():
            return False
        self._load_from_checkpoint(best)
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        in_parts = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if in_parts or not restore_weights(self.model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)


def put_on_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: Steps) -> None:
    """Ask the schedule not for the number of steps done, but for as many of ``horizon`` as the run's progress is."""

    def on_progress(multiplier: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda steps_done: multiplier(steps.progress(steps_done) * steps.horizon)

    scheduler.lr_lambdas = [on_progress(multiplier) for multiplier in scheduler.lr_lambdas]
