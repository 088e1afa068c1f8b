"""Steps of a whole run, over its epochs: integers only. W ranks, G = W x accumulation micro-batches a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy
from luthier.config.schema import Packing
from luthier.packing import (
    EpochPlan,
    MixtureSettings,
    PlanSettings,
    SegmentTable,
    Units,
    plan_epoch,
    row_order,
    segments_of,
    source_counts,
)

_PLANS_KEPT = 2  # an epoch and its neighbour: workers near a border look at both


class Steps(Protocol):
    """What the trainer asks of a run's steps: `Schedule` knows all of them, `loader.live_plan.StreamPlan` those so far.

    Steps are counted from 0; ``steps_done`` steps are the first ones.
    """

    @property
    def settings(self) -> PlanSettings:
        """How steps are planned."""

    @property
    def total_steps(self) -> int:
        """All steps of the run, or how many it is expected to have."""

    @property
    def horizon(self) -> int:
        """The number of steps that learning rate schedules are made for."""

    @property
    def is_exact(self) -> bool:
        """Whether the run has exactly ``horizon`` steps."""

    def num_tokens(self, step: int, /) -> int:
        """Tokens of a step on all ranks, without padding."""

    def turns(self, step: int, /) -> int:
        """How many micro-batches a step has on each rank, blanks counted."""

    def source_counts(self, steps_done: int, /) -> NDArray[np.int64]:
        """int64[S, 4]: rows, segments, tokens and targets of each data set that they take, on all ranks."""

    def epoch_after(self, steps_done: int, /) -> float:
        """How many epochs that is."""

    def ends_epoch(self, steps_done: int, /) -> bool:
        """Whether the last of them was an epoch's last."""

    def is_last(self, step: int, /) -> bool:
        """Whether no step comes after this one."""

    def progress(self, steps_done: int, /) -> float:
        """Which share of the run that is."""


class Schedule:
    """Which micro-batches each optimizer step of the run is made of.

    The whole run is one sequence of steps. Epochs may have different numbers of them (data sets with a fractional
    weight), and the last step of each may be smaller. Pure: the same arguments give the same schedule everywhere.
    """

    def __init__(
        self,
        table: SegmentTable,
        settings: PlanSettings,
        *,
        num_epochs: float,
        max_steps: int | None = None,
        mixture: MixtureSettings | None = None,
    ) -> None:
        """Without a mixture each source comes as often as its weight in the table says."""
        self.table = table
        self.mixture = mixture
        self.settings = settings
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._epoch_counts: dict[int, NDArray[np.int64]] = {}
        self._ends = list(accumulate(self._steps_per_epoch(num_epochs, max_steps)))
        self.total_steps = self._ends[-1]
        self.horizon, self.is_exact = self.total_steps, True

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, kept while it is in use."""
        if epoch not in self._plans:
            self._plans[epoch] = plan_epoch(self.table, self.settings, epoch=epoch, order=self._order(epoch))
            while len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        return self._plans[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """``(epoch, step in it)`` of a step of the run, all counted from 0."""
        assert 0 <= step < self.total_steps, f"step {step} of {self.total_steps}"
        epoch = bisect_right(self._ends, step)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def epoch_after(self, steps_done: int) -> float:
        """How many epochs ``steps_done`` steps are: 1.5 is half through the second."""
        if steps_done == 0:
            return 0.0
        epoch, step = self.locate(steps_done - 1)
        return epoch + (step + 1) / self.plan(epoch).num_steps

    def ends_epoch(self, steps_done: int) -> bool:
        """Whether the last of ``steps_done`` steps was an epoch's last."""
        return self.epoch_after(steps_done).is_integer()

    def is_last(self, step: int) -> bool:
        """Whether no step comes after this one."""
        return step + 1 >= self.total_steps

    def progress(self, steps_done: int) -> float:
        """Which share of the run ``steps_done`` steps are."""
        return steps_done / self.total_steps

    def micro_batch(self, step: int, slot: int) -> tuple[int, int] | None:
        """``(epoch, micro-batch in its plan)`` of a slot of a step; None where the step is smaller than G.

        ``G`` is `turns` x W; slot ``a * W + r`` is the ``a``-th accumulation of rank ``r``.
        """
        epoch, step_in_epoch = self.locate(step)
        members = self.plan(epoch).of_step(step_in_epoch)
        return (epoch, members[slot]) if slot < len(members) else None

    def turns(self, step: int) -> int:
        """How many micro-batches a step has on each rank, blanks counted."""
        epoch, step_in_epoch = self.locate(step)
        planned = len(self.plan(epoch).of_step(step_in_epoch))
        return max(self.settings.micro_batches_per_step, planned) // self.settings.num_ranks

    def num_tokens(self, step: int) -> int:
        """Tokens of a step on all ranks, without padding."""
        epoch, step_in_epoch = self.locate(step)
        plan = self.plan(epoch)
        members = plan.of_step(step_in_epoch)
        last = min(members.stop, len(plan.planned))  # dummies are no tokens
        packs = plan.pack_bounds[plan.batch_bounds[[members.start, last]]]
        return int(plan.planned.lengths(self.table.lengths)[packs[0] : packs[1]].sum())

    def source_counts(self, steps_done: int) -> NDArray[np.int64]:
        """int64[S, 4]: rows, segments, tokens and targets of each data set in the first steps, on all ranks."""
        counts = np.zeros((len(self.table.source_weights), 4), dtype=np.int64)
        if steps_done == 0:
            return counts
        last, step = self.locate(steps_done - 1)
        for epoch in range(last):
            counts += self._counts_of_epoch(0 if self._constant else epoch)
        counts += source_counts(self.plan(last), self.table, num_steps=step + 1)
        return counts

    def _counts_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epoch_counts:
            self._epoch_counts[epoch] = source_counts(self.plan(epoch), self.table)
        return self._epoch_counts[epoch]

    def _order(self, epoch: int) -> NDArray[np.int64] | None:
        if self.mixture is None or self.mixture.by is MixtureBy.EPOCHS:
            return None
        table, num_sources = self.table, len(self.table.source_weights)
        first_of_row = np.append(True, np.diff(table.row_ids) > 0)
        sources, rows = table.source_ids[first_of_row], table.row_ids[first_of_row]
        num_rows = np.bincount(sources, minlength=num_sources)
        tokens = np.bincount(table.source_ids, weights=table.lengths, minlength=num_sources)
        order = row_order(
            num_rows.tolist(),
            self.mixture,
            seed=self.settings.seed,
            epoch=epoch,
            tokens_per_row=tokens / np.maximum(num_rows, 1),
        )
        return segments_of(table, rows[order])

    def _steps_per_epoch(self, num_epochs: float, max_steps: int | None) -> list[int]:
        # whole weights leave the multiset of lengths alone, and with it the number of packs that are planned at once
        at_once = self.settings.packing in (Packing.NONE, Packing.BEST_FIT) and self.settings.tokens_per_step is None
        # and so does everything but completions that each epoch draws anew
        at_once = at_once and (self.settings.units is not Units.FEEDBACK_KL or self.settings.packing is Packing.NONE)
        by_epochs = self.mixture is None or self.mixture.by is MixtureBy.EPOCHS
        self._constant = at_once and by_epochs and all(weight == int(weight) for weight in self.table.source_weights)
        counts: list[int] = []
        while True:
            done = len(counts)
            count = counts[0] if done and self._constant else self.plan(done).num_steps
            assert count > 0, "an epoch without steps: there is nothing to train"
            if max_steps is not None:
                counts.append(min(count, max_steps - sum(counts)))
                if sum(counts) == max_steps:
                    return counts
            else:
                counts.append(math.ceil(min(1.0, num_epochs - done) * count))
                if done + 1 >= num_epochs:
                    return counts
