"""Work that processes share: each unit is done, whoever dies; nothing of an earlier session is believed."""

import errno
import os
import time

import pytest

from luthier.errors import StoreError
from luthier.store import work_list
from luthier.store.disk import Disk
from luthier.store.work_list import Participant, WorkList, anybody_at_work, living


@pytest.fixture(autouse=True)
def _look_always(monkeypatch):
    monkeypatch.setattr(work_list, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(work_list, "POLL", 0.0)


def join(folder, num_units=4, **options):
    return WorkList(folder, num_units, heartbeat=False, **options)


def payload(unit):
    return f"unit {unit}".encode()


def die(work):
    """What is left of a participant whose process ended: its file names a process that is no more."""
    path = next(work._folder.glob(f"session-*/*/live/{work._me.name}"))
    path.write_bytes(Participant(name=work._me.name, pid=work._me.pid, started="long ago").to_bytes())


def do_all(work):
    def wait(seconds):
        assert seconds < 20
        work.beat()
        unit = work.claim()
        if unit is not None:
            work.done(unit, payload(unit))

    return list(work.in_order(wait))


def test_units_are_claimed_in_order_each_once(tmp_path):
    with join(tmp_path) as one, join(tmp_path) as two:
        assert [one.claim(), two.claim(), two.claim(), one.claim(), one.claim(), two.claim()] == [
            0,
            1,
            2,
            3,
            None,
            None,
        ]


def test_results_are_what_was_published_and_none_before(tmp_path):
    with join(tmp_path) as one, join(tmp_path) as two:
        assert one.result(2) is None
        assert two.done(2, b"\0" * 70_000)
        assert one.result(2) == b"\0" * 70_000
        assert two.done(2, b"")  # a slow one comes later: no harm
        assert one.result(2) == b""


def test_results_come_in_order_while_one_waits_and_works(tmp_path):
    with join(tmp_path, 9) as one:
        assert do_all(one) == [payload(unit) for unit in range(9)]
        assert one.claim() is None


def test_a_list_of_no_units_is_done(tmp_path):
    with join(tmp_path, 0) as one:
        assert one.claim() is None and list(one.in_order(lambda seconds: pytest.fail("waited"))) == []


def test_units_of_the_dead_come_first(tmp_path):
    one, two, three = (join(tmp_path, 9) for _ in range(3))
    assert [one.claim(), two.claim(), two.claim(), two.claim()] == [0, 1, 2, 3]
    two.done(2, payload(2))
    die(two)
    assert [one.claim(), three.claim(), one.claim()] == [1, 3, 4]
    die(three)
    assert one.claim() == 3  # a claim that was taken over is taken over again
    assert one.claim() == 5


def test_control_units_of_the_living_are_left_to_them(tmp_path):
    one, two = join(tmp_path, 2), join(tmp_path, 2)
    assert [one.claim(), two.claim(), one.claim(), two.claim()] == [0, 1, None, None]


def test_what_a_participant_held_when_it_left_is_for_others(tmp_path):
    one, two = join(tmp_path), join(tmp_path)
    assert [one.claim(), two.claim()] == [0, 1]
    two.close()
    assert one.claim() == 1


def test_who_shows_no_sign_of_life_is_dead_after_a_while(tmp_path):
    one, two = join(tmp_path, stale_after=0.3), join(tmp_path, stale_after=0.3)
    assert [one.claim(), two.claim()] == [0, 1]
    os.utime(one._beat_file, ns=(0, 0))
    assert two.claim() == 0
    assert one.done(0, b"late")  # it was only slow
    assert two.result(0) == b"late"
    one.beat()
    assert one.claim() == 2


def test_the_heartbeat_keeps_us_alive(tmp_path):
    with WorkList(tmp_path, 3, stale_after=0.3) as one, join(tmp_path, 3) as two:
        assert one.claim() == 0
        os.utime(one._beat_file, ns=(0, 0))  # as if it had been silent for long
        for _ in range(2_000):
            if one._beat_file.stat().st_mtime_ns:
                break
            time.sleep(0.01)
        assert two.claim() == 1
    assert not one._thread.is_alive()


def test_of_processes_on_other_nodes_only_time_tells():
    here = Participant()
    assert not here.is_gone
    assert Participant(pid=here.pid, started="another start").is_gone
    assert Participant(pid=2**22 + 1, started="1").is_gone
    assert not Participant(host="another node", pid=2**22 + 1, started="1").is_gone


def test_a_zombie_is_gone():
    pid = os.posix_spawn("/bin/true", ["true"], {})
    started = work_list._start_of(os.getpid())
    assert started is not None
    for _ in range(500):
        if work_list._start_of(pid) is None:
            break
        time.sleep(0.01)
    else:
        pytest.fail("a zombie counts as alive")
    os.waitpid(pid, 0)


def test_living_compares_times_of_one_clock(tmp_path):
    for name, age in (("young", 1), ("old", 100)):
        (tmp_path / name).write_bytes(Participant(name=name, host="elsewhere", pid=1, started="1").to_bytes())
        os.utime(tmp_path / name, ns=(0, (10**4 - age) * 10**9))
    assert living(tmp_path, now=10**13, stale_after=30, disk=Disk()) == {"young"}


# -------------------------------------------------------------------------------------------------------- sessions


def test_a_session_that_was_closed_leaves_nothing_behind(tmp_path):
    with join(tmp_path) as one:
        do_all(one)
    assert list(tmp_path.iterdir()) == []
    with join(tmp_path) as two:
        assert two.result(0) is None and two.claim() == 0


def test_results_of_a_session_in_which_all_died_are_not_believed(tmp_path):
    one, two = join(tmp_path), join(tmp_path)
    one.done(one.claim(), b"of old data")
    die(one)
    die(two)
    with join(tmp_path) as three:
        assert three.result(0) is None
        assert do_all(three) == [payload(unit) for unit in range(4)]
    assert list(tmp_path.iterdir()) == []


def test_who_comes_while_somebody_works_sees_what_was_done(tmp_path):
    with join(tmp_path) as one:
        one.done(one.claim(), payload(0))
        with join(tmp_path) as two:
            assert two.result(0) == payload(0)
            assert two.claim() == 1
        assert one.result(0) == payload(0)  # it left, but not as the last


def test_a_result_of_a_session_that_is_over_does_not_get_into_the_next(tmp_path):
    slow = join(tmp_path)
    assert slow.claim() == 0
    die(slow)
    with join(tmp_path) as other:
        assert not slow.done(0, b"of old data")
        assert other.result(0) is None
        assert slow.claim() == 0 and other.claim() == 1  # it takes part in the new session
        slow.close()
        assert other.claim() == 0


def test_who_is_thrown_out_by_the_last_to_leave_begins_again(tmp_path):
    one = join(tmp_path)
    one.done(one.claim(), payload(0))
    one._take_away(one._session.parent)
    one.beat()
    assert do_all(one) == [payload(unit) for unit in range(4)]


def test_all_must_mean_the_same_work(tmp_path):
    with join(tmp_path, 4), pytest.raises(StoreError, match="4 units, this process wants 5"):
        join(tmp_path, 5)


def test_a_damaged_result_is_found(tmp_path):
    with join(tmp_path) as one:
        one.done(1, b"twelve bytes")
        (path,) = tmp_path.glob("session-*/*/results/1")
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(StoreError, match="damaged"):
                one.result(1)
        for stop in range(len(whole)):
            path.write_bytes(whole[:stop])
            with pytest.raises(StoreError, match="damaged"):
                one.result(1)
        path.write_bytes(whole)
        assert one.result(1) == b"twelve bytes"


def test_whether_anybody_is_at_work_can_be_asked(tmp_path):
    assert not anybody_at_work(tmp_path, now=time.time_ns())
    one = join(tmp_path)
    assert anybody_at_work(tmp_path, now=time.time_ns())
    assert not anybody_at_work(tmp_path, now=time.time_ns() + 60 * 10**9)
    die(one)
    assert not anybody_at_work(tmp_path, now=time.time_ns())


# ---------------------------------------------------------------------------------------------------------- faults


class Killed(BaseException):
    """Stands for SIGKILL: nothing may run afterwards that mends anything."""


class FailingDisk(Disk):
    """Fails at the ``k``-th operation, and works again then."""

    def __init__(self, k, failure):
        self.k, self.failure, self.operations = k, failure, []

    def before(self, operation, path):
        self.operations.append(operation)
        if len(self.operations) == self.k + 1:
            raise self.failure


def again(do):
    """What a caller does that goes on after an error."""
    try:
        return do()
    except StoreError as error:
        assert error.__cause__ is not None
        return do()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_after_a_failure_at_any_operation_the_work_goes_on(tmp_path, code):
    seen = set()
    for k in range(1000):
        disk = FailingDisk(k, OSError(code, os.strerror(code)))
        folder = tmp_path / str(k)
        with join(folder) as other:
            other.claim()
            work = again(lambda disk=disk, folder=folder: join(folder, disk=disk))
            while (unit := again(work.claim)) is not None:
                assert again(lambda work=work, unit=unit: work.done(unit, payload(unit)))
            other.done(0, payload(0))
            assert [again(lambda work=work, unit=unit: work.result(unit)) for unit in range(4)] == [
                payload(unit) for unit in range(4)
            ]
            again(work.close)
        assert [path for path in folder.iterdir() if path.name.startswith("session")] == []
        if len(disk.operations) <= k:
            break
        seen.add(disk.operations[k])
    assert seen >= {"mkdir", "create", "write", "link", "rename", "read", "list", "stat", "touch", "remove"}
    assert k > 50


def test_whoever_is_killed_at_any_operation_is_replaced(tmp_path):
    for k in range(1000):
        disk = FailingDisk(k, Killed())
        folder = tmp_path / str(k)
        with join(folder) as other:
            victim = None
            try:
                victim = join(folder, disk=disk)
                while (unit := victim.claim()) is not None:
                    victim.done(unit, payload(unit))
                victim.close()
            except Killed:
                for path in folder.glob("session-*/*/live/*"):  # as after the end of its process
                    if path.name != other._me.name:
                        path.write_bytes(Participant(name=path.name, pid=os.getpid(), started="before").to_bytes())
            assert do_all(other) == [payload(unit) for unit in range(4)]
        with join(folder) as later:
            assert later.result(0) is None
            assert do_all(later) == [payload(unit) for unit in range(4)]
        if len(disk.operations) <= k:
            break
    assert k > 50


def test_whoever_is_killed_as_the_first_to_come_leaves_nothing_that_hurts(tmp_path):
    for k in range(100):
        disk = FailingDisk(k, Killed())
        folder = tmp_path / str(k)
        try:
            join(folder, disk=disk)
        except Killed:
            for path in folder.glob("session-*/*/live/*"):
                path.write_bytes(Participant(name=path.name, pid=os.getpid(), started="before").to_bytes())
        else:
            break
        with join(folder) as later:
            assert do_all(later) == [payload(unit) for unit in range(4)]
    assert k > 10
