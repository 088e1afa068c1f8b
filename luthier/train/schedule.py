"""Steps of a whole run, over its epochs: integers only. W ranks, G = W x accumulation micro-batches a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate

from luthier.packing import EpochPlan, PlanSettings, SegmentTable, plan_epoch

_PLANS_KEPT = 2  # an epoch and its neighbour: workers near a border look at both


class Schedule:
    """Which micro-batches each optimizer step of the run is made of.

    The whole run is one sequence of steps. Epochs may have different numbers of them (data sets with a fractional
    weight), and the last step of each may be smaller. Pure: the same arguments give the same schedule everywhere.
    """

    def __init__(
        self, table: SegmentTable, settings: PlanSettings, *, num_epochs: float, max_steps: int | None = None
    ) -> None:
        self.table = table
        self.settings = settings
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._ends = list(accumulate(self._steps_per_epoch(num_epochs, max_steps)))
        self.total_steps = self._ends[-1]

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of one epoch, kept while it is in use."""
        if epoch not in self._plans:
            self._plans[epoch] = plan_epoch(self.table, self.settings, epoch=epoch)
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

    def micro_batch(self, step: int, slot: int) -> tuple[int, int] | None:
        """``(epoch, micro-batch in its plan)`` of a slot of a step; None where the step is smaller than G.

        Slot ``a * W + r`` is the ``a``-th accumulation of rank ``r``.
        """
        epoch, step_in_epoch = self.locate(step)
        members = self.plan(epoch).of_step(step_in_epoch)
        return (epoch, members[slot]) if slot < len(members) else None

    def num_tokens(self, step: int) -> int:
        """Tokens of a step on all ranks, without padding."""
        epoch, step_in_epoch = self.locate(step)
        plan = self.plan(epoch)
        batches = (plan[index] for index in plan.of_step(step_in_epoch))
        ids = [i for batch in batches if not batch.dummy for pack in batch.packs for i in pack]
        return int(self.table.lengths[ids].sum())

    def _steps_per_epoch(self, num_epochs: float, max_steps: int | None) -> list[int]:
        # whole weights leave the multiset of lengths alone, and with it the number of packs
        constant = all(weight == int(weight) for weight in self.table.source_weights)
        counts: list[int] = []
        while True:
            done = len(counts)
            count = counts[0] if done and constant else self.plan(done).num_steps
            assert count > 0, "an epoch without steps: there is nothing to train"
            if max_steps is not None:
                counts.append(min(count, max_steps - sum(counts)))
                if sum(counts) == max_steps:
                    return counts
            else:
                counts.append(math.ceil(min(1.0, num_epochs - done) * count))
                if done + 1 >= num_epochs:
                    return counts
