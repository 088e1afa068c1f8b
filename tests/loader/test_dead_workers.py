"""Workers that die or hang, and trainers that are killed: told at once, with the rows, and nothing is left behind.

Faults are real. Those inside a worker come from a ``sitecustomize`` that its Python finds on the path of this one.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stored_rows import add_samples, is_running, plan_rows, reader_of, uses_shared_memory

from luthier.errors import LoaderError, StoreError
from luthier.loader import prefetch
from luthier.loader.prefetch import iterate
from luthier.loader.worker import SharedArrays
from luthier.store import SampleStore
from tests.conftest import HANG_SECONDS, children

FAULT = """
import ctypes, os, time
from luthier.store import SampleStore
real = SampleStore.read
def read(self, index, address):
    if index == {sample}:
        {act}
    return real(self, index, address)
SampleStore.read = read
"""
FAULTS = {
    "exit": ("os._exit(7)", "ended with exit code 7"),
    "segv": ("ctypes.string_at(0)", "was ended by SIGSEGV"),
    "kill": ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    "loop": ("[None for _ in iter(int, 1)]", r"has not answered for .*: it runs"),
    "wait": ("time.sleep(1000)", r"has not answered for .*: it waits for something"),
    "stop": ("os.kill(os.getpid(), 19)", r"has not answered for .*: it was stopped"),
}


def all_have_ended(pids: list[int]) -> bool:
    """Whether none of these processes runs any more, within five seconds."""
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    return add_samples(tmp_path / "store", 0, 400)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_worker_is_told_within_five_seconds_with_its_rows(
    store: SampleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    act, told = FAULTS[fault]
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(sample=42, act=act))
    monkeypatch.syspath_prepend(tmp_path)
    batches = iterate(reader_of(store), plan_rows(store), num_workers=2)
    num_given = 0
    with pytest.raises(LoaderError, match=told) as caught:
        for _ in batches:
            num_given += 1
            last = time.monotonic()
    assert time.monotonic() - last < 5
    assert num_given <= 10  # samples 0 to 39
    assert "rows.jsonl:41, rows.jsonl:42, rows.jsonl:43, rows.jsonl:44" in str(caught.value)
    assert [address.row for address in caught.value.rows[:4]] == [41, 42, 43, 44]
    assert str(caught.value.pid) in str(caught.value)
    assert not children()


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["in memory", "none"])
def test_workers_start_where_errors_are_written_to_no_file(
    store: SampleStore, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)  # as in a notebook, or under contextlib.redirect_stderr
    assert len(list(iterate(reader_of(store), plan_rows(store), num_workers=2))) == 100


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGSTOP"])
def test_a_worker_that_is_killed_from_outside_is_told(store: SampleStore, name: str) -> None:
    batches = iterate(reader_of(store), plan_rows(store), num_workers=2, patience=2.0)
    next(batches)
    victim = min(children())
    os.kill(victim, signal.Signals[name])
    begun = time.monotonic()
    with pytest.raises(LoaderError, match=str(victim)):
        list(batches)
    assert time.monotonic() - begun < 5
    assert not children()


def test_control_workers_that_are_let_alone_finish(store: SampleStore) -> None:
    assert len(list(iterate(reader_of(store), plan_rows(store), num_workers=2))) == 100


def test_signals_that_are_the_trainers_to_answer_do_not_end_workers(store: SampleStore) -> None:
    batches = iterate(reader_of(store), plan_rows(store), num_workers=2)
    next(batches)
    for pid in children():
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert len(list(batches)) == 99


@pytest.mark.parametrize("end", ["close", "raise", "delete"])
def test_nothing_is_left_however_it_ends(store: SampleStore, end: str) -> None:
    used_before = uses_shared_memory("self")  # by the locks of other tests, perhaps
    batches = iterate(reader_of(store), plan_rows(store), num_workers=2)
    next(batches)
    workers = children()
    assert len(workers) == 2
    assert not any(map(uses_shared_memory, workers))  # so that nothing can be left there
    assert uses_shared_memory("self") == used_before
    if end == "close":
        batches.close()
    elif end == "raise":
        with pytest.raises(ZeroDivisionError):
            batches.throw(ZeroDivisionError())
    else:
        del batches
    assert not any(map(is_running, workers)) and not children()


TRAINER = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from stored_rows import FINGERPRINT, SampleStore, plan_rows, reader_of
from tests.conftest import children
from luthier.loader.prefetch import iterate
store = SampleStore.open(Path({folder!r}), fingerprint=FINGERPRINT)
batches = iterate(reader_of(store), plan_rows(store), num_workers=2)
next(batches)
print(*children(), flush=True)
{then}
"""


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_a_trainer_that_is_killed(
    store: SampleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    if busy:  # in an endless loop when it happens, so that it reads nothing from its socket
        (tmp_path / "sitecustomize.py").write_text(FAULT.format(sample=6, act="[None for _ in iter(int, 1)]"))
        path.insert(0, str(tmp_path))
    script = TRAINER.format(path=path, folder=str(store.folder), then="time.sleep(1000)")
    # no `if __name__ == "__main__"`: workers do not run the user's script
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2 and all(map(is_running, workers))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert all_have_ended(workers)


def test_control_shared_memory_that_is_in_use_is_seen() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm"):
        assert uses_shared_memory("self")


def test_a_script_that_ends_in_the_middle_leaves_no_worker(store: SampleStore) -> None:
    script = TRAINER.format(path=[str(Path(__file__).parent)], folder=str(store.folder), then="sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert all_have_ended([int(pid) for pid in done.stdout.split()])


def test_a_store_that_is_deleted_before_the_workers_open_it_is_named(store: SampleStore) -> None:
    planned = plan_rows(store)
    shutil.rmtree(store.folder)
    began = time.monotonic()
    with pytest.raises(StoreError, match="the store is gone") as caught:
        list(iterate(reader_of(store), planned, num_workers=1))
    assert caught.value.hint and time.monotonic() - began < 60


@pytest.mark.parametrize(("has_media", "silence", "used", "is_stuck"), [
    (False, 5.0, 2.0, True), (False, 5.0, 0.5, False),  # it was given no time
    (True, 59.0, 50.0, False), (True, 61.0, 12.0, False),  # it loads a processor on a busy machine
    (True, 61.0, 40.0, True), (True, 121.0, 12.0, True),
])  # fmt: skip
def test_a_worker_is_stuck_by_the_time_it_was_given(
    monkeypatch: pytest.MonkeyPatch, has_media: bool, silence: float, used: float, is_stuck: bool
) -> None:
    monkeypatch.setattr(prefetch, "_scheduling", lambda pid: ("R", used))
    here, there = socket.socketpair()
    with here, there:
        worker = prefetch.WorkerProcess(cast(Any, SimpleNamespace(pid=1)), here, SharedArrays.create(0))
        worker.is_ready, worker.has_media = True, has_media
        assert worker.is_stuck(silence) == is_stuck
