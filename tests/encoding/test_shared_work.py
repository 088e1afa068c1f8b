"""Work that processes share: each unit is done, whoever dies; nothing that an earlier process left is believed."""

import errno
import os
import shutil
import threading
import time
from contextlib import closing

import pytest

from luthier.errors import StoreError
from luthier.preparation import sharing
from luthier.preparation.sharing import SharedWork
from luthier.store.disk import Disk


@pytest.fixture(autouse=True)
def _look_always(monkeypatch):
    monkeypatch.setattr(sharing, "POLL", 0.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "work"


def join(folder, num_units=4, **options):
    return SharedWork(folder, num_units, **options)


def payload(unit):
    return f"unit {unit}".encode()


def die(work):
    """What the system does when a process ends: its locks are free, and nothing else happens."""
    for lock in work._mine.values():
        lock.release()
    work._users.close()


def do(work):
    def those(units):
        for unit in units:
            work.done(unit, payload(unit))

    return those


def do_all(work):
    do(work)(work.take())
    return list(work.in_order(do(work)))


def all_of(num_units):
    return [payload(unit) for unit in range(num_units)]


def test_units_are_taken_in_order_each_once(folder):
    with closing(join(folder)) as one, closing(join(folder)) as two:
        mine, others = one.take(), two.take()
        assert [next(mine), next(others), next(others), next(mine)] == [0, 1, 2, 3]
        assert list(mine) == list(others) == list(one.take()) == []


def test_results_are_what_was_published_and_none_before(folder):
    with closing(join(folder)) as one, closing(join(folder)) as two:
        assert one.result(2) is None
        two.done(2, b"\0" * 70_000)
        assert one.result(2) == b"\0" * 70_000
        two.done(2, b"")
        assert one.result(2) == b""


def test_results_come_in_order_while_one_waits_and_works(folder):
    with closing(join(folder, 9)) as one:
        assert list(one.in_order(do(one))) == all_of(9)
        assert list(one.take()) == []


def test_work_of_no_units_is_done(folder):
    with closing(join(folder, 0)) as one:
        assert list(one.take()) == list(one.in_order(lambda units: pytest.fail("there is nothing to do"))) == []


def test_units_of_the_dead_are_done_by_those_who_wait_for_them(folder):
    one, two, three = (join(folder, 9) for _ in range(3))
    taken = [next(units) for units in (one.take(), two.take(), three.take(), two.take())]
    assert taken == [0, 1, 2, 3]
    two.done(3, payload(3))
    die(two)
    die(three)
    one.done(0, payload(0))
    done = []

    def those(units):
        for unit in units:
            done.append(unit)
            one.done(unit, payload(unit))

    assert list(one.in_order(those)) == all_of(9)
    assert done == [1, 2, 4, 5, 6, 7, 8]


def test_control_units_of_the_living_are_left_to_them(folder):
    with closing(join(folder, 2)) as one, closing(join(folder, 2)) as two:
        mine = one.take()
        assert next(mine) == 0 and list(two.take()) == [1] and list(mine) == []
        assert list(one.take()) == list(two.take()) == []


def test_a_unit_whose_doer_finishes_late_is_waited_for(folder):
    with closing(join(folder, 2)) as one, closing(join(folder, 2)) as two:
        slow = next(two.take())
        finish = threading.Timer(0.2, lambda: two.done(slow, b"late"))
        finish.start()
        assert list(one.in_order(do(one))) == [b"late", payload(1)]
        finish.join()


def test_what_a_process_held_when_it_left_is_for_others(folder):
    with closing(join(folder)) as one:
        two = join(folder)
        assert next(one.take()) == 0 and next(two.take()) == 1
        two.close()
        assert list(one.take()) == [1, 2, 3]


def test_the_wait_for_a_unit_has_a_bound_and_names_whom_it_waits_for(folder, monkeypatch):
    with closing(join(folder, 3)) as one, closing(join(folder, 3)) as two:
        assert next(two.take()) == 0
        monkeypatch.setattr(sharing, "PATIENCE", 0.2)
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            list(one.in_order(do(one)))
        assert 0.2 <= time.monotonic() - began < 20
        assert f"process {os.getpid()} on " in caught.value.message and "part 1 of 3" in caught.value.message
        two.done(0, payload(0))
        assert list(one.in_order(do(one))) == all_of(3)  # control: within the bound


# ------------------------------------------------------------------------------------- what others left behind


def test_work_that_all_have_left_leaves_nothing_behind(folder):
    with closing(join(folder)) as one:
        do_all(one)
    assert list(folder.parent.iterdir()) == []
    with closing(join(folder)) as two:
        assert two.result(0) is None and next(two.take()) == 0


def test_results_of_work_in_which_all_died_are_not_believed(folder):
    one, two = join(folder), join(folder)
    one.done(next(one.take()), b"of old rows")
    die(one)
    die(two)
    with closing(join(folder)) as three:
        assert three.result(0) is None
        assert do_all(three) == all_of(4)
    assert list(folder.parent.iterdir()) == []


def test_a_process_that_comes_while_another_works_sees_what_was_done(folder):
    with closing(join(folder)) as one:
        one.done(next(one.take()), payload(0))
        with closing(join(folder)) as two:
            assert two.result(0) == payload(0)
            assert next(two.take()) == 1
        assert one.result(0) == payload(0)  # it left, but not as the last


@pytest.mark.parametrize("after", range(5))
def test_work_whose_results_are_removed_by_another_machine_goes_on(folder, after):
    """As where each machine has locks of its own, so that each finds nobody else at work."""
    with closing(join(folder)) as one:
        for number, unit in enumerate(one.take()):
            if number == after:
                shutil.rmtree(folder)
            one.done(unit, payload(unit))
        if after == 4:
            shutil.rmtree(folder)
        assert list(one.in_order(do(one))) == all_of(4)


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: whole[:40] + b"x"])
def test_a_damaged_result_is_made_again(folder, damage):
    with closing(join(folder)) as one, closing(join(folder)) as two:
        do_all(one)
        path = folder / "units" / "1"
        path.write_bytes(damage(path.read_bytes()))
        assert two.result(1) is None
        assert list(two.in_order(do(two))) == all_of(4)
        assert one.result(1) == payload(1)


def test_a_result_that_cannot_be_read_back_is_told(folder):
    with closing(join(folder)) as one, pytest.raises(StoreError, match="cannot be read back"):
        list(one.in_order(lambda units: next(units)))


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ENOLCK])
def test_after_a_failure_at_any_operation_the_work_goes_on(tmp_path, code):
    seen = set()
    for k in range(1000):
        disk = FailingDisk(k, OSError(code, os.strerror(code)))
        folder = tmp_path / str(k) / "work"
        with closing(join(folder)) as other:
            assert next(other.take()) == 0
            work = again(lambda disk=disk, folder=folder: join(folder, disk=disk))
            again(lambda work=work: do(work)(work.take()))
            other.done(0, payload(0))
            assert again(lambda work=work: list(work.in_order(do(work)))) == all_of(4)
            work.close()
        if len(disk.operations) <= k:
            break
        seen.add(disk.operations[k])
    assert seen >= {"mkdir", "create", "write", "lock", "rename", "read", "list", "stat"}
    assert k > 20


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_process_that_is_killed_at_any_operation_is_replaced(tmp_path, is_alone):
    for k in range(1000):
        disk = FailingDisk(k, Killed())
        folder = tmp_path / str(k) / "work"
        victims = []
        other = None if is_alone else join(folder)
        try:
            victims.append(join(folder, disk=disk))
            assert do_all(victims[0]) == all_of(4)
            victims[0].close()
        except Killed as killed:
            killed.__traceback__ = None  # which would keep what the victim holds
            for victim in victims:
                die(victim)
        if other is not None:
            assert do_all(other) == all_of(4)
            other.close()
        with closing(join(folder)) as later:
            assert later.result(0) is None
            assert do_all(later) == all_of(4)
        assert not folder.exists()
        if len(disk.operations) <= k:
            break
    assert k > 20
