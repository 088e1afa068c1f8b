"""Planned micro-batches -> batches: the store's tokens are read, cut and collated here."""

from __future__ import annotations

from luthier.collation import CollateSettings, Grid, blank_grid, lay_out, to_batch
from luthier.encoding.store import SampleStore
from luthier.loader.places import Places, PlannedMicroBatch, segment_at
from luthier.records import NOWHERE, Batch, Pack, Segment


class BatchReader:
    """Reads micro-batches from a store, which may be added to meanwhile."""

    def __init__(self, store: SampleStore, how: CollateSettings) -> None:
        self.store = store
        self.how = how

    def read(self, planned: PlannedMicroBatch) -> Batch:
        """The batch. Raises `StoreError` if its bytes are damaged, ``IndexError`` for a sample that is in no commit."""
        return self.to_batch(self.lay_out(planned), planned)

    def lay_out(self, planned: PlannedMicroBatch) -> Grid:
        """The batch as a worker sends it; a blank is two tokens of padding and has no targets. Raises as `read`."""
        if planned.is_blank:
            return blank_grid(self.how)
        if int(planned.places["sample"].max()) >= len(self.store):
            self.store = self.store.refresh()
        return lay_out([self._pack(places) for places in planned.packs()], self.how)

    def to_batch(self, grid: Grid, planned: PlannedMicroBatch) -> Batch:
        """What a worker laid out, as tensors, with the addresses and sources of its segments."""
        return to_batch(grid, self.how, addresses=tuple(planned.addresses()), sources=planned.sources())

    def _pack(self, places: Places) -> Pack:
        return Pack(segments=tuple(self._segment(place) for place in places))

    def _segment(self, place: Places) -> Segment:
        return segment_at(self.store.read(int(place["sample"]), NOWHERE), place)
