"""Streams to kill: over rows at hand, over a feed that is killed as well, of a `Loader`; and two that lose their place.

Each has ``steps(state, shape)``, see `loading.Stream`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np

from luthier.collation import CollateSettings
from luthier.config.choices import Overflow, Packing
from luthier.config.inputs import DataConfig, ModelConfig
from luthier.config.schema import OutputConfig, RunConfig, TrainConfig
from luthier.ledger import Ledger
from luthier.loader import feed
from luthier.loader.feed import FeedJob, FeedReader, run_feed
from luthier.loader.loader import Loader
from luthier.loader.numbered_rows import ArrivalSettings, ArrivingRows
from luthier.loader.plan import StreamPlan
from luthier.loader.prefetch import iterate as read_ahead
from luthier.loader.reader import BatchReader
from luthier.loader.settings import order_of_run, train_settings
from luthier.loader.stream_state import LoaderState
from luthier.packing import PlanSettings, planner
from luthier.packing.order import EpochOrder, ListedOrder, MixtureSettings, RowOrder
from luthier.preparation import PreparedSet, SourceInfo
from luthier.preparation.resolver import ResolvedPortion
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample
from luthier.training.data import open_live_data
from tests.faults.loading import Line, Shape, line_of

FINGERPRINT = "ab" * 32
SLOTS = 4  # micro-batches a step, whatever the ranks
Steps = Iterator[tuple[int, list[Line], LoaderState]]

NUM_ROWS, NUM_EPOCHS, CAPACITY, WINDOW = 900, 2, 64, 256
HOW = CollateSettings(packed=True, pad_token_id=0)


@dataclass(frozen=True)
class RowsAtHand:
    """A plan over rows that are in the store already, and come in portions."""

    store: Path
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path, sizes: tuple[int, ...]) -> RowsAtHand:
        """Write the rows, if they are not there."""
        if not folder.exists():
            rng = np.random.default_rng(7)
            writer = StoreWriter(folder, fingerprint=FINGERPRINT)
            for row in range(NUM_ROWS):
                length = 3 + row * 7919 % 60
                sample = Sample(
                    input_ids=rng.integers(0, 5000, length, dtype=np.int32),
                    target=rng.random(length) < 0.5,
                    branches=(Branch(parent=-1, length=length),),
                )
                writer.add(_key(row), freeze_sample(sample))
            writer.commit()
        return cls(folder, sizes)

    def plan(
        self,
        ranks: int,
        order: RowOrder | None = None,
        *,
        num_epochs: int = NUM_EPOCHS,
        state: LoaderState | None = None,
    ) -> StreamPlan:
        """The plan of all steps."""
        store = SampleStore.open(self.store, fingerprint=FINGERPRINT)
        arriving = ArrivalSettings(
            counts=(NUM_ROWS,),
            sources=(SourceInfo(name="s", weight=1.0),),
            max_length=CAPACITY,
            overflow=Overflow.DROP,
            max_drop=0.5,
        )
        settings = PlanSettings(
            packing=Packing.WINDOW,
            capacity=CAPACITY,
            micro_batches_per_step=SLOTS,
            num_ranks=ranks,
            seed=3,
            window=WINDOW,
        )
        rows = ArrivingRows(self._portions(own_order().epoch(0).rows(0, NUM_ROWS), store), store, arriving)
        return StreamPlan(rows, settings, order or own_order(), num_epochs=num_epochs, state=state)

    def steps(self, state: LoaderState | None, shape: Shape) -> Steps:
        """See `Stream`."""
        plan = self.plan(shape.ranks, state=state)
        first = 0
        if state is not None:
            first = state.step
            here = state_after(plan, first, data=FINGERPRINT)
            state.check(here)
            assert state.trail.parts_from(here.trail) is None
            assert (state.cursor, state.waiting) == (here.cursor, here.waiting)
        yield from steps_of(plan, BatchReader(plan.rows.store, HOW), shape, first, data=FINGERPRINT)

    def _portions(self, order: Any, store: SampleStore) -> Iterator[ResolvedPortion]:
        start = 0
        for size in [*self.sizes, len(order)]:
            rows = order[start : start + size]
            if len(rows):
                yield _portion(rows, store, first=start == 0)
            start += size


class Forgetful(RowsAtHand):
    """Goes on behind the rows that had been taken, as if none of them had been waiting in the window."""

    def steps(self, state: LoaderState | None, shape: Shape) -> Steps:
        """See `Stream`."""
        if state is None:
            yield from super().steps(None, shape)
            return
        epoch, cursor = (state.epoch, state.cursor) if state.cursor < NUM_ROWS else (state.epoch + 1, 0)
        if epoch == NUM_EPOCHS:
            return

        plan = self.plan(shape.ranks, Rest.of(epoch, cursor), num_epochs=NUM_EPOCHS - epoch)
        reader = BatchReader(plan.rows.store, HOW)
        for number, lines, after in steps_of(plan, reader, shape, 0, data=FINGERPRINT):
            yield state.step + number, lines, replace(after, step=state.step + after.step)


class Hesitant(RowsAtHand):
    """Believes that the step before the state had not been done."""

    def steps(self, state: LoaderState | None, shape: Shape) -> Steps:
        """See `Stream`."""
        plan = self.plan(shape.ranks)
        reader = BatchReader(plan.rows.store, HOW)
        first = 0 if state is None else state.step - 1
        for number, lines, after in steps_of(plan, reader, shape, first, data=FINGERPRINT):
            yield number, lines, replace(after, step=after.step + (state is not None))


def own_order() -> RowOrder:
    """The rows of each epoch."""
    return RowOrder(counts=(NUM_ROWS,), mixture=MixtureSettings(weights=(1.0,)), seed=3)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rest(RowOrder):
    """The same without the rows of ``first`` epochs and ``cursor`` rows."""

    first: int
    cursor: int

    @classmethod
    def of(cls, first: int, cursor: int) -> Rest:
        """Of `own_order`."""
        return cls(counts=(NUM_ROWS,), mixture=MixtureSettings(weights=(1.0,)), seed=3, first=first, cursor=cursor)

    def epoch(self, number: int) -> EpochOrder:
        """As `RowOrder.epoch`."""
        rows = own_order().epoch(self.first + number).rows(0, NUM_ROWS)
        return ListedOrder(rows[0 if number else self.cursor :])


def state_after(plan: StreamPlan, step: int, *, data: str) -> LoaderState:
    """The place after so many steps, as training saves it."""
    epoch, cursor, waiting, trail = plan.state_after(step)
    return LoaderState(
        seed=plan.settings.seed,
        epoch=epoch,
        step=step,
        cursor=cursor,
        waiting=waiting,
        trail=trail,
        settings={"micro-batches per step": plan.settings.micro_batches_per_step},
        data=data,
    )


def steps_of(plan: StreamPlan, reader: BatchReader, shape: Shape, first: int, *, data: str) -> Steps:
    """The steps from ``first`` on: all ranks' micro-batches of each, in the order of their slots."""
    ranks = [
        read_ahead(reader, plan.micro_batches(rank, first_step=first), num_workers=shape.workers)
        for rank in range(shape.ranks)
    ]
    number = first
    while plan.step(number) is not None:
        turns = plan.turns(number)
        lines = [line_of(next(rank)) for _ in range(turns) for rank in ranks]
        yield number, [line for line in lines if line[1]], state_after(plan, number + 1, data=data)  # without blanks
        number += 1


def _key(row: int) -> bytes:
    return row.to_bytes(32, "little")


def _portion(rows: Any, store: SampleStore, *, first: bool) -> ResolvedPortion:
    keys = np.frombuffer(b"".join(map(_key, rows.tolist())), np.uint8).reshape(-1, 32)
    zeros = np.zeros(len(rows), dtype=np.int64)
    return ResolvedPortion(
        rows=rows,
        sample_ids=store.lookup(keys),
        keys=keys,
        source_ids=zeros,
        file_ids=zeros,
        row_numbers=rows + 1,
        new_files=("rows",) if first else (),
        ledger=Ledger(read=len(rows), prepared=len(rows)),
        lost=(),
    )


# ------------------------------------------------------------------------------------------------- a feed


@dataclass(frozen=True)
class FedRows:
    """A plan over rows that another process prepares meanwhile, which is forked here and killed with us."""

    config: RunConfig
    feed: Path

    def steps(self, state: LoaderState | None, shape: Shape) -> Steps:
        """See `Stream`."""
        theirs, ours = Pipe(duplex=False)
        self.feed.mkdir(parents=True, exist_ok=True)
        for left in self.feed.iterdir():  # as `Feed.start`
            left.unlink()
        pid = os.fork()
        if pid == 0:
            ours.close()
            run_feed(FeedJob(config=self.config, folder=self.feed), theirs)
            os._exit(0)
        theirs.close()
        reader = FeedReader(self.feed, alive=lambda: not _has_ended(pid))
        data = open_live_data(self.config, reader)
        slots = train_settings(self.config)
        plan = StreamPlan(
            data.rows,
            replace(slots, num_ranks=shape.ranks),
            order_of_run(self.config, data.rows, slots),
            num_epochs=self.config.train.num_train_epochs,
            state=state,
        )
        first = 0
        if state is not None:
            first = state.step
            here = state_after(plan, first, data=data.fingerprint)
            state.check(here)
            assert state.trail.parts_from(here.trail) is None
        yield from steps_of(plan, BatchReader(data.rows.store, HOW), shape, first, data=data.fingerprint)
        ours.close()
        if not _has_ended(pid):
            os.waitpid(pid, 0)


@cache
def _ended_children() -> set[int]:
    return set()


def _has_ended(pid: int) -> bool:
    if pid not in _ended_children() and os.waitpid(pid, os.WNOHANG)[0]:
        _ended_children().add(pid)
    return pid in _ended_children()


def hand_over_little() -> None:
    """Portions and blocks are tiny from here on, so that a few hundred rows are many of them."""
    feed.FIRST_PORTION, feed.PORTION, feed.NICENESS = 32, 64, 0
    planner.LARGEST_BLOCK = 128


# ------------------------------------------------------------------------------------------------- a Loader


@dataclass(frozen=True)
class LoadedRows:
    """`luthier.Loader` over two epochs."""

    rows: PreparedSet
    packing: str

    def steps(self, state: LoaderState | None, shape: Shape) -> Steps:
        """See `Stream`."""
        loaders = [
            Loader(
                self.rows,
                max_length=CAPACITY,
                packing=self.packing,
                batch_size=2,
                gradient_accumulation_steps=SLOTS // shape.ranks,
                seed=5,
                rank=rank,
                world_size=shape.ranks,
                num_workers=shape.workers,
            )
            for rank in range(shape.ranks)
        ]
        number = 0
        if state is not None:
            number = state.step
            for loader in loaders:
                loader.load_state_dict(state.to_json())
        while loaders[0].epoch < NUM_EPOCHS:
            for parts in zip(*(loader.steps() for loader in loaders), strict=True):
                batches = [batch for turn in zip(*(part.batches for part in parts), strict=True) for batch in turn]
                states = [loader.state_dict() for loader in loaders]
                assert all(each == states[0] for each in states)
                lines = [line_of(batch) for batch in batches if batch.addresses]
                yield number, lines, LoaderState.from_json(states[0])
                number += 1


def loaded_rows(folder: Path, packing: str) -> LoadedRows:
    """The rows of `RowsAtHand` as a prepared set."""
    store = SampleStore.open(RowsAtHand.of(folder, ()).store, fingerprint=FINGERPRINT)
    numbers = np.arange(NUM_ROWS, dtype=np.int64)
    rows = PreparedSet(
        store=store,
        sample_ids=numbers,
        source_ids=np.zeros(NUM_ROWS, np.int32),
        file_ids=np.zeros(NUM_ROWS, np.int32),
        row_numbers=numbers + 1,
        files=("rows",),
        sources=(SourceInfo(name="s", weight=1.0),),
        ledger=Ledger(read=NUM_ROWS, prepared=NUM_ROWS),
    )
    return LoadedRows(rows, packing)


def fed_config(folder: Path, rows: Path) -> RunConfig:
    """A run that trains while its rows are prepared."""
    return RunConfig(
        model=ModelConfig(name_or_path="preset:tiny-qwen3"),
        data=DataConfig(train=[{"path": str(rows)}], store=folder / "store", workers=0, max_length=CAPACITY * 8),
        train=TrainConfig(packing=Packing.WINDOW, gradient_accumulation_steps=SLOTS, num_train_epochs=2),
        output=OutputConfig(dir=folder / "out"),
    )
