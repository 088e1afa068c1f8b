"""Packs while segments are still on their way: each window of segments is packed best fit, and at once decided.

The first windows are small, so that training can begin early. Of each window the packs that are filled worst are
taken apart, and their segments go into the next window with those to come: few of them, so that a checkpoint can name
them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.packing.best_fit import check_lengths, pack_in_order
from luthier.packing.planned import bounds_of, sums, take_groups
from luthier.writing import counted

RAMP = 4  # windows are smaller until then, by half each
MAX_CARRIED = 224  # segments: their ids, five bytes each, stay under 2 kB with all else that a state holds
SHARE_CARRIED = 8  # and at most an eighth of a window: a small one is there to begin soon
GOOD_FILL = 0.995  # packs filled so well are only taken apart to make the number of packs even

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """The packs of one window, in random order: places of segments, ``members[bounds[p]:bounds[p + 1]]``.

    ``carried`` are the places of the segments that wait for the next window.
    """

    members: Ints
    bounds: Ints
    carried: Ints


def plan_packs(
    lengths: Sequence[int] | NDArray[np.integer], capacity: int, *, window: int | None = None, seed: int | None = None
) -> list[Ints]:
    """Indices into ``lengths``, pack by pack; every index is in exactly one.

    ``plan_packs([700, 300, 900], capacity=1024) -> [[2], [0, 1]]``

    All lengths are packed together, longest first, or, with ``window``, so many at a time in the order in which they
    come. ``seed`` shuffles which of equally long segments share packs, and the order of the packs; with ``window``
    both happen within a window.
    Raises `UserError` where a length is over ``capacity`` or not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    check_lengths(sizes, capacity)
    assert window is None or window >= 1, f"a window of {counted(window, 'segment')}"
    rng = None if seed is None else np.random.Generator(np.random.PCG64(seed))
    members, bounds = pack_windows(sizes, capacity, window or max(1, len(sizes)), rng)
    stops = bounds.tolist()
    return [members[start:stop] for start, stop in itertools.pairwise(stops)]


def window_size(number: int, largest: int) -> int:
    """The ``number``-th window is decided when ``largest`` has come, of segments or of tokens; the first ones earlier.

    ``[window_size(n, 4096) for n in range(6)] -> [256, 512, 1024, 2048, 4096, 4096]``
    """
    return max(1, largest >> max(0, RAMP - number))


def pack_window(lengths: Ints, capacity: int, rng: np.random.Generator | None) -> Window:
    """All segments in packs, best fit, none carried; without ``rng`` in the order in which they were opened."""
    order, bounds = pack_in_order(lengths, capacity)
    if rng is not None:
        places, bounds = take_groups(bounds, rng.permutation(len(bounds) - 1))
        order = order[places]
    return Window(members=order, bounds=bounds, carried=order[:0])


def without_worst(
    window: Window, lengths: Ints, capacity: int, *, multiples: tuple[int, ...], ahead: int = 0
) -> Window:
    """Carry the packs that are filled worst, at most `MAX_CARRIED` segments and an eighth of all.

    So many that the packs left, ``ahead`` counted with them, are a multiple of the first of ``multiples`` for which
    that can be.
    """
    tokens = sums(lengths[window.members], window.bounds)
    worst_first = np.argsort(tokens, kind="stable").astype(np.int64)
    max_carried = min(MAX_CARRIED, len(lengths) // SHARE_CARRIED)
    num_most = int(np.searchsorted(np.cumsum(np.diff(window.bounds)[worst_first]), max_carried, side="right"))
    num_bad = int(np.searchsorted(tokens[worst_first], GOOD_FILL * capacity))
    count = _num_carried(min(num_bad, num_most), num_most, len(tokens) + ahead, multiples)
    kept = np.sort(worst_first[count:])
    members, bounds = take_groups(window.bounds, kept)
    carried, _ = take_groups(window.bounds, np.sort(worst_first[:count]))
    return Window(members=window.members[members], bounds=bounds, carried=np.sort(window.members[carried]))


def pack_windows(lengths: Ints, capacity: int, window: int, rng: np.random.Generator | None) -> tuple[Ints, Ints]:
    """All of ``lengths`` in their order, ``window`` new ones at once: flat packs, as of `best_fit.pack_in_order`."""
    waiting = np.zeros(0, dtype=np.int64)
    members, counts = [waiting], [waiting]
    for start in range(0, len(lengths), window):
        stop = min(start + window, len(lengths))
        ids = np.concatenate([waiting, np.arange(start, stop, dtype=np.int64)])
        ids = ids if rng is None else rng.permutation(ids)
        packed = pack_window(lengths[ids], capacity, rng)
        if stop < len(lengths):
            packed = without_worst(packed, lengths[ids], capacity, multiples=(1,))
        waiting = ids[packed.carried]
        members.append(ids[packed.members])
        counts.append(np.diff(packed.bounds))
    return np.concatenate(members), bounds_of(np.concatenate(counts))


def _num_carried(wanted: int, most: int, num_packs: int, multiples: tuple[int, ...]) -> int:
    for multiple in multiples:
        count = wanted + (num_packs - wanted) % multiple
        if count <= most:
            return count
        if count - multiple >= wanted // 2:
            return count - multiple
    return wanted
