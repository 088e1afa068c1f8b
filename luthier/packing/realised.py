"""What a plan takes from each source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.packing.epoch import EpochPlan
from luthier.packing.settings import SegmentTable
from luthier.writing import counted

Ints = NDArray[np.int64]


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
    ids, lengths = plan.segment_ids[taken], plan.planned.lengths(table.lengths)[taken]
    begun = plan.starts[taken] == 0 if plan.starts is not None else np.ones(len(ids), dtype=np.bool_)
    is_first = np.zeros(len(table.lengths), dtype=np.bool_)
    is_first[np.unique(table.row_ids, return_index=True)[1]] = True  # each row's first segment stands for the row
    targets = table.num_targets[ids]
    if plan.starts is not None:  # the first token of what follows a cut is no target any more
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
        return len(plan.segment_ids)
    assert 0 <= num_steps <= plan.num_steps, f"{num_steps} of {counted(plan.num_steps, 'step')}"
    batches = min(int(plan.step_bounds[num_steps]), len(plan.planned))  # dummies come last and take nothing
    return int(plan.pack_bounds[plan.batch_bounds[batches]])
