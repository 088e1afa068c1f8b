"""Plain text in full rows: documents one after the other, cut wherever a row is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.errors import UserError
from luthier.writing import counted

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """N pieces: tokens ``starts[i]:stops[i]`` of segment ``segments[i]``; row ``r`` is ``bounds[r]:bounds[r + 1]``."""

    segments: Ints
    starts: Ints
    stops: Ints
    bounds: Ints


def split_segments(lengths: Sequence[int] | NDArray[np.integer], capacity: int, *, skip: int = 0) -> Pieces:
    """Rows of exactly ``capacity`` tokens, but for the last; segments are taken in order, from token ``skip`` on.

    ``split_segments([5, 2, 4], 4)`` gives the rows ``[0: 0:4], [0: 4:5, 1: 0:2, 2: 0:1], [2: 1:4]``.

    Each piece is a segment of its own: positions start anew, and its first token is no target. Raises `UserError`
    where a length is not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.min() < 1:
        first = int(np.argmax(sizes < 1))
        raise UserError(f"segment number {first} has {counted(sizes[first], 'token')}", hint="leave empty segments out")
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    assert 0 <= skip <= total, f"{skip} of {counted(total, 'token')}"
    full = np.arange(skip + capacity, total, capacity, dtype=np.int64)  # where a row ends and another follows
    stops = np.union1d(ends[ends > skip], full)
    starts = np.concatenate([[skip], stops[:-1]]) if len(stops) else stops
    owner = np.searchsorted(ends, starts, side="right")
    first_token = ends[owner] - sizes[owner]
    return Pieces(
        segments=owner,
        starts=starts - first_token,
        stops=stops - first_token,
        bounds=np.concatenate([[0], np.searchsorted(stops, full) + 1, [len(stops)] if len(stops) else []]).astype(
            np.int64
        ),
    )
