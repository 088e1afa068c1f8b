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

from luthier.packing import MicroBatchPlan, Planned, PlanSettings, SegmentTable, join, sums
from luthier.packing.balance import mean_straggler, micro_batch_costs
from luthier.packing.order import EpochOrder, ListedOrder, MixtureSettings, RowOrder
from luthier.packing.planner import EpochPlanner, RowSegments, TableRows
from luthier.records import Ints
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The micro-batches of one epoch. ``plan[i]``, ``len(plan)`` and iteration go over them in their global order.

    ``planned`` are those without dummies; the last ``num_dummies`` repeat ``dummy_of``. Step ``s`` is the micro-batches
    ``step_bounds[s]:step_bounds[s + 1]``, dummies and all.
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


def plan_epoch(
    rows: RowSegments | SegmentTable, settings: PlanSettings, *, epoch: int, order: EpochOrder | Ints | None = None
) -> EpochPlan:
    """The whole plan of one epoch, for which all of its rows have to be here: what `EpochPlanner` decides, in a row.

    Another order and, but for ``none``, other packs in each epoch, and the same for the same seed. ``order``: the rows
    in the order in which they come, by number, each as often as it is to be seen. Without it every row of a table comes
    as often as its source's weight says, in a full shuffle.
    Raises `UserError` where a segment is longer than the capacity (not under ``Packing.SPLIT``, which cuts), or a unit.
    """
    if isinstance(rows, SegmentTable):
        rows = TableRows(rows)
    weights = rows.whole().source_weights
    if order is None:
        mixture = MixtureSettings(weights=weights)
        order = RowOrder(counts=rows.counts, mixture=mixture, seed=settings.seed).epoch(epoch)
    elif isinstance(order, np.ndarray):
        order = ListedOrder(order)
    planner = EpochPlanner(rows, settings, order, epoch=epoch)
    decided = []
    while (window := planner.next()) is not None:
        decided.append(window)
    planned = planner.of_segments(join(decided))
    return EpochPlan.of_planned(planned, rows.whole().lengths, settings, epoch=epoch)


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
    num_packs = len(plan.planned.pack_bounds) - 1
    tokens = int(lengths.sum())
    slots = 0
    if num_packs:
        rows = np.add.reduceat(lengths, plan.planned.pack_bounds[:-1])
        longest = np.maximum.reduceat(rows, plan.planned.batch_bounds[:-1])
        slots = int((longest * np.diff(plan.planned.batch_bounds)).sum())
    first = plan.planned.starts == 0 if plan.planned.starts is not None else np.ones(len(lengths), dtype=np.bool_)
    return PlanSummary(
        micro_batches=len(plan),
        dummies=plan.num_dummies,
        steps=plan.num_steps,
        packs=num_packs,
        segments=len(plan.planned.segment_ids),
        tokens=tokens,
        # the first token of what follows a cut is no target any more
        targets=int(table.num_targets[plan.planned.segment_ids[first]].sum()) - int((~first).sum()),
        slots=slots,
        fill=tokens / (num_packs * plan.settings.row_capacity) if num_packs else 0.0,
        padding=1 - tokens / slots if slots else 0.0,
    )


def _costs(planned: Planned, table: SegmentTable, settings: PlanSettings) -> Ints:
    extra = None if table.extra_costs is None else table.extra_costs[planned.segment_ids]
    return micro_batch_costs(planned, planned.lengths(table.lengths), settings, extra_costs=extra)


# ----------------------------------------------------------------------------------- what a plan takes from each source


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """What a plan takes from one source: rows are counted as often as they are seen; shares are of the whole plan."""

    rows: int
    segments: int
    tokens: int
    targets: int
    share_of_rows: float
    share_of_tokens: float


def realised_mixture(plan: EpochPlan, table: SegmentTable) -> tuple[SourceShare, ...]:
    """Rows, segments, tokens and targets of each source in a plan, and its shares of them."""
    return shares_of(source_counts(plan, table))


def shares_of(counts: Ints) -> tuple[SourceShare, ...]:
    """What `source_counts` or `count_by_source` found, with shares."""
    all_rows, _, all_tokens, _ = np.maximum(1, counts.sum(axis=0)).tolist()
    return tuple(
        SourceShare(
            rows=rows, segments=segments, tokens=tokens, targets=targets,
            share_of_rows=rows / all_rows, share_of_tokens=tokens / all_tokens,
        )
        for rows, segments, tokens, targets in counts.tolist()
    )  # fmt: skip


def source_counts(plan: EpochPlan, table: SegmentTable, *, num_steps: int | None = None) -> Ints:
    """int64[S, 4]: rows, segments, tokens and targets of each source in the plan, or in its first ``num_steps`` steps.

    A row is in the step that its first segment is in. Of the beginning of a plan under ``Packing.SPLIT`` the targets
    are exact for plain text, all of whose tokens are targets.
    """
    taken = slice(0, _num_members(plan, num_steps))
    ids, lengths = plan.planned.segment_ids[taken], plan.planned.lengths(table.lengths)[taken]
    begun = plan.planned.starts[taken] == 0 if plan.planned.starts is not None else np.ones(len(ids), dtype=np.bool_)
    is_first = np.zeros(len(table.lengths), dtype=np.bool_)
    is_first[np.unique(table.row_ids, return_index=True)[1]] = True  # each row's first segment stands for the row
    targets = table.num_targets[ids]
    if plan.planned.starts is not None:  # the first token of what follows a cut is no target any more
        is_plain = targets == table.lengths[ids] - 1
        targets = np.where(is_plain, lengths - 1, np.where(begun, targets, -1))
    return count_by_source(
        table.source_ids[ids], len(table.source_weights), heads=begun & is_first[ids], lengths=lengths, targets=targets
    )


def count_by_source(
    source_ids: NDArray[np.integer],
    num_sources: int,
    *,
    heads: NDArray[np.bool_],
    lengths: NDArray[np.integer],
    targets: NDArray[np.integer],
) -> Ints:
    """int64[S, 4]: rows, segments, tokens and targets of each source; ``heads``: which segments stand for rows."""
    columns = (heads, np.ones_like(heads), lengths, targets)
    found = [np.bincount(source_ids, weights=column, minlength=num_sources) for column in columns]
    return np.stack(found, axis=1).astype(np.int64)  # exact: far below 2^53


def _num_members(plan: EpochPlan, num_steps: int | None) -> int:
    if num_steps is None:
        return len(plan.planned.segment_ids)
    assert 0 <= num_steps <= plan.num_steps, f"{num_steps} of {counted(plan.num_steps, 'step')}"
    batches = min(int(plan.step_bounds[num_steps]), len(plan.planned))  # dummies come last and take nothing
    return int(plan.planned.pack_bounds[plan.planned.batch_bounds[batches]])
