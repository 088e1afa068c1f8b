"""Keys to sample numbers, for many millions of them, in arrays.

A key is a digest, so 16 of its bytes tell two rows apart as well as all 32 do: among 10 million rows, two agree in them
by chance once in 10^24 stores. 20 bytes a sample are kept in memory, in sorted runs. New samples make a new run, and
small runs are merged, so there are never many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.store.shard import KEY_BYTES

MOST_PER_RUN = 2**21  # sorting one takes some 100 MB for a moment


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyIndex:
    """The keys of the samples ``0:num_samples``. Never changed: `extended` gives another."""

    num_samples: int = 0
    runs: tuple[_Run, ...] = ()

    def extended(self, keys: Iterable[NDArray[np.uint8]]) -> KeyIndex:
        """With the keys of the samples that follow, uint8[m, KEY_BYTES] a shard."""
        runs = list(self.runs)
        for halves in _gathered(keys):
            first = runs[-1].stop if runs else 0
            runs.append(_sorted_run(halves, np.arange(first, first + len(halves), dtype=np.uint32)))
            while len(runs) > 1 and _worth_merging(runs[-2], runs[-1]):
                runs[-2:] = [_merged(runs[-2], runs[-1])]
        return KeyIndex(num_samples=runs[-1].stop if runs else 0, runs=tuple(runs))

    def lookup(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """int64[n]: the number of the sample with each of the keys uint8[n, KEY_BYTES], the first if several; or -1."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if not self.runs or not len(keys):
            return found
        halves = _halves(keys)
        left = np.argsort(halves[:, 0])  # in order, neighbours are found in the same pages
        for run in self.runs:
            numbers = run.lookup(halves[left, 0], halves[left, 1])
            found[left] = numbers
            left = left[numbers < 0]
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """m keys in order, of consecutive samples below ``stop``. Equal keys stand in the order of their numbers."""

    first: NDArray[np.uint64]  # [m], the first 8 bytes, by which they are sorted
    second: NDArray[np.uint64]  # [m], the next 8 bytes
    numbers: NDArray[np.uint32]  # [m]
    stop: int

    def lookup(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.int64]:
        found = np.full(len(first), -1, dtype=np.int64)
        places = np.searchsorted(self.first, first)
        asked = np.arange(len(first))
        while len(asked):  # once more for each key that agrees with another in 8 bytes, and in no others
            inside = places < len(self.first)
            asked, places = asked[inside], places[inside]
            near = self.first[places] == first[asked]
            asked, places = asked[near], places[near]
            equal = self.second[places] == second[asked]
            found[asked[equal]] = self.numbers[places[equal]]
            asked, places = asked[~equal], places[~equal] + 1
        return found


def _gathered(keys: Iterable[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint64]]:
    """The first two halves of the keys, uint64[m, 2], many at once; a view that the next one overwrites."""
    buffer = np.empty((MOST_PER_RUN, 2), dtype=np.uint64)  # takes memory only as it fills
    size = 0
    for part in keys:
        halves = _halves(part)
        while len(halves):
            taken = halves[: MOST_PER_RUN - size, :2]
            buffer[size : size + len(taken)] = taken
            size += len(taken)
            halves = halves[len(taken) :]
            if size == MOST_PER_RUN:
                yield buffer
                size = 0
    if size:
        yield buffer[:size]


def _halves(keys: NDArray[np.uint8]) -> NDArray[np.uint64]:
    assert keys.dtype == np.uint8 and keys.shape[1:] == (KEY_BYTES,), f"keys are uint8[n, 32], not {keys.shape}"
    return np.ascontiguousarray(keys).view("<u8")


def _sorted_run(halves: NDArray[np.uint64], numbers: NDArray[np.uint32]) -> _Run:
    order = np.argsort(halves[:, 0], kind="stable")
    return _Run(first=halves[order, 0], second=halves[order, 1], numbers=numbers[order], stop=int(numbers[-1]) + 1)


def _worth_merging(old: _Run, new: _Run) -> bool:
    return len(old.first) <= 2 * len(new.first) and len(old.first) + len(new.first) <= MOST_PER_RUN


def _merged(old: _Run, new: _Run) -> _Run:
    order = np.argsort(np.concatenate([old.first, new.first]), kind="stable")
    return _Run(
        first=np.concatenate([old.first, new.first])[order],
        second=np.concatenate([old.second, new.second])[order],
        numbers=np.concatenate([old.numbers, new.numbers])[order],
        stop=new.stop,
    )
