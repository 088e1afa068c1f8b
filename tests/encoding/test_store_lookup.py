"""Looking up many keys, many leaves, and following a store that grows."""

import os
import pickle
import tracemalloc

import numpy as np
import pytest

from luthier import store as lookup
from luthier.errors import StoreError
from luthier.records import Branch, Sample
from luthier.store import KeyIndex, SampleStore, StoreWriter, shard_reader
from luthier.store.format import EncodedSample, freeze_sample

FINGERPRINT = "cd" * 32


def random_keys(n, *, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 32), dtype=np.uint8)


def tiny(number):
    payload = np.array([number, 0], dtype="<i4").tobytes()
    leaves = (number % 3) + 1
    return EncodedSample(
        payload=payload,
        num_tokens=1,
        has_weight=False,
        branches=((-1, 1),),
        leaf_lengths=tuple(range(number, number + leaves)),
        leaf_targets=tuple(range(leaves)),
    )


def commit(folder, keys, *, first=0):
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number, key in enumerate(keys):
        writer.add(key.tobytes(), tiny(first + number))
    writer.commit()


def open_store(folder):
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def simple_lookup(stored, asked):
    found = {}
    for number, key in enumerate(stored):
        found.setdefault(key.tobytes(), number)
    return [found.get(key.tobytes(), -1) for key in asked]


@pytest.mark.parametrize("most", [7, 64, 10_000])
def test_lookup_agrees_with_a_dictionary(monkeypatch, most):
    monkeypatch.setattr(lookup, "MOST_PER_RUN", most)
    rng = np.random.default_rng(most)
    stored = random_keys(600)
    stored[rng.integers(0, 600, 60)] = stored[rng.integers(0, 600, 60)]  # keys that two processes have written
    stored[100:200, :8] = stored[100, :8]  # agree in what they are sorted by
    asked = np.concatenate([stored[rng.permutation(600)], random_keys(300, seed=1)])
    asked[-100:, :8] = stored[100, :8]  # agree with some in half of what is compared, and are not there
    index = KeyIndex()
    for parts in np.split(stored, [0, 1, 2, 50, 51, 300, 555]):
        index = index.extended([parts[: len(parts) // 2], parts[len(parts) // 2 :]])
    assert index.num_samples == 600
    assert index.lookup(asked).tolist() == simple_lookup(stored, asked)
    assert index.lookup(asked[:0]).tolist() == []
    assert len(index.runs) <= max(2 * 600 // most + 2, 9)


def test_an_index_that_grows_leaves_the_earlier_one_as_it_was():
    keys = random_keys(100)
    before = KeyIndex().extended([keys[:50]])
    after = before.extended([keys[50:]])
    assert (before.lookup(keys) >= 0).sum() == 50
    assert after.lookup(keys).tolist() == list(range(100))


def test_a_store_finds_the_keys_of_all_shards(tmp_path):
    keys = random_keys(90)
    for part in range(3):
        commit(tmp_path, keys[30 * part : 30 * part + 30], first=30 * part)
    store = open_store(tmp_path)
    order = np.random.default_rng(0).permutation(90)
    assert store.lookup(keys[order]).tolist() == order.tolist()
    assert store.lookup(random_keys(9, seed=5)).tolist() == [-1] * 9
    assert store.keys_of(order).tolist() == keys[order].tolist()
    assert store.index_of(keys[77].tobytes()) == 77 and bytes(32) not in store
    assert open_store(tmp_path / "nowhere").lookup(keys[:3]).tolist() == [-1] * 3


def test_of_two_samples_with_one_key_the_first_that_was_committed_is_found(tmp_path):
    keys = random_keys(4)
    commit(tmp_path, keys)
    commit(tmp_path, keys[[3, 1]], first=50)
    assert open_store(tmp_path).lookup(keys).tolist() == [0, 1, 2, 3]


def test_refresh_sees_later_commits_and_numbers_stay(tmp_path):
    keys = random_keys(60)
    store = open_store(tmp_path / "store")
    assert len(store) == 0 and store.refresh() is store
    for stop in (10, 11, 60):
        before = store
        commit(tmp_path / "store", keys[len(before) : stop], first=len(before))
        assert before.lookup(keys).tolist() == [*range(len(before)), *[-1] * (60 - len(before))]  # a snapshot
        store = before.refresh()
        assert store.lookup(keys).tolist() == [*range(stop), *[-1] * (60 - stop)]
        assert store.refresh() is store
        assert [int(store[n].input_ids[0]) for n in range(stop)] == list(range(stop))
    assert store.shards[0] is before.refresh().shards[0]  # the files that were open stay open


def test_refresh_refuses_a_store_whose_shards_are_others(tmp_path):
    keys = random_keys(4)
    commit(tmp_path / "a", keys[:2])
    store = open_store(tmp_path / "a")
    commit(tmp_path / "b", keys[2:])
    os.replace(tmp_path / "b" / "manifest.json", tmp_path / "a" / "manifest.json")
    with pytest.raises(StoreError, match="changed while it was in use"):
        store.refresh()


def test_what_the_index_says_of_leaves_is_what_samples_have(tmp_path):
    rng = np.random.default_rng(3)
    writer = StoreWriter(tmp_path, fingerprint=FINGERPRINT)
    for number, key in enumerate(random_keys(40)):
        branches = [Branch(parent=int(rng.integers(-1, node)), length=int(rng.integers(1, 9))) for node in range(4)]
        length = sum(branch.length for branch in branches)
        one = Sample(
            input_ids=np.arange(length, dtype=np.int32),
            target=rng.random(length) < 0.5,
            branches=tuple(branches),
        )
        writer.add(key.tobytes(), freeze_sample(one))
        if number % 7 == 0:
            writer.commit()
    writer.commit()
    store = open_store(tmp_path)
    whole = [store[n].segments() for n in range(40)]
    assert np.diff(store.leaf_bounds).tolist() == [len(segments) for segments in whole]
    assert store.leaf_lengths.tolist() == [len(segment) for segments in whole for segment in segments]
    assert store.leaf_targets.tolist() == [int(s.target[1:].sum()) for segments in whole for s in segments]
    asked = rng.integers(0, 40, 100)
    assert len(store.leaf_held(asked)) == sum(len(whole[n]) for n in asked)
    assert store.have_media(asked).tolist() == [False] * 100
    assert store.keys_of(asked).tolist() == store.keys[asked].tolist()
    for ask in (store.have_media, store.keys_of):
        assert not len(ask(asked[:0]))
        for wrong in ([-1], [40]):
            with pytest.raises(IndexError):
                ask(np.array(wrong))


def test_more_shards_than_may_be_open_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader, "MOST_OPEN", 3)
    keys = random_keys(12)
    for number in range(12):
        commit(tmp_path, keys[number : number + 1], first=number)
    store = open_store(tmp_path)
    held = [store[number].input_ids for number in range(12)]
    for _ in range(2):
        assert [int(store[number].input_ids[0]) for number in range(12)] == list(range(12))
        assert len(store._opened) == 3
    assert [int(ids[0]) for ids in held] == list(range(12))  # what was read stays, when its file is closed
    store.verify()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert np.diff(pickle.loads(pickle.dumps(store)).leaf_bounds).tolist() == [1, 2, 3] * 4  # noqa: S301
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


def test_an_index_of_many_keys_costs_20_bytes_each():
    keys = [random_keys(50_000, seed=seed) for seed in range(8)]
    tracemalloc.start()
    index = KeyIndex().extended(keys)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_samples == 400_000
    assert size < 21 * 400_000
