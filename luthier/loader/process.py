"""A worker process as the trainer sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Self

from luthier.collation import MediaInputs
from luthier.errors import LoaderError
from luthier.loader.messages import Answer, Failed, Frames, MediaSetup, Ready, Setup, frame, receive, work_of
from luthier.loader.places import PlannedMicroBatch
from luthier.loader.reader import BatchReader
from luthier.loader.slots import Slots
from luthier.media.feature_files import FeatureFiles
from luthier.records import Address

MAX_ROWS_NAMED = 8
CPU_PATIENCE = 1.0  # processor seconds for one micro-batch, which takes milliseconds
MEDIA_PATIENCE = 60.0  # seconds, of any kind, with media: a processor is loaded first, then long videos are decoded
LONGEST_PATIENCE = 120.0  # seconds, for a store to be opened and for disks to answer
_STATES = {"R": "runs", "D": "waits for a disk", "T": "was stopped", "t": "is held by a debugger"}
_KEPT_FROM_WORKERS = {signal.SIGINT, signal.SIGTERM}  # the trainer's to answer, though the whole group gets them


class WorkerProcess:
    """One process that reads micro-batches, in the order in which they are given to it.

    held     given, and not yet answered; it is at work on the first
    answers  what it said, in order, and nobody has taken yet
    slots    where it puts large arrays
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, slots: Slots) -> None:
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
        slots = Slots.create(0 if media is None else num_slots)
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
                stdout=sys.stderr.fileno(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = cls(process, ours, slots)
        worker.has_media = media is not None
        store = reader.store
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
        """Its process id."""
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
                return self.is_ready and cpu_seconds - self._cpu_seconds > CPU_PATIENCE
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
