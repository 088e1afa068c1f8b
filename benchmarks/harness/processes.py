"""A command run to its end, with what it cost: CPU-seconds, wall time, memory, all of its children included."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.2
KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one run. ``cpu`` counts the process and all children that it waited for; ``peak`` is in bytes."""

    cpu: float
    wall: float
    peak: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run that ended with status 0. ``lines`` of both streams, each with the seconds since the process began."""

    cost: Cost
    lines: tuple[tuple[float, str], ...]

    @property
    def last_line(self) -> str:
        """Where scripts print their result."""
        return self.lines[-1][1] if self.lines else ""


class FailedError(RuntimeError):
    """The command ended with another status than 0; the message ends with its last lines."""


def run(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, folder: Path | None = None) -> Finished:
    """Run to the end; raises `FailedError`."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        cwd=folder,
    )
    assert process.stdout is not None
    memory = PeakMemory(process.pid)
    lines = [(time.perf_counter() - start, line.decode("utf-8", "replace").rstrip("\n")) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)  # unlike Popen.wait, it says what the process used
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    peak = memory.stop()
    if process.returncode:
        shown = "\n".join(line for _, line in lines[-20:])
        raise FailedError(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{shown}")
    cost = Cost(cpu=usage.ru_utime + usage.ru_stime, wall=wall, peak=max(peak, usage.ru_maxrss * KIB))
    return Finished(cost=cost, lines=tuple(lines))


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Each figure's median."""
    return Cost(
        cpu=statistics.median(cost.cpu for cost in costs),
        wall=statistics.median(cost.wall for cost in costs),
        peak=int(statistics.median(cost.peak for cost in costs)),
    )


def load() -> str:
    """How busy the machine is, for titles: timings of a busy machine are not those of a quiet one."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def cpu_seconds(pid: int) -> float:
    """What a living process and its living descendants have used until now, to a hundredth of a second."""
    return sum(_ticks(each) for each in _tree(pid)) / os.sysconf("SC_CLK_TCK")


class PeakMemory:
    """Most memory that a process and its descendants had at once, looked at five times a second.

    Pages that several of them share count once (PSS).
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._peak = max(self._peak, sum(_memory(pid) for pid in _tree(self._pid)))


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for each in pids:
        pids += _children(each)
    return pids


def _children(pid: int) -> list[int]:
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        pass  # it ended meanwhile
    return found


def _ticks(pid: int) -> int:
    try:
        behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0  # it ended meanwhile
    return int(behind_name[11]) + int(behind_name[12])  # user and system: fields 14 and 15


def _memory(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    except OSError:
        pass
    return 0
