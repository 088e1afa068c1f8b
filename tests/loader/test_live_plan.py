"""Steps over rows that are still arriving: the same whenever they arrive, all of them, each once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luthier.collation import CollateSettings
from luthier.config.schema import Overflow, Packing
from luthier.errors import BudgetError, RowError
from luthier.ledger import Ledger
from luthier.loader.live_plan import StreamPlan
from luthier.loader.live_rows import LiveRows, LiveSettings
from luthier.loader.reader import BatchReader
from luthier.loader.run_order import RunOrder
from luthier.packing import PlanSettings
from luthier.packing.mixture import MixtureSettings
from luthier.preparation.portions import LostRow, ResolvedPortion
from luthier.preparation.prepared import SourceInfo
from luthier.records import Address, Branch, Sample
from luthier.store.shard import freeze_sample
from luthier.store.store import SampleStore, StoreWriter

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
) -> StreamPlan:
    settings = LiveSettings(
        num_rows=num_rows,
        sources=tuple(SourceInfo(name=f"s{source}", weight=weight) for source in range(NUM_SOURCES)),
        max_length=CAPACITY,
        overflow=Overflow.DROP,
        max_drop=max_drop,
    )
    mixture = MixtureSettings(weights=(weight,))
    order = RunOrder.of_sources([num_rows], mixture, seed=3, held_out=np.zeros(0, np.int64))
    arriving = np.random.Generator(np.random.PCG64(1)).permutation(num_rows) if weight != 1 else order(0)
    rows = LiveRows(portions(arriving, sizes or [num_rows], store, lost), store, settings, held_out=held_out)
    plan = PlanSettings(
        packing=Packing.WINDOW,
        capacity=CAPACITY,
        micro_batches_per_step=4,
        num_ranks=ranks,
        seed=3,
        window=256,
        shared=shared,
    )
    return StreamPlan(rows, plan, order, num_epochs=num_epochs, max_steps=max_steps)


def rows_of(plan: StreamPlan, step: int) -> list[list[list[int]]]:
    found = plan.step(step)
    assert found is not None
    return [[plan.rows.segments.places(pack)["row"].tolist() for pack in packs] for packs in found.micro_batches]


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
    assert (there.cursor, there.trail, there.waiting) == (here.cursor, here.trail, here.waiting)


def test_other_rows_leave_another_trail(store: SampleStore) -> None:
    there, here = plan_of(store).step(150), plan_of(store).step(150)
    changed = plan_of(store)
    for step in range(100):
        changed.step(step)
    changed.rows.segments._table.records["key"][-200:] = 7
    parted = changed.step(150)
    assert there is not None and here is not None and parted is not None
    assert there.trail.parts_from(here.trail) is None
    assert there.trail.parts_from(parted.trail) is not None


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
        assert plan.is_last(step) == (plan.step(step + 1) is None)
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
    assert ledger.dropped == {"same_as_held_out": 2}
    assert ledger.read == NUM_ROWS == ledger.prepared + ledger.lost


def test_too_many_lost_rows_stop_the_run_on_the_way(store: SampleStore) -> None:
    plan = plan_of(store, sizes=[10] * 89, lost=frozenset(range(0, 900, 5)), max_drop=0.1)
    with pytest.raises(BudgetError, match="bad"):
        all_rows(plan)
    assert plan.rows.ledger.read < 700


def test_a_state_is_small(store: SampleStore) -> None:
    step = plan_of(store).step(100)
    assert step is not None and len(str(step.waiting)) < 2000


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
        found += [plan.rows.segments.places(pack) for packs in planned.micro_batches for pack in packs]
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
