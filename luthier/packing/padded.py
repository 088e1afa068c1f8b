"""Rows of one segment each, padded to the longest of their micro-batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luthier.packing.balance import PORTIONS, groups_sorted
from luthier.packing.planned import Planned, every
from luthier.packing.settings import PlanSettings

SORTING_WINDOW = 50  # micro-batches whose rows are sorted by length together, if there are many: little padding

Ints = NDArray[np.int64]


def pad_rows(chosen: Ints, lengths: Ints, settings: PlanSettings) -> Planned:
    """Micro-batches of rows of similar length: ``chosen`` are segment ids in random order, ``lengths`` those of all.

    With ``tokens_per_step`` a micro-batch has as many rows as stay, padded, within its share of the step, and within
    ``rows_per_micro_batch`` rows of full length; at least one.
    """
    group = settings.micro_batches_per_step
    num_batches = len(chosen) // settings.rows_per_micro_batch
    sorted_together = min(max(SORTING_WINDOW, groups_sorted(settings) * group), max(1, num_batches // PORTIONS))
    window = settings.rows_per_micro_batch * sorted_together
    # lexsort's last key is the first to count: by window, then longest first, then as shuffled
    by_length = chosen[np.lexsort((-lengths[chosen], np.arange(len(chosen)) // window))]
    if settings.tokens_per_step is None:
        bounds = every(len(chosen), settings.rows_per_micro_batch)
    else:
        slots = min(settings.rows_per_micro_batch * settings.capacity, settings.tokens_per_step // group)
        bounds = _within(lengths[by_length], slots)
    return Planned(
        segment_ids=by_length,
        pack_bounds=np.arange(len(by_length) + 1, dtype=np.int64),
        batch_bounds=bounds,
        step_ends=bounds[:0],
    )


def _within(lengths: Ints, slots: int) -> Ints:
    """Bounds of groups of neighbours whose longest times their number is at most ``slots``."""
    bounds = [0]
    longest = 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if longest * (place - bounds[-1] + 1) > slots and place > bounds[-1]:
            bounds.append(place)
            longest = length
    if len(lengths):
        bounds.append(len(lengths))
    return np.array(bounds, dtype=np.int64)
