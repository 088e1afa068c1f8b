"""The run's batches as one deterministic stream with random access, and the state that names a place in it.

Micro-batch ``k`` of a rank is fixed by (settings, seed, k) alone: workers do not matter, resuming reads nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from torch.utils.data import DataLoader, Dataset, Sampler

from luthier.collate import collate
from luthier.config.schema import Packing
from luthier.errors import CheckpointError
from luthier.packing import EpochPlan, PlanSettings, SegmentTable, plan_epoch
from luthier.records import Batch, Pack, Segment
from luthier.train.schedule import Schedule

STATE_VERSION = 1


class Segments(Protocol):
    """Random access to segments, which a `SegmentTable` describes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Segment: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """A place in the stream, and what must be the same for the rest of it to be the same. JSON, under 4 kB.

    The number of ranks is absent on purpose: a step's micro-batches do not depend on it.
    """

    version: int = STATE_VERSION
    seed: int
    epoch: int
    step: int
    micro_batches_per_step: int
    rows_per_micro_batch: int
    max_length: int
    packing: str
    data: str  # fingerprint of the segments and their order of preparation

    def save(self, folder: Path) -> None:
        """Write ``loader_state.json``."""
        (folder / "loader_state.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> LoaderState:
        """Read what `save` wrote. Raises `CheckpointError`."""
        path = folder / "loader_state.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        version = content.get("version") if isinstance(content, dict) else None
        if version != STATE_VERSION:
            raise CheckpointError(f"{path} is of version {version}, this Luthier reads {STATE_VERSION}")
        return cls(**content)

    def check(self, run: LoaderState, checkpoint: Path) -> None:
        """Raise `CheckpointError` naming everything in which this state and the run that wants to resume differ."""
        names = {field.name for field in fields(self)} - {"epoch", "step"}
        differing = sorted(name for name in names if getattr(self, name) != getattr(run, name))
        if not differing:
            return
        lines = "\n".join(
            f"  {_SPOKEN[name]}: {getattr(self, name)} there, {getattr(run, name)} here" for name in differing
        )
        raise CheckpointError(
            f"{checkpoint} was written by a run with another stream of batches:\n{lines}",
            hint="restore those settings, or start anew with output.overwrite: true or another output.dir",
        )


_SPOKEN = {
    "version": "version",
    "seed": "runtime.seed",
    "micro_batches_per_step": "micro-batches per step (gradient_accumulation_steps x ranks)",
    "rows_per_micro_batch": "train.per_device_train_batch_size",
    "max_length": "data.max_length",
    "packing": "train.packing",
    "data": "fingerprint of the data",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateSettings:
    """How packs become tensors."""

    packed: bool
    pad_token_id: int
    varlen: bool = False


class TrainStream(Dataset[Batch]):
    """One rank's micro-batches over the whole run: ``stream[k]`` is its ``k % accumulation``-th of step ``k // …``.

    A slot that a smaller step leaves empty is a blank: two tokens, no targets, so that all ranks stay in step.
    """

    def __init__(self, segments: Segments, schedule: Schedule, how: CollateSettings, *, rank: int) -> None:
        self.segments = segments
        self.schedule = schedule
        self.how = how
        self.rank = rank
        self.accumulation = schedule.settings.micro_batches_per_step // schedule.settings.num_ranks

    def __len__(self) -> int:
        return self.schedule.total_steps * self.accumulation

    def __getitem__(self, index: int) -> Batch:
        step, turn = divmod(index, self.accumulation)
        found = self.schedule.micro_batch(step, turn * self.schedule.settings.num_ranks + self.rank)
        if found is None:
            return _blank(self.segments, self.how)
        epoch, micro_batch = found
        return _batch(self.segments, self.schedule.plan(epoch), micro_batch, self.how)


class EvalStream(Dataset[Batch]):
    """One rank's share of one pass over the held-out segments."""

    def __init__(
        self, segments: Segments, table: SegmentTable, settings: PlanSettings, how: CollateSettings, *, rank: int
    ) -> None:
        self.segments = segments
        self.plan = plan_epoch(table, settings, epoch=0)
        self.how = how
        self.mine = self.plan.of_rank(rank)

    def __len__(self) -> int:
        return len(self.mine)

    def __getitem__(self, index: int) -> Batch:
        return _batch(self.segments, self.plan, self.mine[index], self.how)


def make_loader(stream: Dataset[Batch], *, num_workers: int) -> DataLoader[Batch]:
    """A loader that yields the stream's batches in their order, for any number of workers."""
    # one batch is one item; a batch sampler, not batch_size=None, so that accelerate can skip by index when resuming
    return DataLoader(stream, batch_sampler=_InOrder(stream), num_workers=num_workers, collate_fn=_only)


def is_packed(packing: Packing) -> bool:
    """Whether rows hold several segments that the model must keep apart."""
    match packing:
        case Packing.BEST_FIT:
            return True
        case Packing.NONE:
            return False
        case _:
            raise AssertionError(packing)


class _InOrder(Sampler[list[int]]):
    def __init__(self, stream: Dataset[Batch]) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)  # type: ignore[arg-type]  # both streams have a length, torch's Dataset declares none

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in range(len(self)))


def _only(items: list[Batch]) -> Batch:
    (batch,) = items
    return batch


def _batch(segments: Segments, plan: EpochPlan, micro_batch: int, how: CollateSettings) -> Batch:
    planned = plan[micro_batch]
    if planned.dummy:
        return _blank(segments, how)
    packs = [Pack(segments=tuple(segments[i] for i in pack)) for pack in planned.packs]
    return collate(packs, packed=how.packed, pad_token_id=how.pad_token_id, varlen=how.varlen)


def _blank(segments: Segments, how: CollateSettings) -> Batch:
    # cheaper than a copy of a real micro-batch without its targets, and as good: it adds 0 to every sum
    ids = segments[0].input_ids[:2]
    target = segments[0].target[:2] & False
    pack = Pack(segments=(Segment(input_ids=ids, target=target),))
    return collate([pack], packed=how.packed, pad_token_id=how.pad_token_id, varlen=how.varlen)
