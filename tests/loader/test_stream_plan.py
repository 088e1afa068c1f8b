"""Steps over rows that are still arriving: the same whenever they arrive, all of them, each once an epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luthier.collation import CollateSettings
from luthier.config.choices import Overflow, Packing
from luthier.errors import BudgetError, RowError
from luthier.ledger import Ledger
from luthier.loader.numbered_rows import ArrivalSettings, ArrivingRows
from luthier.loader.plan import StreamPlan
from luthier.loader.reader import BatchReader
from luthier.loader.stream_state import LoaderState, RowTrail
from luthier.packing import PlanSettings
from luthier.packing.order import MixtureSettings, RowOrder
from luthier.packing.packer import WindowPacker
from luthier.preparation import SourceInfo
from luthier.preparation.resolver import LostRow, ResolvedPortion
from luthier.records import Address, Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample

Ints = NDArray[np.int64]

CAPACITY, NUM_ROWS, NUM_SOURCES = 64, 900, 3
FINGERPRINT = "f" * 64


def key_of(row: int) -> bytes:
    return row.to_bytes(32, "little")


def length_of(row: int) -> int:
    return 3 + row * 7919 % 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    folder: Path = tmp_path_factory.mktemp("store")
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for row in range(NUM_ROWS):
        ids = np.full(length_of(row), row, dtype=np.int32)
        sample = Sample(
            input_ids=ids,
            target=np.arange(len(ids)) > 0,
            branches=(Branch(parent=-1, length=len(ids)),),
            address=Address(file="f", row=row + 1),
        )
        writer.add(key_of(row), freeze_sample(sample))
    writer.commit()
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def portion_of(rows: Ints, store: SampleStore, *, first: bool, lost: frozenset[int] = frozenset()) -> ResolvedPortion:
    ledger, gone = Ledger(), []
    ids = []
    for place, row in enumerate(rows.tolist()):
        known = store.index_of(key_of(row))
        assert known is not None
        if row in lost:
            error = RowError("bad", address=Address(file="f", row=row + 1))
            ledger.lose(error)
            gone.append(LostRow(place=place, error=error, raw=b""))
            ids.append(-1)
        else:
            ledger.keep()
            ids.append(known)
    return ResolvedPortion(
        rows=rows,
        sample_ids=np.array(ids, dtype=np.int64),
        keys=np.frombuffer(b"".join(map(key_of, rows.tolist())), np.uint8).reshape(-1, 32),
        source_ids=rows % NUM_SOURCES,
        file_ids=np.zeros(len(rows), dtype=np.int64),
        row_numbers=rows + 1,
        new_files=("f",) if first else (),
        ledger=ledger,
        lost=tuple(gone),
    )


def portions(order: Ints, sizes: list[int], store: SampleStore, lost: frozenset[int]) -> Iterator[ResolvedPortion]:
    start = 0
    for size in [*sizes, len(order)]:
        rows = order[start : start + size]
        if len(rows):
            yield portion_of(rows, store, first=start == 0, lost=lost)
        start += size


def plan_of(
    store: SampleStore,
    *,
    sizes: list[int] | None = None,
    num_rows: int = NUM_ROWS,
    num_epochs: float = 2.0,
    max_steps: int | None = None,
    lost: frozenset[int] = frozenset(),
    max_drop: float = 0.5,
    held_out: Ints | None = None,
    ranks: int = 1,
    weight: float = 1.0,
    shared: bool = False,
    state: LoaderState | None = None,
    arrive_anyhow: bool = False,
    packing: Packing = Packing.WINDOW,
) -> StreamPlan:
    settings = ArrivalSettings(
        counts=(num_rows,),
        sources=tuple(SourceInfo(name=f"s{source}", weight=weight) for source in range(NUM_SOURCES)),
        max_length=CAPACITY,
        overflow=Overflow.DROP,
        max_drop=max_drop,
    )
    mixture = MixtureSettings(weights=(weight,))
    order = RowOrder(counts=(num_rows,), mixture=mixture, seed=3)
    first = order.epoch(0).rows(0, 2**20)
    arriving = np.random.Generator(np.random.PCG64(1)).permutation(num_rows) if arrive_anyhow or weight != 1 else first
    rows = ArrivingRows(portions(arriving, sizes or [num_rows], store, lost), store, settings, held_out=held_out)
    plan = PlanSettings(
        packing=packing,
        capacity=CAPACITY,
        micro_batches_per_step=4,
        num_ranks=ranks,
        seed=3,
        window=256,
        shared=shared,
    )
    return StreamPlan(rows, plan, order, num_epochs=num_epochs, max_steps=max_steps, state=state)


def rows_of(plan: StreamPlan, step: int) -> list[list[list[int]]]:
    found = plan.step(step)
    assert found is not None
    return [[plan.rows.places(pack)["row"].tolist() for pack in packs] for packs in found.micro_batches]


def flat(step: list[list[list[int]]]) -> list[int]:
    return [row for packs in step for pack in packs for row in pack]


def all_rows(plan: StreamPlan) -> list[list[list[list[int]]]]:
    found, step = [], 0
    while plan.step(step) is not None:
        found.append(rows_of(plan, step))
        step += 1
    return found


def test_the_plan_does_not_depend_on_how_rows_arrive(store: SampleStore) -> None:
    whole = all_rows(plan_of(store))
    assert all_rows(plan_of(store, sizes=[1, 2, 3, 50, 70, 500])) == whole
    assert all_rows(plan_of(store, sizes=[10] * 89)) == whole
    assert len(whole) > 100


def test_each_row_comes_once_an_epoch_and_epochs_differ(store: SampleStore) -> None:
    plan = plan_of(store)
    steps = [plan.step(number) for number in range(60)]
    assert steps[0] is not None and steps[0].epoch == 0
    epochs: dict[int, list[int]] = {0: [], 1: []}
    plan = plan_of(store)
    number = 0
    while (step := plan.step(number)) is not None:
        epochs[step.epoch] += [row for packs in rows_of(plan, number) for pack in packs for row in pack]
        number += 1
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, NUM_ROWS + 1))
    assert epochs[0] != epochs[1]


def test_a_row_of_weight_two_comes_twice_and_rows_arrive_in_another_order(store: SampleStore) -> None:
    plan = plan_of(store, num_epochs=1, weight=2.0, sizes=[100, 300])
    rows = [row for step in all_rows(plan) for packs in step for pack in packs for row in pack]
    assert sorted(rows) == sorted([*range(1, NUM_ROWS + 1)] * 2)


def test_ranks_share_the_same_steps(store: SampleStore) -> None:
    alone, two = plan_of(store), plan_of(store, ranks=2)
    assert all_rows(alone) == all_rows(two)
    plan = plan_of(store, ranks=2)
    first = [planned.places["row"].tolist() for planned in list(plan.micro_batches(0))]
    second = [planned.places["row"].tolist() for planned in list(plan_of(store, ranks=2).micro_batches(1))]
    together = [rows for pair in zip(first, second, strict=True) for rows in pair if rows]
    alone = plan_of(store)
    assert together == [planned.places["row"].tolist() for planned in alone.micro_batches(0) if not planned.is_blank]


def test_a_stream_that_begins_at_a_step_is_the_rest_of_the_whole(store: SampleStore) -> None:
    whole = [planned.places["row"].tolist() for planned in plan_of(store).micro_batches(0)]
    rest = [planned.places["row"].tolist() for planned in plan_of(store).micro_batches(0, first_step=37)]
    assert whole[37 * 4 :] == rest
    there, here = plan_of(store).step(36), plan_of(store, sizes=[5]).step(36)
    assert there is not None and here is not None
    assert there.epoch == here.epoch and there.rows_used == here.rows_used
    assert plan_of(store).state_after(37) == plan_of(store, sizes=[5]).state_after(37)


def test_other_rows_leave_another_trail(store: SampleStore) -> None:
    def trail(plan: StreamPlan) -> RowTrail:
        return plan.state_after(50)[3]

    assert trail(plan_of(store)).parts_from(trail(plan_of(store))) is None
    changed = plan_of(store)
    keys, late = changed.rows.keys, {row for step in range(40, 50) for row in flat(rows_of(plan_of(store), step))}

    def other(segments: Ints) -> NDArray[np.uint64]:
        return keys(segments) + np.isin(changed.rows.places(segments)["row"], list(late)).astype(np.uint64)

    changed.rows.keys = other  # type: ignore[method-assign]
    parting = trail(plan_of(store)).parts_from(trail(changed))
    assert parting is not None and 32 <= parting[0] < parting[1] <= 50


def test_progress_rises_to_one_and_the_horizon_is_near(store: SampleStore) -> None:
    plan = plan_of(store, lost=frozenset(range(90)))
    assert not plan.is_exact
    progress = [plan.progress(0)]
    step = 0
    while plan.step(step) is not None:
        progress.append(plan.progress(step + 1))
        step += 1
    assert progress == sorted(progress) and progress[0] == 0 and progress[-1] == pytest.approx(1.0)
    assert abs(plan.horizon - step) / step < 0.1
    assert plan.total_steps == step
    assert plan.epoch_after(step) == 2.0 and plan.ends_epoch(step)


def test_steps_end_where_epochs_end(store: SampleStore) -> None:
    plan = plan_of(store)
    ends = []
    step = 0
    while (found := plan.step(step)) is not None:
        if found.ends_epoch:
            ends.append((found.epoch, step))
        assert plan.is_over(step + 1) == (plan.step(step + 1) is None)
        step += 1
    assert [epoch for epoch, _ in ends] == [0, 1] and ends[-1][1] == step - 1


def test_max_steps_is_exact_and_goes_over_epochs(store: SampleStore) -> None:
    plan = plan_of(store, max_steps=250)
    assert plan.is_exact and plan.horizon == 250 and len(all_rows(plan)) == 250
    assert plan_of(store, max_steps=2).progress(1) == 0.5


def test_half_an_epoch_is_half_of_the_rows(store: SampleStore) -> None:
    plan = plan_of(store, num_epochs=0.5)
    rows = sum(len(pack) for step in all_rows(plan) for packs in step for pack in packs)
    assert NUM_ROWS / 2 <= rows < NUM_ROWS / 2 + 60


def test_a_part_of_an_epoch_ends_with_the_step_that_uses_up_its_rows(store: SampleStore) -> None:
    whole = plan_of(store, num_epochs=1)
    for number in range(1, 7):  # steps of the first three windows, the last ones among them
        end = whole.epoch_after(number) - 0.5 / NUM_ROWS
        assert len(all_rows(plan_of(store, num_epochs=end))) == number


def test_few_rows_are_planned_exactly(store: SampleStore) -> None:
    plan = plan_of(store, num_rows=100, num_epochs=1)
    assert plan.is_exact and plan.horizon == len(all_rows(plan))


def test_several_epochs_of_few_rows_have_a_horizon(store: SampleStore) -> None:
    plan = plan_of(store, num_rows=100, num_epochs=3)
    assert plan.horizon == pytest.approx(len(all_rows(plan)), abs=2)


def test_after_each_step_it_is_known_what_every_source_gave(store: SampleStore) -> None:
    lost = frozenset(range(0, 300, 7))
    plan = plan_of(store, weight=2.0, sizes=[70, 400], lost=lost, num_epochs=1.5)
    counts = np.zeros((NUM_SOURCES, 4), dtype=np.int64)
    assert plan.source_counts(0).tolist() == counts.tolist()
    step = 0
    while plan.step(step) is not None:
        before = counts.copy()
        for row in (row - 1 for packs in rows_of(plan, step) for pack in packs for row in pack):
            counts[row % NUM_SOURCES] += (1, 1, length_of(row), length_of(row) - 1)
        step += 1
        assert plan.source_counts(step).tolist() == counts.tolist()
        assert plan.source_counts(step - 1).tolist() == before.tolist(), "an earlier step keeps its own"
        assert plan.num_tokens(step - 1) == (counts - before)[:, 2].sum()
    assert counts[:, 0].min() > 0 and counts[0].tolist() != counts[1].tolist()


def test_micro_batches_say_which_source_each_segment_is_of(store: SampleStore) -> None:
    found = [planned for planned in plan_of(store).micro_batches(0) if not planned.is_blank]
    assert all((p.places["source"] == (p.places["row"] - 1) % NUM_SOURCES).all() for p in found)
    assert found[0].sources() == tuple(found[0].places["source"].tolist())
    assert {source for planned in found for source in planned.sources()} == set(range(NUM_SOURCES))


def test_rows_that_are_evaluated_on_are_left_out(store: SampleStore) -> None:
    held = np.array([store.index_of(key_of(row)) for row in (5, 6)])
    plan = plan_of(store, num_epochs=1, held_out=held)
    rows = {row for step in all_rows(plan) for packs in step for pack in packs for row in pack}
    assert {6, 7}.isdisjoint(rows) and len(rows) == NUM_ROWS - 2
    ledger = plan.rows.ledger
    assert ledger is not None
    assert ledger.dropped == {"same_as_held_out": 2}
    assert ledger.read == NUM_ROWS == ledger.prepared + ledger.lost


def test_too_many_lost_rows_stop_the_run_on_the_way(store: SampleStore) -> None:
    plan = plan_of(store, sizes=[10] * 89, lost=frozenset(range(0, 900, 5)), max_drop=0.1)
    with pytest.raises(BudgetError, match="bad"):
        all_rows(plan)
    assert plan.rows.ledger is not None and plan.rows.ledger.read < 700


def test_a_state_is_small(store: SampleStore) -> None:
    _, _, waiting, _ = plan_of(store).state_after(100)
    assert waiting["steps"] > 50 and len(json.dumps(waiting)) < 2000


@pytest.mark.parametrize("weight", [1.0, 1.5])
@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_goes_on_plans_nothing_of_what_came_before(
    trees: SampleStore, weight: float, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte the rest of the run, of rows that arrive in another order; what came before is not looked at."""
    how: dict[str, Any] = {"weight": weight, "shared": shared, "lost": frozenset(range(0, 300, 7)), "num_epochs": 2.5}
    whole = plan_of(trees, **how)
    total = len(all_rows(plan_of(trees, **how)))
    jumped, taken, push = 0, list[int](), WindowPacker.push

    def counted(self: WindowPacker, ids: Ints, *columns: Any) -> None:
        taken.append(len(ids))
        push(self, ids, *columns)

    monkeypatch.setattr(WindowPacker, "push", counted)
    for done in range(1, total, 23):
        epoch, cursor, waiting, trail = whole.state_after(done)
        state = LoaderState(
            seed=3, epoch=epoch, step=done, cursor=cursor, waiting=waiting, trail=trail, settings={}, data="x"
        )
        later = plan_of(
            trees, **how, sizes=[100, 300], arrive_anyhow=True, state=LoaderState.from_json(state.to_json())
        )
        taken.clear()
        assert later.state_after(done) == (epoch, cursor, waiting, trail)
        jumped += waiting["place"] is not None and waiting["place"]["position"] > 0
        assert sum(taken) < 1700, "of 3,000 segments and more in an epoch"
        assert (later.horizon, later.is_exact, later.has_trees) == (whole.horizon, whole.is_exact, whole.has_trees)
        for step in range(done, min(done + 40, total)):
            assert rows_of(later, step) == rows_of(whole, step)
            one, other = later.step(step), whole.step(step)
            assert one is not None and other is not None
            assert (one.tokens, one.rows_used, one.ends_epoch) == (other.tokens, other.rows_used, other.ends_epoch)
            assert one.taken.tolist() == other.taken.tolist()
            assert (later.progress(step + 1), later.epoch_after(step + 1)) == (
                whole.progress(step + 1), whole.epoch_after(step + 1)
            )  # fmt: skip
        assert later.state_after(step + 1) == whole.state_after(step + 1)
        assert trained(later, step + 1) == trained(whole, step + 1)
    assert jumped > 3


@pytest.mark.parametrize("packing", [Packing.WINDOW, Packing.SPLIT])
@pytest.mark.parametrize("weight", [1.0, 0.4, 1.5])
def test_the_rows_of_finished_steps_are_those_that_their_segments_are_of(
    trees: SampleStore, weight: float, packing: Packing
) -> None:
    plan = plan_of(trees, weight=weight, lost=frozenset(range(0, 300, 7)), packing=packing)
    seen: set[int] = set()
    step = 0
    while plan.step(step) is not None:
        seen |= {row for packs in rows_of(plan, step) for pack in packs for row in pack}
        step += 1
        if step % 11 == 0:
            assert trained(plan, step) == sorted(seen)
    assert trained(plan, step) == sorted(seen)


def trained(plan: StreamPlan, steps: int) -> list[int]:
    return sorted(plan.rows.places(plan.trained_rows(steps))["row"].tolist())


# ---------------------------------------------------------------------------------------------------------- trees


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    """Every third row is one sequence, the others go on in two to six ways, some of them off another."""
    folder: Path = tmp_path_factory.mktemp("trees")
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for row in range(NUM_ROWS):
        rng = np.random.default_rng(row)
        branches = [Branch(parent=-1, length=int(rng.integers(4, 12)))]
        trunk = 0
        for _ in range(row % 3 * 2):
            branches.append(Branch(parent=trunk, length=int(rng.integers(2, 9))))
            branches.append(Branch(parent=trunk, length=int(rng.integers(2, 9))))
            trunk = len(branches) - 1
        total = sum(branch.length for branch in branches)
        sample = Sample(
            input_ids=rng.integers(0, 2**20, total).astype(np.int32),
            target=np.arange(total) % 2 == 1,
            branches=tuple(branches),
        )
        writer.add(key_of(row), freeze_sample(sample))
    writer.commit()
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def places_of_steps(plan: StreamPlan) -> list[NDArray[Any]]:
    """Those of every pack, in order."""
    found, step = [], 0
    while (planned := plan.step(step)) is not None:
        found += [plan.rows.places(pack) for packs in planned.micro_batches for pack in packs]
        step += 1
    return found


def test_trees_are_planned_whole_with_each_token_counted_once(trees: SampleStore) -> None:
    plan = plan_of(trees, num_epochs=1, shared=True)
    assert plan.has_trees
    packs = places_of_steps(plan)
    for pack in packs:
        assert pack["held"][0] == 0, "a tree is in one row"
        assert int((pack["stop"] - pack["held"]).sum()) <= CAPACITY
    unrolled = plan_of(trees, num_epochs=1)
    alone = places_of_steps(unrolled)
    one, other = (sorted((p["row"], p["leaf"]) for pack in each for p in pack) for each in (packs, alone))
    assert one == other and len(one) == len(set(one)) > NUM_ROWS
    assert len(packs) < 0.8 * len(alone)
    tokens = sum(int((pack["stop"] - pack["held"]).sum()) for pack in packs)
    steps = [plan.step(number) for number in range(plan.num_planned - 60, plan.num_planned)]
    assert steps[-1] is not None and int(steps[-1].taken[:, 2].sum()) == tokens


def test_trees_are_planned_the_same_however_they_arrive_and_on_any_number_of_ranks(trees: SampleStore) -> None:
    whole = all_rows(plan_of(trees, shared=True))
    assert all_rows(plan_of(trees, shared=True, sizes=[1, 2, 3, 50, 70, 500])) == whole
    assert all_rows(plan_of(trees, shared=True, ranks=2)) == whole


def test_arriving_trees_are_read_as_trees(trees: SampleStore) -> None:
    plan = plan_of(trees, num_epochs=1, shared=True)
    how = CollateSettings(packed=True, pad_token_id=0)
    for planned, _ in zip(plan.micro_batches(0), range(20), strict=False):
        shared = BatchReader(trees, how, shared=True).read(planned)
        unrolled = BatchReader(trees, how).read(planned)
        assert shared.num_targets == unrolled.num_targets and shared.addresses == unrolled.addresses
        assert shared.targets.ids_K.tolist() == unrolled.targets.ids_K.tolist()
        assert shared.targets.segments_K.tolist() == unrolled.targets.segments_K.tolist()
