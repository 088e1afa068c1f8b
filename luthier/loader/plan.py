"""The steps of a whole run, planned as its rows arrive: integers only. The one plan of `plan`, `show`, training,
evaluation, `luthier.Loader` and of a run that goes on.

The plan is a pure function of the rows, the settings and (seed, epoch). Asking for a step waits until the rows that
decide it are here; where all rows are here, nobody waits. A run that goes on begins at the window that its checkpoint
names, and plans nothing of what came before.

    order    r r r r r r r r r | r r r r r r r r r | r r r …      rows, taken window by window
    steps    | 0 | 1 | 2 |     3     | 4 |    5    | 6 …          step 3 is complete with the second window
    restart  ^ of steps 0 to 5                     ^ of step 6

A run goes on from the ``restart`` of a step's window: the newest place before it at which no step is incomplete, so
that a place in the order says all. It plans the steps from there again, and gives those that were not taken.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from luthier.loader import stream_state
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.reader import PlannedMicroBatch
from luthier.packing import Planned, PlanSettings, join, sums
from luthier.packing.epoch import EpochPlan, plan_epoch
from luthier.packing.order import RowOrder
from luthier.packing.packer import is_at_once
from luthier.packing.planner import EpochPlanner
from luthier.records import Ints

STEPS_REMEMBERED = 64  # behind the newest step that was asked about
MOST_EPOCHS_COUNTED, MOST_SEGMENTS_COUNTED = 1000, 10**8  # to know how many steps a run has; further ones are estimated
EPOCHS_LOOKED_AT = 100  # for the segments of a run: a source of a small weight may need very many
_PLANS_KEPT = 2  # whole epochs: one and its neighbour


class StreamPlan:
    """The steps of a whole run.

    settings   as for `plan_epoch`; ``order`` gives the rows of each epoch, by number
    horizon    how many steps the run is expected to have, and learning rates are made for. It is exact with
               ``max_steps`` and where epochs are planned at once (`packing.packer.is_at_once`), else estimated from the
               first steps; and so always the same for the same data
    is_exact   whether ``horizon`` is
    has_trees  whether segments of some row that is here before the first step share their beginnings
    """

    def __init__(
        self,
        rows: NumberedRows,
        settings: PlanSettings,
        order: RowOrder,
        *,
        num_epochs: float = math.inf,
        max_steps: int | None = None,
        state: stream_state.LoaderState | None = None,
    ) -> None:
        """``state``: where a run was that goes on here; steps before are forgotten. Raises as `RowOrder.epoch`."""
        self.rows, self.settings, self.order = rows, settings, order
        # a loader's thread plans ahead while the trainer asks about steps
        self._planning, self._steps_lock = threading.RLock(), threading.RLock()
        self._num_epochs = math.inf if max_steps is not None else num_epochs
        self._max_steps = max_steps
        self._windows: deque[stream_state.StepWindow] = deque()
        self._whole: OrderedDict[int, EpochPlan] = OrderedDict()
        self._last: int | None = None  # how many steps there are, once that is known
        self._steps_per_epoch: tuple[float, bool] | None = None  # steps of an epoch, and whether they were counted
        self._counted: tuple[float, ...] = ()  # epochs that are planned at once, and all of their steps
        self._run_facts_known: tuple[int, bool, bool] | None = None
        if state is not None and state.waiting:
            waiting = state.waiting
            self._begin_epoch(stream_state.StreamHistory.from_json(waiting, state.trail))
            self._steps_per_epoch = float(waiting["pace"]), bool(waiting["is_counted"])
            self._has_trees = bool(waiting["has_trees"])
            self._counted = tuple(waiting["counted"])
        else:
            none = np.zeros((len(rows.weights), 4), dtype=np.int64)
            trail = stream_state.RowTrail()
            self._begin_epoch(
                stream_state.StreamHistory(
                    epoch=0, steps=0, rows_used=0, taken=none, of_first_epoch=(0,) * 5, trail=trail, place=None
                )
            )
        self._rows_per_epoch = len(self._planner.order)

    @property
    def horizon(self) -> int:
        """See `StreamPlan`. Waits for the rows that decide the first step. Raises `UserError` where there is none."""
        return self._run_facts()[0]

    @property
    def is_exact(self) -> bool:
        """Whether the run has exactly ``horizon`` steps."""
        return self._run_facts()[1]

    @property
    def num_epochs(self) -> int:
        """How many epochs the run begins, as far as its ``horizon`` says."""
        by_steps = self.horizon / (self._steps_per_epoch or (1.0, True))[0]
        return math.ceil(by_steps if math.isinf(self._num_epochs) else self._num_epochs)

    @property
    def has_trees(self) -> bool:
        """See `StreamPlan`."""
        return self._run_facts()[2]

    @property
    def num_planned(self) -> int:
        """Steps that are decided so far, and of which it is known whether another one follows."""
        if not self._windows:
            return self._history.steps
        newest = self._windows[-1]
        decided = newest.before.steps + len(newest)
        known = decided if newest.ends_epoch else decided - 1
        return known if self._last is None else self._last if decided >= self._last else min(known, self._last)

    @property
    def total_steps(self) -> int:
        """All steps of the run where that is known by now, else `horizon`, and never fewer than are planned."""
        return max(self.horizon, self.num_planned) if self._last is None else self._last

    def step(self, number: int) -> stream_state.PlannedStep | None:
        """A step, counted from 0; None behind the last. Steps long before the newest that was asked for are gone."""
        window = self._window(number)
        if window is None:
            return None
        place = number - window.before.steps
        return stream_state.PlannedStep(
            micro_batches=window.packs(place),
            epoch=window.before.epoch,
            ends_epoch=self.ends_epoch(number + 1),
            tokens=int(window.tokens[place]),
            rows_used=int(window.upto[place]),
            taken=self.source_counts(number + 1),
        )

    def is_over(self, steps_done: int) -> bool:
        """Whether no step is left after so many."""
        return steps_done > 0 and self._window(steps_done) is None

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether the last of ``steps_done`` steps was an epoch's last."""
        window = self._window(steps_done - 1)
        return window is not None and window.ends_epoch and steps_done == window.before.steps + len(window)

    def epoch_after(self, steps_done: int) -> float:
        """How many epochs ``steps_done`` steps are: 1.5 is half through the second. By steps where an epoch is planned
        at once, else by the rows they used up."""
        window = self._window(steps_done - 1) if steps_done else None
        if window is None:
            return 0.0
        epoch, place = window.before.epoch, steps_done - window.before.steps
        if window.is_whole_epoch:
            return epoch + place / len(window)
        if window.ends_epoch and place == len(window):
            return float(epoch + 1)
        return min(int(window.upto[place - 1]) / self._rows_per_epoch, epoch + 1)

    def progress(self, steps_done: int) -> float:
        """Which share of the run ``steps_done`` steps are: of its steps where they can be counted, else of its rows."""
        if self.is_exact:
            return steps_done / self.horizon
        window = self._window(steps_done - 1) if steps_done else None
        if window is None:
            return 0.0 if steps_done == 0 else 1.0
        used = int(window.upto[steps_done - 1 - window.before.steps])
        return min(1.0, used / (self._rows_per_epoch * self._num_epochs))

    def num_tokens(self, number: int) -> int:
        """Tokens of a step on all ranks, without padding."""
        window = self._planned_window(number)
        return int(window.tokens[number - window.before.steps])

    def turns(self, number: int) -> int:
        """How many micro-batches a step has on each rank, blanks counted."""
        window = self._planned_window(number)
        first, stop = map(int, window.bounds[number - window.before.steps :][:2])
        return -(-max(self.settings.micro_batches_per_step, stop - first) // self.settings.num_ranks)

    def micro_batches(self, rank: int, *, first_step: int = 0) -> Iterator[PlannedMicroBatch]:
        """One rank's micro-batches from a step on, accumulation by accumulation; blanks where a step is smaller."""
        ranks = self.settings.num_ranks
        for number in itertools.count(first_step):
            window = self._window(number)
            if window is None:
                return
            first, stop = window.bounds[number - window.before.steps :][:2].tolist()
            for turn in range(self.turns(number)):
                slot = first + turn * ranks + rank
                yield self.rows.micro_batch(
                    window.planned,
                    slot if slot < stop else None,
                    step=number,
                    settings=self.settings,
                    epoch=window.before.epoch,
                )

    def source_counts(self, steps_done: int) -> Ints:
        """int64[S, 4]: rows, segments, tokens and targets of each source in the first steps, on all ranks."""
        window = self._window(steps_done - 1) if steps_done else None
        if window is None:
            return np.zeros((len(self.rows.weights), 4), dtype=np.int64)
        place = steps_done - window.before.steps
        done, counts = window.counted
        if place < done:
            done, counts = 0, window.before.taken
        counts = counts + stream_state.count_taken(self.rows, self.settings, window, done, place)
        window.counted = (place, counts)
        return counts

    def trained_rows(self, steps_done: int) -> Ints:
        """int64[n], by row number: the first segment of each row of which the first steps have seen a segment."""
        window = self._window(steps_done - 1) if steps_done else None
        if window is None:
            return np.zeros(0, dtype=np.int64)
        seen = stream_state.rows_seen_before(self.rows, self.order, window)
        members = window.planned.segment_ids[window.members(0, steps_done - window.before.steps)]
        seen[self.rows.rows_of(members)] = True
        found, counts = self.rows.segments_of(np.flatnonzero(seen))
        first: Ints = found[np.cumsum(counts)[counts > 0] - counts[counts > 0]]
        return first

    def trained_segments(self) -> Ints:
        """int64, ascending: which segments the run has; all, where `EPOCHS_LOOKED_AT` have not taken all and there are
        more. All rows have to be here."""
        seen = np.zeros(len(self.rows), dtype=np.bool_)
        left = self.total_steps
        for epoch in range(EPOCHS_LOOKED_AT):
            if left <= 0 or seen.all():
                return np.flatnonzero(seen)
            plan = self.epoch(epoch)
            stop = min(int(plan.step_bounds[min(left, plan.num_steps)]), len(plan.planned))  # dummies have none
            seen[plan.planned.segment_ids[: plan.planned.pack_bounds[plan.planned.batch_bounds[stop]]]] = True
            left -= plan.num_steps
        return np.flatnonzero(seen | (left > 0))

    def first_epoch(self) -> dict[str, int]:
        """What was planned of the first epoch: ``segments tokens targets micro_batches packs``."""
        names = ("segments", "tokens", "targets", "micro_batches", "packs")
        return dict(zip(names, self._history.of_first_epoch, strict=True))

    def epoch(self, number: int) -> EpochPlan:
        """The whole plan of one epoch, kept while it is in use. Waits for all of its rows."""
        if number not in self._whole:
            self._whole[number] = self._planned_at_once(number) or plan_epoch(
                self.rows, self.settings, epoch=number, order=self.order.epoch(number)
            )
            while len(self._whole) > _PLANS_KEPT:
                self._whole.popitem(last=False)
        return self._whole[number]

    def _planned_at_once(self, epoch: int) -> EpochPlan | None:
        for window in self._windows:
            if window.before.epoch == epoch and window.is_whole_epoch:
                planned = replace(window.planned, step_ends=window.bounds[1:-1])
                return EpochPlan.of_planned(planned, self.rows.whole().lengths, self.settings, epoch=epoch)
        return None

    def count_steps(self) -> int:
        """How many steps the run has, exactly where its epochs are few enough to be planned. Waits for all rows."""
        if self._last is not None or self.is_exact:
            return self.total_steps
        counted = min(math.ceil(self._num_epochs), self._epochs_countable())
        if counted < self._num_epochs:
            steps = sum(self.epoch(epoch).num_steps for epoch in range(counted))
            return math.ceil(self._num_epochs * steps / counted)
        again = StreamPlan(self.rows, self.settings, self.order, num_epochs=self._num_epochs)
        while again._last is None:
            again._plan_window()
        return again._last

    def state_after(self, steps_done: int) -> tuple[int, int, dict[str, object], stream_state.RowTrail]:
        """The place after so many steps: the epoch that goes on, how many rows of its order were taken when the step
        was decided, where a run that goes on begins to plan, and the trail of all rows so far."""
        window = self._window(steps_done - 1) if steps_done else None
        if window is None:
            return 0, 0, {}, stream_state.RowTrail()
        assert self._steps_per_epoch is not None
        waiting = {
            **window.restart.to_json(self._trail_before(window.restart)),
            "pace": self._steps_per_epoch[0],
            "is_counted": self._steps_per_epoch[1],
            "counted": list(self._counted),
            "has_trees": self._has_trees,
        }
        return int(self.epoch_after(steps_done)), window.position, waiting, self._trail_to(window, steps_done)

    def _window(self, number: int) -> stream_state.StepWindow | None:
        """The window that completes a step; None behind the last."""
        if self._run_facts_known is None:
            self._run_facts()
        if number >= self.num_planned:  # who asks for a step that is there does not wait for one who plans
            with self._planning:
                while number >= self.num_planned and (self._last is None or number < self._last):
                    self._plan_window()
        if number >= self.num_planned:
            return None
        with self._steps_lock:
            oldest = self._windows[0].before.steps
            assert number >= oldest, f"step {number} is forgotten, {oldest} is the oldest"
            found = next(window for window in reversed(self._windows) if window.before.steps <= number)
            while len(self._windows) > 1 and self._windows[1].before.steps <= number - STEPS_REMEMBERED:
                self._trail_before(self._windows[1].before)  # which would keep all windows before it else
                self._windows.popleft()
        return found

    def _planned_window(self, number: int) -> stream_state.StepWindow:
        window = self._window(number)
        assert window is not None, f"step {number} of {self.num_planned}"
        return window

    def _begin_epoch(self, before: stream_state.StreamHistory) -> None:
        """Plan an epoch from a place in it."""
        self._history = self._newest_restart = before
        order = self.order.epoch(before.epoch)
        self._planner = EpochPlanner(self.rows, self.settings, order, epoch=before.epoch, place=before.place)
        self._incomplete_step: Planned | None = None  # micro-batches, of occurrences, that are in no complete step
        self._waiting = stream_state.waiting_in(self._planner)

    def _plan_window(self) -> None:
        """Plan until some steps are complete, or the epoch is over."""
        planner = self._planner
        while True:
            window = planner.next()
            assert window is not None, "an epoch that is over was followed by none"
            planned = window if self._incomplete_step is None else join([self._incomplete_step, window])
            ends = planned.step_ends
            if planner.is_over and len(planned) and (not len(ends) or ends[-1] < len(planned)):
                ends = np.append(ends, len(planned))  # the smaller last step
            if len(ends) or planner.is_over:
                break
            self._incomplete_step = planned
        last = int(ends[-1]) if len(ends) else 0
        whole = replace(planned.part(0, last), step_ends=ends)
        self._incomplete_step = planned.part(last, len(planned)) if last < len(planned) else None
        self._add_steps(whole, planner)
        if planner.is_over:
            self._end_epoch()

    def _add_steps(self, planned: Planned, planner: EpochPlanner) -> None:
        """Add the steps of some micro-batches, which end at ``planned.step_ends``."""
        before, waiting, after = self._history, self._waiting, planner.place()
        bounds = np.append(np.int64(0), planned.step_ends)
        segments = planner.of_segments(planned)
        used = planner.occurrences["rows"][planned.segment_ids].astype(np.int64)
        if segments.starts is not None:
            used = np.where(segments.starts == 0, used, 0)
        of_step = planned.pack_bounds[planned.batch_bounds[bounds]]
        lengths = segments.lengths_given(self.rows.table(segments.segment_ids).lengths)
        upto = before.rows_used + np.cumsum(sums(used, of_step))
        if planner.is_over and len(upto):
            upto[-1] += planner.lost_at_end
        window = stream_state.StepWindow(
            before=before,
            restart=self._newest_restart,
            planned=segments,
            bounds=bounds,
            used=used,
            upto=upto,
            tokens=sums(lengths, of_step),
            waiting=waiting,
            position=planner.taken if after is None else after.position,
            ends_epoch=planner.is_over,
            is_whole_epoch=planner.is_over and before.place is None and before is self._newest_restart,
            counted=(0, before.taken),
        )
        self._waiting = stream_state.waiting_in(planner)
        if not len(window):
            self._end_epoch_at_newest(planner)
            return
        taken, summary = (
            before.taken + stream_state.count_taken(self.rows, self.settings, window, 0, len(window)),
            before.of_first_epoch,
        )
        if before.epoch == 0:
            here = [*(taken - before.taken).sum(axis=0)[1:].tolist(), len(planned), len(planned.pack_bounds) - 1]
            summary = tuple(map(sum, zip(summary, here, strict=True)))
        self._history = stream_state.StreamHistory(
            epoch=before.epoch,
            steps=before.steps + len(window),
            rows_used=int(upto[-1]),
            taken=taken,
            trail=None,
            of_first_epoch=summary,
            place=after,
            after=window,
        )
        if self._incomplete_step is None and self._history.place is not None:
            self._newest_restart = self._history
        with self._steps_lock:
            self._windows.append(window)
        self._end_run_within(window)

    def _end_epoch_at_newest(self, planner: EpochPlanner) -> None:
        """The last window of the epoch completed no step: what was the last so far is the epoch's last."""
        if planner.is_over and self._windows and self._windows[-1].before.epoch == self._history.epoch:
            newest = self._windows[-1]
            newest.ends_epoch = True
            newest.upto[-1] += planner.lost_at_end
            self._history.rows_used = int(newest.upto[-1])

    def _end_run_within(self, window: stream_state.StepWindow) -> None:
        """Whether the run ends with one of these steps: a part of an epoch is over when so many rows are used up."""
        if self._last is not None or self._num_epochs % 1 == 0 or math.isinf(self._num_epochs):
            return
        if self._max_steps is None and not is_at_once(self.settings, self._rows_per_epoch):
            place = int(np.searchsorted(window.upto, self._rows_per_epoch * self._num_epochs))
            if place < len(window) - 1 or (place < len(window) and not window.ends_epoch):
                self._last = window.before.steps + place + 1

    def _end_epoch(self) -> None:
        number = self._history.epoch + 1
        if self._last is not None and self._history.steps >= self._last:
            return
        if number >= self._num_epochs:
            self._last = self._history.steps if self._last is None else self._last
            return
        if not self._history.steps:
            raise stream_state.no_steps(len(self.rows))
        self._begin_epoch(replace(self._history, epoch=number, place=None))

    def _run_facts(self) -> tuple[int, bool, bool]:
        """The run's ``horizon``, ``is_exact`` and ``has_trees``."""
        with self._planning:
            if self._run_facts_known is None:
                if self._steps_per_epoch is None:
                    self._steps_per_epoch = self._steps_of_first_epoch()
                    self._has_trees = self.settings.shared and self.rows.have_trees
                horizon, is_exact = self._expected_steps(*self._steps_per_epoch)
                self._last = horizon if is_exact else self._last
                self._run_facts_known = horizon, is_exact, self._has_trees
            return self._run_facts_known

    def _steps_of_first_epoch(self) -> tuple[float, bool]:
        """The steps of an epoch, and whether they were counted, from as few rows as decide the first step."""
        first = self._planner
        while not self._windows and self._last is None:
            self._plan_window()
        while first.taken == len(first.order) and not first.is_over:  # the first block is all there is
            self._plan_window()
        if not self._windows:
            raise stream_state.no_steps(len(self.rows))
        windows = [window for window in self._windows if window.before.epoch == 0]
        steps = sum(map(len, windows))
        if first.is_over:
            return float(steps), True
        tokens_per_step = sum(int(window.tokens.sum()) for window in windows) / steps
        return self._rows_per_epoch * first.tokens / first.taken / tokens_per_step, False

    def _expected_steps(self, steps_of_epoch: float, is_counted: bool) -> tuple[int, bool]:
        """How many steps the run has, and whether that is exact."""
        if self._max_steps is not None:
            return self._max_steps, True
        if math.isinf(self._num_epochs):
            return max(1, round(steps_of_epoch)), False
        if is_at_once(self.settings, self._rows_per_epoch):
            if self._counted[:1] != (self._num_epochs,):
                self._counted = self._num_epochs, self._steps_of_whole_epochs(int(steps_of_epoch))
            return int(self._counted[1]), True
        return max(1, round(self._num_epochs * steps_of_epoch)), is_counted and self._num_epochs == 1

    def _steps_of_whole_epochs(self, of_first: int) -> int:
        """The steps of the run, of whose last epoch a part counts as its share of steps, rounded up."""
        last = math.ceil(self._num_epochs) - 1
        share = min(1.0, self._num_epochs - last)
        if stream_state.has_constant_steps(self.settings, self.order.mixture):
            return last * of_first + math.ceil(share * of_first)
        counted = min(last + 1, self._epochs_countable())
        steps = [self.epoch(epoch).num_steps for epoch in range(counted)]
        if last >= counted:
            return math.ceil(self._num_epochs * sum(steps) / counted)
        return sum(steps[:-1]) + math.ceil(share * steps[-1])

    def _epochs_countable(self) -> int:
        return min(MOST_EPOCHS_COUNTED, max(1, MOST_SEGMENTS_COUNTED // max(1, len(self.rows))))

    def _trail_before(self, before: stream_state.StreamHistory) -> stream_state.RowTrail:
        with self._steps_lock:
            if before.trail is None:
                assert before.after is not None
                before.trail, before.after = self._trail_to(before.after, before.steps), None
            return before.trail

    def _trail_to(self, window: stream_state.StepWindow, steps: int) -> stream_state.RowTrail:
        first, trail = window.before.steps, window.trail
        if trail is None or trail.num_steps > steps:
            trail = self._trail_before(window.before)
        for place in range(trail.num_steps - first, steps - first):
            members = window.planned.segment_ids[window.members(place, place + 1)]
            trail = trail.after(self.rows.keys(members).tobytes())
        window.trail = trail
        return trail
