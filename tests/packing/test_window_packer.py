"""The plan of an epoch while its segments are on their way."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Packing
from luthier.errors import CheckpointError, UserError
from luthier.packing import PlanSettings, SegmentTable, join
from luthier.packing.epoch import EpochPlan, describe, plan_epoch
from luthier.packing.order import ListedOrder, MixtureSettings, RowOrder
from luthier.packing.packer import MAX_CARRIED, WindowPacker
from luthier.packing.planner import EpochPlanner, GrowingTable, PlannerPlace, TableRows
from tests.conftest import examples

NOTHING = (np.zeros(0, np.int64), SegmentTable.of_lengths([]))
ONLINE = [Packing.WINDOW, Packing.SPLIT]


def settings_of(packing=Packing.WINDOW, **changes):
    return PlanSettings(
        **{"packing": packing, "capacity": 128, "window": 64, "seed": 3, "micro_batches_per_step": 4, **changes}
    )


def drawn(n, seed=0, longest=100):
    return np.random.default_rng(seed).integers(1, longest + 1, n)


def arrays(planned):
    fields = (planned.segment_ids, planned.pack_bounds, planned.batch_bounds, planned.step_ends)
    cuts = (planned.starts, planned.stops) if planned.starts is not None else ()
    return [field.tolist() for field in (*fields, *cuts)]


def lines(lengths, ids, extra_costs=None):
    table = SegmentTable.of_lengths(lengths[ids])
    return dataclasses.replace(table, extra_costs=None if extra_costs is None else extra_costs[ids])


def fed(plan_settings, lengths, cuts=(), *, total=None):
    """Everything that comes out when the segments come in portions that end at ``cuts``."""
    packer = WindowPacker(plan_settings, epoch=1, total=total)
    bounds = [0, *sorted(cuts), len(lengths)]
    ids = np.arange(len(lengths)) + 1000
    parts = [packer.add(ids[a:b], lengths[a:b]) for a, b in itertools.pairwise(bounds)]
    return join([*parts, packer.finish()])


@pytest.mark.parametrize("packing", ONLINE)
@given(
    count=st.integers(0, 700),
    cuts=st.lists(st.integers(0, 700), max_size=6),
    rows=st.integers(1, 3),
    group=st.integers(1, 5),
    tokens=st.sampled_from([None, 900]),
)
@settings(deadline=None, max_examples=examples(60))
def test_the_plan_does_not_depend_on_how_segments_are_divided_among_calls(packing, count, cuts, rows, group, tokens):
    lengths = drawn(count)
    changes = {"rows_per_micro_batch": rows, "micro_batches_per_step": group, "tokens_per_step": tokens}
    plan_settings = settings_of(packing, **changes)
    whole = fed(plan_settings, lengths)
    assert arrays(fed(plan_settings, lengths, [min(cut, count) for cut in cuts])) == arrays(whole)
    assert np.bincount(whole.segment_ids, weights=whole.lengths(np.append(np.zeros(1000, int), lengths))).sum() == sum(
        lengths
    )
    assert set(whole.segment_ids.tolist()) == set(range(1000, 1000 + count))


@pytest.mark.parametrize("packing", ONLINE)
def test_segments_one_by_one_give_the_same_plan(packing):
    lengths = drawn(500)
    assert arrays(fed(settings_of(packing), lengths, range(1, 500))) == arrays(fed(settings_of(packing), lengths))


@pytest.mark.parametrize("packing", ONLINE)
@pytest.mark.parametrize("tokens", [None, 1500])
def test_plan_epoch_is_the_plan_of_a_packer_that_was_fed_its_order(packing, tokens):
    table = SegmentTable.of_lengths(drawn(900))
    plan_settings = settings_of(packing, tokens_per_step=tokens, num_ranks=2)
    order = np.random.default_rng(5).permutation(900)
    plan = plan_epoch(table, plan_settings, epoch=2, order=order)
    packer = WindowPacker(plan_settings, epoch=2)
    parts = [packer.add(order[i : i + 100], table.lengths[order[i : i + 100]]) for i in range(0, 900, 100)]
    fed_plan = EpochPlan.of_planned(join([*parts, packer.finish()]), table.lengths, plan_settings, epoch=2)
    assert list(plan) == list(fed_plan)
    assert plan.step_bounds.tolist() == fed_plan.step_bounds.tolist()


def test_what_fits_a_quarter_of_a_window_is_packed_as_best_fit_packs_it():
    """Not a whole window: rows that are still on their way are not waited for, whatever they are prepared by."""
    table = SegmentTable.of_lengths(drawn(16))
    plans = [plan_epoch(table, settings_of(packing), epoch=0) for packing in (Packing.WINDOW, Packing.BEST_FIT)]
    assert list(plans[0]) == list(plans[1])
    more = SegmentTable.of_lengths(drawn(17))
    plans = [plan_epoch(more, settings_of(packing), epoch=0) for packing in (Packing.WINDOW, Packing.BEST_FIT)]
    assert list(plans[0]) != list(plans[1])  # control: 17 are more


def test_the_first_micro_batches_come_after_few_segments():
    # 4,096 segments to a window, but a sixteenth of it decides the first
    plan_settings = PlanSettings(packing=Packing.WINDOW, capacity=4096, micro_batches_per_step=8)
    packer = WindowPacker(plan_settings, epoch=0)
    lengths = np.random.default_rng(0).integers(100, 2400, 300)
    counts = [len(packer.add([i], [length])) for i, length in enumerate(lengths)]
    assert counts.index(max(counts)) == 255 and max(counts) >= 72
    assert sum(counts) % 8 == 0  # no step waits for the next window


@pytest.mark.parametrize("rows", [1, 3])
def test_full_rows_of_documents_come_before_the_last_document(rows):
    packer = WindowPacker(settings_of(Packing.SPLIT, rows_per_micro_batch=rows), epoch=0)
    lengths = drawn(640)
    planned = packer.add(np.arange(640), lengths)
    num_tokens = int((planned.stops - planned.starts).sum())
    assert num_tokens % (rows * 128) == 0, "whole micro-batches of full rows"
    assert lengths.sum() - num_tokens < 2 * 64 * 128, "less than two windows wait for what follows"


def test_a_table_grows_by_more_than_it_holds():
    table = GrowingTable(np.dtype("<i8"))
    numbers = np.arange(5 * len(table._memory))
    table.append(numbers[:1])
    table.append(numbers[1:])
    assert np.array_equal(table.records, numbers)


def test_micro_batches_of_a_window_are_in_random_order_but_for_the_balance():
    lengths = drawn(20_000, longest=60)
    plan = plan_epoch(SegmentTable.of_lengths(lengths), settings_of(window=4096, micro_batches_per_step=8), epoch=0)
    costs = np.add.reduceat(lengths[plan.planned.segment_ids] ** 2, plan.planned.pack_bounds[:-1])[
        : 8 * (len(plan) // 8)
    ]
    of_step = costs.reshape(-1, 8).mean(axis=1)
    assert abs(np.corrcoef(of_step[:-1], of_step[1:])[0, 1]) < 0.15
    ranks = np.argsort(np.argsort(of_step)) / len(of_step)
    assert abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) < 0.15
    assert of_step.std() > 3 * costs.reshape(-1, 8).std(axis=1).mean()  # control: they are grouped by cost


@pytest.mark.parametrize("packing", ONLINE)
@pytest.mark.parametrize("tokens", [None, 2000])
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (2, 8), (1, 40)])
def test_a_restored_packer_goes_on_identically_from_every_window(packing, tokens, rows, group):
    lengths = drawn(4000)
    plan_settings = settings_of(
        packing, rows_per_micro_batch=rows, micro_batches_per_step=group, tokens_per_step=tokens
    )
    whole = fed(plan_settings, lengths)
    packer = WindowPacker(plan_settings, epoch=1)
    ids = np.arange(4000) + 1000
    before = []
    for start in range(0, 4000, 130):
        before.append(packer.add(ids[start : start + 130], lengths[start : start + 130]))
        state = json.loads(json.dumps(packer.state()))
        later = WindowPacker.resume(plan_settings, state, packer.carried_ids, lines(lengths, packer.carried_ids - 1000))
        taken = state["taken"]
        rest = join([*before, later.add(ids[taken:], lengths[taken:]), later.finish()])
        assert arrays(rest) == arrays(whole)
        assert state["micro_batches"] == sum(map(len, before))
    assert packer.num_windows > 4


def test_the_place_of_a_planner_stays_within_two_kilobytes():
    table = SegmentTable.of_lengths(np.random.default_rng(0).integers(1, 4097, 300_000))
    plan_settings = PlanSettings(
        packing=Packing.WINDOW, capacity=4096, micro_batches_per_step=512, tokens_per_step=10**7, seed=2**32 - 1
    )
    order = RowOrder(counts=(300_000,), mixture=MixtureSettings(weights=(1.0,)), seed=3).epoch(0)
    planner = EpochPlanner(TableRows(table), plan_settings, order, epoch=999_999)
    sizes, carried = [], []
    while planner.next() is not None:
        place = planner.place()
        sizes.append(len(json.dumps(place.to_json())))
        carried.append(len(place.carried))
    assert max(carried) >= MAX_CARRIED - 1  # the bound is reached
    assert max(sizes) <= 2048


@pytest.mark.parametrize("packing", ONLINE)
@pytest.mark.parametrize("tokens", [None, 2000])
@pytest.mark.parametrize("shared", [False, True])
def test_a_planner_goes_on_identically_from_every_place_without_what_came_before(packing, tokens, shared):
    """Rows of none to five segments, some lost, some twice, so that a place may lie within a row."""
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 6, 900)
    row_ids = np.repeat(np.arange(900), counts)
    lengths = rng.integers(1, 60, len(row_ids))
    begins = np.append(True, np.diff(row_ids) > 0)
    held = np.where(begins | (rng.random(len(row_ids)) < 0.3), 0, 1) * np.minimum(lengths - 1, 3)
    held = (
        np.where(np.roll(begins, -1) & begins, 0, held) if shared and packing is Packing.WINDOW else np.zeros_like(held)
    )
    table = dataclasses.replace(
        SegmentTable.of_lengths(lengths), row_ids=row_ids, source_ids=np.zeros_like(row_ids), held=held
    )
    plan_settings = settings_of(packing, tokens_per_step=tokens, capacity=512, shared=shared)
    rows = WithLost(TableRows(table))
    order = ListedOrder(np.random.default_rng(2).permutation(np.append(np.arange(1200), np.arange(300))))

    def rest(place):
        planner, found, used = EpochPlanner(rows, plan_settings, order, epoch=1, place=place), [], 0
        while (window := planner.next()) is not None:
            taken = planner.occurrences["rows"][window.segment_ids]
            used += int((taken if window.starts is None else taken[window.starts == 0]).sum())
            found.append((arrays(planner.of_segments(window)), used + planner.lost_at_end * planner.is_over))
        return found

    planner, places = EpochPlanner(rows, plan_settings, order, epoch=1), []
    while not planner.is_over:
        places.append(PlannerPlace.from_json(json.loads(json.dumps(planner.place().to_json()))))
        planner.next()
    whole = rest(None)
    assert len(places) == len(whole) > 6 and whole[-1][1] == 1500
    for number, place in enumerate(places):
        before = whole[number - 1][1] if number else 0
        assert rest(place) == [(window, used - before) for window, used in whole[number:]]
    assert (
        any(place.ordinal for place in places) and any(len(place.carried) for place in places)
    ) or packing is Packing.SPLIT


class WithLost:
    """Every fourth row is lost."""

    def __init__(self, rows):
        self.rows, self.counts = rows, (1200,)
        self.whole, self.table = rows.whole, rows.table

    def segments_of(self, rows):
        kept = rows % 4 > 0
        found, some = self.rows.segments_of(rows[kept] - rows[kept] // 4 - 1)
        counts = np.zeros(len(rows), np.int64)
        counts[kept] = some
        return found, counts


@pytest.mark.parametrize("change", [{"seed": 4}, {"capacity": 256}, {"window": 32}, {"linear_cost": 1}])
def test_a_state_of_other_settings_is_refused(change):
    state = WindowPacker(settings_of(), epoch=0).state()
    ((name, value),) = change.items()
    with pytest.raises(CheckpointError, match=f"{name}: .* there, {value} here"):
        WindowPacker.resume(settings_of(**change), state, *NOTHING)
    with pytest.raises(CheckpointError, match="version 0"):
        WindowPacker.resume(settings_of(), {**state, "version": 0}, *NOTHING)
    WindowPacker.resume(settings_of(num_ranks=2), state, *NOTHING)  # the number of ranks may change


def test_a_segment_over_capacity_is_refused_when_it_comes():
    with pytest.raises(UserError, match="number 1 has 129"):
        WindowPacker(settings_of(), epoch=0).add([7, 8], [128, 129])


def test_windows_fill_packs_as_promised_ramp_and_all():
    lengths = np.random.default_rng(0).integers(1, 4097, 60_000)
    plan_settings = PlanSettings(packing=Packing.WINDOW, capacity=4096, micro_batches_per_step=8)
    table = SegmentTable.of_lengths(lengths)
    assert describe(plan_epoch(table, plan_settings, epoch=0), table).fill >= 0.995


def test_extra_costs_go_with_their_segments():
    lengths = np.full(4000, 64)
    extra = np.where(np.arange(4000) % 2, 10**9, 0)
    plan_settings = settings_of(window=512, micro_batches_per_step=8)
    packer = WindowPacker(plan_settings, epoch=0)
    planned = join([packer.add(np.arange(4000), lengths, extra), packer.finish()])
    costs = np.add.reduceat(extra[planned.segment_ids], planned.pack_bounds[:-1])
    state = packer.state()
    assert np.mean(costs.reshape(-1, 8).std(axis=1) == 0) > 0.8  # images sit with images in a step
    carried = packer.carried_ids
    restored = WindowPacker.resume(plan_settings, state, carried, lines(lengths, carried, extra))
    assert restored.state() == state
