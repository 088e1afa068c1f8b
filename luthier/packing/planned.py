"""Micro-batches as flat arrays, and the views of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from luthier.records import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """The segment ids of each pack. ``dummy``: its targets are to be cleared (`layout.without_targets`).

    ``spans`` is given where segments were cut (`Packing.SPLIT`): of segment ``packs[p][i]`` the tokens
    ``start:stop`` of ``spans[p][i]``, as a segment of their own.
    """

    packs: tuple[tuple[int, ...], ...]
    dummy: bool = False
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """M micro-batches of P packs, in the order in which they are trained.

    segment_ids   int64[S]; pack ``p`` is ``segment_ids[pack_bounds[p]:pack_bounds[p + 1]]``
    pack_bounds   int64[P + 1]
    batch_bounds  int64[M + 1]; micro-batch ``m`` is the packs ``batch_bounds[m]:batch_bounds[m + 1]``
    step_ends     int64[…]; a step ends before micro-batch ``step_ends[i]`` of these. What comes after the last of them
                  belongs to a step that later micro-batches complete
    starts, stops int64[S], or None where all segments are whole
    held          int64[S], tokens at a member's beginning that the one before it holds for both; None: of no member
    """

    segment_ids: Ints
    pack_bounds: Ints
    batch_bounds: Ints
    step_ends: Ints
    starts: Ints | None = None
    stops: Ints | None = None
    held: Ints | None = None

    def __len__(self) -> int:
        return len(self.batch_bounds) - 1

    def __getitem__(self, index: int) -> MicroBatchPlan:
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        first, stop = int(self.batch_bounds[index]), int(self.batch_bounds[index + 1])
        cuts = list(itertools.pairwise(self.pack_bounds[first : stop + 1].tolist()))
        packs = tuple(tuple(self.segment_ids[a:b].tolist()) for a, b in cuts)
        if self.starts is None or self.stops is None:
            return MicroBatchPlan(packs=packs)
        spans = tuple(tuple(zip(self.starts[a:b].tolist(), self.stops[a:b].tolist(), strict=True)) for a, b in cuts)
        return MicroBatchPlan(packs=packs, spans=spans)

    def lengths(self, table_lengths: Ints) -> Ints:
        """int64[S]: the tokens that each member adds to its row, given those of all segments."""
        return self.lengths_given(table_lengths[self.segment_ids])

    def lengths_given(self, lengths: Ints, members: slice = slice(None)) -> Ints:
        """int64: the tokens that some members add to their rows, given those of these members' whole segments."""
        if self.starts is not None and self.stops is not None:
            lengths = self.stops[members] - self.starts[members]
        return lengths if self.held is None else lengths - self.held[members]

    def with_batches_in(self, order: Ints, step_ends: Ints) -> Planned:
        """The micro-batches in another order, ``order[i]`` at place ``i``."""
        packs, batch_bounds = take_groups(self.batch_bounds, order)
        members, pack_bounds = take_groups(self.pack_bounds, packs)
        return Planned(
            **self._columns(members), pack_bounds=pack_bounds, batch_bounds=batch_bounds, step_ends=step_ends
        )

    def part(self, first: int, stop: int) -> Planned:
        """The micro-batches ``first:stop``, and the steps that end among them."""
        packs = slice(int(self.batch_bounds[first]), int(self.batch_bounds[stop]))
        members = slice(int(self.pack_bounds[packs.start]), int(self.pack_bounds[packs.stop]))
        ends = self.step_ends
        return Planned(
            **self._columns(members),
            pack_bounds=self.pack_bounds[packs.start : packs.stop + 1] - members.start,
            batch_bounds=self.batch_bounds[first : stop + 1] - packs.start,
            step_ends=ends[(ends > first) & (ends <= stop)] - first,
        )

    def _columns(self, members: Ints | slice) -> dict[str, Any]:
        """What is known of each of some members."""
        columns = {name: getattr(self, name) for name in _OF_MEMBERS}
        return {name: None if column is None else column[members] for name, column in columns.items()}


_OF_MEMBERS = ("segment_ids", "starts", "stops", "held")


def join(parts: Sequence[Planned]) -> Planned:
    """One after the other; at least one."""
    columns: dict[str, Any] = {}
    for name in _OF_MEMBERS:
        found = [column for part in parts if (column := getattr(part, name)) is not None]
        columns[name] = np.concatenate(found) if found else None
    before = bounds_of([len(part) for part in parts])[:-1]
    return Planned(
        **columns,
        pack_bounds=_joined_bounds([part.pack_bounds for part in parts]),
        batch_bounds=_joined_bounds([part.batch_bounds for part in parts]),
        step_ends=np.concatenate([part.step_ends + first for part, first in zip(parts, before, strict=True)]),
    )


def take_groups(bounds: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Groups ``bounds[g]:bounds[g + 1]`` in another order: the places of their members, and the new bounds.

    ``take_groups([0, 2, 3], [1, 0]) -> [2, 0, 1], [0, 1, 3]``
    """
    counts = np.diff(bounds)[order]
    new = bounds_of(counts)
    return np.arange(new[-1], dtype=np.int64) + np.repeat(bounds[:-1][order] - new[:-1], counts), new


def every(count: int, size: int) -> Ints:
    """Bounds of groups of ``size``: ``every(5, 2) -> [0, 2, 4, 5]``."""
    return np.append(np.arange(0, count, size, dtype=np.int64), np.int64(count))


def bounds_of(counts: Ints | Sequence[int]) -> Ints:
    """``bounds_of([2, 1]) -> [0, 2, 3]``."""
    bounds = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(np.asarray(counts, dtype=np.int64), out=bounds[1:])
    return bounds


def sums(values: Ints, bounds: Ints) -> Ints:
    """int64[G]: the sum of ``values`` in each group ``bounds[g]:bounds[g + 1]``; a group may be empty."""
    return np.diff(bounds_of(values)[bounds])


def _joined_bounds(bounds: Sequence[Ints]) -> Ints:
    return bounds_of(np.concatenate([np.diff(each) for each in bounds]))
