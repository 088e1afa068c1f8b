"""Batches ahead of time: worker processes read what is planned, in order, and are looked after.

Why not torch's DataLoader: it asks its sampler for the next batch before it hands over one that is ready, so a plan
that waits for data would hold up training; its workers load torch and run the user's `__main__`; and a dead one is
reported without its rows, a stuck one not at all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Self

from luthier import errors
from luthier.collation import MediaInputs
from luthier.errors import LoaderError, UserError
from luthier.loader.reader import BatchReader, PlannedMicroBatch, SegmentsInMemory
from luthier.loader.worker import (
    Answer,
    Done,
    Failed,
    Frames,
    MediaSetup,
    Ready,
    Setup,
    SharedArrays,
    frame,
    grid_of,
    receive,
    work_of,
)
from luthier.media import FeatureFiles
from luthier.records import Address, Batch
from luthier.store import SampleStore

# --------------------------------------------------------------------------------------------------------------------
# A worker process as the trainer sees it.


MAX_ROWS_NAMED = 8
CPU_PATIENCE = 1.0  # processor seconds for one micro-batch, which takes milliseconds
MEDIA_CPU_PATIENCE = 30.0  # the same with media, whose processor is loaded first: 10, and a minute on a busy machine
MEDIA_PATIENCE = 60.0  # seconds, of any kind, with media: a processor is loaded first, then long videos are decoded
LONGEST_PATIENCE = 120.0  # seconds, for a store to be opened and for disks to answer
_STATES = {"R": "runs", "D": "waits for a disk", "T": "was stopped", "t": "is held by a debugger"}
# The trainer's to answer, though the whole group gets them.
_KEPT_FROM_WORKERS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def _words_to() -> int:
    """Where workers print: with the errors of this process, also where a notebook or a test has put an object without a
    file in their place."""
    with contextlib.suppress(AttributeError, OSError):  # None in a process without a terminal; a stream in memory
        return sys.stderr.fileno()
    with contextlib.suppress(OSError):
        os.fstat(2)
        return 2
    return subprocess.DEVNULL


class WorkerProcess:
    """One process that reads micro-batches, in the order in which they are given to it.

    held     given, and not yet answered; it is at work on the first
    answers  what it said, in order, and nobody has taken yet
    slots    where it puts large arrays
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, slots: SharedArrays) -> None:
        """Use `WorkerProcess.start`."""
        self.held: deque[PlannedMicroBatch] = deque()
        self.answers: deque[tuple[PlannedMicroBatch, Answer]] = deque()
        self.num_heard = 0  # times that something came from it
        self.is_ready = False
        self.connection = connection
        self.slots = slots
        self._process = process
        self._frames = Frames()
        self.has_media = False
        self._cpu_seconds = 0.0  # that it had used when something came from it last

    @classmethod
    def start(cls, reader: BatchReader, *, num_slots: int) -> Self:
        """Start a process with this reader's store and settings. ``num_slots`` as in `slots`, of use for media only."""
        media = None if reader.media is None else _sendable(reader.media)
        slots = SharedArrays.create(0 if media is None else num_slots)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "luthier.loader.worker", str(theirs.fileno())]
        # what this process imports from, the worker does; and it is one of many on the machine
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_FROM_WORKERS)  # a new process inherits the mask
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno(), *slots.descriptors],
                stdin=subprocess.DEVNULL,
                stdout=_words_to(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = cls(process, ours, slots)
        worker.has_media = media is not None
        store = reader.store
        assert isinstance(store, SampleStore), "segments in memory are read in this process"
        setup = Setup(
            folder=str(store.folder),
            fingerprint=store.fingerprint,
            how=reader.how,
            parent=os.getpid(),
            shared=reader.shared,
            media=media,
            slots=slots.descriptors,
        )
        with contextlib.suppress(OSError):  # it died already, which the first look at it will tell
            ours.sendall(frame(setup))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, planned: PlannedMicroBatch) -> None:
        """Give it a micro-batch. May wait until a worker that is behind has taken in what it was given before."""
        self.held.append(planned)
        with contextlib.suppress(OSError):
            self.connection.sendall(frame(work_of(planned)))

    def listen(self) -> None:
        """Take in what it has said; to be called when its socket can be read.

        Raises `LoaderError` if it is gone or cannot open the store.
        """
        try:
            messages = receive(self.connection, self._frames)
        except (EOFError, ConnectionError):
            raise self._gone() from None
        self.num_heard += 1
        self._cpu_seconds = _scheduling(self.pid)[1]
        for message in messages:
            if isinstance(message, Ready):
                self.is_ready = True
            elif not self.is_ready:
                assert isinstance(message, Failed), message
                raise LoaderError(f"worker process {self.pid} could not start: {message.message}", hint=message.hint)
            else:
                assert isinstance(message, Answer), message
                self.answers.append((self.held.popleft(), message))

    def is_stuck(self, silence: float) -> bool:
        """Whether so many seconds without an answer are its own fault, and not the machine's."""
        if silence > LONGEST_PATIENCE:
            return True
        if self.has_media and silence < MEDIA_PATIENCE:
            return False
        state, cpu_seconds = _scheduling(self.pid)
        match state:
            case "D":  # a disk or a network file system keeps it waiting
                return False
            case "R":  # it runs, or would like to: was it given time?
                enough = MEDIA_CPU_PATIENCE if self.has_media else CPU_PATIENCE
                return self.is_ready and cpu_seconds - self._cpu_seconds > enough
            case "T" | "t":
                return True
            case _:
                return self.is_ready

    def stuck(self, silence: float) -> LoaderError:
        """The error that says that it has not answered for so long."""
        state = _STATES.get(_scheduling(self.pid)[0], "waits for something")
        return self._error(f"has not answered for {silence:.1f} s: it {state}", "find out what keeps it")

    def kill(self) -> None:
        """End it. Nothing is lost: it only reads."""
        self._process.kill()
        self._process.wait()
        self.slots.close()

    def _gone(self) -> LoaderError:
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return self._error("closed its connection", "look for what it printed on standard error")
        if code >= 0:
            return self._error(f"ended with exit code {code}", "look for what it printed on standard error")
        name = signal.Signals(-code).name
        hint = "if memory ran out, use fewer workers" if name == "SIGKILL" else "look for what it printed"
        return self._error(f"was ended by {name}", hint)

    def _error(self, what: str, hint: str) -> LoaderError:
        held = list(self.held)
        rows = tuple(address for planned in held for address in planned.addresses())
        where = f"it held rows of step {held[0].step + 1}: {_named(rows)}" if held else "it held no rows"
        return LoaderError(f"worker process {self.pid} {what}; {where}", hint=hint, pid=self.pid, rows=rows)


def _sendable(media: MediaInputs) -> MediaSetup:
    if media.source is None:
        raise LoaderError(
            "a processor that came from Python cannot be sent to worker processes",
            hint="set num_workers=0, or name the model's folder",
        )
    kept = media.kept.folder if isinstance(media.kept, FeatureFiles) else None
    return MediaSetup.of(media.source, features=kept)


def _named(rows: tuple[Address, ...]) -> str:
    named = ", ".join(map(str, rows[:MAX_ROWS_NAMED]))
    more = len(rows) - MAX_ROWS_NAMED
    return (f"{named} and {more} more" if more > 0 else named) or "no rows"


def _scheduling(pid: int) -> tuple[str, float]:
    """What Linux's scheduler has of a process: its state as a letter, and the processor seconds that it used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # another system
        return "?", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


AHEAD = 2  # micro-batches per worker: one in its hands, one waiting
PATIENCE = 4.0  # seconds for one micro-batch, which takes milliseconds
SECONDS_BETWEEN_LOOKS = 0.25


def iterate(
    reader: BatchReader,
    planned: Iterator[PlannedMicroBatch],
    *,
    num_workers: int,
    ahead: int = AHEAD,
    patience: float = PATIENCE,
) -> Generator[Batch, None, None]:
    """The batches of ``planned`` in its order. Close the generator to end the workers; they end with it in any case.

    ``num_workers`` 0 reads in this process, as segments in memory always are. With workers, ``planned`` runs in a
    thread of its own, at most ``num_workers * ahead`` micro-batches before the last batch handed over; it may wait
    as long as it likes without holding up batches that are ready. It is closed, if it is a generator, by the side
    that runs it.

    Raises `LoaderError`, within ``patience`` seconds of waiting, if a worker died, or holds a micro-batch for longer
    than that and waits neither for a disk nor for its share of the processor; what ``planned`` raised, in its place in
    the order; `StoreError` if bytes are damaged.
    """
    if num_workers == 0 or isinstance(reader.store, SegmentsInMemory):
        with closing(_closable(planned)) as plan:
            for micro_batch in plan:
                yield reader.read(micro_batch)
        return
    crew = _Crew(reader, planned, num_workers=num_workers, ahead=ahead, patience=patience)
    try:
        yield from crew.batches()
    finally:
        crew.close()


class _Crew:
    """Workers, the thread that gives them work in turn, and the queue that says whose turn it is to answer."""

    def __init__(
        self,
        reader: BatchReader,
        planned: Iterator[PlannedMicroBatch],
        *,
        num_workers: int,
        ahead: int,
        patience: float,
    ) -> None:
        self._reader = reader
        self._planned = planned
        self._patience = patience
        self._room = threading.Semaphore(num_workers * ahead)
        self._turns: queue.SimpleQueue[WorkerProcess | BaseException | None] = queue.SimpleQueue()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._giver = threading.Thread(target=self._give, name="luthier-plan", daemon=True)
        try:
            for _ in range(num_workers):
                worker = WorkerProcess.start(reader, num_slots=ahead + 1)
                self._workers.append(worker)
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        except BaseException:
            self.close()
            raise
        self._giver.start()

    def batches(self) -> Iterator[Batch]:
        while True:
            turn = self._next_turn()
            if turn is None:
                return
            if isinstance(turn, BaseException):
                raise turn
            micro_batch, answer = self._answer_of(turn)
            self._room.release()
            yield self._batch(micro_batch, answer, turn)

    def close(self) -> None:
        """End the workers and the thread; a plan that is waiting for data just then ends when it has it."""
        self._closing = True
        self._room.release()
        for worker in self._workers:
            worker.kill()
        if self._giver.ident is not None:
            try:  # noqa: SIM105 - the names of this module are gone where Python is ending
                self._giver.join(timeout=1.0)
            except RuntimeError:  # as of Python 3.14 nothing is joined then
                pass
        for worker in self._workers:
            worker.connection.close()
        self._selector.close()

    def _give(self) -> None:
        """The thread's life: take the next micro-batch when there is room, give it to the next worker."""
        try:
            with closing(_closable(self._planned)) as plan:
                number = 0
                while self._room.acquire() and not self._closing:
                    micro_batch = next(plan, None)
                    if micro_batch is None or self._closing:
                        break
                    worker = self._workers[number % len(self._workers)]
                    worker.give(micro_batch)
                    self._turns.put(worker)
                    number += 1
            self._turns.put(None)
        except BaseException as error:  # noqa: BLE001  the edge of a thread: `batches` raises it again
            self._turns.put(error)

    def _next_turn(self) -> WorkerProcess | BaseException | None:
        while True:
            self._listen(seconds=0)
            try:
                return self._turns.get(timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                continue

    def _answer_of(self, worker: WorkerProcess) -> tuple[PlannedMicroBatch, Answer]:
        silence = 0.0
        num_heard = worker.num_heard
        while not worker.answers:
            looked = time.monotonic()
            self._listen(seconds=SECONDS_BETWEEN_LOOKS)
            # no look counts for more than it was meant to last: this process may have been stopped meanwhile itself
            silence += min(time.monotonic() - looked, SECONDS_BETWEEN_LOOKS)
            if worker.num_heard != num_heard:
                silence, num_heard = 0.0, worker.num_heard
            if not worker.answers and silence > self._patience and worker.is_stuck(silence):
                raise worker.stuck(silence)
        return worker.answers.popleft()

    def _listen(self, *, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            worker: WorkerProcess = key.data
            worker.listen()

    def _batch(self, micro_batch: PlannedMicroBatch, answer: Answer, worker: WorkerProcess) -> Batch:
        match answer:
            case Done():
                return self._reader.to_batch(grid_of(answer, worker.slots), micro_batch)
            case Failed():
                raise _error(micro_batch, answer)
            case _:
                raise AssertionError(answer)


def _error(micro_batch: PlannedMicroBatch, failed: Failed) -> UserError:
    rows = tuple(micro_batch.addresses())
    error: UserError
    if failed.kind == errors.StoreError.__name__:
        error = errors.StoreError(failed.message, hint=failed.hint)
    else:
        what = f"rows of step {micro_batch.step + 1} cannot be read: {failed.kind}: {failed.message}"
        error = LoaderError(what, hint=failed.hint, rows=rows)
    error.add_note(f"in a worker process, for the rows {', '.join(map(str, rows))}\n{failed.traceback}")
    return error


def _closable(planned: Iterator[PlannedMicroBatch]) -> Generator[PlannedMicroBatch, None, None]:
    if isinstance(planned, Generator):
        return planned
    return (micro_batch for micro_batch in planned)
