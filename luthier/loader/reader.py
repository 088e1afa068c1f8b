"""Planned micro-batches -> batches: the store's tokens are read, cut and collated here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from luthier.collation import CollateSettings, Grid, MediaInputs, blank_grid, lay_out, lay_out_trees, to_batch
from luthier.layout.trees import splice, tree_of_runs
from luthier.loader.places import Places, PlannedMicroBatch, segment_at, tail_at
from luthier.records import NOWHERE, Batch, Pack, Sample, Segment, Unit
from luthier.store.store import SampleStore


class BatchReader:
    """Reads micro-batches from a store, which may be added to meanwhile."""

    def __init__(
        self, store: SampleStore, how: CollateSettings, *, shared: bool = False, media: MediaInputs | None = None
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
        segment = segment_at(self.store.read(int(place["sample"]), NOWHERE), place)
        if not place["tail_stop"]:
            return segment
        return splice(segment, tail_at(self.store.read(int(place["tail"]), NOWHERE), place))

    def _trees(self, places: Places) -> list[Sample]:
        segments = [self._segment(place) for place in places]
        held = places["held"].tolist()
        bounds = [*(number for number, count in enumerate(held) if not count), len(held)]
        return [tree_of_runs(segments[start:stop], held[start:stop]) for start, stop in pairwise(bounds)]
