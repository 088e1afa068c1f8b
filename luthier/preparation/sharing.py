"""Preparing as one of several: each unit is resolved by one of them, and told to the others.

One process alone works in the same way. Units whose bytes an earlier preparation has seen are not resolved again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from luthier.errors import StoreError
from luthier.preparation import work_units
from luthier.preparation.resolver import ReadPortion, ResolvedPortion, Resolver, some_at_a_time
from luthier.store.disk import Disk, join_users, reported
from luthier.store.format import USERS, WORK
from luthier.writing import counted, holder_of, only_user

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


def resolve_units(
    units: work_units.WorkUnits, resolver: Resolver, *, workers: int | Literal["auto"]
) -> Generator[ResolvedPortion, None, None]:
    """All rows of all units in their order, whichever process resolved them. Close the generator to leave the work.

    Raises what `Resolver.resolve` raises.
    """
    with closing(SharedWork(resolver.folder / WORK / units.identity[:32], len(units.units))) as work:
        part = UnitResolver(units=units, resolver=resolver, workers=workers, on_done=work.done)
        part.resolve(work.take())
        yield from place_units(units, work.in_order(part.resolve), resolver)


def place_units(units: work_units.WorkUnits, results: Iterable[bytes], resolver: Resolver) -> Iterator[ResolvedPortion]:
    """The rows of all units, of which the encoded ``results`` come in their order. Raises `StoreError`."""
    store = resolver.store
    placing = work_units.Placing()
    for unit, encoded in zip(units.units, results, strict=True):
        result = work_units.decode_result(encoded)
        sample_ids = result.sample_ids(store)
        if sample_ids is None:  # another process has added them since
            store = store.refresh()
            sample_ids = result.sample_ids(store)
        if sample_ids is None:
            raise StoreError(
                f"{resolver.folder}: samples that were written are not there",
                hint="all who prepare need one folder that all see (data.store), and nothing may delete from it",
            )
        yield placing.place(unit if isinstance(unit, work_units.LineUnit) else None, unit.source, result, sample_ids)


@dataclass(kw_only=True, slots=True, eq=False)
class UnitResolver:
    """Resolves units one after the other; ``on_done(number, encoded result)`` is called for each."""

    units: work_units.WorkUnits
    resolver: Resolver
    workers: int | Literal["auto"]
    on_done: Callable[[int, bytes], object]
    _remembered: work_units.RememberedUnits = field(init=False)
    _under_way: deque[_UnderWay] = field(default_factory=deque)
    _files: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._remembered = work_units.RememberedUnits(self.resolver.folder)

    def resolve(self, numbers: Iterable[int]) -> None:
        """Resolve these units; the next one is asked for when there is room for it."""
        with closing(self.resolver.resolve(self._portions(numbers), workers=self.workers)) as portions:
            for portion in portions:
                self._finish()  # a unit is known to be whole only when the next one begins
                self._files.extend(portion.new_files)
                self._under_way[0].portions.append(portion)
        self._finish()
        assert not self._under_way, f"{counted(len(self._under_way), 'unit is', 'units are')} left over"

    def _portions(self, numbers: Iterable[int]) -> Iterator[ReadPortion]:
        for number in numbers:
            self.resolver.share = number / len(self.units.units)
            self.resolver.bytes_left = (len(self.units.units) - number) * work_units.UNIT_BYTES
            read = self.units.read(number)
            digest = None
            if isinstance(read, work_units.UnitBytes):
                digest = read.digest
                known = self._remembered.find(digest, self.resolver.store)
                if known is not None:
                    self._pass_over(number, read, known)
                    continue
                read = self.units.cut(read)
            under_way = _UnderWay(number=number, unit=read, digest=digest)
            self._under_way.append(under_way)
            for rows in some_at_a_time(read.rows):
                under_way.num_portions += 1
                yield ReadPortion(
                    rows=np.full(len(rows), -1, dtype=np.int64),
                    source_ids=np.full(len(rows), read.unit.source, dtype=np.int64),
                    read=rows,
                )
            under_way.is_read = True

    def _pass_over(self, number: int, read: work_units.UnitBytes, known: bytes) -> None:
        result = work_units.decode_result(known)
        num_lost = len(result.lost)
        self.units.pass_over(read, result.num_lines)
        self.resolver.count(encoded=0, reused=len(result) - num_lost, lost=num_lost, source=read.unit.source)
        self.on_done(number, known)

    def _finish(self) -> None:
        while self._under_way and self._under_way[0].is_done:
            done = self._under_way.popleft()
            encoded = msgspec.msgpack.encode(work_units.UnitResult.of(done.unit, done.portions, self._files))
            # Whether files beside the unit decide what comes of it: then its own bytes do not tell that it is the same.
            if done.digest is not None and not any(
                any(row.error.reason.startswith("media") for row in portion.lost)
                or self.resolver.store.have_media(portion.sample_ids[portion.sample_ids >= 0]).any()
                for portion in done.portions
            ):
                self._remembered.keep(done.digest, encoded)
            self.on_done(done.number, encoded)


@dataclass(kw_only=True, slots=True, eq=False)
class _UnderWay:
    """A unit that is being resolved."""

    number: int
    unit: work_units.CutUnit
    digest: str | None
    num_portions: int = 0
    is_read: bool = False
    portions: list[ResolvedPortion] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.is_read and len(self.portions) == self.num_portions
