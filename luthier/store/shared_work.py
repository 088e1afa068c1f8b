"""Numbered units of work that processes share, through nothing but a folder that all of them see and file locks.

    <folder>/users               locked by all who take part
            /units/<unit>.lock   locked by the process that does this unit; says which process that is
                  /<unit>        what came of it, published when it is whole

The process that gets a unit's lock and finds no result does the unit. The system frees the locks of one that ends,
so its units fall to those who come to them next. Results belong to those who are at work: a process that begins alone
removes what others left, since the rows that it was made of may have changed, and the last to leave removes all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from luthier.errors import StoreError
from luthier.locks import holder_of, only_user
from luthier.store.disk import Disk, join_users, reported
from luthier.store.manifest import USERS

if TYPE_CHECKING:
    from filelock import BaseFileLock

MOST_TRIES = 3  # to do a unit again whose result is damaged or gone
POLL = 0.02  # seconds between two looks for a result
PATIENCE = 1800.0  # seconds for a unit that another process does; it takes seconds, or minutes with files of slow hosts


class SharedWork:
    """One process' part in the work on ``units 0:num_units``; close it when done."""

    def __init__(self, folder: Path, num_units: int, *, disk: Disk | None = None) -> None:
        """Take part. Raises `StoreError`."""
        self.num_units = num_units
        self._folder = folder
        self._units = folder / "units"
        self._disk = Disk() if disk is None else disk
        self._mine: dict[int, BaseFileLock] = {}
        self._disk.make_folder(folder)
        with reported(folder), only_user(folder / USERS) as alone:
            if alone:
                self._disk.remove(self._units)
        self._users = join_users(folder / USERS)
        self._disk.make_folder(self._units)

    def take(self, start: int = 0) -> Iterator[int]:
        """The units from ``start`` that nobody has done or is doing, in order; each is ours once it comes out, until it
        is `done` or we leave. Raises `StoreError`."""
        finished = set(self._disk.names(self._units))
        for unit in range(start, self.num_units):
            # results are large: none is read here
            if str(unit) in finished or self._disk.exists(self._units / str(unit)):
                continue
            if self._lock(unit):
                yield unit

    def done(self, unit: int, payload: bytes) -> None:
        """Publish the result of a unit. Raises `StoreError`; it can be called again then."""
        assert 0 <= unit < self.num_units, f"unit {unit} of {self.num_units}"
        try:
            self._disk.publish_sealed(self._units / str(unit), payload)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._disk.make_folder(self._units)  # another machine whose locks are its own has removed it
            self._disk.publish_sealed(self._units / str(unit), payload)
        if unit in self._mine:
            self._mine.pop(unit).release()

    def result(self, unit: int) -> bytes | None:
        """What came of a unit; None if there is no result so far, or it is damaged. Raises `StoreError`."""
        return self._disk.read_sealed(self._units / str(unit))

    def in_order(self, do: Callable[[Iterator[int]], None]) -> Iterator[bytes]:
        """The results of all units, in order. ``do`` is called with units that come free meanwhile, and does them.

        Raises `StoreError`, also if another process does not finish a unit for a long time.
        """
        for unit in range(self.num_units):
            deadline, tries = time.monotonic() + PATIENCE, 0
            while (payload := self.result(unit)) is None:
                if unit in self._mine or self._lock(unit):
                    if tries == MOST_TRIES:
                        raise StoreError(
                            f"{self._units / str(unit)}: what was written there cannot be read back",
                            hint="the disk may be failing: look at the system's log, or choose another data.store",
                        )
                    tries += 1
                    do(chain([unit], self.take(unit + 1)))
                elif time.monotonic() > deadline:
                    raise self._stuck(unit)
                else:
                    time.sleep(POLL)
            yield payload

    def close(self) -> None:
        """Leave: what we have begun goes to others. The last to leave takes all results away. Raises `StoreError`."""
        while self._mine:
            self._mine.popitem()[1].release()
        self._users.close()
        with reported(self._folder), only_user(self._folder / USERS, create=False) as alone:
            if alone:
                self._disk.take_away(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, unit: int) -> bool:
        """Make a unit ours, unless it is done or another process does it."""
        lock = self._disk.try_lock(self._lock_file(unit))
        if lock is None:
            return False
        self._mine[unit] = lock
        if self.result(unit) is None:
            return True
        self._mine.pop(unit).release()  # it was finished just before
        return False

    def _lock_file(self, unit: int) -> Path:
        return self._units / f"{unit}.lock"

    def _stuck(self, unit: int) -> StoreError:
        path = self._lock_file(unit)
        return StoreError(
            f"{path}: {holder_of(path)} has not finished part {unit + 1} of {self.num_units} for {PATIENCE:g} s",
            hint="end that process if it hangs: its part then falls to the others; then start this one again",
        )
