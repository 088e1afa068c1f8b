"""Units of work that several processes and nodes share, through nothing but a folder that all of them see.

    <folder>/session-000001/<id>/live/<name>         who takes part; touched now and then (`participants`)
                                /claims/<unit>.<k>   whose the unit is, by the k-th claim; the last counts
                                /results/<unit>      what came of it
                                /size                how many units there are

A session begins with the first who comes and ends with the last who leaves or dies. Whoever finds no living participant
begins a new session, so nothing of an earlier one is believed: the work may be another by then.

Everything is decided by creating a file that nobody else has created, or by renaming a folder to a name that is free,
which hold on network file systems too. No locks; times are only compared with times of the same file system.
"""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from luthier.errors import StoreError
from luthier.store.disk import TEMPORARY, Disk

STALE_AFTER = 30.0  # a beat is due every sixth of it: longer than any process is stuck in one call
LOOK_EVERY = 0.5  # seconds between two looks at who lives
POLL = 0.02  # seconds between two looks for a result
DIGEST_BYTES = 32


class WorkList:
    """One process' part in the work on ``units 0:num_units``; close it when done.

    A unit is given to one participant after another until there is a result. Should two have worked on the same one,
    because the first was thought dead, their results must be the same, and it does not matter whose is kept.
    """

    def __init__(
        self,
        folder: Path,
        num_units: int,
        *,
        stale_after: float = STALE_AFTER,
        heartbeat: bool = True,
        disk: Disk | None = None,
    ) -> None:
        """Take part. ``heartbeat``: a thread says that we live; else call `beat` every few seconds.

        Raises `StoreError`, also if those who are at work share another number of units.
        """
        self.num_units = num_units
        self._folder = folder
        self._disk = Disk() if disk is None else disk
        self._stale_after = stale_after
        self._me = Participant()
        self._lost = threading.Event()  # our session is gone, or we were taken for dead
        self._disk.make_folder(folder)
        self._join()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name="work list heartbeat")
        if heartbeat:
            self._thread.start()

    def claim(self) -> int | None:
        """A unit to work on: one whose holder died, else the next that nobody has; None if there is none now.

        None does not mean that all is done: a holder may yet die. Raises `StoreError`.
        """
        self._stay()
        if time.monotonic() >= self._next_look:
            self._look()
        for unit, attempt in list(self._abandoned.items()):
            won = self._take(unit, attempt)
            del self._abandoned[unit]
            if won:
                return unit
        while self._next < self.num_units:
            unit = self._next
            won = unit not in self._taken and self._take(unit, 0)
            self._next += 1
            if won:
                return unit
            if unit not in self._taken:
                self._taken.update(_latest(self._disk.names(self._session / "claims")))
        return None

    def done(self, unit: int, payload: bytes) -> bool:
        """Publish the result of a unit; False if the session in which it was claimed is over: nobody waits for it.

        Raises `StoreError`; it can be called again then.
        """
        assert 0 <= unit < self.num_units, f"unit {unit} of {self.num_units}"
        chunks = [hashlib.sha256(payload).digest() + payload]
        try:
            self._disk.publish(self._session / "results" / str(unit), chunks, durable=False)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._lost.set()
            return False
        return True

    def result(self, unit: int) -> bytes | None:
        """What came of a unit, or None so far. Raises `StoreError` if it is damaged."""
        path = self._session / "results" / str(unit)
        raw = self._disk.read(path)
        if raw is None:
            return None
        digest, payload = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            hint = "start again: nothing that was stored is lost"
            raise StoreError(f"{path}: a result is damaged: {len(raw)} bytes, their digest is another", hint=hint)
        return payload

    def in_order(self, on_wait: Callable[[float], None]) -> Iterator[bytes]:
        """The results of all units, in order. While one is missing, ``on_wait(seconds waited for it)`` is called again
        and again: it may claim a unit and do it, or raise."""
        for unit in range(self.num_units):
            started = time.monotonic()
            while (payload := self.result(unit)) is None:
                called = time.monotonic()
                on_wait(called - started)
                self._stay()
                time.sleep(max(0.0, POLL - (time.monotonic() - called)))
            yield payload

    def beat(self) -> None:
        """Say that we live. Raises `StoreError`."""
        if not self._disk.touch(self._beat_file):
            self._lost.set()

    def close(self) -> None:
        """Leave: what we hold goes to others. The last to leave takes all results away. Raises `StoreError`."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.beat()
        if self._lost.is_set():
            return
        now = self._now()
        self._disk.remove(self._beat_file)
        if not living(self._session / "live", now=now, stale_after=self._stale_after, disk=self._disk):
            self._take_away(self._session.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _beat_file(self) -> Path:
        return self._session / "live" / self._me.name

    def _join(self) -> None:
        while True:
            sessions = _sessions(self._disk, self._folder)
            entered = self._enter(sessions[-1]) if sessions else None
            if entered is None:
                entered = self._found(1 + int(sessions[-1].name.partition("-")[2]) if sessions else 1)
                if entered is None:
                    continue  # another was faster: look again
                for old in sessions:
                    self._take_away(old)
            self._session = entered
            self._lost.clear()
            self._next = 0
            self._next_look = 0.0
            self._taken: set[int] = set()
            self._alive: set[str] | None = None
            self._abandoned: dict[int, int] = {}  # unit -> number of the next claim on it
            return

    def _enter(self, folder: Path) -> Path | None:
        """Take part in a session, if somebody does."""
        names = self._disk.names(folder)
        if not names:
            return None
        session = folder / names[0]
        if not living(session / "live", now=self._now(), stale_after=self._stale_after, disk=self._disk):
            return None
        size = self._disk.read(session / "size")
        if size is None:
            return None
        if int(size) != self.num_units:
            raise StoreError(
                f"{self._folder}: others are at work on {int(size)} units, this process wants {self.num_units}",
                hint="wait until they are done, and give all processes of a run the same data",
            )
        mine = session / "live" / self._me.name
        if not self._disk.create_once(mine, self._me.to_bytes()) and self._disk.read(mine) is None:
            return None
        return session

    def _found(self, number: int) -> Path | None:
        """Begin a session; None if another has begun it."""
        draft = self._folder / f"{TEMPORARY}{uuid.uuid4().hex}"
        name = uuid.uuid4().hex
        for part in ("live", "claims", "results"):
            self._disk.make_folder(draft / name / part)
        self._disk.create_once(draft / name / "size", str(self.num_units).encode())
        self._disk.create_once(draft / name / "live" / self._me.name, self._me.to_bytes())
        target = self._folder / f"session-{number:06}"
        if self._disk.move_folder(draft, target):
            return target / name
        self._disk.remove(draft)
        return None

    def _take(self, unit: int, attempt: int) -> bool:
        return self._disk.create_once(self._session / "claims" / f"{unit}.{attempt}", self._me.name.encode())

    def _stay(self) -> None:
        if self._lost.is_set():
            self._join()

    def _look(self) -> None:
        """Find the units whose holders are dead or have left."""
        self._next_look = time.monotonic() + LOOK_EVERY
        live = self._session / "live"
        self.beat()
        now = self._disk.age_mark(self._beat_file)
        if now is None:
            self._lost.set()
            return
        alive = living(live, now=now, stale_after=self._stale_after, disk=self._disk)
        if alive == self._alive and self._next < self.num_units:
            return
        self._alive = alive
        finished = set(self._disk.names(self._session / "results"))
        latest = _latest(self._disk.names(self._session / "claims"))
        self._taken.update(latest)
        self._abandoned = {}
        for unit, attempt in sorted(latest.items()):
            if str(unit) in finished:
                continue
            holder = self._disk.read(self._session / "claims" / f"{unit}.{attempt}")
            if holder is not None and holder.decode() not in alive:
                self._abandoned[unit] = attempt + 1

    def _now(self) -> int:
        """The time as the folder's file system sees it, which gives the participants' files their times."""
        clock = self._folder / f"{TEMPORARY}clock-{self._me.name}"
        self._disk.publish(clock, [b""], durable=False)
        now = self._disk.age_mark(clock)
        self._disk.remove(clock)
        assert now is not None, f"{clock} was removed under us"
        return now

    def _take_away(self, session: Path) -> None:
        # first out of the way, at once; nobody must find half a session
        gone = self._folder / f"{TEMPORARY}{uuid.uuid4().hex}"
        if self._disk.move_folder(session, gone):
            self._disk.remove(gone)

    def _keep_beating(self) -> None:
        while not self._closing.wait(self._stale_after / 6):
            with suppress(StoreError):  # one missed beat is no harm, and who asks for work is told
                self.beat()


def anybody_at_work(folder: Path, *, now: int, stale_after: float = STALE_AFTER) -> bool:
    """Whether a work list has living participants; ``now`` as in `living`."""
    disk = Disk()
    return any(
        living(session / name / "live", now=now, stale_after=stale_after, disk=disk)
        for session in _sessions(disk, folder)
        for name in disk.names(session)
    )


def _sessions(disk: Disk, folder: Path) -> list[Path]:
    return [folder / name for name in sorted(disk.names(folder)) if name.startswith("session-")]


def _latest(claims: list[str]) -> dict[int, int]:
    """``["4.0", "4.1", "7.0"] -> {4: 1, 7: 0}``"""
    latest: dict[int, int] = {}
    for claim in claims:
        unit, attempt = map(int, claim.split("."))
        latest[unit] = max(attempt, latest.get(unit, 0))
    return latest


# --------------------------------------------------------------------------------------------------------------------
# Who takes part in shared work, on which node, and whether it still lives.


@cache
def this_host() -> str:
    """This node and this namespace of process numbers."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Participant:
    """One process' part. ``host`` is the node and the namespace in which ``pid`` means this process."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=lambda: this_host())
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: _start_of(os.getpid()) or "")  # a number may be given again

    def to_bytes(self) -> bytes:
        """As it stands in its file."""
        return msgspec.json.encode(self)

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended; of other nodes' processes nothing is known."""
        return self.host == this_host() and _start_of(self.pid) != self.started


def living(folder: Path, *, now: int, stale_after: float, disk: Disk) -> set[str]:
    """Names of those in a folder of participants that live: each has a file there, and touches it now and then.

    ``now``: nanoseconds of the clock that gives files their times; ``stale_after``: seconds without a touch after which
    one counts as dead. Whose process on this node has ended is dead at once.
    """
    found = set()
    for name in disk.names(folder):
        touched = disk.age_mark(folder / name)
        raw = disk.read(folder / name)
        if touched is not None and raw and now - touched <= stale_after * 1e9 and not _read(raw).is_gone:
            found.add(name)
    return found


def _read(raw: bytes) -> Participant:
    return msgspec.json.decode(raw, type=Participant)


def _start_of(pid: int) -> str | None:
    """When a process of this node started, in whatever unit the system counts; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return _start_elsewhere(pid)
    except OSError:  # it ended while we read
        return None
    state, *others = stat.rpartition(")")[2].split()
    return None if state in "ZX" else others[18]  # field 22 of proc(5); a zombie works no more


def _start_elsewhere(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
