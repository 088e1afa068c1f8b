"""This process among the ranks, and all steps of the run: its schedule, and the place in it that a checkpoint holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.errors import CheckpointError
from luthier.loader.live_plan import StreamPlan
from luthier.loader.run_order import mixture_of
from luthier.loader.run_settings import train_settings
from luthier.loader.state import LoaderState, RowTrail, Scalar
from luthier.train.data import RunData
from luthier.train.live import LiveData
from luthier.train.schedule import Schedule

EPOCHS_LOOKED_AT = 100  # for the rows of a run: a source of a small weight may need very many


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
        return cls(rank=int(os.environ.get("RANK", "0")), size=int(os.environ.get("WORLD_SIZE", "1")))


def make_schedule(config: RunConfig, data: RunData | LiveData, world: World) -> Schedule | StreamPlan:
    """All steps of the run, or a plan that makes them as rows arrive."""
    settings = train_settings(config, num_ranks=world.size)
    if isinstance(data, LiveData):
        return data.plan(config, settings)
    return Schedule(
        data.train_table,
        settings,
        num_epochs=config.train.num_train_epochs,
        max_steps=config.train.max_steps,
        mixture=mixture_of(config, data.train_table.source_weights),
    )


def trained_segments(schedule: Schedule | StreamPlan, num_segments: int) -> NDArray[np.int64]:
    """int64, ascending: which of the segments any step of the run has.

    All of them where steps are planned as rows arrive, and where `EPOCHS_LOOKED_AT` epochs have not taken all.
    """
    if isinstance(schedule, Schedule):
        return schedule.trained_segments(schedule.total_steps, most_epochs=EPOCHS_LOOKED_AT)
    return np.arange(num_segments, dtype=np.int64)


def loader_state(schedule: Schedule | StreamPlan, data: RunData | LiveData, step: int) -> LoaderState:
    """The place after ``step`` steps."""
    settings = schedule.settings
    fixed: dict[str, Scalar] = {
        "train.packing": settings.packing.value,
        "data.max_length": settings.capacity,
        "train.per_device_train_batch_size": settings.rows_per_micro_batch,
        "micro-batches per step (gradient_accumulation_steps x ranks)": settings.micro_batches_per_step,
        "train.tokens_per_step": settings.tokens_per_step,
        "sequences that begin alike are shared (train.shared_prompts)": settings.shared,
    }
    planned = schedule.step(step - 1) if isinstance(schedule, StreamPlan) and step else None
    return LoaderState(
        seed=settings.seed,
        epoch=int(schedule.epoch_after(min(step, schedule.total_steps))),
        step=step,
        cursor=planned.cursor if planned else 0,
        waiting=planned.waiting if planned else {},
        trail=planned.trail if planned else RowTrail(),
        settings=fixed,
        data=data.fingerprint,
    )


def check_rows(there: LoaderState, here: LoaderState, where: Path) -> None:
    """Raise `CheckpointError` if a checkpoint was trained on other rows than those that its steps have now."""
    parting = there.trail.parts_from(here.trail)
    if parting is not None:
        raise CheckpointError(
            f"{where} was trained on other rows: those of steps {parting[0] + 1} to {parting[1]} have changed since",
            hint="restore the data, or start anew with output.overwrite: true or another output.dir",
        )
