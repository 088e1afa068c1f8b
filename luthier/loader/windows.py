"""Steps as a plan keeps them: the windows of rows that complete them, and the places from which a run can go on."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy
from luthier.config.schema import Packing
from luthier.errors import UserError
from luthier.loader.numbered_rows import RowTable
from luthier.loader.stream_state import RowTrail
from luthier.packing import (
    EpochOrder,
    EpochPlanner,
    MixtureSettings,
    Planned,
    PlannerPlace,
    PlanSettings,
    RowOrder,
    UnitKind,
    count_by_source,
)
from luthier.packing.planned import part_of_plan
from luthier.writing import counted

Ints = NDArray[np.int64]

BLOCK = 2**16  # rows that are looked through at once


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """One optimizer step: the packs (arrays of segment numbers) of each of its micro-batches, and its facts.

    epoch       the epoch it belongs to;  ``ends_epoch``: it is the epoch's last
    tokens      of all its micro-batches
    rows_used   rows of the run's orders that this step and those before it have used up
    taken       int64[S, 4], rows, segments, tokens and targets of each source in this step and those before it
    """

    micro_batches: tuple[tuple[Ints, ...], ...]
    epoch: int
    ends_epoch: bool
    tokens: int
    rows_used: int
    taken: Ints


@dataclass(kw_only=True, slots=True, eq=False)
class StreamHistory:
    """What had happened before a window was planned: from some of these a run can go on.

    of_first_epoch  see `StreamPlan.first_epoch`
    trail  of all steps; None: that of the window ``after`` which it comes, not computed yet
    place  of the epoch's planner; None: nothing of the epoch was planned
    """

    epoch: int
    steps: int
    rows_used: int
    taken: Ints
    of_first_epoch: tuple[int, ...]
    trail: RowTrail | None
    place: PlannerPlace | None
    after: StepWindow | None = None

    def to_json(self, trail: RowTrail) -> dict[str, object]:
        taken = zlib.compress(self.taken.astype("<i8").tobytes(), 9)
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "rows_used": self.rows_used,
            "taken": base64.b64encode(taken).decode("ascii"),
            "of_first_epoch": list(self.of_first_epoch),
            "digest": trail.digest,
            "place": None if self.place is None else self.place.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], trail: RowTrail) -> StreamHistory:
        """``trail`` is a later one of the same run."""
        taken = np.frombuffer(zlib.decompress(base64.b64decode(content["taken"])), "<i8").reshape(-1, 4)
        return cls(
            epoch=content["epoch"],
            steps=content["steps"],
            rows_used=content["rows_used"],
            taken=taken.astype(np.int64),
            of_first_epoch=tuple(content["of_first_epoch"]),
            trail=trail.cut_back(content["steps"], content["digest"]),
            place=None if content["place"] is None else PlannerPlace.from_json(content["place"]),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class StepWindow:
    """The steps that one window of rows completes, and what had happened before.

    planned   their micro-batches, of segments;  ``bounds``: int64[n + 1], of the steps in micro-batches
    used      int64[S], how many rows each member uses up;  ``upto``: int64[n], how many are used up after each step
    waiting   int64[w, 2], position and ordinal of the segments taken from the order that no step had had before
    position  how many rows of the order are taken with this window
    restart   where a run that goes on from one of these steps begins
    """

    before: StreamHistory
    restart: StreamHistory
    planned: Planned
    bounds: Ints
    used: Ints
    upto: Ints
    tokens: Ints
    waiting: Ints
    position: int
    ends_epoch: bool
    is_whole_epoch: bool
    counted: tuple[int, Ints]  # so many of these steps, and what all steps up to there take
    trail: RowTrail | None = None  # up to the last step that was asked about

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def members(self, first: int, stop: int) -> slice:
        """The members of the steps ``first:stop`` of these."""
        packs = self.planned.batch_bounds[self.bounds[[first, stop]]]
        return slice(*self.planned.pack_bounds[packs].tolist())

    def packs(self, place: int) -> tuple[tuple[Ints, ...], ...]:
        """The packs of each micro-batch of a step."""
        planned = part_of_plan(self.planned, *self.bounds[place : place + 2].tolist())
        packs = [planned.segment_ids[a:b] for a, b in itertools.pairwise(planned.pack_bounds.tolist())]
        return tuple(tuple(packs[a:b]) for a, b in itertools.pairwise(planned.batch_bounds.tolist()))


def count_taken(rows: RowTable, settings: PlanSettings, window: StepWindow, first: int, stop: int) -> Ints:
    """int64[S, 4]: rows, segments, tokens and targets that the steps ``first:stop`` of a window take of each source."""
    members, planned = window.members(first, stop), window.planned
    table = rows.table(planned.segment_ids[members])
    lengths, targets = planned.lengths_given(table.lengths, members), table.num_targets
    heads = window.used[members] > 0
    if planned.starts is not None and settings.packing is Packing.SPLIT:
        begun = planned.starts[members] == 0
        # the first token of what follows a cut is no target any more; exact for plain text
        targets = np.where(targets == table.lengths - 1, lengths - 1, np.where(begun, targets, -1))
    return count_by_source(table.source_ids, len(rows.weights), heads=heads, lengths=lengths, targets=targets)


def waiting_in(planner: EpochPlanner, open_: Planned | None) -> Ints:
    """int64[w, 2]: position and ordinal of the segments that a planner has taken and that are in no complete step;
    ``open_`` are the micro-batches of the next one."""
    members = planner.held_back()
    if open_ is not None:
        of_open = open_.segment_ids if open_.starts is None else open_.segment_ids[open_.starts == 0]
        members = np.concatenate([members, of_open])
    table = planner.occurrences[members]
    return np.stack([table["position"], table["ordinal"].astype(np.int64)], axis=1)


def rows_seen_before(rows: RowTable, order: RowOrder, window: StepWindow) -> NDArray[np.bool_]:
    """Which rows, by number, the steps before a window have seen a segment of."""
    seen = np.zeros(order.num_rows, dtype=np.bool_)
    for epoch in range(window.before.epoch):
        whole = order.epoch(epoch)
        _mark(seen, whole, len(whole), np.zeros(0, np.int64))
        if int(seen.sum()) == order.num_rows - len(order.held_out):
            break
    place = window.before.place
    if place is None:
        return seen
    waits, begun = window.waiting, order.epoch(window.before.epoch)
    positions, counts = np.unique(waits[:, 0], return_counts=True)
    at = [begun.rows(position, position + 1) for position in positions.tolist()]
    _, all_of_row = rows.segments_of(np.concatenate([*at, np.zeros(0, np.int64)]))
    _mark(seen, begun, place.position, positions[counts >= all_of_row])
    # the next row may have been begun
    taken = place.ordinal + bool(place.packer["skip"]) - int((waits[:, 0] == place.position).sum())
    if taken > 0:
        seen[begun.rows(place.position, place.position + 1)] = True
    return seen


def no_steps(num_segments: int) -> UserError:
    """What to raise where an epoch takes no row."""
    return UserError(
        f"an epoch has no steps: of {counted(num_segments, 'sequence')} it takes none",
        hint="raise the weight of data.train[], which says how often each row is seen in an epoch",
        key="data.train",
    )


def has_constant_steps(settings: PlanSettings, mixture: MixtureSettings) -> bool:
    """Whether all epochs that are planned at once have as many steps as the first one."""
    # whole weights leave the multiset of lengths alone, and with it the number of packs that are planned at once;
    # and so does everything but completions that each epoch draws anew
    drawn_anew = settings.units is UnitKind.FEEDBACK_KL and settings.packing is not Packing.NONE
    whole = mixture.by is MixtureBy.EPOCHS and all(weight == int(weight) for weight in mixture.weights)
    is_cut = settings.packing is Packing.SPLIT
    return whole and not drawn_anew and not is_cut and settings.tokens_per_step is None


def _mark(seen: NDArray[np.bool_], order: EpochOrder, stop: int, without: Ints) -> None:
    """Mark the rows at the first places of an order, but for those at some."""
    for start in range(0, stop, BLOCK):
        end = min(start + BLOCK, stop)
        rows = order.rows(start, end)
        inside = without[(without >= start) & (without < end)] - start
        seen[np.delete(rows, inside) if len(inside) else rows] = True
