"""The rows of a run by number: which segments each has, and where their tokens are; all here, or still arriving.

Nothing here knows of epochs or packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Overflow
from luthier.ledger import Ledger
from luthier.loader.reader import PLACE, Places, PlannedMicroBatch, SegmentsInMemory, segment_at
from luthier.packing import PATCH_COST, Planned, PlanSettings, SegmentTable, UnitKind, completion_room, draw_partners
from luthier.packing.epoch import EpochPlan
from luthier.packing.planner import GrowingTable, first_segments, spread
from luthier.preparation import PreparedSet, Quarantine, SourceInfo, same_as_held_out
from luthier.preparation.resolver import ResolvedPortion
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address, Ints, Segment
from luthier.store import SampleStore

# ``row``: the number of its row; ``key``: the beginning of that row's key, which says what is in it
_COLUMNS = np.dtype([("place", PLACE), ("row", "<i8"), ("key", "<u8")])


class NumberedRows:
    """The rows of one side of a run's data, and their segments, numbered as they came.

    counts   rows of each source, the lost ones among them: rows are numbered source by source
    weights  how often an epoch sees a source's rows
    files    the names that places point to
    samples  where the tokens are: in a store, or in memory
    ledger   what became of the rows that are here, ``max_length`` included; segments in memory have none
    """

    all_here = True

    def __init__(
        self,
        counts: Sequence[int],
        *,
        weights: tuple[float, ...],
        samples: SampleStore | SegmentsInMemory,
        units: UnitKind = UnitKind.NONE,
    ) -> None:
        """No row is here yet; use `of_index` or `of_segments` for rows that are."""
        self.counts = tuple(counts)
        self.weights, self.units = weights, units
        self.files: list[str] = []
        self.ledger: Ledger | None = None
        self.held_out = np.zeros(0, dtype=np.int64)  # rows that no epoch takes
        self.samples = samples
        self._first = np.full(sum(counts), -1, dtype=np.int64)  # of each row its first segment; -1: not here yet
        self._count = np.zeros(sum(counts), dtype=np.int32)
        self._table = GrowingTable(_COLUMNS)

    @classmethod
    def of_index(cls, index: SegmentIndex) -> Self:
        """The rows of a prepared set, all here, by the numbers that they were read under."""
        rows = index.prepared
        numbering = rows.numbering
        sizes = np.bincount(rows.source_ids, minlength=len(rows.sources)).tolist()
        weights = tuple(source.weight for source in rows.sources)
        table = cls(
            sizes if numbering is None else numbering.counts, weights=weights, samples=rows.store, units=index.units
        )
        table.files, table.ledger = list(rows.files), index.ledger
        table.held_out = table.held_out if numbering is None else numbering.held_out
        numbers = np.arange(len(rows), dtype=np.int64) if numbering is None else numbering.rows
        table._add(places_of(index), index.row_ids, numbers, _short(rows.store.keys_of(rows.sample_ids)))
        table._first[table._first < 0] = 0  # nothing is left of the others, and that is known
        return table

    @classmethod
    def of_segments(cls, segments: Sequence[Segment], described: SegmentTable) -> Self:
        """Segments in memory: ``sample`` of a place is the segment's number."""
        files = {name: number for number, name in enumerate(sorted({each.address.file for each in segments}))}
        places = np.zeros(len(segments), dtype=PLACE)
        places["sample"] = np.arange(len(segments))
        places["stop"] = [len(each) for each in segments]
        places["file"] = [files[each.address.file] for each in segments]
        places["row"] = [each.address.row for each in segments]
        places["source"], places["num_targets"] = described.source_ids, described.num_targets
        first, _ = first_segments(described.row_ids)
        sources = described.source_ids[first]
        counts = np.bincount(sources, minlength=len(described.source_weights)).tolist()
        table = cls(counts, weights=described.source_weights, samples=SegmentsInMemory(segments))
        table.files = list(files)
        ranks = np.empty(len(first), dtype=np.int64)
        ranks[np.argsort(sources, kind="stable")] = np.arange(len(first))
        rows = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(segments))))
        table._add(places, rows, ranks, np.arange(len(first), dtype=np.uint64))
        return table

    def __len__(self) -> int:
        """Segments that are here."""
        return len(self._table)

    def __getitem__(self, number: int) -> Segment:
        """A segment in the store, its first token no target. Raises `StoreError` if its bytes are damaged."""
        place = self.places(np.array([number]))[0]
        if int(place["sample"]) >= len(self.store):
            self.samples = self.store.refresh()
        return segment_at(self.store.read(int(place["sample"]), self.address(number)), place)

    @property
    def store(self) -> SampleStore:
        """Where the tokens are, if that is not in memory."""
        assert isinstance(self.samples, SampleStore), "these segments are in memory"
        return self.samples

    @property
    def have_trees(self) -> bool:
        """Whether some segment that is here begins like the one before it, of the same row."""
        return bool(self._table.records["place"]["held"].any())

    def segments_of(self, rows: Ints) -> tuple[Ints, Ints]:
        """As in `packing.planner.RowSegments`. Raises whatever stopped the rows from coming, and `BudgetError`."""
        self.wait_for(rows)
        return spread(self._first[rows], self._count[rows])

    def wait_for(self, rows: Ints) -> None:
        """Return when all of ``rows`` are here."""

    def wait_for_any(self) -> None:
        """Return when some row is here that is not lost, or all are."""

    def table(self, segments: Ints) -> SegmentTable:
        """What a plan needs to know of some segments."""
        records = self._table.records
        whole = records.view(np.dtype((np.void, records.dtype.itemsize)))  # numpy copies fields one by one else
        return self._lines(whole[segments].view(records.dtype))

    def whole(self) -> SegmentTable:
        """What a plan needs to know of the segments that are here."""
        return self._lines(self._table.records)

    def places(self, segments: Ints) -> Places:
        found: Places = self._table.records["place"][segments]
        return found

    def keys(self, segments: Ints) -> NDArray[np.uint64]:
        """The beginning of the keys of these segments' rows, which say what is in them; in memory their numbers."""
        found: NDArray[np.uint64] = self._table.records["key"][segments]
        return found

    def address(self, segment: int) -> Address:
        place = self._table.records["place"][segment]
        return Address(file=self.files[int(place["file"])], row=int(place["row"]))

    def rows_of(self, segments: Ints) -> Ints:
        """The numbers of these segments' rows."""
        found: Ints = self._table.records["row"][segments]
        return found

    def micro_batch(
        self, planned: Planned, number: int | None, *, step: int, settings: PlanSettings, epoch: int
    ) -> PlannedMicroBatch:
        """A micro-batch of a plan of segments; a blank for None: a slot that the plan does not fill."""
        if number is None:
            places = self._table.records["place"][:0]
            return PlannedMicroBatch(step=step, places=places, pack_bounds=(), files={}, units=self.units)
        bounds = planned.pack_bounds[planned.batch_bounds[number] : planned.batch_bounds[number + 1] + 1]
        members = planned.segment_ids[bounds[0] : bounds[-1]]
        places = self.places(members)
        if self.units is UnitKind.FEEDBACK_KL:
            self._add_completions(places, members, settings, epoch)
        elif planned.starts is not None and planned.stops is not None:
            places["stop"] = places["start"] + planned.stops[bounds[0] : bounds[-1]]
            places["start"] += planned.starts[bounds[0] : bounds[-1]].astype(np.int32)
            places["open_end"] = False  # it goes on in another row
        return PlannedMicroBatch(
            step=step,
            places=places,
            pack_bounds=(bounds - bounds[0]).tolist(),
            files={file: self.files[file] for file in set(places["file"].tolist())},
            units=self.units,
        )

    def of_plan(self, plan: EpochPlan, number: int | None, *, step: int) -> PlannedMicroBatch:
        """A micro-batch of an epoch's plan; a blank for a dummy, and for None as in `micro_batch`."""
        real = None if number is None or number >= len(plan.planned) else number
        return self.micro_batch(plan.planned, real, step=step, settings=plan.settings, epoch=plan.epoch)

    def _add_completions(self, places: Places, members: Ints, settings: PlanSettings, epoch: int) -> None:
        """Every second place becomes the prompt with the completion that this epoch draws for it."""
        partners = _partners(len(self) // 2, seed=settings.seed, epoch=epoch)
        theirs = self.places(2 * partners[members[1::2] // 2])
        drawn = places[1::2]
        prompt_in_leaf = theirs["prompt"] + theirs["start"] - theirs["head"]
        room = completion_room(drawn["prompt"], theirs["stop"] - prompt_in_leaf, settings.capacity // 2)
        # up to the end of the prompt, which was cut as it is for the row itself
        drawn["stop"] = drawn["prompt"] + drawn["start"] - drawn["head"]
        drawn["tail"], drawn["tail_start"], drawn["tail_stop"] = theirs["sample"], prompt_in_leaf, prompt_in_leaf + room

    def _lines(self, records: NDArray[Any]) -> SegmentTable:
        places = records["place"]
        columns = {name: places[name].astype(np.int64) for name in ("num_targets", "source", "encoder")}
        compared = self.units.are_compared
        return SegmentTable(
            lengths=places["head"].astype(np.int64) + places["stop"] - places["start"],
            num_targets=columns["num_targets"],
            row_ids=records["row"],
            source_ids=columns["source"],
            source_weights=self.weights,
            extra_costs=PATCH_COST * columns["encoder"],
            prompt_lengths=places["prompt"].astype(np.int64) if compared else None,
            held=None if compared else places["held"].astype(np.int64),
        )

    def _add(self, places: Places, row_ids: Ints, numbers: Ints, keys: NDArray[np.uint64]) -> None:
        """Segments of some rows; ``row_ids`` (ascending) say which of ``numbers`` and ``keys`` each is of."""
        first, counts = first_segments(row_ids)
        rows = numbers[row_ids[first]]
        self._first[rows], self._count[rows] = first + len(self), counts
        records = np.zeros(len(places), dtype=_COLUMNS)
        records["place"], records["row"], records["key"] = places, numbers[row_ids], keys[row_ids]
        self._table.append(records)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalSettings:
    """What decides which of the arriving rows stay, and in which cuts. ``counts``: rows of each source; ``asked``: see
    `SegmentIndex`."""

    counts: tuple[int, ...]
    sources: tuple[SourceInfo, ...]
    max_length: int
    overflow: Overflow
    max_drop: float
    asked: bool = False


class ArrivingRows(NumberedRows):
    """Rows that arrive while training runs, in portions that are resolved one by one."""

    all_here = False

    def __init__(
        self,
        portions: Iterator[ResolvedPortion],
        store: SampleStore,
        settings: ArrivalSettings,
        *,
        held_out: Ints | None = None,
        lost: Quarantine | None = None,
    ) -> None:
        """``portions`` may block. ``held_out``: samples that are evaluated on; rows with the same are left out.

        ``lost`` lists the rows that are lost. It is closed when the last row has come, or with the feed.
        """
        weights = tuple(source.weight for source in settings.sources)
        super().__init__(settings.counts, weights=weights, samples=store)
        self.settings = settings
        self.ledger: Ledger = Ledger()
        self._portions, self._lost = portions, lost
        self._num_come = 0
        self._held_out = np.unique(held_out) if held_out is not None else np.zeros(0, np.int64)

    def wait_for(self, rows: Ints) -> None:
        """Take in portions until all of ``rows`` are here."""
        while (self._first[rows] < 0).any():
            portion = next(self._portions, None)
            assert portion is not None, "the feed ended before all rows that are needed had come"
            self._take_in(portion)

    def wait_for_any(self) -> None:
        """Take in portions until there is a segment, or no row is left to come."""
        while not len(self) and int((self._first < 0).sum()) > len(self.held_out):
            self._take_in(next(self._portions))

    def _take_in(self, portion: ResolvedPortion) -> None:
        settings = self.settings
        self.files.extend(portion.new_files)
        ledger = Ledger.from_json(portion.ledger.to_json())
        kept = portion.sample_ids >= 0
        same = kept & np.isin(portion.sample_ids, self._held_out)
        repeats = [
            same_as_held_out(
                Address(file=self.files[int(portion.file_ids[place])], row=int(portion.row_numbers[place]))
            )
            for place in np.flatnonzero(same).tolist()
        ]
        for error in repeats:
            ledger.lose_kept(error)
        places = np.flatnonzero(kept & ~same)
        index = self._cut(portion, places, ledger)
        self._first[portion.rows] = len(self)  # a lost row is here too
        self._add(places_of(index), index.row_ids, portion.rows[places], _short(portion.keys[places]))
        self.ledger.add(index.ledger)
        self._num_come += len(portion)
        if self._lost is not None:
            for row in portion.lost:
                self._lost.add(row.error, split="train", raw=row.raw)
            self._lost.add_all(repeats, split="train")
            self._lost.add_all(index.losses(), split="train")
            if self._num_come + len(self.held_out) == sum(settings.counts):
                self._lost.close()
        num_rows = sum(settings.counts)
        allowed = settings.max_drop * num_rows if settings.max_drop < 1 else settings.max_drop
        if self.ledger.lost > allowed:
            self.ledger.check(max_drop=settings.max_drop)

    def _cut(self, portion: ResolvedPortion, places: Ints, ledger: Ledger) -> SegmentIndex:
        """The rows of a portion at ``places``, cut to length; the ledger of the result says what that cost, too."""
        if len(places) and int(portion.sample_ids[places].max()) >= len(self.store):
            self.samples = self.store.refresh()
        kept = PreparedSet(
            store=self.store,
            sample_ids=portion.sample_ids[places],
            source_ids=portion.source_ids[places].astype(np.int32),
            file_ids=portion.file_ids[places].astype(np.int32),
            row_numbers=portion.row_numbers[places],
            files=tuple(self.files),
            sources=self.settings.sources,
            ledger=ledger,
        )
        limit, asked = self.settings.max_length, self.settings.asked
        return SegmentIndex(kept, max_length=limit, overflow=self.settings.overflow, asked=asked)


def places_of(index: SegmentIndex) -> Places:
    """Where the tokens of all segments of an index are."""
    rows = index.prepared
    places = np.zeros(len(index), dtype=PLACE)
    places["sample"], places["num_targets"] = index.sample_ids, index.num_targets
    places["leaf"], places["head"], places["start"], places["stop"], places["open_end"] = index.cuts()
    places["prompt"], places["encoder"] = index.prompt_lengths, index.encoder_lengths
    places["held"] = index.held
    places["file"], places["row"] = rows.file_ids[index.row_ids], rows.row_numbers[index.row_ids]
    places["source"] = index.source_ids
    return places


def _short(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = keys[:, :8].copy().view("<u8").reshape(-1)
    return found


_partners = lru_cache(maxsize=2)(draw_partners)  # an epoch, and the next where one ends
