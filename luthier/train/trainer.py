"""transformers' Trainer with our stream, our loss, our evaluation and our checkpoints. W ranks."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from luthier.errors import TrainingError
from luthier.records import Address, Batch
from luthier.train import checkpoint as checkpoints
from luthier.train.adapters import split_loraplus_groups
from luthier.train.callbacks import Meter
from luthier.train.forward import LossFunction, batch_loss, keeps_logits
from luthier.train.loader import EvalStream, TrainStream, make_loader

MAX_ROWS_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What our trainer needs beside the model and transformers' arguments.

    save_model    writes weights, config and tokenizer into a folder (main process only)
    save_state    adds the loader's state and the run description to a checkpoint's folder
    """

    stream: TrainStream
    eval_stream: EvalStream | None
    loss: LossFunction
    label_smoothing: float
    loraplus_lr_ratio: float | None
    save_total_limit: int | None
    keep_best: bool
    meter: Meter
    save_model: Callable[[Path], None]
    save_state: Callable[[Path, int], None]


class LuthierTrainer(Trainer):  # type: ignore[misc]  # transformers publishes no types
    """One run. The loss of a step is the sum over its targets, on all ranks, divided by their number."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, parts: TrainerParts, callbacks: list[TrainerCallback]
    ) -> None:
        self.parts = parts
        self._keep = keeps_logits(model)
        self._step_losses: list[tuple[torch.Tensor, tuple[Address, ...]]] = []
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

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """This rank's micro-batches of the whole run; they are shared out already, so accelerate must not."""
        return make_loader(self.parts.stream, num_workers=self.args.dataloader_num_workers)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Batch]], torch.Tensor]:
        """The micro-batches of one step on this rank, and the number of targets of the step on all ranks."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        targets = torch.tensor(sum(batch.num_targets for batch in batches), device=device)
        targets = self.accelerator.reduce(targets, reduction="sum")
        self.parts.meter.tokens += self.parts.stream.schedule.num_tokens(self.state.global_step)
        self.parts.meter.targets += int(targets)
        self._step_losses.clear()
        return [{"batch": batch} for batch in batches], targets  # the loop wants mappings

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
        sums = batch_loss(
            model,
            batch,
            self.parts.loss,
            device=self.args.device,
            keep=self._keep,
            label_smoothing=self.parts.label_smoothing,
        )
        loss: torch.Tensor = sums.loss_sum * (self.accelerator.num_processes / num_items_in_batch.clamp(min=1))
        self._step_losses.append((loss.detach(), batch.addresses))
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> Any:
        """The gradient's norm; raises `TrainingError` before the update if it or a loss is not finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._check_finite(norm)
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

    # ---------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss per target, perplexity and token accuracy over all held-out segments, by sums over all ranks."""
        assert eval_dataset is None and self.parts.eval_stream is not None
        begun = time.perf_counter()
        loss, targets, correct = self._eval_sums(self.parts.eval_stream).tolist()
        mean = loss / max(targets, 1)
        metrics = {
            "eval_loss": mean,
            "eval_perplexity": math.exp(min(mean, 700.0)),  # a float ends at e^709
            "eval_token_accuracy": correct / max(targets, 1),
            "eval_num_targets": int(targets),
            "eval_seconds": time.perf_counter() - begun,
        }
        self.log(metrics)
        # switches `should_evaluate` off in place
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.parts.meter.paused += time.perf_counter() - begun
        return metrics

    def _eval_sums(self, stream: EvalStream) -> torch.Tensor:
        """float64[3]: loss, targets, correct targets, over all ranks."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for batch in make_loader(stream, num_workers=self.args.dataloader_num_workers):
                found = batch_loss(self.model, batch, self.parts.loss, device=self.args.device, keep=self._keep)
                sums[0] += found.loss_sum
                sums[1] += found.num_targets
                sums[2] += found.num_correct
        self.model.train(training)
        total: torch.Tensor = self.accelerator.reduce(sums, reduction="sum")
        return total

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As transformers does; a new best is saved at once if it is to be loaded at the end."""
        best = bool(super()._determine_best_metric(metrics=metrics, trial=trial))
        if best and self.parts.keep_best:
            self.control.should_save = True
        return best

    # --------------------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint aside, seal it, and delete the ones over the limit."""
        begun = time.perf_counter()
        run, step = Path(self.args.output_dir), self.state.global_step
        staging = checkpoints.staging_folder(run, step)
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
        best = run / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step == step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.parts.save_state(staging, step)
            self.state.save_to_json(str(staging / "trainer_state.json"))
            checkpoints.seal(staging)
            checkpoints.rotate(run, self.parts.save_total_limit, best)
        self.accelerator.wait_for_everyone()
        self.parts.meter.paused += time.perf_counter() - begun

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
