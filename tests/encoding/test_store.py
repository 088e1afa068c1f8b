import errno
import multiprocessing
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier import store as store_module
from luthier.errors import StoreError
from luthier.records import Address, Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.disk import Disk
from luthier.store.format import MANIFEST, build_shard, freeze_sample, row_key, store_folder
from tests.conftest import HANG_SECONDS, examples

FINGERPRINT = "ab" * 32


def sample(n=5, *, seed=0, weighted=False, branches=None):
    rng = np.random.default_rng([seed, n])
    return Sample(
        input_ids=rng.integers(0, 1000, n, dtype=np.int32),
        target=rng.random(n) < 0.5,
        weight=rng.random(n, dtype=np.float32) if weighted else None,
        branches=branches or (Branch(parent=-1, length=n),),
    )


def key(number):
    return row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion="")


def write(folder, numbers, disk=None):
    writer = StoreWriter(folder, fingerprint=FINGERPRINT, disk=disk)
    for number in numbers:
        writer.add(key(number), freeze_sample(sample(4 + number, weighted=number % 2 == 1)))
    writer.commit()


def open_store(folder):
    return SampleStore.open(folder, fingerprint=FINGERPRINT)


def assert_equal(one, other):
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.target.tolist() == other.target.tolist()
    assert one.target.dtype == np.bool_
    assert one.branches == other.branches
    assert (one.weight is None) == (other.weight is None)
    assert one.weight is None or one.weight.tolist() == other.weight.tolist()


def assert_holds(folder, numbers):
    store = open_store(folder)
    store.verify()
    assert len(store) == len(numbers)
    for number in numbers:
        assert_equal(store[store.index_of(key(number))], sample(4 + number, weighted=number % 2 == 1))


@st.composite
def trees(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    branches = tuple(
        Branch(parent=draw(st.integers(-1, node - 1)), length=length) for node, length in enumerate(lengths)
    )
    return sample(sum(lengths), seed=draw(st.integers(0, 9)), weighted=draw(st.booleans()), branches=branches)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(trees(), min_size=1, max_size=6))
def test_samples_come_back_as_they_were_with_exact_leaf_counts(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("store")
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number, one in enumerate(samples):
        writer.add(key(number), freeze_sample(one))
    writer.commit()
    store = open_store(folder)
    for number, one in enumerate(samples):
        assert_equal(store[number], one)
        leaves = slice(*store.leaf_bounds[number : number + 2])
        assert store.leaf_lengths[leaves].tolist() == [len(s) for s in one.segments()]
        assert store.leaf_targets[leaves].tolist() == [int(s.target[1:].sum()) for s in one.segments()]
    assert store.num_tokens == sum(len(one.input_ids) for one in samples)


def test_appending_adds_a_shard_and_keeps_numbers(tmp_path):
    write(tmp_path, [0, 1, 2])
    before = {number: open_store(tmp_path).index_of(key(number)) for number in range(3)}
    shards = {path: path.read_bytes() for path in tmp_path.glob("shard-*")}
    write(tmp_path, [3, 4])
    store = open_store(tmp_path)
    assert {number: store.index_of(key(number)) for number in range(3)} == before
    assert [store.index_of(key(number)) for number in (3, 4)] == [3, 4]
    assert [row.tobytes() for row in store.keys] == [key(number) for number in range(5)]
    assert all(path.read_bytes() == content for path, content in shards.items())
    assert_holds(tmp_path, range(5))


def test_the_same_samples_make_the_same_files(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, [0, 1, 2])
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("*")} for name in ("one", "two")]
    assert files[0] == files[1]


def test_a_store_that_was_never_written_is_empty(tmp_path):
    store = open_store(tmp_path / "nowhere")
    assert len(store) == 0
    assert store.index_of(key(0)) is None
    assert store.leaf_bounds.tolist() == [0]
    store.verify()


def test_large_additions_are_committed_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_BYTES", 60)
    writer = StoreWriter(tmp_path, fingerprint=FINGERPRINT)
    for number in range(7):
        writer.add(key(number), freeze_sample(sample(4)))
    assert len(open_store(tmp_path)) == 6  # three shards of two; the seventh sample waits
    writer.commit()
    assert len(open_store(tmp_path)) == 7


def _resident_kib(folder):
    """What the process holds of the store's files in memory."""
    resident, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1])
    return resident


def test_released_memory_is_read_again_where_it_is_needed(tmp_path):
    for first in (0, 6):  # two shards
        write(tmp_path, range(first, first + 6))
    store = open_store(tmp_path)
    store.release()  # nothing was read yet
    numbers = [store.index_of(key(number)) for number in range(12)]
    held = [store[number] for number in numbers]
    before = _resident_kib(tmp_path) if Path("/proc/self/smaps").exists() else None
    store.release()
    if before is not None:
        assert before > _resident_kib(tmp_path) == 0, "control: reading took memory"
    for number, kept in enumerate(held):  # arrays of the time before are views of the files, and whole
        assert_equal(kept, sample(4 + number, weighted=number % 2 == 1))
        assert_equal(store[numbers[number]], kept)


def test_an_open_store_is_a_snapshot(tmp_path):
    write(tmp_path, [0])
    store = open_store(tmp_path)
    write(tmp_path, [1])
    assert len(store) == 1
    assert key(1) not in store
    assert key(1) in open_store(tmp_path)


def test_a_store_sent_to_another_process_maps_the_same_files(tmp_path):
    write(tmp_path, range(20))
    store = open_store(tmp_path)
    message = pickle.dumps(store)
    assert len(message) < 2000  # names, not tokens
    assert_equal(pickle.loads(message)[7], store[7])  # noqa: S301  what multiprocessing does with arguments


def test_a_sample_carries_the_address_it_is_read_for(tmp_path):
    write(tmp_path, [0])
    here = Address(file="rows.jsonl", row=7)
    assert open_store(tmp_path).read(0, here).address == here


def test_numbers_outside_the_store_are_refused(tmp_path):
    write(tmp_path, [0])
    for number in (-1, 1):
        with pytest.raises(IndexError):
            open_store(tmp_path)[number]


def test_keys_depend_on_the_row_the_encoder_and_the_conversion():
    keys = {row_key(r, fingerprint=f, conversion=c) for r in (b"1", b"2") for f in ("1", "2") for c in ("1", "2")}
    assert len(keys) == 8
    assert row_key(b"b", fingerprint="a", conversion="") != row_key(b"", fingerprint="ab", conversion="")


def test_stores_of_two_encoders_are_apart_and_never_mistaken(tmp_path):
    assert store_folder(tmp_path, "a" * 64) != store_folder(tmp_path, "b" * 64)
    write(tmp_path, [0])
    with pytest.raises(StoreError, match="fingerprint"):
        SampleStore.open(tmp_path, fingerprint="cd" * 32)


# --------------------------------------------------------------------------------------------------------- damage


def flip(path, place, content=None):
    content = bytearray(content or path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def read_everything(folder):
    store = open_store(folder)
    store.verify()


def test_any_flipped_byte_of_any_file_is_found(tmp_path):
    write(tmp_path, [0, 1])
    read_everything(tmp_path)  # control: undamaged, nothing is found
    files = [tmp_path / MANIFEST, *tmp_path.glob("shard-*")]
    assert len(files) == 2
    for path in files:
        whole = path.read_bytes()
        for place in range(len(whole)):
            flip(path, place, whole)
            with pytest.raises(StoreError, match=path.name):
                read_everything(tmp_path)
        path.write_bytes(whole)
    read_everything(tmp_path)


def test_a_damaged_sample_is_found_when_it_is_read_and_the_others_are_not_affected(tmp_path):
    write(tmp_path, [0, 1])
    (shard,) = tmp_path.glob("shard-*")
    flip(shard, 9)  # the first id of the first sample, behind 8 bytes of magic
    store = open_store(tmp_path)
    assert_equal(store[1], sample(5, weighted=True))
    with pytest.raises(StoreError, match="sample 0") as caught:
        store[0]
    assert "encoded again" in str(caught.value)


def test_damage_to_an_index_is_found_before_it_is_used(tmp_path):
    write(tmp_path, [0, 1])
    (shard,) = tmp_path.glob("shard-*")
    whole = shard.read_bytes()
    index_start = 8 + sum(len(freeze_sample(sample(4 + n, weighted=n == 1)).payload) for n in (0, 1))
    keys_stop = index_start + -index_start % 8 + 2 * 32
    wanted = np.frombuffer(key(0) + key(1), np.uint8).reshape(2, 32)
    for place in [*range(8), *range(index_start, len(whole))]:
        flip(shard, place, whole)
        store = open_store(tmp_path)
        if index_start <= place < keys_stop:
            with pytest.raises(StoreError, match="its index"):
                store.lookup(wanted)
            with pytest.raises(StoreError, match="its index"):
                store.keys_of(np.array([1]))
        else:
            assert store.lookup(wanted).tolist() == [0, 1]  # control: the keys are sound
            for use in (lambda store: store[1], lambda store: store.have_media(np.array([1])), SampleStore.notes):
                with pytest.raises(StoreError, match="its index"):
                    use(store, 0) if use is SampleStore.notes else use(store)


@pytest.mark.parametrize("how", ["missing", "short", "empty"])
def test_a_lost_or_shortened_shard_is_found(tmp_path, how):
    write(tmp_path, [0, 1])
    (shard,) = tmp_path.glob("shard-*")
    if how == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] if how == "short" else b"")
    with pytest.raises(StoreError, match=shard.name):
        open_store(tmp_path)


# -------------------------------------------------------------------------------------------------- crashes, full disks


class Killed(BaseException):
    """Stands for SIGKILL: nothing may run afterwards that mends anything."""


class FailingDisk(Disk):
    """Fails at the ``k``-th operation."""

    def __init__(self, k, failure):
        self.k, self.failure, self.operations = k, failure, []

    def before(self, operation, path):
        self.operations.append(operation)
        if len(self.operations) > self.k:
            raise self.failure


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error"), Killed()],
    ids=["full", "broken", "killed"],
)
@pytest.mark.parametrize("already", [0, 2], ids=["new", "appending"])
def test_a_failure_at_any_operation_leaves_the_old_store_or_the_new_one(tmp_path, failure, already):
    seen = set()
    for k in range(100):
        folder = tmp_path / str(k)
        write(folder, range(already)) if already else None
        disk = FailingDisk(k, failure)
        try:
            write(folder, range(already, 5), disk)
        except StoreError as error:
            assert failure.strerror in str(error) and str(folder) in str(error)
            assert not list(folder.glob(".tmp-*"))  # what was half written is gone
        except Killed:
            pass
        else:
            break
        seen.add(disk.operations[-1])
        held = len(open_store(folder))
        assert held in (already, 5)
        assert_holds(folder, range(held))
        write(folder, range(5))  # whatever was left behind, the next run gets there
        assert {key(number) in open_store(folder) for number in range(5)} == {True}
    else:
        pytest.fail("never got through")
    assert seen == {"mkdir", "create", "write", "sync", "rename", "sync_folder", "lock", "read"}
    assert k > 10


def test_a_commit_that_failed_can_be_repeated_by_the_same_writer(tmp_path):
    for k in range(100):
        disk = FailingDisk(10**9, OSError(errno.ENOSPC, "No space left on device"))
        writer = StoreWriter(tmp_path / str(k), fingerprint=FINGERPRINT, disk=disk)
        for number in range(3):
            writer.add(key(number), freeze_sample(sample(4 + number, weighted=number % 2 == 1)))
        disk.k = len(disk.operations) + k
        try:
            writer.commit()
        except StoreError:
            disk.k = 10**9
            writer.commit()
            assert_holds(tmp_path / str(k), range(3))
            assert len(list((tmp_path / str(k)).glob("shard-*"))) == 1
        else:
            break
    assert k > 6


@pytest.mark.parametrize(
    ("code", "way_out"), [(errno.EXDEV, "two file systems"), (errno.ENOSPC, "free space"), (errno.ENOLCK, "no locks")]
)
def test_errors_of_the_disk_say_the_way_out(tmp_path, code, way_out):
    disk = FailingDisk(4, OSError(code, os.strerror(code)))
    with pytest.raises(StoreError) as caught:
        write(tmp_path, [0], disk)
    assert way_out in caught.value.hint and os.strerror(code) in caught.value.message


def test_an_unwritable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"(?s)file.*data\.store"):
        StoreWriter(tmp_path / "file" / "store", fingerprint=FINGERPRINT)


def add_one_by_one(folder, numbers, together):
    together.wait(timeout=HANG_SECONDS)
    for number in numbers:
        write(folder, [number])


def test_two_processes_may_write_the_same_store(tmp_path):
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(2)
    shares = [range(25), range(15, 40)]
    processes = [context.Process(target=add_one_by_one, args=(tmp_path, share, together)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = open_store(tmp_path)
    store.verify()
    for number in range(40):
        assert_equal(store[store.index_of(key(number))], sample(4 + number, weighted=number % 2 == 1))


def test_control_without_the_lock_a_commit_would_be_lost(tmp_path):
    """The lock matters: a manifest written from an old reading forgets what came in between."""

    class Interloper(Disk):
        def locked(self, path):
            write(tmp_path, [1])  # another process commits just before we hold the lock
            return super().locked(path)

    write(tmp_path, [0], Interloper())
    assert_holds(tmp_path, [1, 0])


def test_payloads_of_odd_lengths_stay_aligned():
    odd = [freeze_sample(sample(n, weighted=True)) for n in range(1, 40)]
    assert all(len(one.payload) % 4 == 0 for one in odd)
    shard = build_shard([key(n) for n in range(len(odd))], odd)
    assert shard.entry.size == sum(map(len, shard.chunks()))
    assert shard.entry.keys_start % 8 == 0


def test_a_store_that_is_deleted_while_it_is_in_use_is_named(tmp_path):
    """By those who have it open and ask what is new, and by those who open it only now, as a late worker does."""
    write(tmp_path / "store", range(3))
    early = open_store(tmp_path / "store")
    rebuild, parts = early.__reduce__()  # as for another process
    early[0]
    shutil.rmtree(tmp_path / "store")
    late = open_store(tmp_path / "store")
    asked = [early.refresh, lambda: late[2], lambda: late.have_media(np.array([2])), lambda: rebuild(*parts)]
    for ask in asked:
        with pytest.raises(StoreError, match="the store is gone") as caught:
            ask()
        assert str(tmp_path / "store") in caught.value.message and caught.value.hint
    assert early[0].input_ids.tolist() == sample(4).input_ids.tolist(), "what is mapped stays readable"


def test_a_number_that_no_commit_has_is_our_own_mistake(tmp_path):
    """Control: the store is there, so nobody is told that it is gone."""
    write(tmp_path, range(3))
    with pytest.raises(IndexError):
        open_store(tmp_path)[3]
