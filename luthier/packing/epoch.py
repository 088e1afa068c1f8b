"""The order of everything in one epoch: a pure function of the segments' lengths, the settings, and (seed, epoch).

Micro-batches have one global order, which knows nothing of ranks or workers. Rank ``r`` of ``W`` takes every ``W``-th
from its ``r``-th on, and a step is the next ``micro_batches_per_step`` of them; so a run with half the ranks and twice
the accumulation has the same steps.

The remainder: nothing is left out. The last step of an epoch may have fewer micro-batches. Where they cannot be shared
out evenly among the ranks, copies of the shortest one, with nothing to learn in them (``dummy``), fill the gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Packing
from luthier.packing.best_fit import check_lengths, pack_in_order

SORTING_WINDOW = 50  # micro-batches whose rows are sorted by length together: little padding, and still a random order

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentTable:
    """What a plan needs to know of N segments.

    lengths, num_targets  int64[N]
    row_ids               int64[N], the row each came from: a row's segments are in an epoch together or not at all
    source_ids            int64[N], index into ``source_weights``, which say how often a row is seen per epoch
    """

    lengths: Ints
    num_targets: Ints
    row_ids: Ints
    source_ids: Ints
    source_weights: tuple[float, ...] = (1.0,)

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.integer] | list[int]) -> SegmentTable:
        """Segments that are rows of their own, from one source; every token but the first is taken for a target."""
        sizes = np.asarray(lengths, dtype=np.int64)
        rows = np.arange(len(sizes), dtype=np.int64)
        return cls(lengths=sizes, num_targets=sizes - 1, row_ids=rows, source_ids=np.zeros_like(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """``capacity`` is tokens per pack; ``micro_batches_per_step`` counts those of all ranks together."""

    packing: Packing
    capacity: int
    rows_per_micro_batch: int = 1
    micro_batches_per_step: int = 1
    num_ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.capacity >= 1 and self.rows_per_micro_batch >= 1 and self.num_ranks >= 1
        assert self.micro_batches_per_step % self.num_ranks == 0 and self.micro_batches_per_step > 0, (
            f"{self.micro_batches_per_step} micro-batches a step cannot be shared by {self.num_ranks} ranks"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """The segment ids of each pack. ``dummy``: its targets are to be cleared (`layout.without_targets`)."""

    packs: tuple[tuple[int, ...], ...]
    dummy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochPlan:
    """The micro-batches of one epoch. ``plan[i]``, ``len(plan)`` and iteration go over them in their global order.

    Kept as flat arrays: pack ``p`` is ``segment_ids[pack_bounds[p]:pack_bounds[p + 1]]``, and micro-batch ``m`` is the
    packs ``batch_bounds[m]:batch_bounds[m + 1]``. The last ``num_dummies`` micro-batches repeat ``dummy_of``.
    """

    segment_ids: Ints
    pack_bounds: Ints
    batch_bounds: Ints
    settings: PlanSettings
    epoch: int
    num_dummies: int = 0
    dummy_of: int = field(default=-1)

    def __len__(self) -> int:
        return len(self.batch_bounds) - 1 + self.num_dummies

    def __getitem__(self, index: int) -> MicroBatchPlan:
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        real = len(self.batch_bounds) - 1
        if index >= real:
            return MicroBatchPlan(packs=self[self.dummy_of].packs, dummy=True)
        first, stop = int(self.batch_bounds[index]), int(self.batch_bounds[index + 1])
        bounds = self.pack_bounds[first : stop + 1].tolist()
        spans = itertools.pairwise(bounds)
        return MicroBatchPlan(packs=tuple(tuple(self.segment_ids[a:b].tolist()) for a, b in spans))

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return (self[index] for index in range(len(self)))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch; the last may be smaller than the others."""
        return -(-len(self) // self.settings.micro_batches_per_step)

    def of_rank(self, rank: int) -> range:
        """The micro-batches of one rank, in order; every rank has the same number of them."""
        assert 0 <= rank < self.settings.num_ranks, f"rank {rank} of {self.settings.num_ranks}"
        return range(rank, len(self), self.settings.num_ranks)

    def of_step(self, step: int) -> range:
        """The micro-batches of one step, all ranks together."""
        size = self.settings.micro_batches_per_step
        return range(step * size, min((step + 1) * size, len(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """A plan in numbers. ``slots`` is tokens and padding; ``fill`` is tokens / (packs x capacity)."""

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


def plan_epoch(table: SegmentTable, settings: PlanSettings, *, epoch: int) -> EpochPlan:
    """The plan of one epoch: another order and, under best fit, other packs in each, and the same for the same seed.

    Raises `UserError` where a segment is longer than the capacity.
    """
    check_lengths(table.lengths, settings.capacity)
    rng = np.random.Generator(np.random.PCG64([settings.seed, epoch]))
    chosen = _choose(table, rng)
    chosen = chosen[rng.permutation(len(chosen))]
    match settings.packing:
        case Packing.BEST_FIT:
            segment_ids, pack_bounds = _pack(chosen, table.lengths, settings.capacity, rng)
            num_packs = len(pack_bounds) - 1
            batch_bounds = _every(num_packs, settings.rows_per_micro_batch)
        case Packing.NONE:
            segment_ids, batch_bounds = _group(chosen, table.lengths, settings.rows_per_micro_batch, rng)
            pack_bounds = np.arange(len(segment_ids) + 1, dtype=np.int64)
        case _:
            raise AssertionError(f"unknown packing {settings.packing!r}")
    num_batches = len(batch_bounds) - 1
    sizes = np.add.reduceat(table.lengths[segment_ids], pack_bounds[batch_bounds[:-1]]) if num_batches else np.zeros(0)
    return EpochPlan(
        segment_ids=segment_ids,
        pack_bounds=pack_bounds,
        batch_bounds=batch_bounds,
        settings=settings,
        epoch=epoch,
        num_dummies=-num_batches % settings.num_ranks,
        dummy_of=int(np.argmin(sizes)) if num_batches else -1,
    )


def describe(plan: EpochPlan, table: SegmentTable) -> PlanSummary:
    """What the plan costs. Dummies are counted in ``micro_batches``, ``dummies`` and ``steps``, and in nothing else."""
    lengths = table.lengths[plan.segment_ids]
    num_packs = len(plan.pack_bounds) - 1
    tokens = int(lengths.sum())
    slots = 0
    if num_packs:
        rows = np.add.reduceat(lengths, plan.pack_bounds[:-1])
        longest = np.maximum.reduceat(rows, plan.batch_bounds[:-1])
        slots = int((longest * np.diff(plan.batch_bounds)).sum())
    return PlanSummary(
        micro_batches=len(plan),
        dummies=plan.num_dummies,
        steps=plan.num_steps,
        packs=num_packs,
        segments=len(plan.segment_ids),
        tokens=tokens,
        targets=int(table.num_targets[plan.segment_ids].sum()),
        slots=slots,
        fill=tokens / (num_packs * plan.settings.capacity) if num_packs else 0.0,
        padding=1 - tokens / slots if slots else 0.0,
    )


def _choose(table: SegmentTable, rng: np.random.Generator) -> Ints:
    """Segment ids of the epoch: a row of weight 2.5 twice, and with a seeded half of its source's rows once more."""
    everything = np.arange(len(table.lengths), dtype=np.int64)
    if all(weight == 1 for weight in table.source_weights):
        return everything
    repeats = np.zeros(len(everything), dtype=np.int64)
    for source, weight in enumerate(table.source_weights):
        mine = table.source_ids == source
        rows = np.unique(table.row_ids[mine])
        extra = rng.permutation(rows)[: round((weight - int(weight)) * len(rows))]
        repeats[mine] = int(weight) + np.isin(table.row_ids[mine], extra)
    return np.repeat(everything, repeats)


def _pack(chosen: Ints, lengths: Ints, capacity: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    order, bounds = pack_in_order(lengths[chosen], capacity)
    shuffled = rng.permutation(len(bounds) - 1)
    counts = np.diff(bounds)[shuffled]
    new_bounds = np.zeros_like(bounds)
    np.cumsum(counts, out=new_bounds[1:])
    # where each item of the shuffled packs stands in the old order
    source = np.arange(len(order)) - np.repeat(new_bounds[:-1] - bounds[:-1][shuffled], counts)
    return chosen[order[source]], new_bounds


def _group(chosen: Ints, lengths: Ints, rows: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    window = rows * SORTING_WINDOW
    # lexsort's last key is the first to count: by window, then longest first, then as shuffled
    by_length = chosen[np.lexsort((-lengths[chosen], np.arange(len(chosen)) // window))]
    bounds = _every(len(chosen), rows)
    whole, rest = divmod(len(chosen), rows)
    # the one incomplete micro-batch stays last: the last step is the smaller one anyway
    shuffled = by_length[: whole * rows].reshape(whole, rows)[rng.permutation(whole)].reshape(-1)
    return np.concatenate([shuffled, by_length[len(by_length) - rest :]]), bounds


def _every(count: int, size: int) -> Ints:
    """Bounds of groups of ``size``: ``_every(5, 2) -> [0, 2, 4, 5]``."""
    return np.append(np.arange(0, count, size, dtype=np.int64), np.int64(count))
