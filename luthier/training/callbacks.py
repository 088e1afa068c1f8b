"""The hooks into transformers' loop: when to log, evaluate, save and stop, and what is said of each step."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler

from luthier.config.choices import Strategy
from luthier.config.schema import EvalConfig, RunConfig
from luthier.errors import UserError
from luthier.loader.plan import StreamPlan
from luthier.models.adapter_targets import collapse
from luthier.training.losses import by_source
from luthier.training.report import EvalRecord, StepRecord, exit_code
from luthier.training.report.events import EventListener, Note, Saved, Started, StepDone
from luthier.training.streams import World
from luthier.writing import JsonObject, counted


@dataclass(kw_only=True, slots=True)
class Meter:
    """What happened since the last line of the log. Mutable on purpose: the trainer adds, the journal drains.

    ``paused`` are seconds that were no training: evaluation, saving.
    """

    tokens: int = 0
    targets: int = 0
    paused: float = 0.0
    since: float = field(default_factory=time.perf_counter)
    _pause_began: float | None = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What is done within it is no training."""
        self._pause_began = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - self._pause_began
            self._pause_began = None

    def start(self) -> None:
        """Training begins now; what a checkpoint has told of its interval stays."""
        self.since = time.perf_counter()

    def drain(self) -> tuple[int, int, float]:
        """``(tokens, targets, seconds of training)`` of the interval; a new one begins."""
        now = time.perf_counter()
        interval = (self.tokens, self.targets, max(now - self.since - self.paused, 1e-9))
        self.tokens, self.targets, self.paused, self.since = 0, 0, 0.0, now
        return interval

    def state(self) -> dict[str, float]:
        """What has happened in the interval so far, for a run that goes on."""
        until = time.perf_counter() if self._pause_began is None else self._pause_began
        seconds = until - self.since - self.paused
        return {"tokens": self.tokens, "targets": self.targets, "seconds": seconds}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on with the interval that `state` is of."""
        self.tokens, self.targets, self.paused = int(state["tokens"]), int(state["targets"]), -state["seconds"]


_ROUNDING = 1e-9  # a tenth of the run, ten times, is the run


class Flow(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Decides at the end of each step, and of each epoch, what is due. Takes the place of transformers' own, which
    counts epochs by itself. An epoch that is broken off ends, too.

    ``asked_to_stop`` is asked at each step's end and must answer the same on all ranks.
    """

    def __init__(
        self, config: RunConfig, schedule: StreamPlan, *, evaluates: bool, asked_to_stop: Callable[[], bool]
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.evaluates = evaluates
        self.asked_to_stop = asked_to_stop
        self._is_asked = False

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        step = state.global_step
        state.epoch = self.schedule.epoch_after(step)
        last = self.schedule.is_over(step)
        stop = self._is_asked = self.asked_to_stop()
        evaluation, output = self.config.eval, self.config.output
        # another callback may have switched on what is not due
        control.should_log |= last or stop or step % self.config.tracking.logging_steps == 0
        control.should_evaluate |= self.evaluates and self._due(evaluation.strategy, evaluation.steps, step, last)
        control.should_evaluate &= not stop
        control.should_save |= stop or self._due(output.save_strategy, output.save_steps, step, last)
        control.should_training_stop |= stop or last

    def on_epoch_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._is_asked or state.global_step == 0:  # it has been saved, or there is nothing to save
            return
        control.should_evaluate |= self.evaluates and self.config.eval.strategy is Strategy.EPOCH
        control.should_save |= self.config.output.save_strategy is Strategy.EPOCH

    def _due(self, strategy: Strategy, every: float, step: int, last: bool) -> bool:
        match strategy:
            case Strategy.NO | Strategy.EPOCH:
                return False
            case Strategy.STEPS if every < 1:
                return last or self._times(every, step) > self._times(every, step - 1)
            case Strategy.STEPS:
                return last or step % every == 0
            case _:
                raise AssertionError(strategy)

    def _times(self, share: float, step: int) -> int:
        """How often a share of the run fits into what is done of it."""
        return math.floor(self.schedule.progress(step) / share + _ROUNDING)


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops when the metric has not improved for ``patience`` evaluations. Its memory is the trainer's own history."""

    def __init__(self, section: EvalConfig, note: Callable[[str], None]) -> None:
        assert section.early_stopping_patience is not None
        self.section = section
        self.patience = section.early_stopping_patience
        self.note = note
        self.stopped = False

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Look at all evaluations so far; the one before training does not count."""
        key = f"eval_{self.section.metric_for_best_model}"
        values = [entry[key] for entry in state.log_history if key in entry and entry["step"] > 0]
        waited = evaluations_without_gain(
            values, threshold=self.section.early_stopping_threshold, greater=is_greater_better(self.section)
        )
        if waited >= self.patience:
            control.should_training_stop = True
            self.stopped = True
            self.note(f"early stopping: {key} has not improved for {counted(waited, 'evaluation')}")


class AnsweringBetween(TrainerCallback):  # type: ignore[misc]
    """Has held-out rows answered at each evaluation between the first step and the last; before the one and after the
    other they are answered anyway. ``answer`` is called on all ranks."""

    def __init__(self, answer: Callable[[], None], is_over: Callable[[int], bool]) -> None:
        self.answer, self.is_over = answer, is_over

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Answer, unless that is done elsewhere."""
        if state.global_step and not self.is_over(state.global_step):
            self.answer()


class Unreached(TrainerCallback):  # type: ignore[misc]
    """Tells once which trained weights had no gradient in the first steps: those of layers that the model does not use,
    and adapters of layers that it does not call."""

    STEPS = 10

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.left: dict[str, nn.Parameter] = {}
        self.since = 0

    def on_train_begin(
        self, args: object, state: TrainerState, control: TrainerControl, model: Any = None, **_: object
    ) -> None:
        self.left, self.since = dict(model.named_parameters()), state.global_step

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Forget what has a gradient; after the first step that is all there is, in most models."""
        self.left = {name: weight for name, weight in self.left.items() if weight.requires_grad and weight.grad is None}

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Tell what is left, after ten steps or at the end of a shorter run."""
        done = state.global_step - self.since
        if self.left and (done == self.STEPS or (done < self.STEPS and state.global_step == state.max_steps)):
            names = collapse(self.left)
            more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
            self.note(
                f"model: in {counted(done, 'step')} no loss has reached "
                f"{counted(len(self.left), 'trained weight')}: {', '.join(names[:8])}{more} (N: numbers). "
                "Until one does, nothing is learned there"
            )


class Callbacks(CallbackHandler):  # type: ignore[misc]
    """The callbacks of a run and, behind them, its trackers, which see the epoch that `Flow` has counted.

    A tracker that fails before the first step ends the run: it can be mended at once. If one fails
    later, that is told once, and the run goes on without it: its own log needs no tracker.
    """

    callbacks: list[TrainerCallback]

    def __init__(
        self,
        callbacks: list[TrainerCallback],
        model: nn.Module,
        processing_class: object,
        trackers: list[str],
        *,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(callbacks, model, processing_class, None, None)
        self.note = note
        self.trackers: list[TrainerCallback] = []
        for tracker in get_reporting_integration_callbacks(trackers):
            try:
                self.trackers.append(tracker())
            except Exception as error:
                raise _unusable(tracker, error) from error

    def call_event(self, event: str, args: object, state: object, control: TrainerControl, **facts: Any) -> Any:
        """Call an event of all callbacks and trackers; what the last of them has made of ``control``. Raises
        `UserError` for a tracker that does not begin."""
        control = super().call_event(event, args, state, control, **facts)
        everyone = self.callbacks
        for tracker in tuple(self.trackers):
            self.callbacks = [tracker]
            try:
                control = super().call_event(event, args, state, control, **facts)
            except Exception as error:
                if event in ("on_init_end", "on_train_begin"):
                    raise _unusable(type(tracker), error) from error
                self.trackers.remove(tracker)
                self.note(f"{_in_words(type(tracker), error)}. The run goes on without it")
            finally:
                self.callbacks = everyone
        return control


def _in_words(tracker: type[TrainerCallback], error: Exception) -> str:
    return f"the tracker {tracker.__name__.removesuffix('Callback')} fails: {type(error).__name__}: {error}"


def _unusable(tracker: type[TrainerCallback], error: Exception) -> UserError:
    hint = "set it up as its own documentation says, or leave it out"
    return UserError(_in_words(tracker, error), hint=hint, key="tracking.report_to")


class Journal(TrainerCallback):  # type: ignore[misc]
    """Turns what the loop reports into records and tells the listeners."""

    def __init__(
        self, meter: Meter, measured: tuple[str, ...], tell: EventListener, total_steps: Callable[[], int]
    ) -> None:
        """``measured``: the names of what is reported beside the loss. ``total_steps``: of the run, as far as it is
        known by now."""
        self.meter = meter
        self.measured = measured
        self.tell = tell
        self.total_steps = total_steps

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Say where training begins; the clock starts here."""
        self.meter.start()
        self.tell(Started(step=state.global_step, max_steps=self.total_steps()))

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.tell(StepDone(step=state.global_step, max_steps=max(state.global_step, self.total_steps())))

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, object] | None = None,
        **_: object,
    ) -> None:
        """A logging step, or an evaluation; other logs of the trainer are its own affair."""
        logs = logs or {}
        if "loss" in logs:
            self.tell(self._step_record(state, logs))
        elif "eval_loss" in logs:
            self.tell(eval_record(state, logs, self.measured))

    def on_save(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.tell(Saved(step=state.global_step, name=f"checkpoint-{state.global_step}"))

    def _step_record(self, state: TrainerState, logs: JsonObject) -> StepRecord:
        tokens, targets, seconds = self.meter.drain()
        norm = logs.get("grad_norm")
        return StepRecord(
            step=state.global_step,
            epoch=round(state.epoch, 6),
            loss=logs["loss"],
            # an fp16 step that the loss scaler skips has no finite norm
            grad_norm=float(norm) if norm is not None and math.isfinite(norm) else None,
            learning_rate=logs["learning_rate"],
            tokens=tokens,
            target_tokens=targets,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            target_tokens_per_second=targets / seconds,
            loss_by_source=by_source(logs, "loss"),
            targets_by_source=_whole(by_source(logs, "targets")),
            measures={name: logs[name] for name in self.measured if name in logs},
        )


def eval_record(state: TrainerState, logs: JsonObject, measured: tuple[str, ...]) -> EvalRecord:
    """The record of one evaluation's metrics."""
    return EvalRecord(
        step=state.global_step,
        epoch=round(state.epoch or 0.0, 6),
        loss=logs["eval_loss"],
        perplexity=logs.get("eval_perplexity"),
        token_accuracy=logs.get("eval_token_accuracy"),
        accuracy=logs.get("eval_accuracy"),
        num_targets=logs["eval_num_targets"],
        seconds=logs["eval_seconds"],
        loss_by_source=by_source(logs, "eval_loss"),
        targets_by_source=_whole(by_source(logs, "eval_num_targets")),
        measures={name: logs[f"eval_{name}"] for name in measured if f"eval_{name}" in logs},
    )


def _whole(counts: dict[str, float]) -> dict[str, int]:
    return {name: int(count) for name, count in counts.items()}


def is_greater_better(section: EvalConfig) -> bool:
    """Whether the metric for the best model is to rise."""
    return section.metric_for_best_model in ("token_accuracy", "accuracy")


def evaluations_without_gain(values: Sequence[float], *, threshold: float, greater: bool) -> int:
    """How many evaluations have passed since the last that beat the best before it by more than ``threshold``.

    ``[3.0, 2.0, 2.1, 2.0], threshold=0, greater=False -> 2``
    """
    waited, best = 0, -math.inf
    for value in values:
        score = value if greater else -value
        if score > best + threshold or best == -math.inf:
            waited, best = 0, score
        else:
            waited += 1
    return waited


# --------------------------------------------------------------------- how a run talks, and how its ranks agree to stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """How a run talks, how it is told to stop, what is closed at its end, and the caller's own callbacks, which come
    behind ours."""

    tell: EventListener
    stop: StopAgreement
    closing: ExitStack
    callbacks: tuple[TrainerCallback, ...] = ()

    def note(self, text: str) -> None:
        """Tell a decision or an incident in words."""
        self.tell(Note(text=text))


WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """The first SIGTERM, SIGINT or SIGHUP (the terminal is closed) asks the run to finish its step and save, the second
    ends the process at once.

    While entered, it remembers the first in ``received``. Outside the main thread it watches nothing, and nowhere a
    SIGHUP that is ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            heard = set(WATCHED)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                heard.remove(signal.SIGHUP)
            self._before = {watched: signal.signal(watched, self._receive) for watched in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched, handler in self._before.items():
            signal.signal(watched, handler)

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self.received is not None:
            # no clean-up: what a checkpoint is written into has no name that counts
            os._exit(exit_code(signum))
        self.received = signum
        name = signal.Signals(signum).name
        # not sys.stderr.write: the signal may have come in the middle of one
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: finishing the step, then saving; once more stops at once\n".encode())
        if signum == signal.SIGHUP:
            _leave_lost_terminal()


def _leave_lost_terminal() -> None:
    """Whatever is still printed goes nowhere, instead of raising errors, unless it goes into a file."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if not (stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
            os.dup2(nothing, descriptor)
    os.close(nothing)


class StopAgreement:
    """Whether any rank got a signal: all ranks must leave the loop after the same step."""

    def __init__(self, signals: StopSignals, world: World) -> None:
        self.signals = signals
        self.world = world
        self.signal: int | None = None

    def agreed(self) -> bool:
        """Asked once after each step, on all ranks. ``signal`` is what was agreed on."""
        received = self.signals.received or 0
        if self.world.size > 1:
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            flag = torch.tensor(received, device=device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            received = int(flag)
        if received:
            self.signal = received
        return self.signal is not None
