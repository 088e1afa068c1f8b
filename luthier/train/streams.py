"""The run's batches, of training and of evaluation, as the trainer iterates them.

What a micro-batch holds is fixed by (data, settings, seed, step, slot) alone: ranks and workers do not matter, and a
stream begins at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from luthier.collation import CollateSettings, MediaInputs, blank_grid, lay_out, to_batch
from luthier.loader.live_plan import StreamPlan
from luthier.loader.places import PlannedMicroBatch, part_of
from luthier.loader.planning import SegmentPlaces
from luthier.loader.prefetch import iterate
from luthier.loader.reader import BatchReader
from luthier.packing import EpochPlan, PlanSettings, Segments, SegmentTable, plan_epoch
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Pack
from luthier.train.schedule import Schedule, Steps

ENDLESS = 2**40  # micro-batches: transformers wants a length, the steps say when it is over


Watch = Callable[[Iterator[Batch]], Iterator[Batch]]  # looks at the batches as they go by


class ReadsBatches(Protocol):
    """Makes a batch of what is planned."""

    def read(self, planned: PlannedMicroBatch) -> Batch:
        """The batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentsReader:
    """Reads micro-batches of segments in memory, where a place's ``sample`` is a segment's number."""

    segments: Segments
    how: CollateSettings
    media: MediaInputs | None = None

    def read(self, planned: PlannedMicroBatch) -> Batch:
        """The batch."""
        packs = [
            Pack(segments=tuple(part_of(self.segments[int(place["sample"])], place) for place in pack))
            for pack in planned.packs()
        ]
        addresses = tuple(segment.address for pack in packs for segment in pack.segments)
        grid = blank_grid(self.how) if planned.is_blank else lay_out(packs, self.how)
        if self.media is not None:
            grid = self.media.fill(grid, self.how)
        return to_batch(grid, self.how, addresses=addresses, sources=planned.sources())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainStream:
    """One rank's micro-batches from step ``first_step`` on; ``planned`` says what is in them."""

    schedule: Steps
    reader: ReadsBatches
    planned: Callable[[], Iterator[PlannedMicroBatch]]
    how: CollateSettings
    num_workers: int
    first_step: int
    watch: Watch = iter

    def __len__(self) -> int:
        settings = self.schedule.settings
        return self.first_step * (settings.micro_batches_per_step // settings.num_ranks) if self.is_over else ENDLESS

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.first_step > 0 and self.schedule.is_last(self.first_step - 1)

    def __iter__(self) -> Iterator[Batch]:
        return self.watch(iterate_batches(self.reader, self.planned(), num_workers=self.num_workers))


def train_stream(
    segments: Segments,
    schedule: Schedule | StreamPlan,
    how: CollateSettings,
    *,
    rank: int,
    first_step: int,
    num_workers: int,
    shared: bool = False,
    media: MediaInputs | None = None,
) -> TrainStream:
    """The stream of a run; ``segments`` are those of a `Schedule`. ``shared`` and ``media`` as in `BatchReader`."""
    reader: ReadsBatches
    if isinstance(schedule, StreamPlan):
        reader, live = BatchReader(schedule.rows.segments.store, how, shared=shared, media=media), schedule
        planned = lambda: live.micro_batches(rank, first_step=first_step)  # noqa: E731
    else:
        reader, places, exact = (
            _reader(segments, how, shared=shared, media=media),
            _places(segments, schedule.table),
            schedule,
        )
        planned = lambda: _planned(exact, places, rank, first_step)  # noqa: E731
    return TrainStream(
        schedule=schedule, reader=reader, planned=planned, how=how, num_workers=num_workers, first_step=first_step
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalStream:
    """One rank's share of one pass over the held-out segments."""

    reader: ReadsBatches
    places: SegmentPlaces
    plan: EpochPlan
    rank: int
    num_workers: int
    watch: Watch = iter

    @staticmethod
    def of_segments(
        segments: Segments,
        table: SegmentTable,
        settings: PlanSettings,
        how: CollateSettings,
        *,
        rank: int,
        num_workers: int = 0,
        shared: bool = False,
        media: MediaInputs | None = None,
    ) -> EvalStream:
        """The held-out segments in the order of their first epoch. ``shared``, ``media`` as in `BatchReader`."""
        return EvalStream(
            reader=_reader(segments, how, shared=shared, media=media),
            places=_places(segments, table),
            plan=plan_epoch(table, settings, epoch=0),
            rank=rank,
            num_workers=num_workers,
        )

    def __len__(self) -> int:
        return len(self.plan.of_rank(self.rank))

    def __iter__(self) -> Iterator[Batch]:
        planned = (self.places.micro_batch(self.plan, number, step=0) for number in self.plan.of_rank(self.rank))
        return self.watch(iterate_batches(self.reader, planned, num_workers=self.num_workers))


def sharing(reader: ReadsBatches, shared: bool) -> ReadsBatches:
    """The same reader with segments that begin alike as trees, or each whole."""
    if not isinstance(reader, BatchReader) or reader.shared == shared:
        return reader
    return BatchReader(reader.store, reader.how, shared=shared, media=reader.media)


def iterate_batches(reader: ReadsBatches, planned: Iterator[PlannedMicroBatch], *, num_workers: int) -> Iterator[Batch]:
    """The batches in order, read here or by workers; from memory always here. Raises what `iterate` raises."""
    if isinstance(reader, BatchReader):
        return iterate(reader, planned, num_workers=num_workers)
    return map(reader.read, planned)


def _planned(schedule: Schedule, places: SegmentPlaces, rank: int, first_step: int) -> Iterator[PlannedMicroBatch]:
    ranks = schedule.settings.num_ranks
    for step in range(first_step, schedule.total_steps):
        for turn in range(schedule.turns(step)):
            found = schedule.micro_batch(step, turn * ranks + rank)
            if found is None:
                yield places.micro_batch(schedule.plan(schedule.locate(step)[0]), None, step=step)
            else:
                yield places.micro_batch(schedule.plan(found[0]), found[1], step=step)


def _reader(segments: Segments, how: CollateSettings, *, shared: bool, media: MediaInputs | None) -> ReadsBatches:
    if isinstance(segments, SegmentIndex):
        return BatchReader(segments.prepared.store, how, shared=shared, media=media)
    return SegmentsReader(segments=segments, how=how, media=media)


def _places(segments: Segments, table: SegmentTable) -> SegmentPlaces:
    if isinstance(segments, SegmentIndex):
        return SegmentPlaces.of_index(segments)
    return SegmentPlaces.of_segments([segments[number] for number in range(len(segments))], table.source_ids)
