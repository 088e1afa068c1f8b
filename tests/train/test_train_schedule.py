"""Steps of a run: integers only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from luthier.config.schema import Packing
from luthier.packing import PlanSettings, SegmentTable
from luthier.train.run_stream import trained_segments
from luthier.train.schedule import Schedule


def _schedule(
    count: int, *, step_size: int = 4, ranks: int = 1, epochs: float = 2, steps: int | None = None
) -> Schedule:
    settings = PlanSettings(
        packing=Packing.NONE, capacity=16, micro_batches_per_step=step_size, num_ranks=ranks, seed=3
    )
    table = SegmentTable.of_lengths(np.full(count, 8))
    return Schedule(table, settings, num_epochs=epochs, max_steps=steps)


def test_epochs_follow_one_another_and_each_ends_with_a_smaller_step() -> None:
    schedule = _schedule(10)  # 4 + 4 + 2 micro-batches an epoch
    assert schedule.total_steps == 6
    assert [schedule.locate(step) for step in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [schedule.ends_epoch(done) for done in range(1, 7)] == [False, False, True, False, False, True]
    assert [schedule.micro_batch(2, slot) for slot in range(4)] == [(0, 8), (0, 9), None, None]


def test_every_micro_batch_of_an_epoch_is_in_exactly_one_slot() -> None:
    schedule = _schedule(10, epochs=3)
    found = [schedule.micro_batch(step, slot) for step in range(schedule.total_steps) for slot in range(4)]
    assert [place for place in found if place] == [(epoch, index) for epoch in range(3) for index in range(10)]


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps() -> None:
    assert _schedule(10, epochs=0.5).total_steps == 2
    assert _schedule(10, epochs=1.5).total_steps == 5
    assert _schedule(10, epochs=1.5).epoch_after(5) == pytest.approx(1 + 2 / 3)


def test_max_steps_overrides_epochs_in_both_directions() -> None:
    assert _schedule(10, epochs=1, steps=7).total_steps == 7
    assert _schedule(10, epochs=9, steps=2).total_steps == 2
    assert _schedule(10, epochs=1, steps=7).locate(6) == (2, 0)


def test_epochs_of_fractional_sources_may_differ_in_length() -> None:
    rows = np.arange(9, dtype=np.int64)
    table = dataclasses.replace(SegmentTable.of_lengths(np.full(9, 8)), row_ids=rows, source_weights=(0.5,))
    settings = PlanSettings(packing=Packing.NONE, capacity=16, micro_batches_per_step=2, seed=3)
    schedule = Schedule(table, settings, num_epochs=3)
    assert schedule.total_steps == sum(schedule.plan(epoch).num_steps for epoch in range(3))


def test_tokens_of_a_step_leave_dummies_out() -> None:
    one, two = _schedule(9, step_size=4), _schedule(9, step_size=4, ranks=2)
    assert len(two.plan(0)) == 10  # nine and a dummy
    for step in range(3):
        assert one.num_tokens(step) == two.num_tokens(step) == (32 if step < 2 else 8)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("weight", [1.0, 0.5, 2.0])
def test_the_segments_of_a_run_are_those_of_its_steps(steps: int, weight: float, ranks: int) -> None:
    """Counted step by step: within an epoch, over its end, with a source of which an epoch sees a part."""
    rows = np.arange(11, dtype=np.int64)
    table = dataclasses.replace(SegmentTable.of_lengths(np.full(11, 8)), row_ids=rows, source_weights=(weight,))
    settings = PlanSettings(packing=Packing.NONE, capacity=16, micro_batches_per_step=2, num_ranks=ranks, seed=3)
    schedule = Schedule(table, settings, num_epochs=1, max_steps=steps)
    seen = set()
    for step in range(steps):
        for slot in range(2):
            place = schedule.micro_batch(step, slot)
            if place is not None and place[1] < len(schedule.plan(place[0]).planned):
                micro_batch = schedule.plan(place[0])[place[1]]
                seen |= {int(segment) for pack in micro_batch.packs for segment in pack}
    assert trained_segments(schedule, 11).tolist() == sorted(seen)
    assert steps > 4 or len(seen) < 11, "control: few steps see a part of the rows"
