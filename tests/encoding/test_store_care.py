"""Listing, cleaning up and exporting stores."""

import json
import os
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from luthier import __version__
from luthier.errors import StoreError, UserError
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.care import clean_stores, export_store, list_stores
from luthier.store.format import FORMAT, MANIFEST, WORK, freeze_sample, row_key, store_folder
from luthier.writing import SharedLock

DAY = 86_400


def sample(number):
    rng = np.random.default_rng(number)
    return Sample(
        input_ids=rng.integers(0, 1000, 20, dtype=np.int32),
        target=rng.random(20) < 0.5,
        weight=rng.random(20, dtype=np.float32) if number % 2 else None,
        branches=(Branch(parent=-1, length=8), Branch(parent=0, length=5), Branch(parent=0, length=7)),
        notes=(("truncated", number),) if number % 3 == 0 else (),
    )


def key(number, fingerprint):
    return row_key(str(number).encode(), fingerprint=fingerprint, conversion="")


def make(root, letter, numbers, **about):
    fingerprint = letter * 64
    folder = store_folder(root, fingerprint)
    writer = StoreWriter(folder, fingerprint=fingerprint, about=about)
    for number in numbers:
        writer.add(key(number, fingerprint), freeze_sample(sample(number)))
    writer.commit()
    return folder


def age(folder, days):
    then = time.time() - days * DAY
    for path in (folder / "about.json", folder / MANIFEST):
        os.utime(path, (then, then))


def test_stores_are_listed_with_what_made_them_last_used_first(tmp_path):
    old = make(tmp_path, "a", range(3), model="org/small")
    new = make(tmp_path, "b", range(5))
    age(old, 9)
    (tmp_path / "something else").mkdir()
    found = list_stores(tmp_path)
    assert [info.folder for info in found] == [new, old]
    assert [info.num_samples for info in found] == [5, 3]
    assert [info.num_tokens for info in found] == [100, 60]
    assert found[1].about == {"luthier": __version__, "format": FORMAT, "fingerprint": "a" * 64, "model": "org/small"}
    assert 8.9 * DAY < time.time() - found[1].last_use < 9.1 * DAY
    assert found[1].num_bytes == sum(path.stat().st_size for path in old.iterdir())
    assert [info.in_use for info in found] == [False, False]
    assert list_stores(old) == [found[1]] and list_stores(tmp_path / "nowhere") == []


def test_opening_a_store_counts_as_use_and_listing_does_not(tmp_path):
    folder = make(tmp_path, "a", range(3))
    age(folder, 9)
    assert time.time() - list_stores(tmp_path)[0].last_use > 8 * DAY
    store = SampleStore.open(folder, fingerprint="a" * 64)
    (info,) = list_stores(tmp_path)
    assert time.time() - info.last_use < DAY and info.in_use
    del store
    assert not list_stores(tmp_path)[0].in_use


def test_what_made_a_store_first_is_kept(tmp_path):
    folder = make(tmp_path, "a", range(3), model="first")
    make(tmp_path, "a", range(5), model="second")
    assert json.loads((folder / "about.json").read_text())["model"] == "first"


def test_a_store_that_cannot_be_read_is_listed_with_the_reason(tmp_path):
    folder = make(tmp_path, "a", range(3))
    (folder / MANIFEST).write_text("{}")
    (folder / "about.json").write_text("[")
    (info,) = list_stores(tmp_path)
    assert "damaged" in info.problem and info.num_samples == 0 and info.about == {}


def litter(folder):
    (folder / ".tmp-1-abc").write_bytes(b"x" * 100)
    (folder / "shard-00.bin").write_bytes(b"x" * 50)
    (folder / WORK / "list").mkdir(parents=True)
    (folder / "units").mkdir(exist_ok=True)
    (folder / "units" / ".tmp-1-def").write_bytes(b"x" * 3)
    (folder / WORK / "list" / "file").write_bytes(b"x" * 7)
    return {
        folder / ".tmp-1-abc": 100,
        folder / "shard-00.bin": 50,
        folder / "units" / ".tmp-1-def": 3,
        folder / WORK: 7,
    }


def everything(root):
    return sorted(path for path in root.rglob("*"))


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    folder = make(tmp_path, "a", range(3))
    (folder / "units").mkdir()
    (folder / "units" / "kept").write_bytes(b"")
    before = everything(tmp_path)
    left = litter(folder)
    (tmp_path / ".tmp-gone").mkdir()
    with_litter = everything(tmp_path)
    told = clean_stores(tmp_path, dry_run=True)
    assert {removed.path: removed.num_bytes for removed in told.removed} == {**left, tmp_path / ".tmp-gone": 0}
    assert everything(tmp_path) == with_litter
    assert clean_stores(tmp_path).removed == told.removed
    assert everything(tmp_path) == before
    assert clean_stores(tmp_path).removed == ()
    SampleStore.open(folder, fingerprint="a" * 64).verify()


def test_a_store_in_use_is_left_alone(tmp_path):
    folder = make(tmp_path, "a", range(3))
    litter(folder)
    age(folder, 90)
    before = everything(tmp_path)
    for user in (
        SharedLock(folder / "users"),
        SampleStore.open(folder, fingerprint="a" * 64),
        StoreWriter(folder, fingerprint="a" * 64),
    ):
        age(folder, 90)
        told = clean_stores(tmp_path, older_than=DAY, max_bytes=0)
        assert told.removed == () and told.in_use == (folder,)
        assert everything(tmp_path) == before
        del user
    assert clean_stores(tmp_path, older_than=DAY).in_use == ()
    assert not folder.exists()


def test_shards_stay_where_the_manifest_cannot_be_read(tmp_path):
    folder = make(tmp_path, "a", range(3))
    (folder / MANIFEST).write_text("{}")
    assert clean_stores(tmp_path).removed == ()


def test_old_stores_go_by_age(tmp_path):
    folders = [make(tmp_path, letter, range(3)) for letter in "abc"]
    for folder, days in zip(folders, (40, 29, 31), strict=True):
        age(folder, days)
    told = clean_stores(tmp_path, older_than=30 * DAY)
    assert sorted(removed.path for removed in told.removed) == [folders[0], folders[2]]
    assert [folder.exists() for folder in folders] == [False, True, False]
    assert list(tmp_path.glob(".tmp-*")) == []


def test_beyond_a_size_the_stores_used_least_recently_go(tmp_path):
    folders = [make(tmp_path, letter, range(30)) for letter in "abcd"]
    for folder, days in zip(folders, (4, 1, 3, 2), strict=True):
        age(folder, days)
    size = list_stores(folders[0])[0].num_bytes
    told = clean_stores(tmp_path, max_bytes=int(2.5 * size), dry_run=True)
    assert [removed.path for removed in told.removed] == [folders[2], folders[0]]
    assert all(folder.exists() for folder in folders)
    clean_stores(tmp_path, max_bytes=int(2.5 * size))
    assert [folder.exists() for folder in folders] == [False, True, False, True]
    assert clean_stores(tmp_path, max_bytes=int(2.5 * size)).removed == ()  # control: now it is enough


def test_a_writer_begins_anew_where_its_shard_was_removed_before_it_was_named(tmp_path):
    """As when another node cleans up where locks are not shared."""
    folder = tmp_path / "store"
    writer = StoreWriter(folder, fingerprint="a" * 64)
    publish = writer._disk.publish
    removed = []

    def spoil(path, chunks, **how):
        publish(path, chunks, **how)
        if not removed:
            removed.append(path)
            path.unlink()

    writer._disk.publish = spoil
    writer.add(key(0, "a" * 64), freeze_sample(sample(0)))
    writer.commit()
    assert removed
    SampleStore.open(folder, fingerprint="a" * 64).verify()


def test_a_store_is_exported_as_parquet(tmp_path):
    folder = make(tmp_path, "a", range(7))
    told = []
    target = tmp_path / "new folder" / "out.parquet"
    assert export_store(folder, target, on_samples=lambda done, total: told.append((done, total))) == 7
    rows = pq.read_table(target).to_pylist()
    assert told == [(7, 7)] and len(rows) == 7
    for number, row in enumerate(rows):
        one = sample(number)
        assert row["row_key"] == key(number, "a" * 64).hex()
        assert row["input_ids"] == one.input_ids.tolist() and row["target"] == one.target.tolist()
        assert row["weight"] == (None if one.weight is None else one.weight.tolist())
        assert [(branch["parent"], branch["length"]) for branch in row["branches"]] == [(-1, 8), (0, 5), (0, 7)]
        assert row["notes"] == list(one.notes)
    assert os.listdir(target.parent) == ["out.parquet"]


def test_a_damaged_store_is_not_exported(tmp_path):
    folder = make(tmp_path, "a", range(7))
    (shard,) = folder.glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StoreError, match="sample 5"):
        export_store(folder, tmp_path / "out.parquet")
    with pytest.raises(StoreError, match="no store"):
        export_store(tmp_path / "nowhere", tmp_path / "out.parquet")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        export_store(make(tmp_path, "b", range(2)), tmp_path / "file" / "out.parquet")
    assert not list(tmp_path.glob("*out*"))
