"""Which rows of several sources an epoch sees, and in which order."""

import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import MixtureBy, MixtureStop, Packing
from luthier.errors import UserError
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import plan_epoch, realised_mixture, shares_of, source_counts
from luthier.packing.order import LISTED, KeyedPermutation, MixtureSettings, RowOrder


def mixture(*weights, by=MixtureBy.ROWS, **changes):
    return MixtureSettings(weights=weights, by=by, **changes)


def order_of(sizes, mixed, *, seed=0, epoch=0, **more):
    order = RowOrder(counts=tuple(sizes), mixture=mixed, seed=seed, **more).epoch(epoch)
    return order.rows(0, len(order))


def sources_of(order, sizes):
    return np.searchsorted(np.cumsum(sizes), order, side="right")


def test_by_epochs_a_weight_is_how_often_each_row_is_seen():
    for seed in range(8):
        counts = Counter(order_of([100, 100, 100], mixture(1, 2.5, 0.25, by=MixtureBy.EPOCHS), seed=seed).tolist())
        times = [Counter(counts[row] for row in range(first, first + 100)) for first in (0, 100, 200)]
        assert times == [{1: 100}, {2: 50, 3: 50}, {0: 75, 1: 25}]


def test_by_epochs_the_order_is_one_full_shuffle():
    order = order_of([500, 500], mixture(1, 1, by=MixtureBy.EPOCHS))
    assert sorted(order.tolist()) == list(range(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


@pytest.mark.parametrize("by", list(MixtureBy))
def test_the_same_seed_and_epoch_give_the_same_order_and_others_do_not(by):
    def order(seed=0, epoch=0):
        return order_of([50, 70], mixture(1, 1.5, by=by), seed=seed, epoch=epoch, tokens_per_row=[10, 20]).tolist()

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 20), min_size=5, max_size=5),
    stop=st.sampled_from(MixtureStop),
)
@settings(deadline=None)
def test_every_beginning_of_the_order_has_the_shares_to_a_few_rows(sizes, weights, stop):
    shares = np.array(weights[: len(sizes)]) / sum(weights[: len(sizes)])
    sources = sources_of(order_of(sizes, mixture(*weights[: len(sizes)], stop=stop)), sizes)
    for source, share in enumerate(shares):
        seen = np.cumsum(sources == source)
        assert np.abs(seen - share * np.arange(1, len(sources) + 1)).max() <= 1 + len(sizes)


def test_first_ends_with_the_first_source_that_was_seen_whole():
    order = order_of([100, 30, 500], mixture(1, 1, 2, stop=MixtureStop.FIRST))
    sources = sources_of(order, [100, 30, 500])
    assert Counter(sources.tolist())[1] == 30
    assert sources[-1] == 1
    assert max(Counter(order.tolist()).values()) == 1


def test_all_ends_when_every_source_was_seen_whole_and_small_ones_are_repeated_in_other_orders():
    sizes = [100, 30, 500]
    order = order_of(sizes, mixture(1, 1, 2, stop=MixtureStop.ALL))
    counts = Counter(order.tolist())
    assert min(counts[row] for row in range(630)) == 1 and {counts[row] for row in range(130, 630)} == {1}
    assert {counts[row] for row in range(100, 130)} == {8, 9}
    small = [row for row in order.tolist() if 100 <= row < 130]
    passes = [small[i : i + 30] for i in range(0, 240, 30)]
    assert all(sorted(each) == list(range(100, 130)) for each in passes)
    assert len({tuple(each) for each in passes}) == 8


def test_later_epochs_go_on_in_the_shuffle_where_the_last_one_stopped():
    mixed = mixture(1, 1, stop=MixtureStop.FIRST)
    rows = [row for epoch in range(10) for row in order_of([10, 100], mixed, epoch=epoch).tolist() if row >= 10]
    assert len(rows) in (90, 100, 110)
    assert len(set(rows[:100])) == min(100, len(rows))  # none twice before all were seen once


def test_temperature_flattens_the_sizes():
    sizes = [10_000, 100]
    for temperature, share in ((1, 1 / 101), (2, 1 / 11), (1e9, 0.5)):
        order = order_of(sizes, mixture(1, 1, temperature=temperature, stop=MixtureStop.FIRST))
        assert np.mean(sources_of(order, sizes) == 1) == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize(("temperature", "share"), [(None, 0.75), (1, 3 / (3 + 9)), (2, 3 / (3 + 3))])
def test_shares_of_tokens_count_what_a_row_holds(temperature, share):
    sizes, means = [3000, 3000], np.array([100.0, 900.0])
    mixed = mixture(3, 1, by=MixtureBy.TOKENS, temperature=temperature)
    tokens = np.bincount(sources_of(order_of(sizes, mixed, tokens_per_row=means), sizes)) * means
    assert tokens[0] / tokens.sum() == pytest.approx(share, abs=0.001)


def test_a_source_without_rows_or_tokens_can_have_no_share():
    with pytest.raises(UserError, match="source 1 has 0 rows"):
        order_of([10, 0], mixture(1, 1))
    with pytest.raises(UserError, match="source 1 has 10 rows of 0 tokens"):
        order_of([10, 10], mixture(1, 1, by=MixtureBy.TOKENS), tokens_per_row=[5, 0])
    assert len(order_of([10, 0], mixture(1, 1, by=MixtureBy.EPOCHS))) == 10


def test_an_epoch_that_would_never_end_is_refused():
    with pytest.raises(UserError, match=r"(?s)source 1 \(1,000 rows, .*stop: first"):
        order_of([1000, 1000], mixture(1e7, 1))
    assert len(order_of([1000, 1000], mixture(1e7, 1, stop=MixtureStop.FIRST))) in (1000, 1001)


def test_a_million_rows_are_ordered_in_three_tenths_of_a_second():
    for by in MixtureBy:
        mixed = mixture(1, 1.5, 2, by=by, stop=MixtureStop.FIRST)
        seconds = []
        for _ in range(3):
            start = time.process_time()
            order = order_of([800_000, 800_000, 400_000], mixed, tokens_per_row=[1, 1, 1])
            seconds.append(time.process_time() - start)
        assert min(seconds) / len(order) * 1e6 <= 0.3


def test_the_realised_mixture_counts_what_a_plan_takes():
    rows = np.repeat(np.arange(200), 2)  # two segments to a row
    lengths = np.where(rows < 100, 10, 30)
    table = SegmentTable(
        lengths=lengths, num_targets=lengths // 2, row_ids=rows, source_ids=rows // 100, source_weights=(1.0, 0.5)
    )
    settings_ = PlanSettings(packing=Packing.WINDOW, capacity=64)
    one, two = realised_mixture(plan_epoch(table, settings_, epoch=0), table)
    assert (one.rows, one.segments, one.tokens, one.targets) == (100, 200, 2000, 1000)
    assert (two.rows, two.segments, two.tokens, two.targets) == (50, 100, 3000, 1500)
    assert (one.share_of_rows, one.share_of_tokens) == pytest.approx((2 / 3, 0.4))


def test_the_realised_mixture_of_split_documents_counts_each_once():
    table = SegmentTable.of_lengths(np.full(50, 100))
    plan = plan_epoch(table, PlanSettings(packing=Packing.SPLIT, capacity=64), epoch=0)
    (one,) = realised_mixture(plan, table)
    assert (one.rows, one.tokens) == (50, 5000)
    assert one.targets == 5000 - one.segments


def test_the_steps_of_a_plan_take_what_the_plan_takes():
    rows = np.arange(200)
    lengths = 5 + rows * 37 % 40
    table = SegmentTable(
        lengths=lengths, num_targets=lengths - 1, row_ids=rows, source_ids=rows % 3, source_weights=(1.0, 1.0, 1.5)
    )
    for packing in Packing:
        plan = plan_epoch(table, PlanSettings(packing=packing, capacity=64, micro_batches_per_step=4), epoch=0)
        counts = [source_counts(plan, table, num_steps=steps) for steps in range(plan.num_steps + 1)]
        assert not counts[0].any()
        assert (np.diff(counts, axis=0) >= 0).all() and (np.diff(counts, axis=0).sum(axis=1)[:, 2] > 0).all()
        assert shares_of(counts[-1]) == realised_mixture(plan, table)


@pytest.mark.parametrize("by", [MixtureBy.EPOCHS, MixtureBy.ROWS])
def test_weights_that_make_an_epoch_of_far_more_rows_than_there_are_are_refused_at_once(by: MixtureBy) -> None:
    weights = (1.0, 1e9) if by is MixtureBy.EPOCHS else (1e-9, 1.0)
    with pytest.raises(UserError, match=r"an epoch would have [\d,]+ rows, and there are 200") as raised:
        order_of([100, 100], MixtureSettings(weights=weights, by=by), seed=1)
    assert raised.value.hint
    assert len(order_of([100, 100], MixtureSettings(weights=(1.0, 50.0), by=by), seed=1)) > 5000


def test_a_plan_of_segments_refuses_such_weights_too() -> None:
    table = SegmentTable(
        lengths=np.full(10, 8), num_targets=np.full(10, 4), row_ids=np.arange(10), source_ids=np.zeros(10, np.int64),
        source_weights=(1e9,),
    )  # fmt: skip
    with pytest.raises(UserError, match="an epoch would have"):
        plan_epoch(table, PlanSettings(packing=Packing.WINDOW, capacity=64), epoch=0)


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.3, 4), min_size=4, max_size=4),
    by=st.sampled_from(MixtureBy),
    held=st.integers(0, 20),
    block=st.integers(1, 50),
)
@settings(deadline=None)
def test_any_stretch_of_an_order_is_that_part_of_the_whole(sizes, weights, by, held, block):
    """It is computed from the places alone, so that nobody has to keep the order."""
    total = sum(sizes)
    held_out = np.unique(np.random.default_rng(held).integers(0, total, held))
    left = np.diff([0, *np.cumsum(sizes)] - np.searchsorted(held_out, [0, *np.cumsum(sizes)]))
    if not left.all():
        return
    mixed = mixture(*weights[: len(sizes)], by=by)
    order = RowOrder(
        counts=tuple(sizes), mixture=mixed, seed=1, held_out=held_out, tokens_per_row=tuple(range(1, len(sizes) + 1))
    ).epoch(2)
    whole = order.rows(0, len(order))
    assert not np.isin(whole, held_out).any() and (len(whole) == 0 or whole.max() < total)
    parts = [order.rows(start, start + block) for start in range(0, len(order) + block, block)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 100, LISTED, LISTED + 1, 100_003])
def test_a_keyed_permutation_has_each_number_once_and_looks_like_a_shuffle(size):
    found = KeyedPermutation(size, 1, 2)[np.arange(size)]
    assert np.array_equal(np.sort(found), np.arange(size))
    if size < 1000:
        return
    others = [np.arange(size), np.roll(found, 1), np.roll(found, 64), KeyedPermutation(size, 1, 3)[np.arange(size)]]
    assert all(abs(np.corrcoef(found, other)[0, 1]) < 0.02 for other in others)
    steps = np.bincount((np.diff(found) % size) * 50 // size, minlength=50)
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() < 2 * 50, "a row tells nothing about the next one"


def test_an_order_needs_no_memory_that_grows_with_its_rows():
    tracemalloc.start()
    try:
        order = RowOrder(counts=(10**9, 10**9), mixture=mixture(1, 1, by=MixtureBy.EPOCHS), seed=0)
        rows = order.epoch(3).rows(10**8, 10**8 + 100)
        assert len(set(rows.tolist())) == 100
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
