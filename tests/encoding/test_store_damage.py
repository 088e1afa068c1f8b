"""Every cut, every flipped bit, every swapped file is found before what it spoils is used."""

import hashlib
import os
import re

import numpy as np
import pytest

from luthier.errors import StoreError
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.care import verify_store
from luthier.store.format import MANIFEST, freeze_sample, row_key

FINGERPRINT = "12" * 32


def sample(number):
    rng = np.random.default_rng(number)
    n = 50 + number % 37
    return Sample(
        input_ids=rng.integers(0, 1000, n, dtype=np.int32),
        target=rng.random(n) < 0.5,
        branches=(Branch(parent=-1, length=n),),
        notes=(("seen", number),),
    )


def key(number):
    return row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion="")


def commit(folder, numbers):
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number in numbers:
        writer.add(key(number), freeze_sample(sample(number)))
    writer.commit()


def open_store(folder):
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def use_everything(folder, numbers):
    """Look up and read as training does, without `verify`; what is read must be right."""
    store = open_store(folder)
    found = store.lookup(np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32))
    assert len(store.leaf_lengths) == len(store.leaf_targets) == store.leaf_bounds[-1]
    for number, place in zip(numbers, found.tolist(), strict=True):
        got, wanted = store[place], sample(number)
        assert got.input_ids.tolist() == wanted.input_ids.tolist()
        assert got.target.tolist() == wanted.target.tolist()
        assert got.notes == wanted.notes


def sections(store):
    """Where each part of a shard begins and ends."""
    (shard,) = store.shards
    index = shard.index
    cuts = {0, 8, shard.entry.index_start, shard.entry.keys_start, shard.entry.keys_stop, shard.entry.size}
    cuts.update(index.payload_bounds.tolist()[:: len(index.keys) // 10])
    place = shard.entry.keys_start
    for name in index.__slots__:
        place += getattr(index, name).nbytes
        cuts.add(place)
        place += -place % 8
    return sorted(cuts)


def test_a_shard_cut_anywhere_is_found_when_the_store_is_opened(tmp_path):
    commit(tmp_path, range(200))
    store = open_store(tmp_path)
    (path,) = tmp_path.glob("shard-*")
    whole = path.read_bytes()
    cuts = [cut for cut in sections(store) if cut < len(whole)]
    assert len(cuts) > 20
    for cut in {*cuts, *(cut + 1 for cut in cuts), len(whole) - 1} - {len(whole)}:
        path.write_bytes(whole[:cut])
        with pytest.raises(StoreError, match=path.name):
            open_store(tmp_path)
    path.write_bytes(whole + b"\0")  # longer is wrong too
    with pytest.raises(StoreError, match="size"):
        open_store(tmp_path)
    path.write_bytes(whole)
    use_everything(tmp_path, range(200))


def test_a_manifest_cut_anywhere_is_found(tmp_path):
    commit(tmp_path, [0])
    commit(tmp_path, [1])
    path = tmp_path / MANIFEST
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(StoreError, match="damaged"):
            open_store(tmp_path)


def test_one_flipped_bit_in_any_block_of_any_file_is_found_in_use_and_by_verify(tmp_path):
    commit(tmp_path, range(700))
    for number in range(700, 720):
        commit(tmp_path, [number])
    use_everything(tmp_path, range(720))  # control
    assert not verify_store(tmp_path).damaged
    rng = np.random.default_rng(0)
    blocks = 0
    for path in [tmp_path / MANIFEST, *tmp_path.glob("shard-*")]:
        whole = path.read_bytes()
        for start in range(0, len(whole), 4096):
            blocks += 1
            damaged = bytearray(whole)
            damaged[rng.integers(start, min(start + 4096, len(whole)))] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=path.name):
                use_everything(tmp_path, range(720))
            assert [damage.name for damage in verify_store(tmp_path).damaged] == [path.name]
        path.write_bytes(whole)
    assert blocks > 60
    use_everything(tmp_path, range(720))


def test_two_swapped_shards_are_found(tmp_path):
    commit(tmp_path, [1])
    commit(tmp_path, [38])  # the same number of tokens: the files have the same size
    one, two = tmp_path.glob("shard-*")
    if one.stat().st_size != two.stat().st_size:
        pytest.fail("the control lost its point")
    os.replace(one, tmp_path / "aside")
    os.replace(two, one)
    os.replace(tmp_path / "aside", two)
    store = open_store(tmp_path)
    for use in (
        lambda: store.lookup(np.frombuffer(key(1), np.uint8).reshape(1, 32)),
        lambda: store[0],
        lambda: store.have_media(np.array([1])),
        lambda: store.notes(1),
        store.verify,
    ):
        with pytest.raises(StoreError, match="its index"):
            use()
    assert {damage.name for damage in verify_store(tmp_path).damaged} == {one.name, two.name}


def test_a_stale_manifest_is_an_earlier_store_and_never_a_mix(tmp_path):
    commit(tmp_path, [0, 1])
    stale = (tmp_path / MANIFEST).read_bytes()
    commit(tmp_path, [2])
    store = open_store(tmp_path)
    (tmp_path / MANIFEST).write_bytes(stale)
    use_everything(tmp_path, [0, 1])
    assert key(2) not in open_store(tmp_path)
    with pytest.raises(StoreError, match="changed"):  # but whoever has seen the later one does not go on silently
        store.refresh()
    commit(tmp_path, [2])
    use_everything(tmp_path, [0, 1, 2])


def test_a_manifest_of_another_version_or_with_other_fields_is_one_clear_error(tmp_path):
    commit(tmp_path, [0])
    path = tmp_path / MANIFEST
    body = path.read_bytes().partition(b"\n")[2]
    for wrong, match in (
        (re.sub(rb'"format": \d+', b'"format": 99', body), "format is 99"),
        (body.replace(b"keys_digest", b"keys_digits"), "not written by Luthier"),
        (b"[]", "not written by Luthier"),
    ):
        path.write_bytes(hashlib.sha256(wrong).hexdigest().encode() + b"\n" + wrong)
        with pytest.raises(StoreError, match=match):
            open_store(tmp_path)


def test_repair_drops_what_is_damaged_and_it_is_encoded_again(tmp_path):
    commit(tmp_path, range(10))
    commit(tmp_path, range(10, 14))
    commit(tmp_path, range(14, 20))
    damaged = open_store(tmp_path).shards[1].path
    content = bytearray(damaged.read_bytes())
    content[100] ^= 4
    damaged.write_bytes(content)
    health = verify_store(tmp_path, repair=True)
    assert health.repaired and [(one.name, one.num_samples) for one in health.damaged] == [(damaged.name, 4)]
    assert not damaged.exists() and not verify_store(tmp_path).damaged
    use_everything(tmp_path, [*range(10), *range(14, 20)])
    assert key(11) not in open_store(tmp_path)
    commit(tmp_path, range(10, 14))
    use_everything(tmp_path, range(20))


def test_repair_of_a_manifest_begins_the_store_anew(tmp_path):
    commit(tmp_path, range(3))
    (tmp_path / MANIFEST).write_bytes(b"?" + (tmp_path / MANIFEST).read_bytes()[1:])
    assert [one.name for one in verify_store(tmp_path, repair=True).damaged] == [MANIFEST]
    assert len(open_store(tmp_path)) == 0
    commit(tmp_path, range(3))
    use_everything(tmp_path, range(3))


def test_a_store_in_use_is_not_repaired(tmp_path):
    commit(tmp_path, range(3))
    store = open_store(tmp_path)
    (shard,) = tmp_path.glob("shard-*")
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    with pytest.raises(StoreError, match="others use this store"):
        verify_store(tmp_path, repair=True)
    assert shard.exists()
    del store
    assert verify_store(tmp_path, repair=True).repaired
