"""Planned micro-batches -> batches. A plan says where the tokens of a micro-batch are, in numbers that are cheap to
send to a worker; the store's tokens are read, cut and collated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.collation import CollateSettings, Grid, MediaInputs, blank_grid, lay_out, lay_out_trees
from luthier.collation.collator import to_batch
from luthier.layout import leaf_segment, spans_of, splice, tree_of_runs
from luthier.layout.cutting import SegmentCut, take_window
from luthier.packing import Segments, UnitKind
from luthier.records import Address, Batch, Branch, Pack, Sample, Segment, Unit
from luthier.store import SampleStore

# One record a segment: leaf ``leaf`` of sample ``sample``, its first ``head`` tokens and ``start:stop``, ``open_end``
# as in `layout.cutting.SegmentCut`; ``file`` and ``row`` say where its row was read, ``source`` from which data set.
# Where it is compared, its first ``prompt`` tokens are the prompt. Where ``tail_stop`` is not 0, tokens
# ``tail_start:tail_stop`` of the first leaf of sample ``tail`` follow: another row's completion. ``encoder`` is what
# encoders run through for its media (`SegmentIndex.encoder_lengths`). Its first ``held`` tokens are those of the
# segment before it.
PLACE = np.dtype(
    [
        ("sample", "<i8"),
        ("leaf", "<i4"),
        ("start", "<i4"),
        ("stop", "<i4"),
        ("num_targets", "<i4"),
        ("file", "<i4"),
        ("open_end", "?"),
        ("row", "<i8"),
        ("source", "<i4"),
        ("head", "<i4"),
        ("prompt", "<i4"),
        ("tail", "<i8"),
        ("tail_start", "<i4"),
        ("tail_stop", "<i4"),
        ("encoder", "<i4"),
        ("held", "<i4"),
    ]
)

Places = NDArray[Any]  # of dtype PLACE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedMicroBatch:
    """The packs of one micro-batch: pack ``p`` is ``places[pack_bounds[p]:pack_bounds[p + 1]]``.

    step   the optimizer step that it is part of, from 0
    files  the names that ``file`` points to, of those files that occur here
    units  how many segments, one behind the other, are compared
    A blank (no places) is what a rank gets where a step has fewer micro-batches than ranks have slots.
    """

    step: int
    places: Places
    pack_bounds: Sequence[int]
    files: dict[int, str]
    units: UnitKind = UnitKind.NONE

    @property
    def is_blank(self) -> bool:
        return len(self.places) == 0

    def packs(self) -> Iterator[Places]:
        return (self.places[start:stop] for start, stop in itertools.pairwise(self.pack_bounds))

    def addresses(self) -> list[Address]:
        return [self.address(place) for place in self.places]

    def sources(self) -> tuple[int, ...]:
        """The source of each segment in it."""
        return tuple(self.places["source"].tolist())

    def address(self, place: Places) -> Address:
        return Address(file=self.files[int(place["file"])], row=int(place["row"]))


def segment_at(sample: Sample, place: Places) -> Segment:
    """The segment of a sample that a place names, without what follows from another."""
    return part_of(leaf_segment(sample, int(place["leaf"])), place)


def part_of(segment: Segment, place: Places) -> Segment:
    window = SegmentCut(
        head=int(place["head"]),
        start=int(place["start"]),
        stop=int(place["stop"]),
        open_end=bool(place["open_end"]),
        num_targets=int(place["num_targets"]),
    )
    return take_window(segment, window)


class SegmentsInMemory:
    """Segments as a store has samples: the ``n``-th is all of sample ``n``."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, number: int) -> Sample:
        segment = self._segments[number]
        columns = {each.name: getattr(segment, each.name) for each in fields(Segment)}
        return Sample(**columns, branches=(Branch(parent=-1, length=len(segment)),))

    def refresh(self) -> SegmentsInMemory:
        """As `SampleStore.refresh`; none is added."""
        return self


class BatchReader:
    """Reads micro-batches from a store, which may be added to meanwhile, or from memory."""

    def __init__(
        self,
        store: SampleStore | SegmentsInMemory,
        how: CollateSettings,
        *,
        shared: bool = False,
        media: MediaInputs | None = None,
    ) -> None:
        """``shared``: segments that begin alike hold that once (`collation.lay_out_trees`); rows have to be packed.
        ``media``: what a multimodal model gets besides."""
        self.store, self.media = store, media
        self.how = how
        self.shared = shared

    def read(self, planned: PlannedMicroBatch) -> Batch:
        """The batch. Raises `StoreError` if its bytes are damaged, ``IndexError`` for a sample that is in no commit."""
        return self.to_batch(self.lay_out(planned), planned)

    def lay_out(self, planned: PlannedMicroBatch) -> Grid:
        """The batch as a worker sends it; a blank is two tokens of padding and has no targets. Raises as `read`."""
        grid = self._tokens(planned)
        return grid if self.media is None else self.media.fill(grid, self.how)

    def _tokens(self, planned: PlannedMicroBatch) -> Grid:
        if planned.is_blank:
            return blank_grid(self.how)
        last = max(int(planned.places["sample"].max()), int(planned.places["tail"].max()))
        if last >= len(self.store):
            self.store = self.store.refresh()
        if self.shared and planned.places["held"].any():
            return lay_out_trees([self._trees(places) for places in planned.packs()], self.how)
        return lay_out([Pack(segments=tuple(map(self._segment, places))) for places in planned.packs()], self.how)

    def packs(self, planned: PlannedMicroBatch) -> list[Pack]:
        """The segments themselves, with their rows' addresses. Raises as `read`."""
        return [
            Pack(segments=tuple(replace(self._segment(place), address=planned.address(place)) for place in places))
            for places in planned.packs()
        ]

    def to_batch(self, grid: Grid, planned: PlannedMicroBatch) -> Batch:
        """What a worker laid out, as tensors, with the addresses, sources and units of its segments."""
        return to_batch(
            grid,
            self.how,
            addresses=tuple(planned.addresses()),
            sources=planned.sources(),
            units=() if not planned.units.are_compared else self._units(planned),
        )

    def _units(self, planned: PlannedMicroBatch) -> tuple[Unit, ...]:
        size, places = planned.units.size, planned.places
        samples = places["sample"]
        assert isinstance(self.store, SampleStore), "what is compared is in a store"
        verdicts = self.store.verdicts[samples].tolist()
        leaves = self.store.leaf_bounds[samples] + places["leaf"]
        leaves[places["tail_stop"] > 0] = -1
        return tuple(
            Unit(
                segments=tuple(range(first, first + size)),
                verdict=verdicts[first],
                leaves=tuple(leaves[first : first + size].tolist()),
            )
            for first in range(0, len(places), size)
        )

    def _segment(self, place: Places) -> Segment:
        segment = segment_at(self.store[int(place["sample"])], place)
        if not place["tail_stop"]:
            return segment
        theirs = leaf_segment(self.store[int(place["tail"])], 0)
        return splice(segment, spans_of(theirs, slice(int(place["tail_start"]), int(place["tail_stop"]))))

    def _trees(self, places: Places) -> list[Sample]:
        segments = [self._segment(place) for place in places]
        held = places["held"].tolist()
        bounds = [*(number for number, count in enumerate(held) if not count), len(held)]
        return [tree_of_runs(segments[start:stop], held[start:stop]) for start, stop in pairwise(bounds)]
