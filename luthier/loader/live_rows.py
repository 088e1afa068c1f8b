"""Rows that arrive while training runs: which segments each has, and where their tokens are.

Portions of resolved rows come in one by one; nothing here knows of epochs or packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Overflow
from luthier.errors import RowDropped
from luthier.ledger import Ledger
from luthier.loader.growing import GrowingTable
from luthier.loader.places import PLACE, Places, segment_at
from luthier.loader.planning import places_of
from luthier.packing import PATCH_COST
from luthier.preparation.portions import ResolvedPortion
from luthier.preparation.prepared import PreparedSet, SourceInfo
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address, Segment
from luthier.store.store import SampleStore

Ints = NDArray[np.int64]

SAME_AS_HELD_OUT = "same_as_held_out"
_COLUMNS = np.dtype([("place", PLACE), ("key", "<u8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSettings:
    """What decides which of the arriving rows stay, and in which cuts."""

    num_rows: int
    sources: tuple[SourceInfo, ...]
    max_length: int
    overflow: Overflow
    max_drop: float


class LiveRows:
    """The rows of one split by global number, as far as they have arrived.

    ledger    what became of the rows that arrived, `max_length` included
    segments  `LiveSegments` of those rows
    """

    def __init__(
        self,
        portions: Iterator[ResolvedPortion],
        store: SampleStore,
        settings: LiveSettings,
        *,
        held_out: Ints | None = None,
    ) -> None:
        """``portions`` may block. ``held_out``: samples that are evaluated on; rows with the same are left out."""
        self.settings = settings
        self.ledger = Ledger()
        self.segments = LiveSegments(store)
        self._portions = portions
        self._held_out = np.unique(held_out) if held_out is not None else np.zeros(0, np.int64)
        self._first = np.full(settings.num_rows, -1, dtype=np.int64)  # -1: not here yet
        self._count = np.zeros(settings.num_rows, dtype=np.int32)

    def segments_of(self, rows: Ints) -> tuple[Ints, Ints]:
        """``(ids int64[n], counts int64[len(rows)])``: the segments of these rows in their order; a lost row has none.

        Waits until all of them are here. Raises whatever stopped the portions from coming, and `BudgetError`.
        """
        self.wait_for(rows)
        counts = self._count[rows].astype(np.int64)
        first = np.repeat(self._first[rows] - (np.cumsum(counts) - counts), counts)
        return first + np.arange(int(counts.sum()), dtype=np.int64), counts

    def wait_for(self, rows: Ints) -> None:
        """Take in portions until all of ``rows`` are here."""
        while (self._first[rows] < 0).any():
            portion = next(self._portions, None)
            assert portion is not None, "the feed ended before all rows that are needed had come"
            self._take_in(portion)

    def _take_in(self, portion: ResolvedPortion) -> None:
        settings = self.settings
        self.segments.add_files(portion.new_files)
        ledger = Ledger.from_json(portion.ledger.to_json())
        kept = portion.sample_ids >= 0
        same = kept & np.isin(portion.sample_ids, self._held_out)
        for place in np.flatnonzero(same).tolist():
            address = self.segments.address(int(portion.file_ids[place]), int(portion.row_numbers[place]))
            ledger.lose_kept(RowDropped(SAME_AS_HELD_OUT, "this content is evaluated on", address=address))
        places = np.flatnonzero(kept & ~same)
        first, counts, ledger = self.segments.add(portion, places, settings, ledger)
        self._first[portion.rows] = first[0] if len(first) else len(self.segments)  # a lost row is here too
        self._count[portion.rows] = 0
        self._first[portion.rows[places]] = first
        self._count[portion.rows[places]] = counts
        self.ledger.add(ledger)
        allowed = settings.max_drop * settings.num_rows if settings.max_drop < 1 else settings.max_drop
        if self.ledger.lost > allowed:
            self.ledger.check(max_drop=settings.max_drop)


class LiveSegments:
    """Segments by number, in the order of their arrival: random access, and columns of what plans need to know."""

    def __init__(self, store: SampleStore) -> None:
        self.store = store
        self.files: list[str] = []
        self._table = GrowingTable(_COLUMNS)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Segment:
        """The segment, its first token no target. Raises `StoreError` if its bytes are damaged."""
        place = self.places(np.array([number]))[0]
        if int(place["sample"]) >= len(self.store):
            self.store = self.store.refresh()
        address = self.address(int(place["file"]), int(place["row"]))
        return segment_at(self.store.read(int(place["sample"]), address), place)

    def places(self, numbers: Ints) -> Places:
        """Where the tokens of these segments are."""
        found: Places = self._table.records["place"][numbers]
        return found

    def lengths(self, numbers: Ints) -> Ints:
        """int64, tokens of these segments."""
        places = self.places(numbers)
        lengths: Ints = (places["stop"] - places["start"]).astype(np.int64)
        return lengths

    def held(self, numbers: Ints) -> Ints:
        """int64, of these segments how many of their first tokens are those of the segment before (`SegmentIndex`)."""
        return self.places(numbers)["held"].astype(np.int64)

    def extra_costs(self, numbers: Ints) -> Ints:
        """int64, what these segments cost besides their tokens, as in `packing.SegmentTable`."""
        return PATCH_COST * self.places(numbers)["encoder"].astype(np.int64)

    def keys(self, numbers: Ints) -> NDArray[np.uint64]:
        """The beginning of the keys of these segments' rows, which say what is in them."""
        found: NDArray[np.uint64] = self._table.records["key"][numbers]
        return found

    def address(self, file: int, row: int) -> Address:
        """Where a row was read."""
        return Address(file=self.files[file], row=row)

    def add_files(self, names: tuple[str, ...]) -> None:
        """Files that later rows point to."""
        self.files.extend(names)

    def add(
        self, portion: ResolvedPortion, places: Ints, settings: LiveSettings, ledger: Ledger
    ) -> tuple[Ints, Ints, Ledger]:
        """Add the rows of a portion at ``places``, cut to length: each one's first segment, and how many it has.

        The ledger that is returned says what cutting cost, too.
        """
        if len(places) and int(portion.sample_ids[places].max()) >= len(self.store):
            self.store = self.store.refresh()
        kept = PreparedSet(
            store=self.store,
            sample_ids=portion.sample_ids[places],
            source_ids=portion.source_ids[places].astype(np.int32),
            file_ids=portion.file_ids[places].astype(np.int32),
            row_numbers=portion.row_numbers[places],
            files=tuple(self.files),
            sources=settings.sources,
            ledger=ledger,
        )
        index = SegmentIndex(kept, max_length=settings.max_length, overflow=settings.overflow)
        counts = np.bincount(index.row_ids, minlength=len(places))
        first = len(self) + np.cumsum(counts) - counts
        keys = portion.keys[places][:, :8].copy().view("<u8").reshape(-1)
        self._table.append(_records(index, keys))
        return first, counts, index.ledger


def _records(index: SegmentIndex, keys: NDArray[np.uint64]) -> NDArray[Any]:
    records = np.zeros(len(index), dtype=_COLUMNS)
    records["place"], records["key"] = places_of(index), keys[index.row_ids]
    return records
