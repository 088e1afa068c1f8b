"""What is compared stays together; partners are drawn from the whole set, and are never the row itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Packing
from luthier.errors import UserError
from luthier.packing import PlanSettings, SegmentTable, UnitKind, draw_partners
from luthier.packing.balance import micro_batch_costs
from luthier.packing.epoch import describe, plan_epoch
from tests.conftest import examples

MAX_LENGTH = 60


def table_of(lengths: list[tuple[int, int]], *, sources: int = 1, prompt: int = 3) -> SegmentTable:
    flat = np.array(lengths, dtype=np.int64).reshape(-1)
    rows = np.repeat(np.arange(len(lengths)), 2)
    return SegmentTable(
        lengths=flat,
        num_targets=np.maximum(flat - prompt, 1),
        row_ids=rows,
        source_ids=rows % sources,
        source_weights=tuple(float(n) for n in range(1, sources + 1)),
        prompt_lengths=np.full_like(flat, prompt),
    )


def plan_settings(
    packing: Packing = Packing.BEST_FIT, units: UnitKind = UnitKind.PAIRS, **fields: object
) -> PlanSettings:
    return PlanSettings(packing=packing, capacity=2 * MAX_LENGTH, units=units, **fields)  # type: ignore[arg-type]


def random_table(count: int, seed: int = 0, **fields: int) -> SegmentTable:
    drawn = np.random.default_rng(seed).integers(4, MAX_LENGTH + 1, (count, 2))
    return table_of([tuple(pair) for pair in drawn.tolist()], **fields)


pairs = st.lists(st.tuples(st.integers(4, MAX_LENGTH), st.integers(4, MAX_LENGTH)), min_size=1, max_size=40)


@given(pairs, st.sampled_from([Packing.BEST_FIT, Packing.WINDOW, Packing.NONE]), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(60))
def test_a_rows_segments_share_a_micro_batch_and_a_pack(lengths: list[tuple[int, int]], packing: Packing, rows: int):
    table = table_of(lengths)
    plan = plan_epoch(table, plan_settings(packing, rows_per_micro_batch=rows), epoch=0)
    seen: list[int] = []
    for micro_batch in plan:
        flat = [i for pack in micro_batch.packs for i in pack]
        assert [i % 2 for i in flat] == [0, 1] * (len(flat) // 2)
        assert all(second == first + 1 for first, second in zip(flat[::2], flat[1::2], strict=True))
        if packing is Packing.NONE:
            assert all(len(pack) == 1 for pack in micro_batch.packs) and len(flat) <= 2 * rows
        else:
            assert all(len(pack) % 2 == 0 and table.lengths[list(pack)].sum() <= 120 for pack in micro_batch.packs)
            assert len(micro_batch.packs) <= rows
        seen += flat
    assert sorted(seen) == list(range(len(table.lengths)))


def test_without_units_pairs_come_apart() -> None:
    table = random_table(40)
    apart = plan_epoch(table, replace(plan_settings(), units=UnitKind.NONE), epoch=0)
    assert any(len(pack) % 2 for micro_batch in apart for pack in micro_batch.packs), "what the units are needed for"


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.NONE])
def test_steps_do_not_depend_on_the_number_of_ranks(packing: Packing) -> None:
    table = random_table(50)
    for units in (UnitKind.PAIRS, UnitKind.FEEDBACK_KL):
        plans = [
            plan_epoch(table, plan_settings(packing, units, micro_batches_per_step=4, num_ranks=ranks), epoch=1)
            for ranks in (1, 2, 4)
        ]
        real = [[plan[number] for number in range(len(plan.planned))] for plan in plans]
        assert real[0] == real[1] == real[2]


def test_tokens_per_step_counts_the_tokens_of_whole_units() -> None:
    table = random_table(200)
    for packing in (Packing.BEST_FIT, Packing.NONE):
        plan = plan_epoch(table, plan_settings(packing, tokens_per_step=900, rows_per_micro_batch=4), epoch=0)
        for step in range(plan.num_steps - 1):
            members = [i for n in plan.of_step(step) for pack in plan[n].packs for i in pack]
            tokens = int(table.lengths[members].sum())
            assert 900 <= tokens <= 900 + 4 * 120


def test_sources_come_as_often_as_they_weigh_a_row_at_a_time() -> None:
    table = random_table(30, sources=2)
    ids = np.concatenate([np.array(p) for m in plan_epoch(table, plan_settings(), epoch=0) for p in m.packs])
    times = np.bincount(ids, minlength=60)
    assert times[table.source_ids == 0].tolist() == [1] * 30 and times[table.source_ids == 1].tolist() == [2] * 30


def test_an_order_of_rows_is_kept_to() -> None:
    table = random_table(20)
    plan = plan_epoch(table, plan_settings(), epoch=0, order=np.array([3, 3, 7, 1]))
    assert sorted(plan.planned.segment_ids.tolist()) == sorted([6, 7, 6, 7, 14, 15, 2, 3])


def test_costs_are_those_of_the_segments_not_of_a_long_one() -> None:
    table = table_of([(40, 40), (60, 4), (30, 30), (50, 14)])
    settings_ = plan_settings(linear_cost=0, micro_batches_per_step=4)
    plan = plan_epoch(table, settings_, epoch=0)
    costs = micro_batch_costs(plan.planned, table.lengths[plan.planned.segment_ids], settings_)
    by_hand = [sum(int(table.lengths[i]) ** 2 for pack in micro_batch.packs for i in pack) for micro_batch in plan]
    assert costs.tolist() == by_hand and by_hand == sorted(by_hand), "they ascend within the step"


def test_fill_of_padded_rows_is_counted_by_the_row() -> None:
    table = table_of([(60, 60)] * 4)
    assert describe(plan_epoch(table, plan_settings(Packing.NONE), epoch=0), table).fill == 1.0
    assert describe(plan_epoch(table, plan_settings(), epoch=0), table).fill == 1.0


def test_a_unit_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError):
        plan_epoch(table_of([(61, 60)]), plan_settings(), epoch=0)
    with pytest.raises(AssertionError):
        plan_settings(Packing.SPLIT)


@pytest.mark.parametrize("num_rows", range(2, 51))
def test_no_row_is_its_own_partner_and_every_completion_is_used_once(num_rows: int) -> None:
    for epoch in range(5):
        partners = draw_partners(num_rows, seed=1, epoch=epoch)
        assert (partners != np.arange(num_rows)).all()
        assert sorted(partners.tolist()) == list(range(num_rows))
        assert partners.tolist() == draw_partners(num_rows, seed=1, epoch=epoch).tolist()


def test_partners_change_with_the_epoch_and_the_seed_and_a_single_row_has_none() -> None:
    found = {tuple(draw_partners(50, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert len(found) == 9
    assert len(draw_partners(0, seed=1, epoch=0)) == 0
    with pytest.raises(UserError, match="only one row"):
        draw_partners(1, seed=1, epoch=0)


@pytest.mark.parametrize("packing", [Packing.BEST_FIT, Packing.NONE])
def test_drawn_segments_are_as_long_as_the_prompt_and_the_partners_completion(packing: Packing) -> None:
    own = np.random.default_rng(0).integers(10, MAX_LENGTH + 1, 30)
    prompts = np.random.default_rng(1).integers(2, 10, 30)
    table = replace(table_of([(n, n) for n in own.tolist()]), prompt_lengths=np.repeat(prompts, 2))
    for epoch in (0, 1):
        plan = plan_epoch(table, plan_settings(packing, UnitKind.FEEDBACK_KL), epoch=epoch)
        partners = draw_partners(30, seed=0, epoch=epoch)
        lengths = dict(
            zip(plan.planned.segment_ids.tolist(), plan.planned.lengths(table.lengths).tolist(), strict=True)
        )
        for row in range(30):
            other = partners[row]
            completion = min(own[other] - prompts[other], MAX_LENGTH - prompts[row])
            assert lengths[2 * row] == own[row] and lengths[2 * row + 1] == prompts[row] + completion
        assert max(lengths.values()) <= MAX_LENGTH
