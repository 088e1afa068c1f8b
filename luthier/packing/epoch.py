"""The order of everything in one epoch: a pure function of the segments' lengths, the settings, and (seed, epoch).

Micro-batches have one global order, which knows nothing of ranks or workers. Rank ``r`` of ``W`` takes every ``W``-th
from its ``r``-th on, and a step is the next ``micro_batches_per_step`` of them, or, with ``tokens_per_step``, several
times as many; so a run with half the ranks and twice the accumulation has the same steps.

The remainder: nothing is left out. The last step of an epoch may have fewer micro-batches. Where they cannot be shared
out evenly among the ranks, copies of the shortest one, with nothing to learn in them (``dummy``), fill the gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Packing
from luthier.packing.balance import Balancer, mean_straggler, micro_batch_costs
from luthier.packing.best_fit import check_lengths
from luthier.packing.mixture import check_epoch, repeat_counts
from luthier.packing.packer import WindowPacker
from luthier.packing.padded import pad_rows
from luthier.packing.planned import MicroBatchPlan, Planned, bounds_of, join, sums
from luthier.packing.settings import PlanSettings, SegmentTable
from luthier.packing.units import epoch_lengths, unit_bounds, unit_table, units_in, with_segments

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The micro-batches of one epoch. ``plan[i]``, ``len(plan)`` and iteration go over them in their global order.

    Kept as flat arrays: pack ``p`` is ``segment_ids[pack_bounds[p]:pack_bounds[p + 1]]``, and micro-batch ``m`` is the
    packs ``batch_bounds[m]:batch_bounds[m + 1]``. Under ``Packing.SPLIT``, ``starts`` and ``stops`` say which tokens of
    each segment are meant; else they are None. The last ``num_dummies`` micro-batches repeat ``dummy_of``.
    Step ``s`` is the micro-batches ``step_bounds[s]:step_bounds[s + 1]``, dummies and all.
    """

    planned: Planned
    step_bounds: Ints
    settings: PlanSettings
    epoch: int
    num_dummies: int = 0
    dummy_of: int = -1

    @classmethod
    def of_planned(cls, planned: Planned, lengths: Ints, settings: PlanSettings, *, epoch: int) -> EpochPlan:
        """A whole epoch's micro-batches with their remainder dealt with; ``lengths`` are those of all segments."""
        num_batches = len(planned)
        tokens = sums(planned.lengths(lengths), planned.pack_bounds[planned.batch_bounds])
        num_dummies = -num_batches % settings.num_ranks
        ends = planned.step_ends
        if num_batches and (not len(ends) or ends[-1] < num_batches):
            ends = np.append(ends, num_batches + num_dummies)
        return cls(
            planned=planned,
            step_bounds=np.append(np.int64(0), ends),
            settings=settings,
            epoch=epoch,
            num_dummies=num_dummies,
            dummy_of=int(np.argmin(tokens)) if num_batches else -1,
        )

    @property
    def segment_ids(self) -> Ints:
        """int64[S]."""
        return self.planned.segment_ids

    @property
    def pack_bounds(self) -> Ints:
        """int64[P + 1]."""
        return self.planned.pack_bounds

    @property
    def batch_bounds(self) -> Ints:
        """int64[M + 1], without dummies."""
        return self.planned.batch_bounds

    @property
    def starts(self) -> Ints | None:
        """int64[S] where segments are cut."""
        return self.planned.starts

    @property
    def stops(self) -> Ints | None:
        """int64[S] where segments are cut."""
        return self.planned.stops

    def __len__(self) -> int:
        return len(self.planned) + self.num_dummies

    def __getitem__(self, index: int) -> MicroBatchPlan:
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        if index >= len(self.planned):
            return replace(self.planned[self.dummy_of], dummy=True)
        return self.planned[index]

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return (self[index] for index in range(len(self)))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch; the last may be smaller than the others."""
        return len(self.step_bounds) - 1

    def of_rank(self, rank: int) -> range:
        """The micro-batches of one rank, in order; every rank has the same number of them."""
        assert 0 <= rank < self.settings.num_ranks, f"rank {rank} of {self.settings.num_ranks}"
        return range(rank, len(self), self.settings.num_ranks)

    def of_step(self, step: int) -> range:
        """The micro-batches of one step, all ranks together: a multiple of the number of ranks."""
        assert 0 <= step < self.num_steps, f"step {step} of {self.num_steps}"
        return range(int(self.step_bounds[step]), int(self.step_bounds[step + 1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """A plan in numbers. ``slots`` is tokens and padding; ``fill`` is tokens / (packs x capacity of a row)."""

    micro_batches: int
    dummies: int
    steps: int
    packs: int
    segments: int
    tokens: int
    targets: int
    slots: int
    fill: float
    padding: float


def plan_epoch(table: SegmentTable, settings: PlanSettings, *, epoch: int, order: Ints | None = None) -> EpochPlan:
    """The plan of one epoch: another order and, but for ``none``, other packs in each, and the same for the same seed.

    ``order``, int64[S], are the segments in the order in which they come, each as often as it is to be seen, those of
    a unit side by side. Without it every row comes as often as its source's weight says, in a seeded full shuffle of
    the segments, or units.
    Raises `UserError` where a segment is longer than the capacity (not under ``Packing.SPLIT``, which cuts), or a unit.
    """
    lengths = epoch_lengths(table, settings, epoch=epoch)
    units = unit_table(table, lengths, settings)
    if settings.packing is not Packing.SPLIT:
        check_lengths(units.lengths, settings.capacity)
    rng = np.random.Generator(np.random.PCG64([settings.seed, epoch]))
    if order is None:
        order = _choose(units, rng)
        order = order[rng.permutation(len(order))]
    else:
        order = units_in(order, unit_bounds(table, settings))
    extra_costs = None if units.extra_costs is None else units.extra_costs[order]
    match settings.packing:
        case Packing.BEST_FIT | Packing.WINDOW | Packing.SPLIT:
            packer = WindowPacker(settings, epoch=epoch, total=len(order))
            planned = join([packer.add(order, units.lengths[order], extra_costs), packer.finish()])
            planned = with_segments(planned, table, lengths, settings)
        case Packing.NONE:
            planned = with_segments(pad_rows(order, units.lengths, settings), table, lengths, settings)
            costs, tokens = _costs(planned, table, settings), _tokens(planned, table)
            planned = planned.with_batches_in(*Balancer(settings).order(costs, tokens, rng, whole=True))
        case _:
            raise AssertionError(f"unknown packing {settings.packing!r}")
    return EpochPlan.of_planned(planned, table.lengths, settings, epoch=epoch)


def segments_of(table: SegmentTable, rows: Ints) -> Ints:
    """The segments of ``rows``, row by row: what `plan_epoch` takes as ``order``. A row without segments gives none.

    ``table.row_ids`` has to ascend, as those of a `SegmentIndex` do.
    """
    assert not len(table.row_ids) or np.all(np.diff(table.row_ids) >= 0), "rows are not in order"
    first = np.searchsorted(table.row_ids, rows, side="left")
    counts = np.searchsorted(table.row_ids, rows, side="right") - first
    places = bounds_of(counts)
    within: Ints = np.arange(places[-1], dtype=np.int64) - np.repeat(places[:-1], counts)
    return within + np.repeat(first, counts)


def straggler_factor(plan: EpochPlan, table: SegmentTable, settings: PlanSettings, num_ranks: int) -> float:
    """How uneven the ranks' work is: max/mean of the costs of micro-batches that run at the same time, on average.

    ``num_ranks`` neighbours of a step run at the same time. Those at the end of an epoch that are too few for all
    ranks do not count here (`PlanSummary.dummies` counts them). Costs are those of ``settings``.
    """
    num_batches = len(plan.planned)
    step_bounds = np.minimum(plan.step_bounds, num_batches)
    return mean_straggler(_costs(plan.planned, table, settings), step_bounds, num_ranks)


def describe(plan: EpochPlan, table: SegmentTable) -> PlanSummary:
    """What the plan costs. Dummies are counted in ``micro_batches``, ``dummies`` and ``steps``, and in nothing else.

    Under ``Packing.SPLIT`` ``targets`` is exact for plain text, all of whose tokens are targets.
    """
    lengths = plan.planned.lengths(table.lengths)
    num_packs = len(plan.pack_bounds) - 1
    tokens = int(lengths.sum())
    slots = 0
    if num_packs:
        rows = np.add.reduceat(lengths, plan.pack_bounds[:-1])
        longest = np.maximum.reduceat(rows, plan.batch_bounds[:-1])
        slots = int((longest * np.diff(plan.batch_bounds)).sum())
    first = plan.starts == 0 if plan.starts is not None else np.ones(len(lengths), dtype=np.bool_)
    return PlanSummary(
        micro_batches=len(plan),
        dummies=plan.num_dummies,
        steps=plan.num_steps,
        packs=num_packs,
        segments=len(plan.segment_ids),
        tokens=tokens,
        # the first token of what follows a cut is no target any more
        targets=int(table.num_targets[plan.segment_ids[first]].sum()) - int((~first).sum()),
        slots=slots,
        fill=tokens / (num_packs * plan.settings.row_capacity) if num_packs else 0.0,
        padding=1 - tokens / slots if slots else 0.0,
    )


def _costs(planned: Planned, table: SegmentTable, settings: PlanSettings) -> Ints:
    extra = None if table.extra_costs is None else table.extra_costs[planned.segment_ids]
    return micro_batch_costs(planned, planned.lengths(table.lengths), settings, extra_costs=extra)


def _tokens(planned: Planned, table: SegmentTable) -> Ints:
    return sums(planned.lengths(table.lengths), planned.pack_bounds[planned.batch_bounds])


def _choose(table: SegmentTable, rng: np.random.Generator) -> Ints:
    """Segment ids of the epoch: a row of weight 2.5 twice, and with a seeded half of its source's rows once more."""
    everything = np.arange(len(table.lengths), dtype=np.int64)
    if all(weight == 1 for weight in table.source_weights):
        return everything
    rows, row_of = np.unique(table.row_ids, return_inverse=True)
    times = np.zeros(len(rows), dtype=np.int64)
    for source, weight in enumerate(table.source_weights):
        mine = np.unique(row_of[table.source_ids == source])
        times[mine] = repeat_counts(len(mine), weight, rng)
    check_epoch(int(times.sum()), len(rows), why="the weights say how often each row is seen")
    return np.repeat(everything, times[row_of])
