"""What the disk does where file systems lack something."""

import errno
import fcntl
import os
import threading
import time
from contextlib import closing

import pytest

from luthier.errors import StoreError
from luthier.preparation.sharing import SharedWork
from luthier.store import SampleStore, StoreWriter
from luthier.store import disk as disk_module
from luthier.store.disk import Disk
from luthier.store.format import EncodedSample
from luthier.writing import SharedLock, only_user
from tests.conftest import HANG_SECONDS

ONE = EncodedSample(
    payload=bytes(8), num_tokens=1, has_weight=False, branches=((-1, 1),), leaf_lengths=(1,), leaf_targets=(0,)
)


def lacks(code):
    def call(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return call


def test_without_locks_work_is_not_shared_and_it_is_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lacks(errno.ENOLCK))
    with closing(SharedWork(tmp_path / "work", 2)) as work, pytest.raises(StoreError, match="lock") as caught:
        next(work.take())
    assert "no locks" in caught.value.hint


def test_one_of_many_holds_a_lock_and_the_others_are_told_who(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    inside = []

    def hold(number):
        with Disk().locked(path):
            inside.append(number)
            time.sleep(0.002)
            inside.append(number)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside[::2] == inside[1::2] and sorted(inside[::2]) == list(range(6))

    lock = Disk().try_lock(path)
    assert Disk().try_lock(path) is None
    monkeypatch.setattr(disk_module, "LONGEST_LOCK", 0.05)
    with pytest.raises(StoreError) as caught, Disk().locked(path):
        pass
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert f"process {os.getpid()} on " in caught.value.message and "end that process" in caught.value.hint
    lock.release()
    with Disk().locked(path):
        pass


def test_without_locks_a_store_is_read_but_not_written(tmp_path, monkeypatch):
    writer = StoreWriter(tmp_path, fingerprint="a" * 64)
    writer.add(bytes(32), ONE)
    writer.commit()
    monkeypatch.setattr(fcntl, "flock", lacks(errno.ENOLCK))
    assert len(SampleStore.open(tmp_path, fingerprint="a" * 64)) == 1
    writer.add(bytes(31) + b"1", ONE)
    with pytest.raises(StoreError, match="lock") as caught:
        writer.commit()
    assert "no locks" in caught.value.hint
    assert len(SampleStore.open(tmp_path, fingerprint="a" * 64)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_may_only_be_read_is_read(tmp_path):
    writer = StoreWriter(tmp_path, fingerprint="a" * 64)
    writer.add(bytes(32), ONE)
    writer.commit()
    tmp_path.chmod(0o555)
    try:
        assert len(SampleStore.open(tmp_path, fingerprint="a" * 64)) == 1
    finally:
        tmp_path.chmod(0o755)


def test_a_folder_that_others_remove_while_it_is_made_is_made_and_locked(tmp_path, monkeypatch):
    """As when a process takes part in shared work while the last of the others leaves."""
    opened, made, failures = os.open, os.mkdir, []

    def fails_twice(call, code):
        def do(path, *arguments, **options):
            if str(path).startswith(str(tmp_path)) and failures.count(code) < 2:
                failures.append(code)
                raise OSError(code, os.strerror(code))
            return call(path, *arguments, **options)

        return do

    monkeypatch.setattr(os, "mkdir", fails_twice(made, errno.EEXIST))
    Disk().make_folder(tmp_path / "work")
    assert (tmp_path / "work").is_dir() and failures == [errno.EEXIST] * 2
    monkeypatch.setattr(os, "open", fails_twice(opened, errno.ENOENT))
    users = SharedLock(tmp_path / "work" / "users")
    assert users.held and failures[2:] == [errno.ENOENT] * 2
    with only_user(tmp_path / "work" / "users") as alone:
        assert not alone
    with pytest.raises(StoreError, match="File exists"):  # control: what is in the way is no folder
        Disk().make_folder(tmp_path / "work" / "users")


def test_a_rename_between_file_systems_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module.os, "replace", lacks(errno.EXDEV))
    with pytest.raises(StoreError, match="cross-device") as caught:
        Disk().publish(tmp_path / "file", [b"x"])
    assert "two file systems" in caught.value.hint and "data.store" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_shared_locks_end_with_their_objects(tmp_path):
    path = tmp_path / "users"
    one, two = SharedLock(path), SharedLock(path)
    for hold in (one, two):
        with only_user(path) as alone:
            assert not alone
        hold.close()
    with only_user(path) as alone:
        assert alone
    with only_user(path), pytest.raises(TimeoutError, match=f"process {os.getpid()} on "):
        SharedLock(path, seconds=0.05)
    assert SharedLock(tmp_path / "nowhere" / "users", create=False).held is False


def test_who_waits_for_a_store_that_is_removed_holds_the_one_that_follows(tmp_path):
    path = tmp_path / "store" / "users"
    SharedLock(path).close()
    held = []
    with only_user(path) as alone:
        assert alone
        waiting = threading.Thread(target=lambda: held.append(SharedLock(path)))
        waiting.start()
        os.rename(tmp_path / "store", tmp_path / "gone")
    waiting.join(HANG_SECONDS)
    assert path.exists() and held[0].held
    with only_user(path) as alone:
        assert not alone
