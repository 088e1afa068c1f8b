import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Packing
from luthier.errors import UserError
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import describe, plan_epoch
from luthier.packing.planner import TableRows

WHOLE = [packing for packing in Packing if packing is not Packing.SPLIT]  # those that never cut a segment


def table_of(n=200, seed=0, longest=100):
    return SegmentTable.of_lengths(np.random.default_rng(seed).integers(1, longest + 1, n))


def settings_of(packing=Packing.BEST_FIT, **changes):
    return PlanSettings(packing=packing, **{"capacity": 128, "rows_per_micro_batch": 2, **changes})


def ids_of(plan):
    return [segment for batch in plan if not batch.dummy for pack in batch.packs for segment in pack]


@pytest.mark.parametrize("packing", WHOLE)
@given(lengths=st.lists(st.integers(1, 50), max_size=60), rows=st.integers(1, 5), ranks=st.integers(1, 4))
@settings(deadline=None)
def test_every_segment_is_in_exactly_one_pack_of_an_epoch(packing, lengths, rows, ranks):
    plan_settings = PlanSettings(
        packing=packing, capacity=50, rows_per_micro_batch=rows, num_ranks=ranks, micro_batches_per_step=ranks
    )
    plan = plan_epoch(SegmentTable.of_lengths(lengths), plan_settings, epoch=0)
    assert sorted(ids_of(plan)) == list(range(len(lengths)))
    for batch in plan:
        assert 1 <= len(batch.packs) <= rows
        assert all(1 <= sum(lengths[i] for i in pack) <= 50 for pack in batch.packs)
        assert packing.is_packed or all(len(pack) == 1 for pack in batch.packs)
    shares = [plan.of_rank(rank) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(index for share in shares for index in share) == list(range(len(plan)))


@pytest.mark.parametrize("packing", list(Packing))
def test_the_same_seed_and_epoch_give_the_same_plan_and_others_do_not(packing):
    table = table_of()
    first = list(plan_epoch(table, settings_of(packing), epoch=1))
    assert first == list(plan_epoch(table, settings_of(packing), epoch=1))
    assert first != list(plan_epoch(table, settings_of(packing), epoch=2))
    assert first != list(plan_epoch(table, settings_of(packing, seed=1), epoch=1))


def test_packs_have_other_members_in_another_epoch():
    table = table_of(n=400, longest=20)
    packs = [
        {frozenset(pack) for batch in plan_epoch(table, settings_of(), epoch=e) for pack in batch.packs} for e in (0, 1)
    ]
    assert len(packs[0] & packs[1]) < 0.2 * len(packs[0])


@pytest.mark.parametrize("packing", list(Packing))
def test_steps_do_not_depend_on_the_number_of_ranks(packing):
    table = table_of(n=333)
    steps = []
    for ranks in (1, 2, 4):
        plan = plan_epoch(table, settings_of(packing, num_ranks=ranks, micro_batches_per_step=8), epoch=3)
        steps.append(
            [sorted(plan[m].packs for m in plan.of_step(s) if not plan[m].dummy) for s in range(plan.num_steps)]
        )
    assert steps[0] == steps[1] == steps[2]


def test_each_rank_takes_its_share_of_each_step():
    plan = plan_epoch(table_of(), settings_of(num_ranks=2, micro_batches_per_step=4), epoch=0)
    for step in range(plan.num_steps):
        of_step = plan.of_step(step)
        shares = [[m for m in plan.of_rank(rank) if m in of_step] for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) <= 2
        assert sorted(shares[0] + shares[1]) == list(of_step)


def test_the_gap_in_the_last_step_is_filled_with_the_shortest_micro_batch_as_a_dummy():
    table = SegmentTable.of_lengths([100, 100, 7, 100, 100])
    plan = plan_epoch(
        table, settings_of(Packing.NONE, rows_per_micro_batch=1, num_ranks=4, micro_batches_per_step=4), epoch=0
    )
    assert len(plan) == 8
    assert [batch.dummy for batch in plan] == [False] * 5 + [True] * 3
    assert {batch.packs for batch in plan if batch.dummy} == {((2,),)}
    assert plan.num_steps == 2


def test_one_rank_needs_no_dummies_and_its_last_step_is_smaller():
    plan = plan_epoch(
        table_of(n=5), settings_of(Packing.NONE, rows_per_micro_batch=1, micro_batches_per_step=4), epoch=0
    )
    assert plan.num_dummies == 0
    assert [len(plan.of_step(step)) for step in range(plan.num_steps)] == [4, 1]


def test_padded_rows_are_grouped_by_similar_length_and_come_in_random_order():
    table = table_of(n=2000)
    plan = plan_epoch(table, settings_of(Packing.NONE, rows_per_micro_batch=8), epoch=0)
    assert describe(plan, table).padding < 0.1
    means = [np.mean([table.lengths[pack[0]] for pack in batch.packs]) for batch in plan]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # not sorted: neighbours are unrelated
    random_order = plan.planned.segment_ids[np.random.default_rng(0).permutation(2000)].reshape(-1, 8)
    sizes = table.lengths[random_order]
    assert 1 - sizes.sum() / (sizes.max(1) * 8).sum() > 0.3  # control: without grouping much is padding


def weighted(weights, rows_per_source=100, leaves=2):
    rows = np.repeat(np.arange(rows_per_source * len(weights)), leaves)
    lengths = np.random.default_rng(0).integers(1, 50, len(rows))
    return SegmentTable(
        lengths=lengths,
        num_targets=lengths // 2,
        row_ids=rows,
        source_ids=rows // rows_per_source,
        source_weights=weights,
    )


def test_source_weights_say_how_often_a_row_is_seen():
    table = weighted((1.0, 2.0, 0.5, 1.25))
    plan = plan_epoch(table, settings_of(), epoch=0)
    counts = Counter(ids_of(plan))
    per_source = [Counter(counts[s] for s in np.flatnonzero(table.source_ids == source)) for source in range(4)]
    assert per_source[0] == {1: 200}
    assert per_source[1] == {2: 200}
    assert per_source[2] == {0: 100, 1: 100}
    assert per_source[3] == {1: 150, 2: 50}


def test_a_fractional_weight_takes_whole_rows_and_others_in_each_epoch():
    table = weighted((0.5,))
    taken = []
    for epoch in range(2):
        ids = set(ids_of(plan_epoch(table, settings_of(), epoch=epoch)))
        assert ids == set(np.flatnonzero(np.isin(table.row_ids, table.row_ids[list(ids)])).tolist())
        taken.append(ids)
    assert taken[0] != taken[1]


def test_describe_counts_tokens_targets_slots_and_steps():
    table = SegmentTable.of_lengths([4, 3, 2, 1])
    packed = PlanSettings(packing=Packing.BEST_FIT, capacity=6, micro_batches_per_step=2)
    summary = describe(plan_epoch(table, packed, epoch=0), table)
    assert dataclasses.asdict(summary) == {
        "micro_batches": 2, "dummies": 0, "steps": 1, "packs": 2, "segments": 4,
        "tokens": 10, "targets": 6, "slots": 10, "fill": 10 / 12, "padding": 0.0,
    }  # fmt: skip
    padded = PlanSettings(packing=Packing.NONE, capacity=6, rows_per_micro_batch=4)
    summary = describe(plan_epoch(table, padded, epoch=0), table)
    assert (summary.slots, summary.packs, summary.padding) == (16, 4, 1 - 10 / 16)


def test_no_segments_give_an_empty_plan():
    table = SegmentTable.of_lengths([])
    for packing in Packing:
        plan = plan_epoch(table, settings_of(packing, num_ranks=2, micro_batches_per_step=2), epoch=0)
        assert len(plan) == 0
        assert describe(plan, table).steps == 0


@pytest.mark.parametrize("packing", WHOLE)
def test_a_segment_over_capacity_is_refused(packing):
    with pytest.raises(UserError, match="does not fit a pack of 128 tokens"):
        plan_epoch(SegmentTable.of_lengths([5, 129]), settings_of(packing), epoch=0)


def test_a_plan_can_only_be_indexed_within_itself():
    plan = plan_epoch(table_of(n=3), settings_of(), epoch=0)
    with pytest.raises(IndexError):
        plan[len(plan)]


def budget_settings(packing, ranks=4, **changes):
    return settings_of(packing, num_ranks=ranks, micro_batches_per_step=4, tokens_per_step=3000, **changes)


@pytest.mark.parametrize("packing", list(Packing))
def test_steps_reach_their_tokens_and_are_no_longer_than_needed(packing):
    table = table_of(n=3000)
    plan = plan_epoch(table, budget_settings(packing), epoch=0)
    lengths = plan.planned.lengths(table.lengths)
    of_batch = np.add.reduceat(lengths, plan.planned.pack_bounds[plan.planned.batch_bounds[:-1]])
    assert plan.num_steps > 10
    assert [m for s in range(plan.num_steps) for m in plan.of_step(s)] == list(range(len(plan)))
    for step in range(plan.num_steps):
        members = plan.of_step(step)
        assert len(members) % 4 == 0
        tokens = [int(of_batch[m]) if m < len(of_batch) else 0 for m in members]
        assert sum(tokens[:-4]) < 3000
        assert sum(tokens) >= 3000 or step == plan.num_steps - 1


@pytest.mark.parametrize("packing", list(Packing))
def test_steps_of_a_token_budget_do_not_depend_on_the_number_of_ranks(packing):
    table = table_of(n=1111)
    steps = []
    for ranks in (1, 2, 4):
        plan = plan_epoch(table, budget_settings(packing, ranks), epoch=3)
        real = len(plan.planned)
        steps.append([[plan[m] for m in plan.of_step(s) if m < real] for s in range(plan.num_steps)])
    assert steps[0] == steps[1] == steps[2]


def test_padded_micro_batches_of_a_token_budget_stay_within_their_slots():
    table = table_of(n=3000)
    for rows, tokens, slots in ((2, 3000, 256), (100, 3000, 750), (1, 100, 25)):
        changes = {"rows_per_micro_batch": rows, "tokens_per_step": tokens, "micro_batches_per_step": 4}
        plan = plan_epoch(table, settings_of(Packing.NONE, **changes), epoch=0)
        assert sorted(ids_of(plan)) == list(range(3000))
        sizes = [[int(table.lengths[i]) for (i,) in batch.packs] for batch in plan if not batch.dummy]
        assert all(max(batch) * len(batch) <= slots or len(batch) == 1 for batch in sizes)
        if slots > 100:
            assert np.mean([max(batch) * len(batch) for batch in sizes]) > 0.75 * slots


@pytest.mark.parametrize("packing", WHOLE)
def test_a_small_data_set_has_other_steps_in_every_epoch(packing):
    table = table_of(n=64)
    settings_ = settings_of(packing, rows_per_micro_batch=1, micro_batches_per_step=8)
    plans = [plan_epoch(table, settings_, epoch=epoch) for epoch in range(6)]
    steps = [{frozenset(i for m in p.of_step(s) for (*pack,) in p[m].packs for i in pack) for s in range(p.num_steps)}
             for p in plans]  # fmt: skip
    assert all(not one & other for i, one in enumerate(steps) for other in steps[:i])


def test_an_order_of_the_callers_own_is_followed_with_its_repetitions():
    table = table_of(n=300)
    order = np.array([5, 5, 7, *range(200, 300)])
    for packing in WHOLE:
        plan = plan_epoch(table, settings_of(packing), epoch=0, order=order)
        assert sorted(ids_of(plan)) == sorted(order.tolist())


def test_segments_of_rows_come_row_by_row():
    table = dataclasses.replace(table_of(n=6), row_ids=np.array([0, 0, 2, 3, 3, 3]))
    found, counts = TableRows(table).segments_of(np.array([2, 0, 2]))  # row ids may have gaps, numbers have none
    assert found.tolist() == [3, 4, 5, 0, 1, 3, 4, 5] and counts.tolist() == [3, 2, 3]
    assert TableRows(table).segments_of(np.zeros(0, dtype=np.int64))[0].tolist() == []


def test_rows_are_numbered_source_by_source():
    table = dataclasses.replace(table_of(n=4), source_ids=np.array([1, 0, 1, 0]), source_weights=(1.0, 1.0))
    assert TableRows(table).counts == (2, 2)
    assert TableRows(table).segments_of(np.arange(4))[0].tolist() == [1, 3, 0, 2]
