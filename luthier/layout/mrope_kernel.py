"""`mrope.packed_mrope` for grids in whole numbers, compiled: one pass over the row. Imported where numba is loaded."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill_positions(
    types_T: Ints,
    branches_n2: Ints,
    grids: tuple[Ints, Ints],
    times: tuple[Ints, Ints],
    by_extent: bool,
    found_4T: Ints,
) -> bool:
    """Write text positions and those of three axes; False, with nonsense written, where tokens and grids do not fit.

    ``branches_n2`` are parents and lengths; ``grids`` [N, 3] of images and of videos, in tokens; ``times`` the
    positions in time of their grids, one item behind the other; ``by_extent`` as `Advance.EXTENT`.
    """
    ends_n2 = np.zeros((len(branches_n2), 2), dtype=np.int64)  # text and reach behind each branch
    items, clocks = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    at = 0
    for branch in range(len(branches_n2)):
        parent, end = branches_n2[branch, 0], at + branches_n2[branch, 1]
        text, reach = (ends_n2[parent, 0], ends_n2[parent, 1]) if parent >= 0 else (0, 0)
        while at < end:
            kind = types_T[at] - 1
            if kind < 0:
                found_4T[0, at] = text
                found_4T[1:, at] = reach
                at, text, reach = at + 1, text + 1, reach + 1
                continue
            if kind > 1 or items[kind] == len(grids[kind]):
                return False
            steps, height, width = grids[kind][items[kind]]
            size = steps * height * width
            if size == 0 or at + size > end:
                return False
            clock = 0
            for step in range(steps):
                clock = times[kind][clocks[kind] + step]
                for row in range(height):
                    for column in range(width):
                        if types_T[at] != kind + 1:
                            return False
                        found_4T[0, at], found_4T[1, at] = text, reach + clock
                        found_4T[2, at], found_4T[3, at] = reach + row, reach + column
                        at, text = at + 1, text + 1
            items[kind] += 1
            clocks[kind] += steps
            reach += max(height, width) if by_extent else max(clock + 1, height, width)
        ends_n2[branch, 0], ends_n2[branch, 1] = text, reach
    return bool(at == len(types_T) and items[0] == len(grids[0]) and items[1] == len(grids[1]))
