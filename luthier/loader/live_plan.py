"""Steps that are planned while rows are still on their way: integers only.

The plan is a pure function of the rows, the settings and (seed, epoch). Rows are taken from the order in blocks of
fixed sizes, so nothing depends on when a row arrives; asking for a step waits until the rows that decide it are here.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import UserError
from luthier.loader.growing import GrowingTable
from luthier.loader.live_epoch import LARGEST_BLOCK, LiveEpoch, occurrences_of
from luthier.loader.live_rows import LiveRows
from luthier.loader.places import PlannedMicroBatch
from luthier.loader.state import RowTrail
from luthier.packing import Planned, PlanSettings, SegmentTable, WindowPacker, count_by_source, unit_table
from luthier.store.shard import numbers_within

Ints = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max  # no step has it so far
STEPS_REMEMBERED = 64  # behind the newest step that was asked about


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """One optimizer step: the packs (arrays of segment numbers) of each of its micro-batches, and its facts.

    epoch       the epoch it belongs to;  ``ends_epoch``: it is the epoch's last
    tokens      of all its micro-batches
    rows_used   rows of the run's orders that this step and those before it have used up
    taken       int64[S, 4], rows, segments, tokens and targets of each source in this step and those before it
    cursor      how many rows of the epoch's order had been taken when it was decided
    waiting     what the packer held then
    trail       of the rows of this step and those before it
    """

    micro_batches: tuple[tuple[Ints, ...], ...]
    epoch: int
    ends_epoch: bool
    tokens: int
    rows_used: int
    taken: Ints
    cursor: int
    waiting: dict[str, Any]
    trail: RowTrail


class StreamPlan:
    """The steps of a whole run over rows that are still arriving.

    settings   as for `plan_epoch`; ``order_of(epoch)`` gives the rows of an epoch, by global number
    horizon    how many steps the run is expected to have: exact with ``max_steps`` and where the first block of rows
               is all there is, else estimated from the first steps, and so always the same for the same data
    is_exact   whether ``horizon`` is
    has_trees  whether segments of some row planned so far share their beginnings; before the first step that is always
               the same for the same data
    """

    def __init__(
        self,
        rows: LiveRows,
        settings: PlanSettings,
        order_of: Callable[[int], Ints],
        *,
        num_epochs: float,
        max_steps: int | None = None,
    ) -> None:
        """Waits for the rows that decide the first step."""
        self.rows = rows
        self.settings = settings
        self._order_of = order_of
        # a loader's thread plans ahead while the trainer asks about steps
        self._planning, self._steps_lock = threading.RLock(), threading.Lock()
        self._num_epochs = math.inf if max_steps is not None else num_epochs
        self._max_steps = max_steps
        self._steps: deque[PlannedStep] = deque()
        self._num_dropped = self._num_planned = 0  # steps that are forgotten; that were planned, these included
        self._finished = False
        self._trail = RowTrail()
        self._rows_used = 0
        self._taken = self._no_rows()
        self._first_steps = GrowingTable(np.dtype("<i8"))  # of each segment the step that takes it first
        self.has_trees = False
        self._summary = Counter[str]()
        self._epoch = self._begin(0)
        self._rows_per_epoch = len(self._epoch.order)
        self.horizon, self.is_exact = self._look_ahead()

    @property
    def num_planned(self) -> int:
        """Steps that are decided so far."""
        return self._num_planned

    @property
    def total_steps(self) -> int:
        """All steps of the run where that is known by now, else `horizon`, and never fewer than are planned."""
        return self.num_planned if self._finished else max(self.horizon, self.num_planned)

    def step(self, number: int) -> PlannedStep | None:
        """A step, counted from 0; None behind the last. Steps long before the newest that was asked for are gone."""
        if number >= self.num_planned:  # who asks for a step that is there does not wait for one who plans
            with self._planning:
                while not self._finished and number >= self.num_planned:
                    self._plan_block()
        return self._found(number) if number < self.num_planned else None

    def _found(self, number: int) -> PlannedStep:
        with self._steps_lock:
            return self._remembered(number)

    def _remembered(self, number: int) -> PlannedStep:
        assert number >= self._num_dropped, f"step {number} is forgotten, {self._num_dropped} is the oldest"
        found = self._steps[number - self._num_dropped]
        while self._num_dropped < number - STEPS_REMEMBERED:
            self._steps.popleft()
            self._num_dropped += 1
        return found

    def is_last(self, number: int) -> bool:
        """Whether no step comes after this one."""
        return self.step(number + 1) is None

    def progress(self, steps_done: int) -> float:
        """Which share of the run ``steps_done`` steps are: of its steps where they can be counted, else of its rows."""
        if self.is_exact:
            return steps_done / self.horizon
        if steps_done == 0:
            return 0.0
        step = self.step(steps_done - 1)
        return 1.0 if step is None else min(1.0, step.rows_used / (self._rows_per_epoch * self._num_epochs))

    def epoch_after(self, steps_done: int) -> float:
        """How many epochs ``steps_done`` steps are, by the rows they used up: 1.5 is half through the second."""
        step = self.step(steps_done - 1) if steps_done else None
        if step is None:
            return 0.0
        return float(step.epoch + 1) if step.ends_epoch else min(step.rows_used / self._rows_per_epoch, step.epoch + 1)

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether the last of ``steps_done`` steps was an epoch's last."""
        step = self.step(steps_done - 1)
        return step is not None and step.ends_epoch

    def num_tokens(self, number: int) -> int:
        """Tokens of a step on all ranks, without padding."""
        step = self.step(number)
        assert step is not None, f"step {number} of {self.num_planned}"
        return step.tokens

    def micro_batches(self, rank: int, *, first_step: int = 0) -> Iterator[PlannedMicroBatch]:
        """One rank's micro-batches from a step on, accumulation by accumulation; blanks where a step is smaller."""
        ranks = self.settings.num_ranks
        for number in itertools.count(first_step):
            step = self.step(number)
            if step is None:
                return
            for turn in range(self.turns(number)):
                slot = turn * ranks + rank
                yield self._planned(number, step.micro_batches[slot] if slot < len(step.micro_batches) else ())

    def turns(self, number: int) -> int:
        """How many micro-batches a step has on each rank, blanks counted."""
        step = self.step(number)
        assert step is not None, f"step {number} of {self.num_planned}"
        least = self.settings.micro_batches_per_step
        return max(least, len(step.micro_batches)) // self.settings.num_ranks

    def source_counts(self, steps_done: int) -> Ints:
        """int64[S, 4]: rows, segments, tokens and targets of each source in the first steps, on all ranks."""
        step = self.step(steps_done - 1) if steps_done else None
        return self._no_rows() if step is None else step.taken

    def trained_rows(self, steps_done: int) -> Ints:
        """int64[n], ascending: numbers of one segment each of the rows that the first steps have seen a segment of."""
        if steps_done:
            self.step(steps_done - 1)  # all before it are planned then
        with self._steps_lock:
            taken = np.flatnonzero(self._first_steps.records < steps_done)
        places = self.rows.segments.places(taken)
        _, first = np.unique(places[["file", "row"]], return_index=True)
        return taken[np.sort(first)]

    def _no_rows(self) -> Ints:
        return np.zeros((len(self.rows.settings.sources), 4), dtype=np.int64)

    def first_epoch(self) -> dict[str, int]:
        """What was planned of the first epoch: ``segments tokens targets micro_batches slots``."""
        return dict(self._summary)

    def _planned(self, step: int, packs: tuple[Ints, ...]) -> PlannedMicroBatch:
        segments = self.rows.segments
        places = segments.places(np.concatenate(packs) if packs else np.zeros(0, np.int64))
        bounds = [0, *itertools.accumulate(map(len, packs))]
        files = {int(file): segments.files[file] for file in np.unique(places["file"])}
        return PlannedMicroBatch(step=step, places=places, pack_bounds=bounds, files=files)

    # ------------------------------------------------------------------------------------------------ planning

    def _look_ahead(self) -> tuple[int, bool]:
        first = self._epoch  # a small one is over at once, and the next has begun
        while not self._steps and not self._finished:
            self._plan_block()
        if self._max_steps is not None:
            return self._max_steps, True
        if self._finished:
            return self.num_planned, True
        tokens_per_row = first.tokens / first.taken
        tokens_per_step = sum(step.tokens for step in self._steps) / len(self._steps)
        rows = self._rows_per_epoch * self._num_epochs
        return max(self.num_planned, round(rows * tokens_per_row / tokens_per_step)), False

    def _begin(self, number: int) -> LiveEpoch:
        return LiveEpoch(number=number, order=self._order_of(number), packer=WindowPacker(self.settings, epoch=number))

    def _plan_block(self) -> None:
        """Take the next rows of the order, and note the steps that they decide."""
        epoch = self._epoch
        rows = epoch.order[epoch.taken : epoch.taken + epoch.block]
        segments, counts = self.rows.segments_of(rows)
        epoch.taken += len(rows)
        epoch.block = min(2 * epoch.block, LARGEST_BLOCK)
        first = len(epoch.occurrences)
        held = self.rows.segments.held(segments) * self.settings.shared
        epoch.occurrences.append(occurrences_of(epoch, segments, counts, held))
        self.has_trees = self.has_trees or bool(held.any())
        units = self._units(segments, held)
        epoch.tokens += int(units.lengths.sum())
        heads = first + np.flatnonzero(held == 0)
        self._take(epoch.packer.add(heads, units.lengths, units.extra_costs))
        epoch.waiting = epoch.packer.state()
        if epoch.taken == len(epoch.order):
            self._take(epoch.packer.finish(), ends_epoch=True)
            self._end_epoch()

    def _units(self, numbers: Ints, held: Ints) -> SegmentTable:
        """What is packed of some segments that are here: themselves, or those that share their beginnings together."""
        segments = self.rows.segments
        places = segments.places(numbers)
        table = SegmentTable(
            lengths=segments.lengths(numbers),
            num_targets=places["num_targets"].astype(np.int64),
            row_ids=np.cumsum(held == 0),
            source_ids=places["source"].astype(np.int64),
            extra_costs=segments.extra_costs(numbers),
            held=held,
        )
        return unit_table(table, table.lengths, self.settings)

    def _take(self, planned: Planned, *, ends_epoch: bool = False) -> None:
        """Note micro-batches, in occurrences. A step is added once it is known whether another one follows."""
        pending, done = self._epoch.pending, self._epoch.done
        ends = set(planned.step_ends.tolist())
        for number, (start, stop) in enumerate(itertools.pairwise(planned.batch_bounds.tolist())):
            packs = itertools.pairwise(planned.pack_bounds[start : stop + 1].tolist())
            pending.append(tuple(self._members(planned.segment_ids[a:b]) for a, b in packs))
            if number + 1 in ends:
                done.append(list(pending))
                pending.clear()
        if ends_epoch and pending:  # the smaller last step
            done.append(list(pending))
            pending.clear()
        while len(done) > 1 or (ends_epoch and done):
            self._add_step(done.popleft(), ends_epoch=ends_epoch and not done)

    def _members(self, heads: Ints) -> Ints:
        """The occurrences of units, by the first of each."""
        counts = self._epoch.occurrences.records["unit"][heads].astype(np.int64)
        return np.repeat(heads, counts) + numbers_within(counts)

    def _add_step(self, batches: list[tuple[Ints, ...]], *, ends_epoch: bool) -> None:
        epoch = self._epoch
        if self._finished:
            return
        table = epoch.occurrences.records
        taken = table[np.concatenate([pack for packs in batches for pack in packs])]
        self._rows_used += int(taken["rows"].sum()) + (epoch.lost_since if ends_epoch else 0)
        counts = self._count(batches, taken)
        self._taken = self._taken + counts  # another array: earlier steps keep theirs
        self._trail = self._trail.after(self.rows.segments.keys(taken["segment"]).tobytes())
        step = PlannedStep(
            micro_batches=tuple(tuple(table["segment"][pack] for pack in packs) for packs in batches),
            epoch=epoch.number,
            ends_epoch=ends_epoch,
            tokens=int(counts[:, 2].sum()),
            rows_used=self._rows_used,
            taken=self._taken,
            cursor=epoch.taken,
            waiting=epoch.waiting,
            trail=self._trail,
        )
        with self._steps_lock:
            self._note_first_step(taken["segment"])
            self._steps.append(step)
            self._num_planned += 1
        # a row counts with its first segment, so a whole epoch goes on to the last segment of its rows
        is_part = self._num_epochs % 1 > 0
        enough_rows = is_part and self._rows_used >= self._rows_per_epoch * self._num_epochs
        self._finished = self.num_planned == self._max_steps or (enough_rows and not ends_epoch)

    def _note_first_step(self, segments: Ints) -> None:
        missing = int(segments.max(initial=-1)) + 1 - len(self._first_steps)
        if missing > 0:
            self._first_steps.append(np.full(missing, NEVER))
        first = self._first_steps.records
        first[segments] = np.minimum(first[segments], self._num_planned)

    def _count(self, batches: list[tuple[Ints, ...]], taken: NDArray[Any]) -> Ints:
        places = self.rows.segments.places(taken["segment"])
        counts = count_by_source(
            places["source"],
            len(self.rows.settings.sources),
            heads=taken["rows"] > 0,
            lengths=places["stop"] - places["start"] - places["held"] * self.settings.shared,
            targets=places["num_targets"],
        )
        if self._epoch.number == 0:
            _, segments, tokens, targets = counts.sum(axis=0).tolist()
            found = {"segments": segments, "tokens": tokens, "targets": targets, "micro_batches": len(batches)}
            self._summary.update({**found, "packs": sum(map(len, batches))})  # a Counter adds
        return counts

    def _end_epoch(self) -> None:
        number = self._epoch.number + 1
        if self._finished or number >= self._num_epochs:
            self._finished = True
        else:
            if not self.num_planned:
                raise UserError(
                    "an epoch has no steps: it takes no row",
                    hint="raise the weight of data.train[], which says how often each row is seen in an epoch",
                    key="data.train",
                )
            self._epoch = self._begin(number)
