"""Segments that stay together: units are planned as if each were one long segment, then become their segments again.

    segments   0: 30   1: 50   2: 10   3: 20     (rows 0 and 1, two continuations each)
    units      0: 80           1: 30             (padded: 0: 2 x 50, 1: 2 x 20)
    a pack     units [1, 0]  ->  segments [2, 3, 0, 1]

Where nothing is compared, the segments of a row that begin alike are a unit of any number, if they are to share.

The KL continuation of feedback (KTO, https://arxiv.org/abs/2402.01306): the prompt of one row with the completion of
another, an answer that nobody gave to this question. TRL takes it from the same batch, so that it depends on the batch
size, and is the row itself in a batch of one. Here it comes from the whole set, by a permutation that leaves no row in
its place, drawn anew for each epoch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Packing
from luthier.errors import UserError
from luthier.packing.planned import sums
from luthier.packing.settings import PlanSettings, SegmentTable, UnitKind, segment_costs

Ints = NDArray[np.int64]

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
    """The table with a line for each unit; ``lengths`` are those of `epoch_lengths`."""
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
    return replace(
        table,
        lengths=taken,
        num_targets=sums(table.num_targets, bounds),
        row_ids=table.row_ids[first],
        source_ids=table.source_ids[first],
        extra_costs=real_costs - segment_costs(taken, settings),
        prompt_lengths=None,
        held=None,
    )


def _prompts(table: SegmentTable) -> Ints:
    assert table.prompt_lengths is not None, "a table of what is compared has the lengths of prompts"
    return table.prompt_lengths
