"""Run by tests as a program: forks processes that write, kills them at random moments, and looks at what is left.

It is a program of its own so that it can fork: it has no threads, and imports nothing heavy.

    python killed_processes.py store  FOLDER CYCLES WRITERS
    python killed_processes.py work   FOLDER CYCLES WORKERS

Prints one line of JSON: what it saw. Any fault ends it with a traceback.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import filelock  # noqa: F401  the first lock imports it, which would be most of a child's life
import numpy as np

from luthier.preparation.sharing import SharedWork
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import EncodedSample, row_key
from tests.conftest import HANG_SECONDS

FINGERPRINT = "ef" * 32
NUM_UNITS = 400
PARENT = os.getpid()


def key(number: int) -> bytes:
    return row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion="")


def ids_of(number: int) -> np.ndarray:
    return np.arange(number, number + 1 + number % 40, dtype=np.int32)


def encoded(number: int) -> EncodedSample:
    ids = ids_of(number)
    bits = np.packbits(ids % 2 == 0, bitorder="little").tobytes()
    return EncodedSample(
        payload=ids.tobytes() + bits + b"\0" * (-len(bits) % 4),
        num_tokens=len(ids),
        has_weight=False,
        branches=((-1, len(ids)),),
        leaf_lengths=(len(ids),),
        leaf_targets=(int((ids[1:] % 2 == 0).sum()),),
    )


def write_forever(folder: Path, log: int, rng: random.Random) -> None:
    """Commit some rows after another, and say so once they are."""
    while os.getppid() == PARENT:  # it must not outlive what started it
        first = rng.randrange(3000)
        numbers = range(first, first + rng.randrange(1, 60))
        writer = StoreWriter(folder, fingerprint=FINGERPRINT)
        for number in numbers:
            writer.add(key(number), encoded(number))
        writer.commit()
        os.write(log, f"{numbers.start} {numbers.stop}\n".encode())  # one call: whole or not at all


def promise_forever(folder: Path, log: int, rng: random.Random) -> None:
    """The control: says so before it commits. Somebody must notice."""
    while os.getppid() == PARENT:  # it must not outlive what started it
        number = rng.randrange(3000)
        os.write(log, f"{number} {number + 1}\n".encode())
        writer = StoreWriter(folder, fingerprint=FINGERPRINT)
        writer.add(key(number), encoded(number))
        writer.commit()


def work_forever(folder: Path, log: int, rng: random.Random) -> None:
    """Do units until there is a result of each, and stay."""
    work = SharedWork(folder, NUM_UNITS)

    def do(units: Iterator[int]) -> None:
        for unit in units:
            os.write(log, f"{unit}\n".encode())  # one call: whole or not at all
            time.sleep(rng.random() * 0.004)
            work.done(unit, result_of(unit))

    do(work.take())
    for _ in work.in_order(do):
        pass
    while os.getppid() == PARENT:  # it must not outlive what started it
        time.sleep(0.01)


def result_of(unit: int) -> bytes:
    return f"result of {unit} ".encode() * (unit + 1)


RUNNING: set[int] = set()


def fork(do: object, folder: Path, log: int, seed: int) -> int:
    pid = os.fork()
    if pid:
        RUNNING.add(pid)
    if pid == 0:
        try:
            do(folder, log, random.Random(seed))  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - the edge of a process
            import traceback

            traceback.print_exc()
        finally:
            os._exit(7)  # only a fault gets here
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    RUNNING.discard(pid)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"a process ended by itself: {status}"


def said(log: Path) -> set[int]:
    lines = log.read_text().splitlines()
    return {number for line in lines for number in range(*map(int, line.split()))}


def check(committed: set[int], store: SampleStore, rng: random.Random) -> SampleStore:
    """All that was committed is there, and what is there is right; numbers stay."""
    before = len(store)
    earlier = store.keys
    store = store.refresh()
    assert (store.keys[:before] == earlier).all()
    numbers = sorted(committed)
    if numbers:
        wanted = np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)
        found = store.lookup(wanted)
        assert (found >= 0).all(), f"{(found < 0).sum()} rows that were committed are lost"
        for number in rng.sample(list(zip(numbers, found.tolist(), strict=True)), min(50, len(numbers))):
            assert store[number[1]].input_ids.tolist() == ids_of(number[0]).tolist()
    return store


def kill_writers(folder: Path, cycles: int, writers: int, *, do: object = write_forever) -> dict[str, int]:
    log = folder / "log"
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    store = SampleStore.open(folder / "store", fingerprint=FINGERPRINT)
    rng = random.Random(1)
    running = [fork(do, folder / "store", descriptor, seed) for seed in range(writers)]
    for cycle in range(cycles):
        time.sleep(rng.random() * 0.08)
        place = rng.randrange(writers)
        kill(running[place])
        store = check(said(log), store, rng)
        running[place] = fork(do, folder / "store", descriptor, writers + cycle)
    for pid in running:
        kill(pid)
    store = check(said(log), store, rng)
    store.verify()
    left = [path.name for path in (folder / "store").glob(".tmp-*")]
    return {
        "cycles": cycles,
        "shards": len(store.shards),
        "committed": len(said(log)),
        "unfinished": len(left),
        "repeated": len(store) - len({row.tobytes() for row in store.keys}),
    }


def kill_workers(folder: Path, cycles: int, workers: int) -> dict[str, int]:
    log = folder / "log"
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    rng = random.Random(2)
    with closing(SharedWork(folder / "work", NUM_UNITS)) as work:  # takes no unit, so the dead must be replaced
        running = [fork(work_forever, folder / "work", descriptor, seed) for seed in range(workers)]
        for cycle in range(cycles):
            time.sleep(rng.random() * 0.05)
            place = rng.randrange(workers)
            kill(running[place])
            running[place] = fork(work_forever, folder / "work", descriptor, workers + cycle)
        deadline = time.monotonic() + HANG_SECONDS
        while any(work.result(unit) is None for unit in range(NUM_UNITS)):
            assert time.monotonic() < deadline, "a dead process' unit was not taken over"
            time.sleep(0.01)
        assert [work.result(unit) for unit in range(NUM_UNITS)] == list(map(result_of, range(NUM_UNITS)))
        begun = [int(line) for line in log.read_text().splitlines()]
        for pid in running:
            kill(pid)
    assert not (folder / "work").exists()
    return {"cycles": cycles, "units": len(set(begun)), "begun_again": len(begun) - len(set(begun))}


def kill_careless_workers(folder: Path, cycles: int, workers: int) -> dict[str, int]:
    """The control: nobody looks whether another has the unit. Somebody must notice."""
    SharedWork._lock = lambda work, unit: work.result(unit) is None  # type: ignore[method-assign]
    return kill_workers(folder, cycles, workers)


if __name__ == "__main__":
    what, where, cycles, processes = sys.argv[1:]
    run = {
        "store": kill_writers,
        "control": partial(kill_writers, do=promise_forever),
        "work": kill_workers,
        "work-control": kill_careless_workers,
    }[what]
    try:
        print(json.dumps(run(Path(where), int(cycles), int(processes))))
    finally:
        for left in RUNNING:
            os.kill(left, signal.SIGKILL)
