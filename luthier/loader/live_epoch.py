"""One epoch of a run whose rows are still arriving: how far its order was taken, and what waits to be a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.loader.growing import GrowingTable
from luthier.packing import WindowPacker

Ints = NDArray[np.int64]

FIRST_BLOCK, LARGEST_BLOCK = 256, 2048  # rows of the order that are taken at a time: small at first, to begin soon

_OCCURRENCE = np.dtype([("segment", "<i8"), ("rows", "<i4"), ("unit", "<i4")])


@dataclass(kw_only=True, slots=True, eq=False)
class LiveEpoch:
    """The order of the epoch that is being planned, and how far it is.

    taken        rows of the order, with so many ``tokens``
    occurrences  the segments of the rows taken so far; a row that is in the order twice has its segments twice.
                 ``rows``: so many rows are used up with this one: its own, and the lost ones before it. ``unit``: so
                 many segments are packed as one, this one first; 0 for the others of them
    pending      micro-batches that wait to fill a step, in occurrences
    done         steps that wait for the next one
    lost_since   rows that were lost after the last one that was kept
    waiting      what the packer holds
    """

    number: int
    order: Ints
    packer: WindowPacker
    taken: int = 0
    tokens: int = 0
    block: int = FIRST_BLOCK
    lost_since: int = 0
    occurrences: GrowingTable = field(default_factory=lambda: GrowingTable(_OCCURRENCE))
    pending: list[tuple[Ints, ...]] = field(default_factory=list)
    done: deque[list[tuple[Ints, ...]]] = field(default_factory=deque)
    waiting: dict[str, Any] = field(default_factory=dict)


def occurrences_of(epoch: LiveEpoch, segments: Ints, counts: Ints, held: Ints) -> NDArray[Any]:
    """The segments of the next rows, of which each has ``counts``, with the rows that they use up; ``held`` as in a
    `packing.SegmentTable`.
    """
    found = np.zeros(len(segments), dtype=_OCCURRENCE)
    found["segment"] = segments
    first = np.flatnonzero(held == 0)
    found["unit"][first] = np.diff(np.append(first, len(held)))
    kept = np.flatnonzero(counts)
    if len(kept) == 0:
        epoch.lost_since += len(counts)
        return found
    heads = (np.cumsum(counts) - counts)[kept]  # the first segment of each row that is kept
    found["rows"][heads] = np.diff(kept, prepend=-1)
    found["rows"][heads[0]] += epoch.lost_since
    epoch.lost_since = len(counts) - 1 - int(kept[-1])
    return found
