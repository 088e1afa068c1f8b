"""What a template that rewrites history costs: how many tokens are computed for one token of the rows' text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.loader.run_settings import shares_prompts
from luthier.packing import Units
from luthier.preparation.segments import SegmentIndex
from luthier.records import Sample

MOST_READ = 2_000  # rows whose text is compared; of more, so many are taken at even distances
SHOWN = 8  # tokens of an example
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryCost:
    """Rows of which some turn has an inference context of its own, since the template shows earlier answers otherwise
    once later turns follow. Tokens are those of all segments, of rows with and without.

    rows        how many they are, of ``all_rows``
    habit       the beginning of what an answer has and its later self in the history has not; "" where it is rewritten
                in another way
    shared      tokens computed if what turns have in common is computed once, ``unrolled`` if for each turn
    text        tokens of the text: those of ``shared`` without the answers that history repeats
    is_shared   the run computes ``shared``
    """

    rows: int
    all_rows: int
    habit: str
    shared: int
    unrolled: int
    text: int
    is_shared: bool

    @property
    def ratio(self) -> float:
        """Tokens computed for one token of text."""
        return (self.shared if self.is_shared else self.unrolled) / self.text

    @property
    def sentence(self) -> str:
        """Why, how much, and the choices."""
        habit = f" (it leaves out {self.habit!r} …)" if self.habit else ""
        other = self.unrolled if self.is_shared else self.shared
        choice = "unrolled" if self.is_shared else "shared"
        setting = "false" if self.is_shared else "auto, with rows that are packed"
        return (
            f"{self.ratio:.2f} tokens computed for one of text: in {self.rows:,} of {self.all_rows:,} rows the "
            f"template shows earlier answers otherwise once later turns follow{habit}, so turns have contexts of "
            f"their own. {choice.capitalize()} (train.shared_prompts: {setting}) it is {other / self.text:.2f}; "
            "rendered once (template.history: one_rendering) 1.00 at most, in contexts that inference does not show"
        )


def history_cost(config: RunConfig, index: SegmentIndex, decode: Decode) -> HistoryCost | None:
    """The cost of an index; None where every row is one sequence, or rows are compared."""
    if index.units is not Units.NONE:
        return None
    rows, first = np.unique(index.row_ids, return_index=True)
    trees = np.flatnonzero(np.diff(np.append(first, len(index))) > 1)
    trees = trees[_leave_a_branch(index, rows[trees])]
    if not len(trees):
        return None
    shared, unrolled = int((index.lengths - index.held).sum()), int(index.lengths.sum())
    taken = trees[:: -(-len(trees) // MOST_READ)]
    repeated, habit = 0, ""
    for row in rows[taken].tolist():
        count, left_out = _repeated(index.prepared[int(row)])
        repeated += count
        habit = habit or decode(left_out[:SHOWN])
    index.prepared.store.release()
    return HistoryCost(
        rows=len(trees),
        all_rows=len(rows),
        habit=habit,
        shared=shared,
        unrolled=unrolled,
        text=max(1, shared - round(repeated * len(trees) / len(taken))),
        is_shared=shares_prompts(config),
    )


def _leave_a_branch(index: SegmentIndex, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows have several leaves in the store; others have several segments because they were cut."""
    bounds = index.prepared.store.leaf_bounds
    samples = index.prepared.sample_ids[rows]
    found: NDArray[np.bool_] = bounds[samples + 1] - bounds[samples] > 1
    return found


def _repeated(sample: Sample) -> tuple[int, list[int]]:
    """How many tokens of answers stand again in the branch that goes on instead of them, and what the first such answer
    has in front of them.

    q [t a] with the sibling [a q2]  ->  the length of a, and t
    """
    ends = np.cumsum([branch.length for branch in sample.branches]).tolist()
    total, left_out = 0, list[int]()
    for node, branch in enumerate(sample.branches):
        sibling = next((n for n in range(node + 1, len(ends)) if sample.branches[n].parent == branch.parent), None)
        if sibling is None:
            continue
        own = sample.input_ids[ends[node] - branch.length : ends[node]]
        count = _overlap(own, sample.input_ids[ends[sibling] - sample.branches[sibling].length : ends[sibling]])
        total += count
        if count and not left_out:
            left_out = own[: len(own) - count].tolist()
    return total, left_out


def _overlap(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The longest end of one that the other begins with: ``_overlap([1, 2, 3], [2, 3, 4]) -> 2``."""
    starts = np.flatnonzero(one == other[0]).tolist() if len(other) else []
    for start in starts:
        length = len(one) - start
        if length <= len(other) and np.array_equal(one[start:], other[:length]):
            return length
    return 0
