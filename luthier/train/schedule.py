"""Steps of a whole run, over its epochs: integers only. W ranks, G = W x accumulation micro-batches a step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy, Strategy
from luthier.config.schema import Packing, RunConfig
from luthier.errors import UserError
from luthier.loader.run_settings import train_settings
from luthier.packing import (
    EpochPlan,
    MixtureSettings,
    PlanSettings,
    SegmentTable,
    Units,
    held_tokens,
    plan_epoch,
    row_order,
    segments_of,
    source_counts,
)

_PLANS_KEPT = 2  # an epoch and its neighbour: workers near a border look at both
MOST_EPOCHS_COUNTED, MOST_SEGMENTS_COUNTED = 1000, 10**8  # to know how many steps a run has; further ones are estimated


FEW_STEPS = 20  # fewer teach next to nothing, whatever the rate


def ways_to_more_steps(
    config: RunConfig, table: SegmentTable, *, num_ranks: int, mixture: MixtureSettings | None = None
) -> tuple[str, ...]:
    """Settings of which each gives a run at least `FEW_STEPS` steps, as ``key: value``; none, where it has as many.

    Each is tried: what is given is what the changed run would do.
    """

    def total(**changes: Any) -> int:
        changed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        return Schedule(
            table,
            train_settings(changed, num_ranks=num_ranks),
            num_epochs=changed.train.num_train_epochs,
            max_steps=changed.train.max_steps,
            mixture=mixture,
        ).total_steps

    train = config.train
    if total() >= FEW_STEPS:
        return ()
    found: list[dict[str, Any]] = []
    if train.max_steps is not None:
        found.append({"max_steps": FEW_STEPS})
    else:
        epochs = math.ceil(train.num_train_epochs * FEW_STEPS / total())
        while total(num_train_epochs=float(epochs)) < FEW_STEPS:
            epochs += 1
        found.append({"num_train_epochs": epochs})
    if train.packing.is_packed and train.packing is not Packing.SPLIT and train.shared_prompts is not True:
        found += [{"packing": Packing.NONE, "per_device_train_batch_size": size} for size in (16, 8, 4, 2, 1)]
    elif train.per_device_train_batch_size > 1:
        found.append({"per_device_train_batch_size": 1})
    if train.gradient_accumulation_steps > 1:
        found.append({"gradient_accumulation_steps": 1})
    if train.tokens_per_step is not None:
        found.append({"tokens_per_step": max(1, int(table.lengths.sum() * train.num_train_epochs) // (2 * FEW_STEPS))})
    enough = [found[0], *(changes for changes in found[1:] if total(**changes) >= FEW_STEPS)]
    unpacked = [changes for changes in enough if "packing" in changes]
    kept = [changes for changes in enough if "packing" not in changes] + unpacked[:1]
    return tuple(" and ".join(f"train.{key}: {value}" for key, value in changes.items()) for changes in kept)


def length_notes(config: RunConfig, total_steps: int, micro_batches: int | None = None) -> tuple[str, ...]:
    """What is asked of a run and will not happen, as it has so few steps, or its epoch so few ``micro_batches``."""
    evaluation, output, train = config.eval, config.output, config.train
    evaluates = bool(config.data.eval or config.data.eval_use or config.data.eval_split)
    every = [
        (
            "eval.steps",
            evaluation.steps,
            evaluates and evaluation.strategy is Strategy.STEPS,
            "evaluated before and after",
        ),
        ("output.save_steps", output.save_steps, output.save_strategy is Strategy.STEPS, "saved at its end alone"),
        ("tracking.logging_steps", config.tracking.logging_steps, True, "logged at its end alone"),
    ]
    notes = [
        f"{key} is {number:,}, and the run has {total_steps:,} steps: it is {what}"
        for key, number, applies, what in every
        if applies and number > total_steps
    ]
    patience = evaluation.early_stopping_patience
    if evaluates and patience is not None:
        steps = evaluation.steps if evaluation.strategy is Strategy.STEPS else 1
        if patience * steps >= total_steps:
            what = f"{patience:,} evaluations without improvement do not fit into {total_steps:,} steps"
            notes.append(f"eval.early_stopping_patience: {what}: the run cannot stop early")
    if micro_batches is not None and train.gradient_accumulation_steps > micro_batches:
        asked = (
            f"asks for {train.gradient_accumulation_steps:,} micro-batches a step, and an epoch has {micro_batches:,}"
        )
        notes.append(f"train.gradient_accumulation_steps {asked}: every step is a whole epoch, the rest of it is blank")
    return tuple(notes)


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

    def trained_rows(self, steps_done: int, /) -> NDArray[np.int64]:
        """int64[n]: numbers of the rows of which those steps have seen a segment, each row once."""

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

    An epoch is planned when one of its steps is asked for. Only a run of epochs of different lengths, whose number of
    steps nobody gave, plans them at the start, to know how many steps it has: as many as `MOST_EPOCHS_COUNTED` and
    `MOST_SEGMENTS_COUNTED` allow, and further ones count as the mean of these. The run has just so many steps then.
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
        """Without a mixture each source comes as often as its weight in the table says.

        Raises `UserError` where that is too rarely for a single row in an epoch.
        """
        self.table = table
        self.mixture = mixture
        self.settings = settings
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._taken: tuple[int, NDArray[np.int64]] | None = None  # what the first epochs take, and how many they are
        first = self.plan(0)
        if not first.num_steps:
            raise UserError(
                f"an epoch has no steps: of {len(table.lengths):,} sequences it takes none",
                hint="raise the weight of data.train[], which says how often each row is seen in an epoch",
                key="data.train",
            )
        self._constant = self._is_constant(first)
        self._ends = [first.num_steps]  # of the epochs whose lengths are known, in steps of the run
        self.total_steps = max_steps if max_steps is not None else self._steps_of(num_epochs)
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
        if self._constant:
            return divmod(step, self._ends[0])
        while self._ends[-1] <= step:
            self._ends.append(self._ends[-1] + self.plan(len(self._ends)).num_steps)
        epoch = bisect_right(self._ends, step)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def epoch_after(self, steps_done: int) -> float:
        """How many epochs ``steps_done`` steps are: 1.5 is half through the second."""
        if steps_done == 0:
            return 0.0
        epoch, step = self.locate(steps_done - 1)
        return epoch + (step + 1) / self._num_steps(epoch)

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
        return self._counts_before(last) + source_counts(self.plan(last), self.table, num_steps=step + 1)

    def _counts_before(self, epoch: int) -> NDArray[np.int64]:
        """What the epochs before this one take: `source_counts` of whole epochs."""
        if self._constant:
            return epoch * source_counts(self.plan(0), self.table)
        done, counts = self._taken or (0, np.zeros((len(self.table.source_weights), 4), dtype=np.int64))
        if done > epoch:
            done, counts = 0, np.zeros_like(counts)
        for each in range(done, epoch):
            counts = counts + source_counts(self.plan(each), self.table)
        self._taken = (epoch, counts)
        return counts

    def trained_segments(self, steps_done: int, *, most_epochs: int | None = None) -> NDArray[np.int64]:
        """int64, ascending: which segments of the table the first steps have; all, where ``most_epochs`` have not taken
        all and there are more."""
        seen = np.zeros(len(self.table.lengths), dtype=bool)
        last, step = self.locate(steps_done - 1) if steps_done else (-1, 0)
        for epoch in range(last + 1):
            if epoch == most_epochs:
                seen[:] = True
                break
            plan = self.plan(epoch)
            stop = plan.step_bounds[step + 1] if epoch == last else len(plan)
            packs = plan.batch_bounds[min(int(stop), len(plan.planned))]  # dummies have no segments of their own
            seen[plan.segment_ids[: plan.pack_bounds[packs]]] = True
            if seen.all():
                break
        return np.flatnonzero(seen)

    def trained_rows(self, steps_done: int) -> NDArray[np.int64]:
        """int64[n], ascending: the ``row_ids`` that the first steps have seen a segment of."""
        return np.unique(self.table.row_ids[self.trained_segments(steps_done)])

    def _num_steps(self, epoch: int) -> int:
        return self._ends[0] if self._constant else self.plan(epoch).num_steps

    def _order(self, epoch: int) -> NDArray[np.int64] | None:
        if self.mixture is None or self.mixture.by is MixtureBy.EPOCHS:
            return None
        table, num_sources = self.table, len(self.table.source_weights)
        first_of_row = np.append(True, np.diff(table.row_ids) > 0)
        sources, rows = table.source_ids[first_of_row], table.row_ids[first_of_row]
        num_rows = np.bincount(sources, minlength=num_sources)
        of_table = held_tokens(table, self.settings)
        held = 0 if of_table is None else of_table
        tokens = np.bincount(table.source_ids, weights=table.lengths - held, minlength=num_sources)
        order = row_order(
            num_rows.tolist(),
            self.mixture,
            seed=self.settings.seed,
            epoch=epoch,
            tokens_per_row=tokens / np.maximum(num_rows, 1),
        )
        return segments_of(table, rows[order])

    def _is_constant(self, first: EpochPlan) -> bool:
        """Whether all epochs have as many steps as the first one, and take as much of each source."""
        settings, weights = self.settings, self.table.source_weights
        # whole weights leave the multiset of lengths alone, and with it the number of packs that are planned at once
        num_units = len(first.segment_ids) // settings.units.size
        one_window = settings.packing is Packing.WINDOW and num_units <= settings.window
        at_once = settings.packing in (Packing.NONE, Packing.BEST_FIT) or one_window
        # and so does everything but completions that each epoch draws anew
        drawn_anew = settings.units is Units.FEEDBACK_KL and settings.packing is not Packing.NONE
        by_epochs = self.mixture is None or self.mixture.by is MixtureBy.EPOCHS
        whole = by_epochs and all(weight == int(weight) for weight in weights)
        return whole and at_once and not drawn_anew and settings.tokens_per_step is None

    def _steps_of(self, num_epochs: float) -> int:
        """The steps of so many epochs; of a part of an epoch, its share of the steps, rounded up."""
        last = math.ceil(num_epochs) - 1
        share = min(1.0, num_epochs - last)
        if self._constant:
            return last * self._ends[0] + math.ceil(share * self._ends[0])
        counted = min(MOST_EPOCHS_COUNTED, max(1, MOST_SEGMENTS_COUNTED // max(1, len(self.table.lengths))))
        while len(self._ends) <= min(last, counted - 1):
            self._ends.append(self._ends[-1] + self.plan(len(self._ends)).num_steps)
        if last >= counted:
            return math.ceil(num_epochs * self._ends[-1] / len(self._ends))
        before = self._ends[last - 1] if last else 0
        return before + math.ceil(share * (self._ends[last] - before))
