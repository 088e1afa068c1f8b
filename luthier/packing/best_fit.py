"""Exact best-fit decreasing: each segment, longest first, goes into the fullest pack that still has room for it.

A counting sort orders the segments, packs are kept in buckets by the room they have left, and a bitmap of the buckets
that are not empty finds the best one without a search. The cost hardly depends on how many packs are open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.errors import UserError
from luthier.packing.settings import bounds_of
from luthier.records import Ints
from luthier.writing import counted

# Loading numba and the kernel takes a second, and saves half a second per million; both ways give the same packs.
# What is loaded already pays for far less.
MIN_TO_LOAD, MIN_COMPILED = 1_000_000, 1000
KERNEL = "luthier.packing.best_fit_kernel"


def pack_in_order(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> tuple[Ints, Ints]:
    """Packs as one flat array of indices into ``lengths``: pack ``i`` is ``order[bounds[i]:bounds[i + 1]]``.

    Equal lengths are placed in the order in which they come, so shuffling them changes who shares a pack with whom.
    Raises `UserError` where a length is over ``capacity`` or not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    check_lengths(sizes, capacity)
    longest_first = np.argsort(_sort_key(capacity - sizes, capacity), kind="stable").astype(np.int64)
    fill = _compiled() if len(sizes) >= (MIN_COMPILED if KERNEL in sys.modules else MIN_TO_LOAD) else _fill_packs
    pack_of, num_packs = fill(sizes[longest_first], capacity)
    bounds = bounds_of(np.bincount(pack_of, minlength=num_packs))
    return longest_first[np.argsort(_sort_key(pack_of, num_packs), kind="stable")], bounds


def check_lengths(sizes: Ints, capacity: int) -> None:
    """Raise `UserError` where a length is over ``capacity`` or not positive."""
    wrong = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{counted(len(wrong), 'segment does', 'segments do')} not fit a pack of {counted(capacity, 'token')}: "
            f"number {first} has {sizes[first]}",
            hint="cut them first (luthier.layout.cutting.cut_segment), or raise the capacity",
        )


def _sort_key(values: Ints, limit: int) -> NDArray[np.integer]:
    # numpy's stable sort of 16-bit integers is a counting (radix) sort
    return values.astype(np.uint16) if limit < 2**16 else values


def _fill_packs(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """The pack of each size (longest first), and how many packs there are."""
    room: dict[int, list[int]] = {}  # room left -> open packs, the newest last
    open_rooms = 0  # bit r is set: a pack has r tokens of room
    pack_of = []
    num_packs = 0
    for size in sizes.tolist():
        fitting = open_rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            packs = room[left]
            pack = packs.pop()
            if not packs:
                open_rooms ^= 1 << left
        else:
            left, pack = capacity, num_packs
            num_packs += 1
        left -= size
        packs = room.setdefault(left, [])
        if not packs:
            open_rooms |= 1 << left
        packs.append(pack)
        pack_of.append(pack)
    return np.array(pack_of, dtype=np.int64), num_packs


def _compiled() -> Callable[[Ints, int], tuple[Ints, int]]:
    try:
        from luthier.packing.best_fit_kernel import fill_packs
    except (ImportError, RuntimeError):  # no numba, or no folder in which it may keep what it compiled
        return _fill_packs
    compiled: Callable[[Ints, int], tuple[Ints, int]] = fill_packs
    return compiled
