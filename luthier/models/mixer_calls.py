"""Which stretches of a batch go through a recurrent layer together, as plain numbers: `models.mixers` computes by them.

A recurrent layer carries a state from token to token, so each segment, and each leaf of a token tree with all that it
continues, is a row of its own for it. Rows of about the same length go through the layer in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from luthier.models.attention_plan import AttentionPlan

TOKENS_PER_CALL = 256  # a call costs about as much as this many tokens more in one of them (benchmarks/recurrent.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerCall:
    """Rows that go through a layer together, ``width`` tokens each with padding at the end.

    ``rows``: for each the numbers of the stretches on its path, root first.
    """

    width: int
    rows: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=8)  # every recurrent layer asks for the same batch, and once more where it is checkpointed
def plan_calls(plan: AttentionPlan, tokens_per_call: int = TOKENS_PER_CALL) -> tuple[MixerCall, ...]:
    """The calls for a batch. Every stretch but padding is on the path of some row.

    whole 700, whole 650, whole 30 -> (700: rows (0,), (1,)), (30: row (2,))
    root 5, child 3, child 2       -> (8: rows (0, 1), (0, 2))

    Rows in descending order are cut into calls such that their tokens, padding included, and ``tokens_per_call`` for
    each call are as few as can be.
    """
    paths = [(*context, stretch) for stretch, context in enumerate(plan.contexts) if context is not None]
    continued = {stretch for path in paths for stretch in path[:-1]}
    rows = [path for path in paths if path[-1] not in continued]
    lengths = np.array([sum(plan.lengths[stretch] for stretch in row) for row in rows])
    order = np.argsort(-lengths, kind="stable")
    found = []
    for start, end in _cheapest_cuts(lengths[order], tokens_per_call):
        members = order[start:end]
        found.append(MixerCall(width=int(lengths[members[0]]), rows=tuple(rows[member] for member in members)))
    return tuple(found)


def _cheapest_cuts(descending: NDArray[np.int64], tokens_per_call: int) -> list[tuple[int, int]]:
    """[700, 650, 30], 256 -> [(0, 2), (2, 3)]; a call costs its number of rows times its first one's length."""
    count = len(descending)
    costs = np.zeros(count + 1, dtype=np.int64)  # of the rows before each cut
    begins = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        of_last = costs[:end] + (end - np.arange(end)) * descending[:end] + tokens_per_call
        begins[end] = int(of_last.argmin())
        costs[end] = of_last[begins[end]]
    cuts, end = [], count
    while end:
        cuts.append((int(begins[end]), end))
        end = int(begins[end])
    return cuts[::-1]
