"""The plan of one epoch while its rows are still on their way: which packs each window of rows gives.

Rows are taken from the epoch's order in blocks, their segments go to the packer, and what it decides comes out window
by window. Nothing depends on the size of the blocks or on when a row arrives. Packings that need all lengths take all
rows first; else a window is decided as soon as the rows it needs are here.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Packing
from luthier.packing import (
    Planned,
    PlanSettings,
    SegmentTable,
    UnitKind,
    bounds_of,
    epoch_lengths,
    held_tokens,
    sums,
    unit_bounds,
    unit_table,
)
from luthier.packing.balance import Balancer, check_lengths, micro_batch_costs, pad_rows
from luthier.packing.order import EpochOrder
from luthier.packing.packer import WindowPacker
from luthier.records import Ints

FIRST_BLOCK, LARGEST_BLOCK = 256, 2048  # rows of the order that are taken at a time: few at first, to begin soon


# A segment as often as it is seen. ``segment`` is its number; ``position`` the place of its row in the epoch's order,
# and ``ordinal`` its own in its row. ``unit``: so many segments are packed as one, this one first; 0 for the others of
# them. ``rows``: so many rows of the order are used up with this segment: its own row, if it is the row's first, and
# the lost ones before that.
OCCURRENCE = np.dtype([("segment", "<i8"), ("position", "<i8"), ("ordinal", "<i4"), ("rows", "<i4"), ("unit", "<i4")])
_CARRIED = np.dtype([("position", "<i8"), ("ordinal", "<i4"), ("rows", "<i4")])


class RowSegments(Protocol):
    """The rows of a run by number, as far as they are here, and their segments."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows each source has, the lost ones among them."""

    def segments_of(self, rows: Ints, /) -> tuple[Ints, Ints]:
        """``(ids int64[n], counts int64[len(rows)])``: the segments of these rows in their order; a lost row has none.

        Waits until all of them are here.
        """

    def table(self, segments: Ints, /) -> SegmentTable:
        """The lines of some segments; ``row_ids`` have no meaning."""

    def whole(self) -> SegmentTable:
        """The segments that are here."""


class TableRows:
    """The rows of a table, numbered source by source, and all here."""

    def __init__(self, table: SegmentTable) -> None:
        """``table.row_ids`` has to ascend, as those of a `SegmentIndex` do."""
        first, counts = first_segments(table.row_ids)
        sources = table.source_ids[first]
        by_source = np.argsort(sources, kind="stable")
        self.counts: tuple[int, ...] = tuple(
            np.bincount(sources, minlength=len(table.source_weights)).tolist() if len(sources) else ()
        ) or (0,) * len(table.source_weights)
        self._table, self._first, self._count = table, first[by_source], counts[by_source]

    def segments_of(self, rows: Ints) -> tuple[Ints, Ints]:
        return spread(self._first[rows], self._count[rows])

    def table(self, segments: Ints) -> SegmentTable:
        return lines_of(self._table, segments)

    def whole(self) -> SegmentTable:
        return self._table


def first_segments(row_ids: Ints) -> tuple[Ints, Ints]:
    """Where each row's segments begin, and how many there are, of rows that ascend."""
    assert not len(row_ids) or np.all(np.diff(row_ids) >= 0), "rows are not in order"
    first = np.flatnonzero(np.append(True, np.diff(row_ids) > 0)) if len(row_ids) else np.zeros(0, np.int64)
    return first, np.diff(np.append(first, len(row_ids)))


def spread(first: Ints, counts: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The numbers ``first[i] … first[i] + counts[i] - 1`` of all ``i`` in a row, and ``counts``."""
    sizes = counts.astype(np.int64)
    begins = np.repeat(first - bounds_of(sizes)[:-1], sizes)
    return begins + np.arange(len(begins), dtype=np.int64), sizes


def lines_of(table: SegmentTable, segments: Ints) -> SegmentTable:
    columns = {field.name: getattr(table, field.name) for field in fields(table) if field.name != "source_weights"}
    return replace(table, **{name: column[segments] for name, column in columns.items() if column is not None})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannerPlace:
    """Where a planner is between two windows: enough to go on from, without what came before.

    position  of the next row in the order;  ordinal: so many of its segments are taken
    lost      rows before it that are lost, behind the last one that is not
    carried   of dtype ``_CARRIED``: the units that the packer holds back, each by its first segment
    packer    the packer's state, but for these
    """

    position: int
    ordinal: int
    lost: int
    carried: NDArray[np.void]
    packer: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        """Under 2 kB."""
        columns = b"".join(np.ascontiguousarray(self.carried[name]).tobytes() for name in _CARRIED.names or ())
        return {
            "position": self.position,
            "ordinal": self.ordinal,
            "lost": self.lost,
            "carried": base64.b64encode(zlib.compress(columns, 9)).decode("ascii"),
            "packer": dict(self.packer),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlannerPlace:
        """What `to_json` gave."""
        columns = zlib.decompress(base64.b64decode(content["carried"]))
        carried = np.zeros(len(columns) // _CARRIED.itemsize, dtype=_CARRIED)
        start = 0
        for name in _CARRIED.names or ():
            dtype = _CARRIED[name]
            carried[name] = np.frombuffer(columns, dtype, len(carried), start)
            start += len(carried) * dtype.itemsize
        return cls(
            position=content["position"],
            ordinal=content["ordinal"],
            lost=content["lost"],
            carried=carried,
            packer=content["packer"],
        )


class EpochPlanner:
    """Plans an epoch window by window. What comes out are micro-batches whose ``segment_ids`` are numbers of
    ``occurrences``; `of_segments` makes segments of these.

    taken   rows of the order, and their ``tokens``
    """

    def __init__(
        self,
        rows: RowSegments,
        settings: PlanSettings,
        order: EpochOrder,
        *,
        epoch: int,
        place: PlannerPlace | None = None,
    ) -> None:
        """``place``: where another planner of the same epoch was, to go on from there."""
        self.rows, self.settings, self.order, self.epoch = rows, settings, order, epoch
        self.taken = self.tokens = 0
        self.is_over = False
        self._block = FIRST_BLOCK
        self._ordinal = self._lost = 0
        self._occurrences = GrowingTable(OCCURRENCE)
        self._padded: list[tuple[Ints, SegmentTable]] = []
        drawn = settings.units is UnitKind.FEEDBACK_KL
        self._drawn = epoch_lengths(rows.whole(), settings, epoch=epoch) if drawn else None
        packed = settings.packing is not Packing.NONE
        self._packer = WindowPacker(settings, epoch=epoch, total=len(order)) if packed else None
        if place is not None:
            self._go_to(place)

    @property
    def occurrences(self) -> NDArray[np.void]:
        """Of dtype `OCCURRENCE`: the segments of the rows taken so far. A row that is in the order twice is there
        twice."""
        return self._occurrences.records

    @property
    def lost_at_end(self) -> int:
        """Rows that were lost behind the last one that was kept."""
        return self._lost

    def next(self) -> Planned | None:
        """The next window; None behind the last. Waits for the rows that decide it.

        The last one has all that is left; the end of a smaller last step is not among its ``step_ends``.
        """
        if self.is_over:
            return None
        while True:
            window = None if self._packer is None else self._packer.decide()
            if window is not None:
                return self._of_members(window)
            if self.taken == len(self.order):
                self.is_over = True
                return self._padded_rows() if self._packer is None else self._of_members(self._packer.finish())
            self.take_block()

    def take_block(self) -> None:
        """Take the next rows of the order."""
        stop = min(self.taken + self._block, len(self.order))
        rows = self.order.rows(self.taken, stop)
        self._block = min(2 * self._block, LARGEST_BLOCK)
        records, units, heads = self._look_at(rows, np.arange(self.taken, stop, dtype=np.int64))
        self.taken = stop
        left = records["ordinal"][heads] >= np.where(records["position"][heads] == stop - len(rows), self._ordinal, 0)
        self._lost = _note_rows(records, stop - len(rows), stop, self._lost, begins_within=self._ordinal > 0)
        self._ordinal = 0
        self._push(records, lines_of(units, np.flatnonzero(left)), heads[left])

    def place(self) -> PlannerPlace | None:
        """Where it is between the last window and the next; None where an epoch is planned at once."""
        packer = self._packer
        if packer is None or packer.at_once:
            return None
        table, coming = self.occurrences, packer.next_id
        waits = table[packer.carried_ids]
        carried = np.zeros(len(waits), dtype=_CARRIED)
        for name in _CARRIED.names or ():
            carried[name] = waits[name]
        first = None if coming is None else table[coming]
        used = 0 if first is None else int(first["rows"])
        state = {name: value for name, value in packer.state().items() if name in _KEPT}
        return PlannerPlace(
            position=self.taken if first is None else int(first["position"]),
            ordinal=0 if first is None else int(first["ordinal"]),
            lost=self._lost if first is None else max(0, used - 1),
            carried=carried,
            packer=state,
        )

    def held_back(self) -> Ints:
        """The occurrences that the packer holds back, which were in the order before the place."""
        if self._packer is None or self._packer.at_once:
            return np.zeros(0, dtype=np.int64)
        heads = self._packer.carried_ids
        return spread(heads, self.occurrences["unit"][heads])[0]

    def of_segments(self, planned: Planned) -> Planned:
        """The same micro-batches with numbers of segments, what of them is meant, and what they share."""
        segments = self.occurrences["segment"][planned.segment_ids].astype(np.int64)
        if self._drawn is not None:
            planned = replace(planned, starts=np.zeros_like(segments), stops=self._drawn[segments])
        held = held_tokens(self.rows.table(segments), self.settings) if self.settings.shared else None
        return replace(planned, segment_ids=segments, held=held)

    # ------------------------------------------------------------------------------------------------- the rows

    def _look_at(self, rows: Ints, positions: Ints) -> tuple[NDArray[np.void], SegmentTable, Ints]:
        """The segments of some rows, what is packed of them as one, and which segments these begin with."""
        segments, counts = self.rows.segments_of(rows)
        at = np.repeat(positions, counts)
        table = replace(self.rows.table(segments), row_ids=at)
        lengths = table.lengths if self._drawn is None else self._drawn[segments]
        bounds = unit_bounds(table, self.settings) if len(segments) else None
        bounds = np.arange(len(segments) + 1, dtype=np.int64) if bounds is None else bounds
        records = np.zeros(len(segments), dtype=OCCURRENCE)
        records["segment"], records["position"] = segments, at
        records["ordinal"] = np.arange(len(segments)) - np.repeat(bounds_of(counts)[:-1], counts)
        records["unit"][bounds[:-1]] = np.diff(bounds)
        return records, unit_table(table, lengths, self.settings) if len(segments) else table, bounds[:-1]

    def _push(self, records: NDArray[np.void], units: SegmentTable, heads: Ints) -> None:
        heads = heads + len(self._occurrences)
        self._occurrences.append(records)
        self.tokens += int(units.lengths.sum())
        if self._packer is None:
            self._padded.append((heads, units))
        else:
            self._packer.push(heads, units.lengths, units.extra_costs)

    def _go_to(self, place: PlannerPlace) -> None:
        carried = place.carried
        positions = np.unique(carried["position"]).astype(np.int64)
        rows = [self.order.rows(position, position + 1) for position in positions.tolist()]
        records, units, heads = self._look_at(np.concatenate([*rows, positions[:0]]), positions)
        found = {
            (position, ordinal): number
            for number, (position, ordinal) in enumerate(records[["position", "ordinal"]][heads].tolist())
        }
        chosen = np.array([found[place] for place in carried[["position", "ordinal"]].tolist()], dtype=np.int64)
        records["rows"][heads[chosen]] = carried["rows"]
        self._occurrences.append(records)
        assert self._packer is not None, "padded rows are planned at once"
        state = {**self._packer.state(), **place.packer}
        self._packer = WindowPacker.resume(self.settings, state, heads[chosen], lines_of(units, chosen))
        self.taken, self._ordinal, self._lost = place.position, place.ordinal, place.lost

    # ------------------------------------------------------------------------------------------------- the packs

    def _of_members(self, planned: Planned) -> Planned:
        """A plan of units as a plan of their segments."""
        counts = self.occurrences["unit"][planned.segment_ids].astype(np.int64)
        if len(counts) == 0 or counts.max() == 1:
            return planned
        members, _ = spread(planned.segment_ids, counts)
        ends = bounds_of(counts)
        if self._packer is not None:
            return replace(planned, segment_ids=members, pack_bounds=ends[planned.pack_bounds])
        # padded, each segment has a row of its own
        rows = np.arange(len(members) + 1, dtype=np.int64)
        return replace(planned, segment_ids=members, pack_bounds=rows, batch_bounds=ends[planned.batch_bounds])

    def _padded_rows(self) -> Planned:
        heads = np.concatenate([*(heads for heads, _ in self._padded), np.zeros(0, np.int64)])
        lengths = np.concatenate([*(units.lengths for _, units in self._padded), np.zeros(0, np.int64)])
        check_lengths(lengths, self.settings.capacity)
        sorted_by = np.ones_like(lengths) if self.settings.alike else lengths
        planned = pad_rows(np.arange(len(heads), dtype=np.int64), sorted_by, self.settings)
        planned = self._of_members(replace(planned, segment_ids=heads[planned.segment_ids]))
        segments = self.of_segments(planned)
        table = self.rows.table(segments.segment_ids)
        own = table.lengths if self._drawn is None else self._drawn[segments.segment_ids]
        costs = micro_batch_costs(planned, own, self.settings, extra_costs=table.extra_costs)
        costs = np.ones_like(costs) if self.settings.alike else costs
        tokens = sums(own, planned.pack_bounds[planned.batch_bounds])
        rng = np.random.Generator(np.random.PCG64([self.settings.seed, self.epoch]))
        return planned.with_batches_in(*Balancer(self.settings).order(costs, tokens, rng, whole=True))


_KEPT = ("windows", "taken", "left", "skip", "micro_batches", "balance")  # of a packer's state


class GrowingTable:
    """Records of one dtype. ``table.records`` is a view of what is there; do not keep it over an `append`."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._memory = np.zeros(2 * LARGEST_BLOCK, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> NDArray[np.void]:
        return self._memory[: self._length]

    def append(self, records: NDArray[np.void]) -> None:
        needed = self._length + len(records)
        if needed > len(self._memory):
            grown = np.zeros(max(needed, 2 * len(self._memory)), dtype=self._memory.dtype)
            grown[: self._length] = self.records
            self._memory = grown
        self._memory[self._length : needed] = records
        self._length = needed


def _note_rows(records: NDArray[np.void], start: int, stop: int, lost: int, *, begins_within: bool) -> int:
    """Write how many rows of the places ``start:stop`` are used up with each segment; ``lost`` rows come before. How
    many are lost at the end. ``begins_within``: the first row was used up before."""
    heads = np.flatnonzero(records["ordinal"] == 0)
    if begins_within:
        assert len(heads) and records["position"][0] == start, "a row that was begun is not lost"
        heads = heads[1:]
        start += 1
    if not len(heads):
        return lost + stop - start
    places = records["position"][heads]
    records["rows"][heads] = np.diff(places, prepend=start - 1)
    records["rows"][heads[0]] += lost
    return stop - 1 - int(places[-1])
