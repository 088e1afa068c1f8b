"""Micro-batches of a whole epoch's plan, with the places of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from luthier.loader.places import PLACE, Places, PlannedMicroBatch
from luthier.packing import EpochPlan, Units, completion_room, draw_partners
from luthier.preparation.segments import SegmentIndex
from luthier.records import Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPlaces:
    """Where the tokens of N segments are, by number: ``places[N]``, whose files ``files`` names.

    ``units``: which of them are compared. Completions of other rows are drawn when a plan's epoch is known.
    """

    places: Places
    files: Mapping[int, str]
    units: Units = Units.NONE

    @classmethod
    def of_index(cls, index: SegmentIndex) -> Self:
        """In the store."""
        return cls(places=places_of(index), files=dict(enumerate(index.prepared.files)), units=index.units)

    @classmethod
    def of_segments(cls, segments: Sequence[Segment], source_ids: Ints) -> Self:
        """In memory: ``sample`` is the segment's number. ``source_ids``, int64[N], as in a `SegmentTable`."""
        files = {name: number for number, name in enumerate(sorted({each.address.file for each in segments}))}
        places = np.zeros(len(segments), dtype=PLACE)
        places["sample"] = np.arange(len(segments))
        places["stop"] = [len(each) for each in segments]
        places["file"] = [files[each.address.file] for each in segments]
        places["row"] = [each.address.row for each in segments]
        places["source"] = source_ids
        return cls(places=places, files={number: name for name, number in files.items()})

    def micro_batch(self, plan: EpochPlan, number: int | None, *, step: int) -> PlannedMicroBatch:
        """A micro-batch of the plan; a blank for a dummy, and for None: a slot that the plan does not fill."""
        planned = None if number is None else plan[number]
        if planned is None or planned.dummy:
            return PlannedMicroBatch(step=step, places=self.places[:0], pack_bounds=(), files={}, units=self.units)
        members = np.array([i for pack in planned.packs for i in pack], dtype=np.int64)
        places = self.places[members]
        if self.units is Units.FEEDBACK_KL:
            self._add_completions(places, members, plan)
        elif planned.spans is not None:
            spans = np.array([span for pack in planned.spans for span in pack], dtype=np.int32)
            places["stop"] = places["start"] + spans[:, 1]
            places["start"] += spans[:, 0]
            places["open_end"] = False  # it goes on in another row
        return PlannedMicroBatch(
            step=step,
            places=places,
            pack_bounds=list(itertools.accumulate(map(len, planned.packs), initial=0)),
            files={file: self.files[file] for file in set(places["file"].tolist())},
            units=self.units,
        )

    def _add_completions(self, places: Places, members: Ints, plan: EpochPlan) -> None:
        """Every second place becomes the prompt with the completion that this epoch draws for it."""
        settings = plan.settings
        partners = _partners(len(self.places) // 2, settings.seed, plan.epoch)
        theirs = self.places[2 * partners[members[1::2] // 2]]
        drawn = places[1::2]
        prompt_in_leaf = theirs["prompt"] + theirs["start"] - theirs["head"]
        room = completion_room(drawn["prompt"], theirs["stop"] - prompt_in_leaf, settings.capacity // 2)
        # up to the end of the prompt, which was cut as it is for the row itself
        drawn["stop"] = drawn["prompt"] + drawn["start"] - drawn["head"]
        drawn["tail"], drawn["tail_start"], drawn["tail_stop"] = theirs["sample"], prompt_in_leaf, prompt_in_leaf + room


def places_of(index: SegmentIndex) -> Places:
    """Where the tokens of all segments of an index are."""
    rows = index.prepared
    places = np.zeros(len(index), dtype=PLACE)
    places["sample"], places["num_targets"] = index.sample_ids, index.num_targets
    places["leaf"], places["head"], places["start"], places["stop"], places["open_end"] = index.cuts()
    places["prompt"], places["encoder"] = index.prompt_lengths, index.encoder_lengths
    places["held"] = index.held
    places["file"], places["row"] = rows.file_ids[index.row_ids], rows.row_numbers[index.row_ids]
    places["source"] = index.source_ids
    return places


@lru_cache(maxsize=2)  # an epoch, and the next where one ends
def _partners(num_rows: int, seed: int, epoch: int) -> Ints:
    return draw_partners(num_rows, seed=seed, epoch=epoch)
