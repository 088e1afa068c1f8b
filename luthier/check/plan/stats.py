"""How long the data is and how much of it is learned, per source and before any cutting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.check.plan.costs import LongRow, MediaCount, MediaItems, longest_rows
from luthier.config.schema import Overflow
from luthier.preparation.prepared import PreparedSet
from luthier.preparation.segments import SegmentIndex

PERCENTILES = (50, 90, 95, 99)
NO_LIMIT = 2**31 - 1  # no segment is longer: token numbers are int32
NUM_BINS = 16
WIDE_RANGE = 64  # largest over smallest

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Of whole numbers: extremes, mean, ``percentiles`` (nearest rank: a value that occurs), and a histogram.

    Bin ``i`` counts values in ``edges[i] <= value < edges[i + 1]``; the last edge is above the maximum.
    """

    minimum: int
    mean: float
    maximum: int
    percentiles: dict[int, int]
    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats:
    """One source, or all of them. A segment is what attends to itself: most rows have one."""

    name: str
    weight: float
    rows: int
    segments: int
    tokens: int
    targets: int
    lengths: Distribution
    targets_per_segment: Distribution
    over_max_length: int  # segments
    media: tuple[MediaCount, ...] = ()

    @property
    def share_trained(self) -> float:
        """Targets / tokens."""
        return self.targets / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """``fitting`` says which share of segments fits into so many tokens, to choose ``data.max_length`` by."""

    split: str
    max_length: int
    total: SourceStats
    sources: tuple[SourceStats, ...]
    fitting: dict[int, float]
    longest: tuple[LongRow, ...]


def stats(prepared: PreparedSet, *, split: str, max_length: int) -> Stats:
    """The numbers of one prepared set; a source none of whose rows is left is not listed."""
    index = SegmentIndex(prepared, max_length=NO_LIMIT, overflow=Overflow.ERROR)
    everything = np.ones(len(index), dtype=np.bool_)
    media = MediaItems.of_index(index)
    sources = []
    for number, source in enumerate(prepared.sources):
        mine = index.source_ids == number
        if mine.any():
            found = _source_stats(index, mine, name=source.name, weight=source.weight, max_length=max_length)
            sources.append(replace(found, media=media.counts(mine)))
    total = _source_stats(index, everything, name="all", weight=1.0, max_length=max_length)
    return Stats(
        split=split,
        max_length=max_length,
        total=replace(total, media=media.counts()),
        sources=tuple(sources),
        fitting=_fitting(index.lengths, max_length),
        longest=longest_rows(index),
    )


def distribution(values: Ints) -> Distribution:
    """Of at least one value."""
    assert len(values), "a distribution of nothing"
    edges = _edges(int(values.min()), int(values.max()))
    counts, _ = np.histogram(values, bins=np.array(edges))
    return Distribution(
        minimum=int(values.min()),
        mean=float(values.mean()),
        maximum=int(values.max()),
        percentiles={p: int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES},
        edges=edges,
        counts=tuple(counts.tolist()),
    )


def _source_stats(
    index: SegmentIndex, mine: NDArray[np.bool_], *, name: str, weight: float, max_length: int
) -> SourceStats:
    lengths, targets = index.lengths[mine], index.num_targets[mine]
    return SourceStats(
        name=name,
        weight=weight,
        rows=len(np.unique(index.row_ids[mine])),
        segments=len(lengths),
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        lengths=distribution(lengths),
        targets_per_segment=distribution(targets),
        over_max_length=int((lengths > max_length).sum()),
    )


def _edges(low: int, high: int) -> tuple[int, ...]:
    """Edges of bins. Of equal, round width: ``(3, 17) -> (3, 4, 5, … 18)``; over wide ranges they double instead."""
    if high > WIDE_RANGE * max(low, 1):  # one row of 10,000 tokens would put all others into the first bin
        start = 1 << max(0, low.bit_length() - 1) if low else 0
        return (
            *([0] if start == 0 else []),
            *(1 << n for n in range(max(start, 1).bit_length() - 1, high.bit_length() + 1)),
        )
    width = max(1, -(-(high - low + 1) // NUM_BINS))
    magnitude = 10 ** max(0, len(str(width)) - 1)
    width = -(-width // magnitude) * magnitude
    start = low // width * width
    return tuple(range(start, high + width + 1, width))


def _fitting(lengths: Ints, max_length: int) -> dict[int, float]:
    longest = int(lengths.max())
    powers = [2**n for n in range(7, 32)]
    useful = [limit for limit in powers if limit >= np.percentile(lengths, 25)]
    stop = next((number for number, limit in enumerate(useful) if limit >= longest), len(useful))
    limits = sorted({*useful[: stop + 1][-6:], max_length})
    return {limit: float((lengths <= limit).mean()) for limit in limits}
