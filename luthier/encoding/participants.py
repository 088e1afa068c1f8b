"""Who takes part in shared work, on which node, and whether it still lives."""

from __future__ import annotations

import os
import platform
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from luthier.encoding.disk import Disk


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
