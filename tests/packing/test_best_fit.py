import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.errors import UserError
from luthier.kernels import fill_packs
from luthier.packing import balance as best_fit
from luthier.packing.packer import plan_packs


def naive_best_fit(lengths, capacity):
    """The textbook's loop: sort, then search all packs for the one with the least room that is enough."""
    packs, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [p for p, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda p: rooms[p])
        else:
            best = len(packs)
            packs.append([])
            rooms.append(capacity)
        packs[best].append(index)
        rooms[best] -= lengths[index]
    return packs


some_lengths = st.integers(1, 300).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=80))
)


def test_the_example_of_the_docstring():
    assert [pack.tolist() for pack in plan_packs([700, 300, 900], capacity=1024)] == [[2], [0, 1]]


def test_nothing_gives_no_packs():
    assert plan_packs([], capacity=8) == []


@given(some_lengths)
def test_every_index_is_in_exactly_one_pack_and_no_pack_is_over_capacity(case):
    capacity, lengths = case
    packs = plan_packs(lengths, capacity)
    assert sorted(np.concatenate([*packs, np.zeros(0, np.int64)]).tolist()) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= capacity for pack in packs)


@given(some_lengths)
def test_as_many_packs_as_the_naive_best_fit_with_the_same_room_left(case):
    capacity, lengths = case
    mine = sorted(sum(lengths[i] for i in pack) for pack in plan_packs(lengths, capacity))
    assert mine == sorted(sum(lengths[i] for i in pack) for pack in naive_best_fit(lengths, capacity))


def test_the_compiled_kernel_and_the_plain_loop_give_the_same_packs():
    rng = np.random.default_rng(0)
    for capacity in (1, 63, 64, 65, 4096, 70_000):
        sizes = np.sort(rng.integers(1, capacity + 1, 3000))[::-1].copy()
        compiled, num_compiled = fill_packs(sizes, capacity)
        plain, num_plain = best_fit._fill_packs(sizes, capacity)
        assert num_compiled == num_plain
        assert (compiled == plain).all()


def test_large_inputs_take_the_kernel_and_pack_tightly():
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6.6, 1.0, 100_000), 8, 4096).astype(np.int64)
    assert best_fit._compiled() is fill_packs  # it is loaded by now, so packing 100,000 uses it
    packs = plan_packs(lengths, 4096)
    assert lengths.sum() / (len(packs) * 4096) >= 0.9998


def test_without_a_place_for_compiled_code_the_plain_loop_is_used(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "luthier.kernels", None)  # import fails
    assert best_fit._compiled() is best_fit._fill_packs


@pytest.mark.parametrize("wrong", [9, 0, -1])
def test_a_length_that_cannot_be_placed_is_named(wrong):
    with pytest.raises(UserError) as caught:
        plan_packs([3, wrong, 8], capacity=8)
    assert f"number 1 has {wrong}" in str(caught.value)
    assert "8 tokens" in str(caught.value)


@pytest.mark.parametrize("wrong", [[3, 1.5], [float("nan")], [True, False]])
def test_lengths_that_are_no_whole_numbers_are_refused(wrong):
    with pytest.raises(UserError):
        plan_packs(wrong, capacity=8)
