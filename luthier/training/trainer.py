"""The training loop: our stream, loss, evaluation and checkpoints, with transformers' callbacks. W ranks."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from peft import PeftModel
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import speed_metrics, validate_quantization_for_training

from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RunConfig
from luthier.errors import TrainingError, UserError
from luthier.models import evaluating, sharding
from luthier.models.passes import RouterBalance
from luthier.models.sharding import restore_weights
from luthier.records import Address, Batch
from luthier.training import losses as step_losses
from luthier.training.callbacks import Callbacks, Meter
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder import state as states
from luthier.training.folder.checkpoint import taking_over
from luthier.training.losses.verdicts import FeedbackLosses
from luthier.training.optimizer import ON_METRIC, learning_rate, make_optimizer, make_scheduler, take_up_schedule
from luthier.training.processes import check_finite
from luthier.training.streams import EvalStream, TrainStream
from luthier.training.updates import BackwardUpdates, LossScaler, activations_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """What the trainer needs beside the model and transformers' arguments.

    sources       names of the data sets, by number; where there are several, losses are told apart
    losses        what is minimised; ``eval_losses``: what is measured on held-out rows
    measured      names of what is reported of each step beside its loss
    processing_class  the tokenizer that callbacks get; None where the caller has brought no callbacks
    save_model    writes weights (a sharded model's: as given), config and tokenizer into a folder (main process only)
    save_state    adds the loader's state and the run description to a checkpoint's folder
    note          tells an incident in words
    """

    config: RunConfig
    stream: TrainStream
    eval_stream: EvalStream | None
    sources: tuple[str, ...]
    eval_sources: tuple[str, ...]
    losses: step_losses.StepLosses
    eval_losses: step_losses.StepLosses
    measured: tuple[str, ...]
    meter: Meter
    processing_class: PreTrainedTokenizerBase | None
    save_model: Callable[[Path, dict[str, torch.Tensor] | None], None]
    save_state: Callable[[Path, int], None]
    note: Callable[[str], None]


class Trainer:
    """One run. The loss of a step is the sum over its targets (or pairs, or rows) on all ranks, divided by their
    number.

    The batches of a step are asked for when the step before is over, and never earlier. Callbacks get the events of
    transformers' Trainer in its order, with its ``args``, ``state`` and ``control``; they may set the switches of
    ``control`` as there.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: TrainingArguments,
        parts: TrainerParts,
        callbacks: list[TrainerCallback],
    ) -> None:
        set_seed(args.seed)
        validate_quantization_for_training(model)
        self.model, self.args, self.parts = model, args, parts
        self.accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=args.ddp_find_unused_parameters)],
        )
        self.accelerator.scaler = self.accelerator.scaler and LossScaler(args.device)
        # completions of other rows, by which feedback is compared, are measured and not learned
        learned = parts.losses.own if isinstance(parts.losses, FeedbackLosses) else None
        self.balance = RouterBalance(parts.losses.forward, learned)
        self.passes = parts.config.rollout.passes
        self._step_losses: list[tuple[torch.Tensor, tuple[Address, ...]]] = []
        self._interval = step_losses.LossSums(
            () if parts.stream.rollouts else parts.sources, parts.measured, args.device
        )
        self._parts_of_interval: dict[str, Meter | RouterBalance] = {"meter": parts.meter, "router": self.balance}
        self._last_update: dict[str, Any] = {}
        self.in_backward: BackwardUpdates | None = None
        self._loss_of_run = torch.zeros((), dtype=torch.float64, device=args.device)
        self.callback_handler = Callbacks(callbacks, model, parts.processing_class, args.report_to, note=parts.note)
        self.callback_handler.train_dataloader = parts.stream
        self.callback_handler.eval_dataloader = parts.eval_stream
        self.control = TrainerControl()
        self.state = self._state_at_start()
        self._tell(self.callback_handler.on_init_end)

    def _state_at_start(self) -> TrainerState:
        state = TrainerState(
            max_steps=self.args.max_steps,
            num_train_epochs=self.parts.stream.schedule.num_epochs,
            train_batch_size=self.args.per_device_train_batch_size,
            total_flos=0.0,  # not estimated: transformers' formula counts padding and no attention
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.args.process_index == 0,
            stateful_callbacks=self._stateful(),
        )
        state.compute_steps(self.args, self.args.max_steps)
        return state

    def _stateful(self) -> list[ExportableState]:
        """Whoever remembers something from step to step. A run that goes on begins with all switches off."""
        return [
            *(each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)),
            TrainerControl(),
        ]

    def _tell(self, event: Callable[..., TrainerControl], **facts: Any) -> None:
        """Call an event of all callbacks, any of which may replace the control."""
        self.control = event(self.args, self.state, self.control, **facts)

    # -------------------------------------------------------------------------------------------------------- run

    def train(self, resume: Path | None, finish: Callable[[], None]) -> None:
        """All steps of the run, from the beginning or from a checkpoint. ``finish`` is to leave the model with the
        weights that stay, before callbacks hear that training is over.

        Raises `TrainingError` before an update that would spoil the weights, `UnusableCheckpoint`, `CheckpointError`.
        """
        noise = self._set_up(resume)
        begun, first_step = time.time(), self.state.global_step
        self._last_logged = first_step
        self._tell(self.callback_handler.on_train_begin)
        if self.args.eval_on_start:
            self.evaluate()
        if not self.parts.stream.is_over:
            self._take_steps(resume)
        steps = self.state.global_step - first_step
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        metrics = speed_metrics("train", begun, num_samples=batch * steps, num_steps=steps)
        mean_loss = float(self.accelerator.reduce(self._loss_of_run, reduction="mean")) / max(steps, 1)
        self._log({**metrics, "total_flos": self.state.total_flos, "train_loss": mean_loss})
        finish()
        self._tell(self.callback_handler.on_train_end)
        if noise is not None:
            deactivate_neftune(self.model, noise, self.accelerator)

    def _set_up(self, resume: Path | None) -> object:
        """Prepare model, optimizer and schedule, as they are in the checkpoint. Returns the hook of NEFTune or None."""
        args = self.args
        if args.use_liger_kernel:
            apply_liger_kernel(self.model, args.liger_kernel_config)
        if args.activation_checkpointing:
            self.model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
        alpha = args.neftune_noise_alpha
        noise = None if alpha is None else activate_neftune(self.model, alpha, self.accelerator)
        if resume is not None:
            with taking_over(resume, "weights"):
                restore_weights(self.model, resume)
            self._take_over_history(resume)
        optimizer = make_optimizer(self.model, args, self.parts.config)
        divided, self._averages = sharding.is_sharded(self.model), sharding.begin_alike(self.model)
        self.wrapped: nn.Module = self.accelerator.prepare_model(
            self.model, device_placement=False if divided else None, evaluation_mode=divided or self._averages
        )
        self.optimizer: AcceleratedOptimizer = self.accelerator.prepare_optimizer(optimizer)
        self.lr_scheduler = make_scheduler(self.optimizer, args, self.parts.stream.schedule)
        if OPTIMIZERS[self.parts.config.train.optim].in_backward:
            # the schedule has put a method of its own around that of the optimizer
            self.in_backward = BackwardUpdates(self.model, self.optimizer.step)
        if resume is not None:
            self._take_over_training_state(resume)
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.wrapped.zero_grad()
        return noise

    def _take_steps(self, resume: Path | None) -> None:
        """Step by step and epoch by epoch, until a callback says that training should stop: `Flow` at the last step."""
        schedule = self.parts.stream.schedule
        self._tell(self.callback_handler.on_epoch_begin)
        if resume is not None:
            self._take_over_random_state(resume)
        steps = self.parts.stream.steps()
        while True:
            self._take_step(steps)
            self._follow_control()
            is_over = self._is_stopping or schedule.is_over(self.state.global_step)
            if is_over or schedule.ends_epoch(self.state.global_step):
                self._tell(self.callback_handler.on_epoch_end)
                self._follow_control()
                if is_over or self._is_stopping:
                    return
                self._tell(self.callback_handler.on_epoch_begin)

    @property
    def _is_stopping(self) -> bool:
        # no row of an epoch is passed over, so the end of an epoch before its time is the end of the run
        return bool(self.control.should_training_stop or self.control.should_epoch_stop)

    # ------------------------------------------------------------------------------------------------------- step

    def _take_step(self, steps: Iterator[list[Batch]]) -> None:
        """One update, or ``rollout.passes`` of them; none if a callback stops the run between two micro-batches."""
        *first, last = self.read_step(steps)
        self._tell(self.callback_handler.on_step_begin)
        self.wrapped.train()
        self.optimizer.train()
        for number in range(self.passes):
            if number and isinstance(self.parts.losses, step_losses.AnswerLosses):  # compared by the weights of now
                self.parts.losses.begin_step(self.model, [*first, last], self._sum_of_ranks)
            for batch in first:
                with self.accelerator.no_sync(self.wrapped):
                    self._learn(batch)
                self._tell(self.callback_handler.on_substep_end)
                if self._is_stopping and number == 0:  # a step that has begun to change the weights is finished
                    return
            self._learn(last)
            self.update(number)
        self.state.global_step += 1
        self._tell(self.callback_handler.on_step_end)

    def read_step(self, steps: Iterator[list[Batch]]) -> list[Batch]:
        """The next step's micro-batches on this rank that there is something to learn from, at least one. What its loss
        is divided by is counted on all ranks."""
        step, parts = self.state.global_step, self.parts
        if draws := parts.stream.rollouts is not None:
            sharding.gather_all(self.model)  # ranks draw answers of different lengths
        read = next(steps)
        counts_T3 = torch.tensor(
            [step_losses.counts_of(parts.losses, batch) for batch in read], device=self.args.device
        )
        # ranks have as many micro-batches each, except of answers that they draw themselves
        counts_T3 = self._sum_of_ranks(counts_T3.sum(0, keepdim=True) if draws else counts_T3)
        self._units, targets, tokens = counts_T3.sum(dim=0)
        parts.meter.tokens += int(tokens) if draws else parts.stream.schedule.num_tokens(step)
        parts.meter.targets += int(targets)
        self._step_losses.clear()
        learned = read if draws else step_losses.learned_from(read, counts_T3[:, :2])
        parts.losses.begin_step(self.model, learned, self._sum_of_ranks)
        sharding.give_up_gathered(self.model)
        self.balance.begin_step(self.model, learned, self._sum_of_ranks)
        return learned

    def _learn(self, batch: Batch) -> None:
        """Forward and backward pass of a micro-batch. Where weights change during the latter it waits for `update`."""
        if self.in_backward is not None and self.args.max_grad_norm > 0:
            self._measure(batch, self.in_backward)
        sums, loss = self._loss(batch)
        self._interval.add(sums)
        self._step_losses.append((loss.detach(), batch.addresses))
        self._loss_of_run += loss.detach() / self.passes
        if self.in_backward is None:
            self._backward(loss)
        else:
            self.in_backward.waiting = partial(self._backward, loss)

    def _backward(self, loss: torch.Tensor) -> None:
        """Nothing where the loss depends on nothing that is trained: of text, where only a tower is."""
        if loss.requires_grad:
            self.accelerator.backward(loss)

    def _loss(self, batch: Batch) -> tuple[step_losses.MicroLoss, torch.Tensor]:
        """A micro-batch's part of the step's loss. It comes times W, since gradients are averaged over W ranks."""
        with self.balance.counting(), activations_kept(self.model, self.parts.config.train.offload):
            sums = self.parts.losses.loss(self.wrapped, batch)
        if self.parts.stream.rollouts is not None:
            drawn = step_losses.measures_of_drawing(batch.drawn, self.parts.config.rollout, self.args.device)
            sums = replace(sums, measures={**drawn, **sums.measures})
        ranks = self.accelerator.num_processes
        return sums, sums.loss_sum * (ranks / self._units.clamp(min=1)) + self.balance.loss() * ranks

    def _measure(self, batch: Batch, in_backward: BackwardUpdates) -> None:
        """Compute a step's only micro-batch once more, with the same random numbers, for the norm of its gradient: what
        a loss keeps for its backward pass is gone after it."""
        before = states.random_state()
        in_backward.measure(partial(self._backward, self._loss(batch)[1]))
        states.set_random_state(before)
        self.parts.losses.begin_step(self.model, [batch], self._sum_of_ranks)

    def update(self, number: int = 0) -> None:
        """Clip the gradient and change the weights by it, in pass ``number`` over the step. Raises `TrainingError`
        before if its norm or a loss is not finite."""
        if self._averages:
            sharding.average_gradients(self.model)
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        own, clip = self.in_backward, self.accelerator.clip_grad_norm_
        sharding.average_replicated(self.model)
        norm = own.norm if own else sharding.whole_gradient_norm(clip(self.wrapped.parameters(), limit))
        # under fp16 the loss scaler skips steps whose gradients overflow, which is no fault
        checked = norm if self.accelerator.scaler is None else None
        check_finite(self._step_losses, checked, step=self.state.global_step + 1)
        if number == 0:
            self._interval.add_measures(self.parts.losses.end_step(self._sum_of_ranks))
        self._tell(self.callback_handler.on_pre_optimizer_step)
        self.accelerator.sync_gradients = True  # another Accelerator of this process may have switched it off
        if own is None:
            self.optimizer.step()
        else:
            norm = own.update(limit)
            check_finite(self._step_losses, norm, step=self.state.global_step + 1)
        self._tell(self.callback_handler.on_optimizer_step)
        self._last_update = {"grad_norm": norm, "learning_rate": learning_rate(self.optimizer, self.lr_scheduler)}
        is_last = number == self.passes - 1 and not self.optimizer.step_was_skipped
        if is_last and not isinstance(self.lr_scheduler, ON_METRIC):
            self.lr_scheduler.step()
        self.wrapped.zero_grad()

    def _sum_of_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(sums, reduction="sum")
        return total

    # ------------------------------------------------------------------------------------- what callbacks ask for

    def _follow_control(self) -> None:
        """Log, evaluate and save, where a callback has said so."""
        if self.control.should_log and self.state.global_step > self._last_logged:
            self._last_logged = self.state.global_step
            found = self._interval.drain(self._sum_of_ranks)
            of_update = {name: float(value) for name, value in self._last_update.items()}
            measured = {**found.to_logs("loss", "targets"), **found.measures, **self.balance.drain()}
            self._log({"loss": found.loss, **of_update, **measured})
        if self.control.should_evaluate:
            self._note_best(self.evaluate())
        if self.control.should_save:
            self.save_checkpoint()
            self._tell(self.callback_handler.on_save)

    def _log(self, logs: dict[str, float]) -> None:
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell(self.callback_handler.on_log, logs=logs)

    def evaluate(self) -> dict[str, float]:
        """Loss per unit and all measures over the held-out rows, by sums over all ranks. Raises `UserError` without
        any."""
        if self.parts.eval_stream is None:
            raise UserError(
                "a callback has set control.should_evaluate, and the run has no held-out rows",
                hint="set data.eval or data.eval_split",
            )
        begun = time.perf_counter()
        with states.evaluation_point(self.optimizer):
            found = self._eval_losses(self.parts.eval_stream)
        metrics = {**found.of_evaluation(), "eval_seconds": time.perf_counter() - begun}
        self._log(metrics)
        self._tell(self.callback_handler.on_evaluate, metrics={**metrics, "epoch": self.state.epoch})
        self.parts.meter.paused += time.perf_counter() - begun
        return metrics

    def _eval_losses(self, stream: EvalStream) -> step_losses.MeanLosses:
        losses = self.parts.eval_losses
        sums = step_losses.LossSums(self.parts.eval_sources, losses.measured, self.args.device)
        with evaluating(self.model), torch.no_grad():
            losses.begin_step(self.model, stream, self._sum_of_ranks)
            for batch in stream:
                sums.add(losses.loss(self.model, batch))
                self._tell(self.callback_handler.on_prediction_step)
        sharding.give_up_gathered(self.model)
        return sums.drain(self._sum_of_ranks)

    def _note_best(self, metrics: dict[str, float]) -> None:
        """Look at the metric for the best model: a new best is saved at once if it is to be loaded at the end, and a
        schedule may go by it."""
        name = f"eval_{self.args.metric_for_best_model}"
        if name not in metrics and self.parts.config.goes_by_metric:
            raise TrainingError(
                f"the evaluation after step {self.state.global_step} has no {name}, only {', '.join(sorted(metrics))}",
                hint="set eval.metric_for_best_model: loss",
            )
        value, best = metrics.get(name, math.nan), self.state.best_metric
        if isinstance(self.lr_scheduler, ON_METRIC):
            self.lr_scheduler.step(value)
        best = best if best is not None else -math.inf if self.args.greater_is_better else math.inf
        if value > best if self.args.greater_is_better else value < best:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            self.control.should_save = self.control.should_save or self.parts.config.eval.load_best_model_at_end

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(self) -> None:
        """Write a checkpoint aside, seal it, and delete the ones over the limit. Raises `CheckpointError`."""
        run, step = Path(self.args.output_dir), self.state.global_step
        staging = checkpoints.staging_folder(run, step)
        best = run / f"checkpoint-{self.state.best_global_step}"
        with self.parts.meter.pausing():
            with checkpoints.saving(staging), states.evaluation_point(self.optimizer) as trained:
                self._write_checkpoint(staging, best, trained)
                if self.args.should_save:
                    checkpoints.seal(staging)
            if self.args.should_save:
                checkpoints.rotate(run, self.parts.config.output.save_total_limit, best)
            self.accelerator.wait_for_everyone()

    def _write_checkpoint(self, staging: Path, best: Path, trained: list[torch.Tensor] | None) -> None:
        keep, divided = self.args.should_save, sharding.is_sharded(self.model)
        if keep:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        weights = sharding.whole_weights(self.model, keep=keep) if divided else None
        if keep:
            self.parts.save_model(staging, weights)
        if not self.args.save_only_model:
            self._save_training_state(staging, trained)
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step == self.state.global_step or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        if keep:
            self.parts.save_state(staging, self.state.global_step)
            self.state.stateful_callbacks = TrainerState(stateful_callbacks=self._stateful()).stateful_callbacks
            self.state.save_to_json(str(staging / checkpoints.TRAINER_STATE))

    def _save_training_state(self, staging: Path, trained: list[torch.Tensor] | None) -> None:
        """Optimizer, schedule, scaler of fp16, and the random numbers of each rank, as data. No pickle is written."""
        keep, sharded = self.args.should_save, sharding.is_sharded(self.model)
        state = states.optimizer_state(self.optimizer, trained, sharded=sharded, keep=keep)
        interval: dict[str, Any] = {name: part.state() for name, part in self._parts_of_interval.items()}
        interval["sums"] = self._interval.state(self._sum_of_ranks)
        if keep:
            states.write_state(staging, checkpoints.INTERVAL_STATE, interval)
            states.write_state(staging, checkpoints.OPTIMIZER_STATE, state)
            states.write_state(staging, checkpoints.SCHEDULER_STATE, self.lr_scheduler.state_dict())
            if self.accelerator.scaler is not None:
                states.write_state(staging, checkpoints.SCALER_STATE, self.accelerator.scaler.state_dict())
        states.write_state(
            staging, checkpoints.RANDOM_STATE.format(rank=self.args.process_index), states.random_state()
        )
        self.parts.stream.save(staging, self.state.global_step)

    def _take_over_history(self, checkpoint: Path) -> None:
        """Go on with what the run has logged, with its best checkpoint if it is still there, and with what callbacks
        remember."""
        with taking_over(checkpoint, checkpoints.TRAINER_STATE):
            self.state = checkpoints.history(checkpoint, self.state, self._stateful())

    def _take_over_training_state(self, checkpoint: Path) -> None:
        """Go on with the optimizer, the schedule, and the loss scaler of a run in fp16. Raises `UnusableCheckpoint`."""
        with taking_over(checkpoint, checkpoints.OPTIMIZER_STATE):
            states.put_optimizer_state(self.optimizer, states.read_state(checkpoint, checkpoints.OPTIMIZER_STATE))
        with taking_over(checkpoint, checkpoints.SCHEDULER_STATE):
            schedule = states.read_state(checkpoint, checkpoints.SCHEDULER_STATE)
            states.check_alike(schedule, self.lr_scheduler.state_dict(), "schedule")
            take_up_schedule(self.lr_scheduler, schedule)
        if states.has_state(checkpoint, checkpoints.INTERVAL_STATE):  # else an earlier Luthier wrote it
            with taking_over(checkpoint, checkpoints.INTERVAL_STATE):
                interval = states.read_state(checkpoint, checkpoints.INTERVAL_STATE)
                for name, part in self._parts_of_interval.items():
                    part.load_state(interval[name])
                self._interval.load_state(interval["sums"], keep=self.args.process_index == 0)
        scaler = self.accelerator.scaler
        if scaler is not None and states.has_state(checkpoint, checkpoints.SCALER_STATE):
            with taking_over(checkpoint, checkpoints.SCALER_STATE):
                state = states.read_state(checkpoint, checkpoints.SCALER_STATE)
                states.check_alike(state, scaler.state_dict(), "scaler")
                scaler.load_state_dict(state)

    def _take_over_random_state(self, checkpoint: Path) -> None:
        """Go on with this rank's random numbers; with another number of ranks there may be none for it."""
        name = checkpoints.RANDOM_STATE.format(rank=self.args.process_index)
        if states.has_state(checkpoint, name):
            with taking_over(checkpoint, name):
                states.set_random_state(states.read_state(checkpoint, name))

    def finish(self) -> None:
        """No step comes any more: the weights are from here on those that were learned."""
        states.go_to_evaluation_point(self.optimizer)

    def load_best(self) -> bool:
        """Put the best checkpoint's weights into the model, if there is one."""
        best = self.state.best_model_checkpoint
        if best is None or not Path(best).is_dir():
            return False
        with taking_over(Path(best), "weights"):
            restore_weights(self.model, Path(best))
        return True
