"""Batches read ahead by worker processes: the same as without, in order, and no further ahead than asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_rows import PACKED, add_samples, plan_rows, reader_of

from luthier.collation import CollateSettings
from luthier.errors import LoaderError, StoreError
from luthier.loader.prefetch import iterate
from luthier.loader.reader import PLACE, BatchReader, PlannedMicroBatch
from luthier.records import Batch
from luthier.store import SampleStore
from tests.conftest import HANG_SECONDS, children

BLANK = PlannedMicroBatch(step=99, places=np.zeros(0, PLACE), pack_bounds=[0], files={})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return add_samples(tmp_path_factory.mktemp("store"), 0, 120)


def assert_same(one: Batch, other: Batch) -> None:
    assert one.model_inputs.keys() == other.model_inputs.keys()
    for name, value in one.model_inputs.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.model_inputs[name])), name
    assert torch.equal(one.labels_BT, other.labels_BT)
    assert (one.weights_BT is None) == (other.weights_BT is None)
    if one.weights_BT is not None and other.weights_BT is not None:
        assert torch.equal(one.weights_BT, other.weights_BT)
    assert (one.num_targets, one.segment_starts, one.addresses, one.sources) == (
        other.num_targets,
        other.segment_starts,
        other.addresses,
        other.sources,
    )


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_workers_change_nothing(store: SampleStore, num_workers: int, packed: bool) -> None:
    reader = BatchReader(store, CollateSettings(packed=packed, pad_token_id=7, varlen=packed, pad_to_multiple_of=8))
    bounds = [0, 2, 4] if packed else [0, 1, 2, 3, 4]
    planned = [
        PlannedMicroBatch(step=p.step, places=p.places, pack_bounds=bounds, files=p.files) for p in plan_rows(store)
    ]
    planned.insert(5, BLANK)
    here = list(iterate(reader, iter(planned), num_workers=0))
    there = list(iterate(reader, iter(planned), num_workers=num_workers))
    assert len(here) == len(there) == 31
    assert any(batch.weights_BT is not None for batch in here)
    assert {source for batch in here for source in batch.sources} == {0, 1, 2}
    assert all(len(batch.sources) == sum(map(len, batch.segment_starts)) for batch in here if batch.num_targets)
    for one, other in zip(here, there, strict=True):
        assert_same(one, other)
    assert str(here[0].addresses[1]) == "rows.jsonl:2"
    assert here[5].num_targets == 0 and here[5].labels_BT.shape == (1, 2)
    assert not children()


def test_a_batch_of_workers_can_be_written_to(store: SampleStore) -> None:
    for batch in iterate(reader_of(store), plan_rows(store, stop=40), num_workers=1):
        for tensor in (batch.model_inputs["input_ids"], batch.labels_BT, batch.weights_BT):
            if tensor is not None:
                tensor += 1


def test_the_plan_is_taken_only_a_few_micro_batches_ahead(store: SampleStore) -> None:
    taken = []

    def plan() -> Iterator[PlannedMicroBatch]:
        for planned in plan_rows(store):
            taken.append(planned)
            yield planned

    batches = iterate(reader_of(store), plan(), num_workers=2, ahead=2)
    for _ in range(5):
        next(batches)
    time.sleep(0.3)
    assert len(taken) <= 5 + 2 * 2
    batches.close()


def test_a_plan_that_waits_does_not_hold_up_what_is_ready(store: SampleStore) -> None:
    more = threading.Event()

    def plan() -> Iterator[PlannedMicroBatch]:
        planned = list(plan_rows(store))
        yield from planned[:2]
        assert more.wait(HANG_SECONDS)
        yield from planned[2:4]

    batches = iterate(reader_of(store), plan(), num_workers=2, patience=1.0)
    next(batches), next(batches)  # with torch's DataLoader the second would wait for the third
    threading.Timer(2.5, more.set).start()  # longer than the patience with a worker: waiting for the plan is no fault
    assert len(list(batches)) == 2


def test_what_the_plan_raises_comes_in_its_place(store: SampleStore) -> None:
    def plan() -> Iterator[PlannedMicroBatch]:
        yield from list(plan_rows(store))[:3]
        raise RuntimeError("no more rows")

    for num_workers in (0, 2):
        batches = iterate(reader_of(store), plan(), num_workers=num_workers)
        for _ in range(3):
            next(batches)
        with pytest.raises(RuntimeError, match="no more rows"):
            next(batches)
    assert not children()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_plan_is_closed_when_the_batches_are(store: SampleStore, num_workers: int) -> None:
    closed = threading.Event()

    def plan() -> Iterator[PlannedMicroBatch]:
        try:
            yield from plan_rows(store)
        finally:
            closed.set()

    batches = iterate(reader_of(store), plan(), num_workers=num_workers)
    next(batches)
    batches.close()
    assert closed.wait(2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_are_added_meanwhile_are_read(tmp_path: Path, num_workers: int) -> None:
    before = add_samples(tmp_path, 0, 8)

    def plan() -> Iterator[PlannedMicroBatch]:
        yield from plan_rows(before)
        after = add_samples(tmp_path, 8, 8)
        yield from plan_rows(after, first=8)

    batches = list(iterate(reader_of(before), plan(), num_workers=num_workers))
    assert [batch.addresses[0].row for batch in batches] == [1, 5, 9, 13]
    after = SampleStore.open(tmp_path, fingerprint=before.fingerprint)
    assert batches[2].model_inputs["input_ids"][0, :4].tolist() == after[8].input_ids[:4].tolist()


def test_a_sample_that_is_in_no_commit_is_an_error_with_its_rows(store: SampleStore) -> None:
    places = np.zeros(2, PLACE)
    places["sample"], places["stop"], places["row"] = [3, 10_000], 4, [4, 10_001]
    missing = PlannedMicroBatch(step=0, places=places, pack_bounds=[0, 2], files={0: "rows.jsonl"})
    with pytest.raises(IndexError):
        list(iterate(reader_of(store), iter([missing]), num_workers=0))
    with pytest.raises(LoaderError, match="IndexError") as caught:
        list(iterate(reader_of(store), iter([missing]), num_workers=1))
    assert [address.row for address in caught.value.rows] == [4, 10_001]
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_bytes_are_a_store_error(tmp_path: Path, num_workers: int) -> None:
    store = add_samples(tmp_path, 0, 8)
    (shard,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000)
    content = bytearray(shard.read_bytes())
    at = content.find(store[2].input_ids.astype("<i4").tobytes())
    assert at > 0
    content[at] ^= 1
    shard.write_bytes(content)
    reader = BatchReader(SampleStore.open(tmp_path, fingerprint=store.fingerprint), PACKED)
    with pytest.raises(StoreError, match="damaged"):
        list(iterate(reader, plan_rows(store), num_workers=num_workers))
    assert not children()
