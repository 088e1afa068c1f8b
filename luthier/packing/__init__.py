"""Which segments share a row, and in which order the rows come: plans, made of integers only.

Here is what a plan is made from: a table of segments and units, and the settings that fix the order of everything; and
the micro-batches of a plan as flat arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Packing
from luthier.errors import UserError
from luthier.records import Ints, Segment
from luthier.writing import counted

# ---- Micro-batches as flat arrays, and the views of them.


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """The segment ids of each pack. ``dummy``: its targets are to be cleared.

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


# ---- What a plan is made from

DEFAULT_WINDOW = 4096
LINEAR_COST = 24_576  # 6 x 4096: a token's matrix products over its attention to one other, at a width of 4096
# What a patch (or a frame of sound) costs in an encoder that has a tenth of the language model's parameters. If the
# encoder is trained, that is a tenth of a token. If it is frozen, it has no backward pass, which leaves a third of a
# tenth. A plan does not know which of the two it is, so it takes a number between them.
PATCH_COST = LINEAR_COST // 16


class UnitKind(StrEnum):
    """What of a row is compared, and so has to be in one micro-batch.

    none         nothing: each segment goes its own way
    pairs        its two segments, the chosen continuation and the rejected one
    rewards      the same, each judged at its last token: what stands behind its last target counts too, and stays
    feedback     its only segment, with a verdict
    feedback_kl  that one and its prompt with another row's completion, drawn anew in each epoch (`draw_partners`)
    """

    NONE = "none"
    PAIRS = "pairs"
    REWARDS = "rewards"
    FEEDBACK = "feedback"
    FEEDBACK_KL = "feedback_kl"

    @property
    def size(self) -> int:
        """Segments that stay together: with size 2, segments ``2 u`` and ``2 u + 1`` of a table are unit ``u``."""
        match self:
            case UnitKind.NONE | UnitKind.FEEDBACK:
                return 1
            case UnitKind.PAIRS | UnitKind.REWARDS | UnitKind.FEEDBACK_KL:
                return 2

    @property
    def are_pairs(self) -> bool:
        """Whether a row has a chosen and a rejected continuation."""
        return self in (UnitKind.PAIRS, UnitKind.REWARDS)

    @property
    def are_compared(self) -> bool:
        """Whether an objective compares segments, or judges them by a verdict."""
        return self is not UnitKind.NONE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentTable:
    """What a plan needs to know of N segments.

    lengths, num_targets  int64[N]
    row_ids               int64[N], the row each came from: a row's segments are in an epoch together or not at all
    source_ids            int64[N], index into ``source_weights``, which say how often a row is seen per epoch
    extra_costs           int64[N], what a segment costs besides its tokens (images), in the unit of `segment_costs`
    prompt_lengths        int64[N], of segments that are compared: how many of their first tokens are the prompt
    held                  int64[N], of segments that are not: how many of their first tokens are those of the segment
                          before them, which is of the same row; 0 where a tree begins
    """

    lengths: Ints
    num_targets: Ints
    row_ids: Ints
    source_ids: Ints
    source_weights: tuple[float, ...] = (1.0,)
    extra_costs: Ints | None = None
    prompt_lengths: Ints | None = None
    held: Ints | None = None

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.integer] | list[int]) -> SegmentTable:
        """Segments that are rows of their own, from one source; every token but the first is taken for a target."""
        sizes = np.asarray(lengths, dtype=np.int64)
        rows = np.arange(len(sizes), dtype=np.int64)
        return cls(lengths=sizes, num_targets=sizes - 1, row_ids=rows, source_ids=np.zeros_like(rows))


class Segments(Protocol):
    """Random access to segments, which a `SegmentTable` describes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Segment: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """``capacity`` is tokens per pack; ``micro_batches_per_step`` counts those of all ranks together.

    tokens_per_step  a step goes on, in whole groups of ``micro_batches_per_step``, until it has so many tokens
    window           under ``Packing.WINDOW`` and ``Packing.SPLIT``, segments that are packed together, at least: a
                     window also has tokens enough for the micro-batches that are balanced together
    linear_cost      a segment of l tokens costs ``linear_cost * l + l * l``
    units            segments that share a micro-batch and, where rows are packed, a pack. ``rows_per_micro_batch``
                     counts units where rows are padded, and ``capacity`` is that of a whole unit: a pair of segments
                     of at most ``max_length`` tokens each has ``2 * max_length``
    shared           a unit's segments hold once what they share; for packed rows. Where nothing is compared, the
                     segments of a row that begin alike (`SegmentTable.held`) are a unit

    alike            padded rows are not sorted by length: what they cost is known only when they are answered

    Nothing of a plan but the number of dummies at its end depends on ``num_ranks``.
    """

    packing: Packing
    capacity: int
    rows_per_micro_batch: int = 1
    micro_batches_per_step: int = 1
    num_ranks: int = 1
    seed: int = 0
    tokens_per_step: int | None = None
    window: int = DEFAULT_WINDOW
    linear_cost: int = LINEAR_COST
    units: UnitKind = UnitKind.NONE
    shared: bool = False
    alike: bool = False

    @property
    def row_capacity(self) -> int:
        """The most tokens of one row of a batch: padded, a unit's segments have a row each."""
        return self.capacity // self.units.size if self.packing is Packing.NONE else self.capacity

    def __post_init__(self) -> None:
        assert self.capacity >= 1 and self.rows_per_micro_batch >= 1 and self.num_ranks >= 1
        assert self.window >= 1 and self.linear_cost >= 0 and (self.tokens_per_step or 1) >= 1
        assert self.units is UnitKind.NONE or self.packing is not Packing.SPLIT, "what is compared is never cut"
        assert not self.shared or self.packing.is_packed, "padded rows share nothing"
        assert self.micro_batches_per_step % self.num_ranks == 0 and self.micro_batches_per_step > 0, (
            f"{self.micro_batches_per_step} micro-batches a step cannot be shared by {counted(self.num_ranks, 'rank')}"
        )


def segment_costs(lengths: Ints, settings: PlanSettings, extra_costs: Ints | None = None) -> Ints:
    """int64[N]: the work that segments are, in units of one token attending to one other.

    Attention grows with the square of a segment's length (packed segments do not see each other), all else with the
    length itself.
    """
    costs = settings.linear_cost * lengths + lengths * lengths
    return costs if extra_costs is None else costs + extra_costs


# ------------------------------------------------------------------------------------------ segments that stay together


_PARTNERS = 3  # beside (seed, epoch): the stream of random numbers that is only for this


def draw_partners(num_rows: int, *, seed: int, epoch: int) -> Ints:
    """int64[num_rows]: whose completion follows each row's prompt; never its own, and each row's exactly once.

    A seeded permutation as one cycle: each row's partner is the next one in it. Raises `UserError` for a single row,
    which has nobody else.
    """
    if num_rows == 1:
        raise UserError(
            "the KL estimate takes another row's completion, and there is only one row",
            hint="add rows, or choose a loss that estimates no KL",
            key="data.train",
        )
    cycle = np.random.Generator(np.random.PCG64([seed, epoch, _PARTNERS])).permutation(num_rows)
    partners = np.empty(num_rows, dtype=np.int64)
    partners[cycle] = np.roll(cycle, -1)
    return partners


def completion_room(prompt_lengths: Ints, completion_lengths: Ints, max_length: int) -> Ints:
    """int64: how many tokens of another row's completion follow a prompt: all, or as many as there is room for.

    It is cut at its end: an estimate of how likely it is needs no stop token. There is room for one token at least,
    because the prompt leaves room for its own completion.
    """
    return np.minimum(completion_lengths, max_length - prompt_lengths)


def epoch_lengths(table: SegmentTable, settings: PlanSettings, *, epoch: int) -> Ints:
    """int64[N]: the segments' lengths in this epoch, which differ from the table's where completions are drawn."""
    if settings.units is not UnitKind.FEEDBACK_KL or not len(table.lengths):
        return table.lengths
    prompts = _prompts(table)[::2]
    completions = table.lengths[::2] - prompts
    partners = draw_partners(len(prompts), seed=settings.seed, epoch=epoch)
    lengths = table.lengths.copy()
    lengths[1::2] = prompts + completion_room(prompts, completions[partners], settings.capacity // 2)
    return lengths


def unit_bounds(table: SegmentTable, settings: PlanSettings) -> Ints | None:
    """int64[U + 1]: unit u is the segments ``bounds[u]:bounds[u + 1]``; None where each segment goes its own way."""
    size = settings.units.size
    if size > 1:
        return np.arange(0, len(table.lengths) + size, size, dtype=np.int64)
    if settings.shared and table.held is not None and table.held.any():
        return np.append(np.flatnonzero(table.held == 0), len(table.held)).astype(np.int64)
    return None


def held_tokens(table: SegmentTable, settings: PlanSettings) -> Ints | None:
    """int64[N]: how many of a segment's first tokens the one before it holds for both; None where each has its own."""
    if not settings.shared:
        return None
    if settings.units.size > 1:
        is_first = np.arange(len(table.lengths)) % settings.units.size == 0
        return np.where(is_first, 0, _prompts(table))
    return table.held


def unit_table(table: SegmentTable, lengths: Ints, settings: PlanSettings) -> SegmentTable:
    """What each unit takes and costs, where it counts as one segment; ``lengths`` are those of `epoch_lengths`."""
    bounds = unit_bounds(table, settings)
    if bounds is None:
        return table
    first = bounds[:-1]
    assert bounds[-1] == len(lengths) and (table.row_ids[first] == table.row_ids[bounds[1:] - 1]).all(), (
        "every row has all segments of a unit, side by side"
    )
    extra = np.zeros_like(lengths) if table.extra_costs is None else table.extra_costs
    # padded, each segment of a micro-batch takes as much room as the longest
    padded = settings.packing is Packing.NONE
    taken = np.diff(bounds) * np.maximum.reduceat(lengths, first) if padded else sums(lengths, bounds)
    real_costs = sums(segment_costs(lengths, settings, extra), bounds)
    held = held_tokens(table, settings)
    if held is not None:
        taken = taken - sums(held, bounds)
        real_costs = real_costs - sums(segment_costs(held, settings), bounds)
    return replace(SegmentTable.of_lengths(taken), extra_costs=real_costs - segment_costs(taken, settings))


def _prompts(table: SegmentTable) -> Ints:
    assert table.prompt_lengths is not None, "a table of what is compared has the lengths of prompts"
    return table.prompt_lengths
