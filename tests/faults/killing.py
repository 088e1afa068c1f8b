"""Processes that are killed: what the programs of this folder share. It needs no torch.

Children are forked from a process that has imported everything, which is quick, where none of its threads can be half
there in the child: `computes_nothing` refuses torch's.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAULT = 7  # exit code of a child that ended by a fault of its own


@dataclass(kw_only=True)
class Findings:
    """What came of so many points of one kind.

    points     processes that were killed, or operations that failed, while there was something left to do
    lost       rows that are missing at the end
    doubled    rows that came more than once too often
    differing  batches or samples whose bytes are not those of the uninterrupted run
    facts      what shows that the points were worth trying
    """

    kind: str
    points: int = 0
    lost: int = 0
    doubled: int = 0
    differing: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong, and something was tried."""
        return self.points > 0 and not (self.lost or self.doubled or self.differing)

    def compare_rows(self, found: Iterable[Hashable], expected: Iterable[Hashable]) -> None:
        """Count rows that are missing and rows that are too many."""
        here, there = Counter(found), Counter(expected)
        self.lost += (there - here).total()
        self.doubled += (here - there).total()

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {**vars(self), "facts": {name: count for name, count in self.facts.items() if count}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Findings:
        """What `to_json` gave."""
        return cls(**{**content, "facts": Counter(content["facts"])})


class Kills:
    """Starts children, kills them, and leaves none behind. Use it in a ``with`` block."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._running: dict[int, Path] = {}

    def start(self, do: Callable[[], object], errors: Path, *, group: bool = False) -> int:
        """Fork a child that does this and ends; its standard error goes to ``errors``. ``group``: with its children."""
        pid = os.fork()
        if pid:
            if group:
                with _already():
                    os.setpgid(pid, pid)
            self._running[pid] = errors
            return pid
        code = FAULT
        try:
            if group:
                os.setpgid(0, 0)
            descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 2)
            do()
            code = 0
        except BaseException:  # noqa: BLE001  the edge of a process
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)

    def kill_after(
        self, pid: int, seconds: float, *, once: Callable[[], bool] = lambda: True, group: bool = False
    ) -> bool:
        """Wait until ``once`` holds, and so long, then kill; False if it had ended by then.

        Raises if it ended by a fault.
        """
        while not once():
            if self.has_ended(pid):
                return False
            time.sleep(0.001)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.has_ended(pid):
                return False
            time.sleep(min(0.001, max(0.0, deadline - time.monotonic())))
        return self.kill(pid, group=group)

    def kill(self, pid: int, *, group: bool = False) -> bool:
        """Kill now; False if it had ended before."""
        if self.has_ended(pid):
            return False
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        return self.wait(pid) == -signal.SIGKILL

    def has_ended(self, pid: int) -> bool:
        """Whether it did its work and is gone. Raises if it ended by a fault."""
        if pid not in self._running:
            return True
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return False
        self._ended(pid, status)
        return True

    def wait(self, pid: int) -> int:
        """Its exit code, negative for a signal. Raises if it ended by a fault."""
        if pid not in self._running:
            return 0
        return self._ended(pid, os.waitpid(pid, 0)[1])

    def _ended(self, pid: int, status: int) -> int:
        errors = self._running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"a child ended with {code}: {errors.read_text()[-4000:]}"
        return code

    def __enter__(self) -> Kills:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in list(self._running):
            for kill in (os.killpg, os.kill):
                with _already():
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._running.clear()


@contextmanager
def _already() -> Any:
    try:
        yield
    except (ProcessLookupError, PermissionError, FileNotFoundError):
        return


@contextmanager
def computes_nothing() -> Any:
    """Within this no function of torch may be called by this process, only by the children that it forks.

    torch keeps a pool of threads from its first computation on. A fork has the pool and not the threads, and aborts
    now and then.
    """
    from torch.overrides import TorchFunctionMode

    parent = os.getpid()

    class Refusal(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert os.getpid() != parent, f"{func} is called in a process that forks"
            return func(*args, **(kwargs or {}))

    with Refusal():
        yield


def tell_progress(path: Path, num_steps: int) -> None:
    """Say how many steps this process has done."""
    path.write_text(f"{os.getpid()} {num_steps}")


def has_done(path: Path, pid: int, *, num_steps: int) -> Callable[[], bool]:
    """Whether this process has told of so many."""

    def look() -> bool:
        said = path.read_text().split() if path.exists() else []
        return len(said) == 2 and int(said[0]) == pid and int(said[1]) >= num_steps

    return look


def group_is_gone(leader: int) -> bool:
    """Whether no process of a group runs any more."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with _already():
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                return False
    return True


def die_at(k: int) -> Callable[..., None]:
    """A ``before`` (see `Disk.before`, `RunFiles.before`) that kills the process at operation ``k``, from 0."""
    count = iter(range(1 << 60))

    def before(*_: object) -> None:
        if next(count) == k:
            os.kill(os.getpid(), signal.SIGKILL)

    return before


class FailsOnce:
    """A ``before`` that raises at operation ``k`` and lets everything else pass; ``k`` None: counts."""

    def __init__(self, k: int | None, code: int = 0) -> None:
        self.k, self.code = k, code
        self.operations: list[tuple[str, Path]] = []

    def __call__(self, operation: str, path: Path) -> None:
        self.operations.append((operation, path))
        if self.k is not None and len(self.operations) == self.k + 1:
            raise OSError(self.code, os.strerror(self.code))

    @property
    def has_failed(self) -> bool:
        """Whether it came to that."""
        return self.k is not None and len(self.operations) > self.k


@contextmanager
def before_each(kind: type, before: Callable[..., None]) -> Any:
    """Put ``before`` under all operations of a kind of disk."""
    own = kind.before  # type: ignore[attr-defined]
    kind.before = lambda _, operation, path: before(operation, path)  # type: ignore[attr-defined]
    try:
        yield before
    finally:
        kind.before = own  # type: ignore[attr-defined]
