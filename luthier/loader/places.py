"""Where the tokens of a micro-batch are: numbers that are cheap to send to a worker, which reads the store itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.layout.cutting import SegmentCut, take_window
from luthier.layout.trees import leaf_segment, span_of
from luthier.packing.settings import UnitKind
from luthier.records import Address, Sample, Segment

# One record a segment: leaf ``leaf`` of sample ``sample``, its first ``head`` tokens and ``start:stop``, ``open_end``
# as in `layout.SegmentCut`; ``file`` and ``row`` say where its row was read, ``source`` from which data set. Where it
# is compared, its first ``prompt`` tokens are the prompt. Where ``tail_stop`` is not 0, tokens ``tail_start:tail_stop``
# of the first leaf of sample ``tail`` follow: another row's completion. ``encoder`` is what encoders run through for
# its media (`SegmentIndex.encoder_lengths`). Its first ``held`` tokens are those of the segment before it.
PLACE = np.dtype(
    [
        ("sample", "<i8"),
        ("leaf", "<i4"),
        ("start", "<i4"),
        ("stop", "<i4"),
        ("num_targets", "<i4"),
        ("file", "<i4"),
        ("open_end", "?"),
        ("row", "<i8"),
        ("source", "<i4"),
        ("head", "<i4"),
        ("prompt", "<i4"),
        ("tail", "<i8"),
        ("tail_start", "<i4"),
        ("tail_stop", "<i4"),
        ("encoder", "<i4"),
        ("held", "<i4"),
    ]
)

Places = NDArray[Any]  # of dtype PLACE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedMicroBatch:
    """The packs of one micro-batch: pack ``p`` is ``places[pack_bounds[p]:pack_bounds[p + 1]]``.

    step   the optimizer step that it is part of, from 0
    files  the names that ``file`` points to, of those files that occur here
    units  how many segments, one behind the other, are compared
    A blank (no places) is what a rank gets where a step has fewer micro-batches than ranks have slots.
    """

    step: int
    places: Places
    pack_bounds: Sequence[int]
    files: dict[int, str]
    units: UnitKind = UnitKind.NONE

    @property
    def is_blank(self) -> bool:
        return len(self.places) == 0

    def packs(self) -> Iterator[Places]:
        return (self.places[start:stop] for start, stop in itertools.pairwise(self.pack_bounds))

    def addresses(self) -> list[Address]:
        return [self.address(place) for place in self.places]

    def sources(self) -> tuple[int, ...]:
        """The source of each segment in it."""
        return tuple(self.places["source"].tolist())

    def address(self, place: Any) -> Address:
        return Address(file=self.files[int(place["file"])], row=int(place["row"]))


def segment_at(sample: Sample, place: Any) -> Segment:
    """The segment of a sample that a place names, without what follows from another."""
    return part_of(leaf_segment(sample, int(place["leaf"])), place)


def tail_at(sample: Sample, place: Any) -> Segment:
    """What a place names of another row's sample."""
    return span_of(leaf_segment(sample, 0), int(place["tail_start"]), int(place["tail_stop"]))


def part_of(segment: Segment, place: Any) -> Segment:
    window = SegmentCut(
        head=int(place["head"]),
        start=int(place["start"]),
        stop=int(place["stop"]),
        open_end=bool(place["open_end"]),
        num_targets=int(place["num_targets"]),
    )
    return take_window(segment, window)
