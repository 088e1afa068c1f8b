"""What the disk does where file systems lack something."""

import errno
import fcntl
import os
import threading

import pytest

from luthier.errors import StoreError
from luthier.store import disk as disk_module
from luthier.store.disk import Disk, Hold, only_user
from luthier.store.shard import EncodedSample
from luthier.store.store import SampleStore, StoreWriter
from luthier.store.work_list import WorkList

ONE = EncodedSample(
    payload=bytes(8), num_tokens=1, has_weight=False, branches=((-1, 1),), leaf_lengths=(1,), leaf_targets=(0,)
)


def lacks(code):
    def call(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.ENOTSUP])
def test_a_file_is_created_once_with_and_without_hard_links(tmp_path, monkeypatch, code):
    if code is not None:
        monkeypatch.setattr(disk_module.os, "link", lacks(code))
    disk = Disk()
    wins = []

    def race(number):
        for place in range(30):
            if disk.create_once(tmp_path / str(place), str(number).encode()):
                wins.append((place, number))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place for place, _ in wins) == list(range(30))
    assert all((tmp_path / str(place)).read_text() == str(number) for place, number in wins)
    assert len(list(tmp_path.iterdir())) == 30
    assert not disk.create_once(tmp_path / "no folder" / "file", b"")


def test_a_link_whose_answer_was_lost_is_ours(tmp_path, monkeypatch):
    link = os.link

    def link_and_fail(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "the server did it, the client asked twice")

    monkeypatch.setattr(disk_module.os, "link", link_and_fail)
    assert Disk().create_once(tmp_path / "file", b"mine")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_work_is_shared_without_hard_links_and_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module.os, "link", lacks(errno.EPERM))
    monkeypatch.setattr(fcntl, "flock", lacks(errno.ENOLCK))
    with WorkList(tmp_path, 2, heartbeat=False) as one, WorkList(tmp_path, 2, heartbeat=False) as two:
        assert [one.claim(), two.claim(), one.claim()] == [0, 1, None]
        assert two.done(1, b"x") and one.result(1) == b"x"


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


def test_a_rename_between_file_systems_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module.os, "replace", lacks(errno.EXDEV))
    with pytest.raises(StoreError, match="cross-device") as caught:
        Disk().publish(tmp_path / "file", [b"x"])
    assert "two file systems" in caught.value.hint and "data.store" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_holds_are_shared_and_end_with_their_objects(tmp_path):
    path = tmp_path / "users"
    one, two = Hold(path), Hold(path)
    for hold in (one, two):
        with only_user(path) as alone:
            assert not alone
        hold.close()
    with only_user(path) as alone:
        assert alone
    assert Hold(tmp_path / "nowhere" / "users", create=False).held is False


def test_who_waits_for_a_store_that_is_removed_holds_the_one_that_follows(tmp_path):
    path = tmp_path / "store" / "users"
    Hold(path).close()
    held = []
    with only_user(path) as alone:
        assert alone
        waiting = threading.Thread(target=lambda: held.append(Hold(path)))
        waiting.start()
        os.rename(tmp_path / "store", tmp_path / "gone")
    waiting.join(10)
    assert path.exists() and held[0].held
    with only_user(path) as alone:
        assert not alone
