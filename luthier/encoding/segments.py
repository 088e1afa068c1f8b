"""The store seen through `layout`: every segment of a prepared set, cut to a run's ``max_length``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Overflow
from luthier.encoding.prepared import PreparedSet
from luthier.errors import RowDropped
from luthier.layout import Window, leaf_segment, plan_windows, take_window
from luthier.ledger import Ledger
from luthier.packing import SegmentTable
from luthier.records import Segment

Ints = NDArray[np.int64]


class SegmentIndex:
    """N segments by number, in the order of their rows, then leaves, then windows.

    lengths      int64[N], tokens
    num_targets  int64[N], as collation will count them; at least 1
    row_ids      int64[N], the row of ``prepared`` each belongs to
    sample_ids   int64[N], its sample in the store
    source_ids   int64[N], index into ``prepared.sources``
    lost_rows    int64[…], rows of ``prepared`` of which nothing is left
    ledger       the prepared set's, with this run's losses and notes in it; the set's own is left as it is

    A row is lost only if all of its segments are; segments lost from a row that stays are notes.
    """

    lengths: Ints
    num_targets: Ints
    row_ids: Ints
    sample_ids: Ints
    source_ids: Ints
    lost_rows: Ints

    def __init__(self, prepared: PreparedSet, *, max_length: int, overflow: Overflow) -> None:
        """Plan all cuts; tokens are read only of segments that have to be cut.

        Raises `UserError` under ``Overflow.ERROR`` for the first segment that is too long.
        """
        self.prepared = prepared
        self.ledger = Ledger.from_json(prepared.ledger.to_json())
        leaves = _leaves_of(prepared)
        fits = leaves.lengths <= max_length
        cuts = _cut(prepared, leaves, np.flatnonzero(~fits), max_length=max_length, overflow=overflow)
        whole = np.flatnonzero(fits & (leaves.num_targets > 0))
        of_leaf = np.concatenate([whole, np.array(cuts.leaf, dtype=np.int64)])
        start = np.concatenate([np.zeros_like(whole), np.array([w.start for w in cuts.windows], dtype=np.int64)])
        stop = np.concatenate([leaves.lengths[whole], np.array([w.stop for w in cuts.windows], dtype=np.int64)])
        targets = [leaves.num_targets[whole], np.array([w.num_targets for w in cuts.windows], dtype=np.int64)]
        order = np.lexsort((start, of_leaf))
        self._leaf, self._start, self._stop = of_leaf[order], start[order], stop[order]
        self._open_end = np.array([False] * len(whole) + [w.open_end for w in cuts.windows], dtype=np.bool_)[order]
        self._leaf_number = leaves.number
        self.lengths = self._stop - self._start
        self.num_targets = np.concatenate(targets)[order]
        self.row_ids = leaves.row[self._leaf]
        self.sample_ids = prepared.sample_ids[self.row_ids]
        self.source_ids = prepared.source_ids[self.row_ids].astype(np.int64)
        self.lost_rows = self._account(leaves, fits, cuts, max_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Segment:
        """The segment, its first token no target. Raises `StoreError` if its bytes are damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        leaf = int(self._leaf[index])
        segment = leaf_segment(self.prepared[int(self.row_ids[index])], int(self._leaf_number[leaf]))
        window = Window(
            start=int(self._start[index]),
            stop=int(self._stop[index]),
            open_end=bool(self._open_end[index]),
            num_targets=int(self.num_targets[index]),
        )
        return take_window(segment, window)

    def place(self, index: int) -> tuple[int, int, int]:
        """Which part of its row a segment is: the leaf's number in its sample, and ``start:stop`` of that run."""
        return int(self._leaf_number[self._leaf[index]]), int(self._start[index]), int(self._stop[index])

    def cuts(self) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
        """``(leaf, start, stop, open_end)`` of every segment: `place` and `layout.Window` as columns."""
        return self._leaf_number[self._leaf], self._start, self._stop, self._open_end

    def table(self) -> SegmentTable:
        """What `packing.plan_epoch` needs to know."""
        return SegmentTable(
            lengths=self.lengths,
            num_targets=self.num_targets,
            row_ids=self.row_ids,
            source_ids=self.source_ids,
            source_weights=tuple(source.weight for source in self.prepared.sources),
        )

    def _account(self, leaves: _Leaves, fits: NDArray[np.bool_], cuts: _Cuts, max_length: int) -> Ints:
        stays = np.zeros(len(self.prepared), dtype=np.bool_)
        stays[self.row_ids] = True
        used = np.zeros(len(leaves.row), dtype=np.bool_)
        used[self._leaf] = True
        longest_dropped = np.zeros(len(self.prepared), dtype=np.int64)
        if cuts.dropped:
            np.maximum.at(longest_dropped, leaves.row[~fits], leaves.lengths[~fits])
        for row in np.flatnonzero(~stays).tolist():
            self.ledger.lose_kept(_loss(int(longest_dropped[row]), max_length).at(self.prepared.address(row)))
        lost_leaves = stays[leaves.row] & ~used
        notes = Counter(cuts.notes)
        notes["leaf_too_long"] = int((lost_leaves & ~fits).sum())
        notes["leaf_without_target"] = int((lost_leaves & fits).sum())
        for what, count in notes.items():
            if count:
                self.ledger.note(what, count)
        return np.flatnonzero(~stays)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Leaves:
    """All leaves of all rows: the row, the leaf's number in its sample, its tokens and targets."""

    row: Ints
    number: Ints
    lengths: Ints
    num_targets: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cuts:
    """Windows with targets, of leaves that are too long. ``dropped``: the policy drops such leaves as a whole."""

    dropped: bool
    leaf: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def _leaves_of(prepared: PreparedSet) -> _Leaves:
    bounds = prepared.store.leaf_bounds
    first = bounds[prepared.sample_ids]
    counts = bounds[prepared.sample_ids + 1] - first
    row = np.repeat(np.arange(len(prepared), dtype=np.int64), counts)
    number = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    stored = first[row] + number
    return _Leaves(
        row=row,
        number=number,
        lengths=prepared.store.leaf_lengths[stored],
        num_targets=prepared.store.leaf_targets[stored],
    )


def _cut(prepared: PreparedSet, leaves: _Leaves, too_long: Ints, *, max_length: int, overflow: Overflow) -> _Cuts:
    cuts = _Cuts(dropped=overflow is Overflow.DROP)
    if cuts.dropped:
        return cuts
    for leaf in too_long.tolist():
        segment = leaf_segment(prepared[int(leaves.row[leaf])], int(leaves.number[leaf]))
        windows = plan_windows(segment.target, max_length=max_length, overflow=overflow, address=segment.address)
        useful = [window for window in windows if window.num_targets]
        cuts.leaf.extend([leaf] * len(useful))
        cuts.windows.extend(useful)
        if useful:
            cuts.notes["truncated" if overflow is Overflow.TRUNCATE else "split"] += 1
            cuts.notes["window_without_target"] += len(windows) - len(useful)
    return cuts


def _loss(too_long: int, max_length: int) -> RowDropped:
    if too_long:
        return RowDropped("too_long", f"{too_long} tokens, data.max_length is {max_length}")
    return RowDropped("no_target_left", f"no target within data.max_length={max_length} tokens")
