"""Prompts that are asked in place of those whose answers teach nothing.

They come from an order of their own: from epochs that no run reaches, of which each step has a stretch. So the prompts
of a step follow from its number, the seed and the data, and the order of the run itself stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from luthier.loader.plan import StreamPlan
from luthier.loader.reader import PlannedMicroBatch
from luthier.packing.settings import Planned
from luthier.records import Ints
from luthier.training.streams import World

FIRST_EPOCH = 2**32  # of the spare rows; runs count theirs from 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparePrompts:
    """The spare rows of each step, in their order. ``per_step``: how many a step may need at most."""

    schedule: StreamPlan
    per_step: int
    world: World

    def segments(self, step: int, start: int, stop: int) -> Ints:
        """int64: the spare segments ``start:stop`` of a step; fewer, where there are no more."""
        return np.array(list(itertools.islice(self._segments(step), start, stop)), dtype=np.int64)

    def share(self, step: int, segments: Ints) -> PlannedMicroBatch:
        """This rank's share of some segments, which is a blank where there is none for it."""
        own = segments[self.world.rank :: self.world.size]
        bounds = np.array([0, len(own)])
        pack = Planned(segment_ids=own, pack_bounds=bounds, batch_bounds=np.array([0, 1]), step_ends=np.array([1]))
        number, settings = 0 if len(own) else None, self.schedule.settings
        return self.schedule.rows.micro_batch(pack, number, step=step, settings=settings, epoch=FIRST_EPOCH)

    def _segments(self, step: int) -> Iterator[int]:
        """Of rows that the step does not ask anyway, each row once: the rest of an epoch and all of the next."""
        rows, order, planned = self.schedule.rows, self.schedule.order, self.schedule.step(step)
        assert planned is not None, "a step that asks is a step of the run"
        members = [pack for micro_batch in planned.micro_batches for pack in micro_batch]
        asked = set(rows.rows_of(np.concatenate(members)).tolist())
        length = len(order.epoch(FIRST_EPOCH))
        epoch, first = divmod(step * self.per_step, length)
        for number, begin in ((epoch, first), (epoch + 1, 0)):
            for start in range(begin, length, self.per_step):
                for row in order.epoch(FIRST_EPOCH + number).rows(start, start + self.per_step).tolist():
                    if row not in asked:
                        asked.add(row)
                        yield from rows.segments_of(np.array([row]))[0].tolist()
