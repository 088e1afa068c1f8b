"""This process among the ranks, and the batches of training and of evaluation as the trainer iterates them.

What a micro-batch holds is fixed by (data, settings, seed, step, slot) alone: ranks and workers do not matter, and a
stream begins at any step.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.collation import CollateSettings, MediaInputs
from luthier.config import num_processes
from luthier.config.choices import Packing, Strategy
from luthier.config.schema import RunConfig
from luthier.errors import CheckpointError
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.loader.prefetch import iterate
from luthier.loader.reader import BatchReader, PlannedMicroBatch
from luthier.loader.settings import plan_of_run, train_settings
from luthier.loader.stream_state import LoaderState, StateScalar
from luthier.packing import Planned, PlanSettings, Segments
from luthier.packing.epoch import EpochPlan, plan_epoch
from luthier.records import Batch, Ints
from luthier.training.data import RunData
from luthier.writing import counted

ENDLESS = 2**40  # micro-batches: transformers wants a length, the steps say when it is over


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun says; alone without it."""
        return cls(rank=int(os.environ.get("RANK", "0")), size=num_processes())


Watch = Callable[[Iterator[Batch]], Iterator[Batch]]  # looks at the batches as they go by


class DrawsAnswers(Protocol):
    """Has the model answer the questions of a step."""

    @property
    def updates(self) -> int:
        """How many steps learn from answers that are drawn at once, by the same weights."""

    @property
    def staleness(self) -> int:
        """How many updates the weights that draw may be behind."""

    def begin(self, reader: BatchReader, planned: Sequence[PlannedMicroBatch], *, after: int) -> None:
        """Have the answers of a later step drawn meanwhile, by the weights of now, which are those ``after`` so many
        steps."""

    def batches(self, reader: BatchReader, planned: Sequence[PlannedMicroBatch]) -> list[Batch]:
        """What this rank learns from, at least one micro-batch, which is blank where nothing can be learned from."""

    def save(self, folder: Path, step: int) -> None:
        """Keep in a checkpoint what this rank has drawn for the steps after the first ``step``."""

    def load(self, folder: Path, step: int) -> None:
        """Read from a checkpoint what `save` kept there. Raises `CheckpointError`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainStream:
    """One rank's micro-batches from step ``first_step`` on. With ``rollouts`` rows are questions, and micro-batches
    hold the answers that the model gives in that step."""

    schedule: StreamPlan
    reader: BatchReader
    rank: int
    num_workers: int
    first_step: int
    watch: Watch = iter
    rollouts: DrawsAnswers | None = None

    def __len__(self) -> int:
        settings = self.schedule.settings
        return self.first_step * (settings.micro_batches_per_step // settings.num_ranks) if self.is_over else ENDLESS

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.schedule.is_over(self.first_step)

    def save(self, checkpoint: Path, step: int) -> None:
        """Keep what this rank has drawn for the steps after the first ``step``."""
        if self.rollouts is not None:
            self.rollouts.save(checkpoint, step)

    def load(self, checkpoint: Path) -> None:
        """Read what `save` kept for this rank. Raises `CheckpointError`."""
        if self.rollouts is not None:
            self.rollouts.load(checkpoint, self.first_step)

    def steps(self) -> Iterator[list[Batch]]:
        """The micro-batches of each step, at least one: read when they are asked for, and answers drawn then."""
        if self.rollouts is None:
            batches = iter(self)
            for step in itertools.count(self.first_step):
                yield list(itertools.islice(batches, self.schedule.turns(step)))
        reader, rollouts = self.reader, self.rollouts
        assert rollouts is not None
        questions = self.schedule.micro_batches(self.rank, first_step=self.first_step)
        drawn: deque[list[Batch]] = deque()
        ahead: deque[list[PlannedMicroBatch]] = deque()
        for step in itertools.count(self.first_step) if rollouts.staleness else ():
            for other in range(step + len(ahead), step + rollouts.staleness + 1):
                if self.schedule.is_over(other):
                    break
                ahead.append(list(itertools.islice(questions, self.schedule.turns(other))))
                rollouts.begin(reader, ahead[-1], after=step)
            yield rollouts.batches(reader, ahead.popleft())
        for step in itertools.count(self.first_step):
            if not drawn:  # answers of all steps up to the next multiple of `updates`, if the run has so many
                others = range(step + 1, step - step % rollouts.updates + rollouts.updates)
                now = [step, *itertools.takewhile(lambda other: not self.schedule.is_over(other), others)]
                turns = [list(itertools.islice(questions, self.schedule.turns(each))) for each in now]
                drawn.extend(rollouts.batches(reader, planned) for planned in turns)
            yield drawn.popleft()

    def __iter__(self) -> Iterator[Batch]:
        planned = self.schedule.micro_batches(self.rank, first_step=self.first_step)
        return self.watch(iterate(self.reader, planned, num_workers=self.num_workers))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalStream:
    """One rank's share of one pass over the held-out segments."""

    reader: BatchReader
    rows: NumberedRows
    plan: EpochPlan
    rank: int
    num_workers: int
    watch: Watch = iter

    @staticmethod
    def of_rows(
        rows: NumberedRows,
        settings: PlanSettings,
        how: CollateSettings,
        *,
        rank: int,
        num_workers: int = 0,
        shared: bool = False,
        media: MediaInputs | None = None,
    ) -> EvalStream:
        """The segments of some rows, in the order of their first epoch. ``shared``, ``media`` as in `BatchReader`."""
        return EvalStream(
            reader=BatchReader(rows.samples, how, shared=shared, media=media),
            rows=rows,
            plan=plan_epoch(rows, settings, epoch=0),
            rank=rank,
            num_workers=num_workers,
        )

    def __len__(self) -> int:
        return len(self.plan.of_rank(self.rank))

    def __iter__(self) -> Iterator[Batch]:
        planned = (self.rows.of_plan(self.plan, number, step=0) for number in self.plan.of_rank(self.rank))
        return self.watch(iterate(self.reader, planned, num_workers=self.num_workers))


def state_at_start(config: RunConfig, data: RunData, world: World) -> LoaderState:
    """The place before the first step."""
    settings = train_settings(config, num_ranks=world.size)
    return LoaderState(
        seed=settings.seed, epoch=0, step=0, cursor=0, settings=_decisive(settings), data=data.fingerprint
    )


def loader_state(schedule: StreamPlan, data: RunData, step: int) -> LoaderState:
    """The place after ``step`` steps."""
    settings = schedule.settings
    epoch, cursor, waiting, trail = schedule.state_after(step)
    return LoaderState(
        seed=settings.seed,
        epoch=epoch,
        step=step,
        cursor=cursor,
        waiting=waiting,
        trail=trail,
        settings=_decisive(settings),
        data=data.fingerprint,
    )


def needed_segments(schedule: StreamPlan, data: RunData, segments: Segments) -> NDArray[np.int64]:
    """int64, ascending: which segments of a side the run reads; all, where many epochs have not taken all."""
    if segments is data.train:
        return schedule.trained_segments()
    return np.arange(len(segments), dtype=np.int64)


def check_rows(there: LoaderState, here: LoaderState, where: Path) -> None:
    """Raise `CheckpointError` if a checkpoint was trained on other rows than those that its steps have now."""
    parting = there.trail.parts_from(here.trail)
    if parting is not None:
        raise CheckpointError(
            f"{where} was trained on other rows: those of steps {parting[0] + 1} to {parting[1]} have changed since",
            hint="restore the data, or start anew with output.overwrite: true or another output.dir",
        )


def _decisive(settings: PlanSettings) -> dict[str, StateScalar]:
    return {
        "train.packing": settings.packing.value,
        "data.max_length": settings.capacity,
        "train.per_device_train_batch_size": settings.rows_per_micro_batch,
        "micro-batches per step (gradient_accumulation_steps x ranks)": settings.micro_batches_per_step,
        "train.tokens_per_step": settings.tokens_per_step,
        "sequences that begin alike are shared (train.shared_prompts)": settings.shared,
    }


# ---- Prompts that are asked in place of those whose answers teach nothing.
#
# They come from an order of their own: from epochs that no run reaches, of which each step has a stretch. So the
# prompts of a step follow from its number, the seed and the data, and the order of the run itself stays as it is.


FIRST_EPOCH = 2**32  # of the spare rows; runs count theirs from 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparePrompts:
    """The spare rows of each step, in their order. ``per_step``: how many a step may need at most."""

    schedule: StreamPlan
    per_step: int
    world: World

    def segments(self, step: int, start: int, stop: int) -> Ints:
        """int64: the spare segments ``start:stop`` of a step; fewer, where there are no more."""
        return np.array(list(itertools.islice(self._segments(step), start, stop)), dtype=np.int64)

    def share(self, step: int, segments: Ints) -> PlannedMicroBatch:
        """This rank's share of some segments, which is a blank where there is none for it."""
        own = segments[self.world.rank :: self.world.size]
        bounds = np.array([0, len(own)])
        pack = Planned(segment_ids=own, pack_bounds=bounds, batch_bounds=np.array([0, 1]), step_ends=np.array([1]))
        number, settings = 0 if len(own) else None, self.schedule.settings
        return self.schedule.rows.micro_batch(pack, number, step=step, settings=settings, epoch=FIRST_EPOCH)

    def _segments(self, step: int) -> Iterator[int]:
        """Of rows that the step does not ask anyway, each row once: the rest of an epoch and all of the next."""
        rows, order, planned = self.schedule.rows, self.schedule.order, self.schedule.step(step)
        assert planned is not None, "a step that asks is a step of the run"
        members = [pack for micro_batch in planned.micro_batches for pack in micro_batch]
        asked = set(rows.rows_of(np.concatenate(members)).tolist())
        length = len(order.epoch(FIRST_EPOCH))
        epoch, first = divmod(step * self.per_step, length)
        for number, begin in ((epoch, first), (epoch + 1, 0)):
            for start in range(begin, length, self.per_step):
                for row in order.epoch(FIRST_EPOCH + number).rows(start, start + self.per_step).tolist():
                    if row not in asked:
                        asked.add(row)
                        yield from rows.segments_of(np.array([row]))[0].tolist()


# ---- What is said of a run by the number of its steps: that they are few, and what would make them more.

FEW_STEPS = 20  # fewer teach next to nothing, whatever the rate


def ways_to_more_steps(config: RunConfig, rows: NumberedRows, *, num_ranks: int) -> tuple[str, ...]:
    """Settings of which each gives a run at least `FEW_STEPS` steps, as ``key: value``; none, where it has as many.

    Each is tried: what is given is what the changed run would do.
    """

    def total(**changes: object) -> int:
        changed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        return plan_of_run(changed, rows, num_ranks=num_ranks).count_steps()

    train = config.train
    if total() >= FEW_STEPS:
        return ()
    found: list[dict[str, object]] = []
    if train.max_steps is not None:
        found.append({"max_steps": FEW_STEPS})
    else:
        epochs = math.ceil(train.num_train_epochs * FEW_STEPS / total())
        while total(num_train_epochs=float(epochs)) < FEW_STEPS:
            epochs += 1
        found.append({"num_train_epochs": epochs})
    if train.packing.is_packed and train.packing is not Packing.SPLIT and train.shared_prompts is not True:
        found += [{"packing": Packing.NONE, "per_device_train_batch_size": size} for size in (16, 8, 4, 2, 1)]
    elif train.per_device_train_batch_size > 1:
        found.append({"per_device_train_batch_size": 1})
    if train.gradient_accumulation_steps > 1:
        found.append({"gradient_accumulation_steps": 1})
    if train.tokens_per_step is not None:
        found.append(
            {"tokens_per_step": max(1, int(rows.whole().lengths.sum() * train.num_train_epochs) // (2 * FEW_STEPS))}
        )
    enough = [found[0], *(changes for changes in found[1:] if total(**changes) >= FEW_STEPS)]
    unpacked = [changes for changes in enough if "packing" in changes]
    kept = [changes for changes in enough if "packing" not in changes] + unpacked[:1]
    return tuple(" and ".join(f"train.{key}: {value}" for key, value in changes.items()) for changes in kept)


def length_notes(config: RunConfig, total_steps: int, micro_batches: int | None = None) -> tuple[str, ...]:
    """What is asked of a run and will not happen, as it has so few steps, or its epoch so few ``micro_batches``."""
    evaluation, output, train = config.eval, config.output, config.train
    evaluates = bool(config.data.eval or config.data.eval_use or config.data.eval_split)
    every = [
        (
            "eval.steps",
            evaluation.steps,
            evaluates and evaluation.strategy is Strategy.STEPS,
            "evaluated before and after",
        ),
        ("output.save_steps", output.save_steps, output.save_strategy is Strategy.STEPS, "saved at its end alone"),
        ("tracking.logging_steps", config.tracking.logging_steps, True, "logged at its end alone"),
    ]
    notes = [
        f"{key} is {number:,}, and the run has {counted(total_steps, 'step')}: it is {what}"
        for key, number, applies, what in every
        if applies and number > total_steps
    ]
    patience = evaluation.early_stopping_patience
    if evaluates and patience is not None:
        steps = evaluation.steps if evaluation.strategy is Strategy.STEPS else 1
        steps = steps * total_steps if steps < 1 else steps
        if patience * steps >= total_steps:
            what = (
                f"{counted(patience, 'evaluation does', 'evaluations do')} not fit into {counted(total_steps, 'step')}"
            )
            notes.append(f"eval.early_stopping_patience: {what}: the run cannot stop early")
    if micro_batches is not None and train.gradient_accumulation_steps > micro_batches:
        asked = (
            f"asks for {train.gradient_accumulation_steps:,} micro-batches a step, and an epoch has {micro_batches:,}"
        )
        notes.append(f"train.gradient_accumulation_steps {asked}: every step is a whole epoch, the rest of it is blank")
    return tuple(notes)
