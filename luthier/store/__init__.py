"""Encoded samples on disk, found by the content of their rows: shards that are written once and never changed, and a
manifest that names them.

    <store>/about.json          what made it; its time is that of the last use
    <store>/lock                one writer at a time changes the manifest
    <store>/users               locked by all who use the store, so that nobody cleans up under them
    <store>/manifest.json       names the shards; replaced as a whole, last of all
    <store>/shard-<hash>.bin    samples (`luthier.store.format`)
    <store>/shared-work/        work that processes share (`luthier.preparation.sharing`)

A key is a digest of a row's bytes and of everything else that decides its sample (`store.format.row_key`), so a sample
is encoded once, however often, in whichever file or run its row comes again. Readers see the manifest before a commit
or after it, never a mix. Several processes may add to a store at the same time: shards have names of their own, and the
manifests are merged under the lock; should two have encoded the same row, the first to commit is read.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier import __version__
from luthier.errors import StoreError
from luthier.layout import held_of_leaves
from luthier.packing import bounds_of, take_groups
from luthier.records import NOWHERE, Address, Ints, Sample
from luthier.store.disk import Disk, join_users
from luthier.store.format import (
    ABOUT,
    FORMAT,
    KEY_BYTES,
    LOCK,
    MANIFEST,
    USERS,
    EncodedSample,
    Manifest,
    NewShard,
    build_shard,
    joined,
    read_manifest,
    write_manifest,
)
from luthier.store.shard_reader import Shard, store_gone
from luthier.writing import SharedLock, counted

# --------------------------------------------------------------------------------------------------------------------
# Keys to sample numbers, for many millions of them, in arrays.
#
# A key is a digest, so 16 of its bytes tell two rows apart as well as all 32 do: among 10 million rows, two agree in
# them by chance once in 10^24 stores. 20 bytes a sample are kept in memory, in sorted runs. New samples make a new
# run, and small runs are merged, so there are never many.


MOST_PER_RUN = 2**21  # sorting one takes some 100 MB for a moment


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyIndex:
    """The keys of the samples ``0:num_samples``. Never changed: `extended` gives another."""

    num_samples: int = 0
    runs: tuple[_SortedKeys, ...] = ()

    def extended(self, keys: Iterable[NDArray[np.uint8]]) -> KeyIndex:
        """With the keys of the samples that follow, uint8[m, KEY_BYTES] a shard."""
        runs = list(self.runs)
        for halves in _gathered(keys):
            first = runs[-1].stop if runs else 0
            runs.append(_sorted_run(halves, np.arange(first, first + len(halves), dtype=np.uint32)))
            while len(runs) > 1 and _worth_merging(runs[-2], runs[-1]):
                runs[-2:] = [_merged(runs[-2], runs[-1])]
        return KeyIndex(num_samples=runs[-1].stop if runs else 0, runs=tuple(runs))

    def lookup(self, keys: NDArray[np.uint8]) -> Ints:
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
class _SortedKeys:
    """m keys in order, of consecutive samples below ``stop``. Equal keys stand in the order of their numbers."""

    first: NDArray[np.uint64]  # [m], the first 8 bytes, by which they are sorted
    second: NDArray[np.uint64]  # [m], the next 8 bytes
    numbers: NDArray[np.uint32]  # [m]
    stop: int

    def lookup(self, first: NDArray[np.uint64], second: NDArray[np.uint64]) -> Ints:
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


def _sorted_run(halves: NDArray[np.uint64], numbers: NDArray[np.uint32]) -> _SortedKeys:
    order = np.argsort(halves[:, 0], kind="stable")
    return _SortedKeys(
        first=halves[order, 0], second=halves[order, 1], numbers=numbers[order], stop=int(numbers[-1]) + 1
    )


def _worth_merging(old: _SortedKeys, new: _SortedKeys) -> bool:
    return len(old.first) <= 2 * len(new.first) and len(old.first) + len(new.first) <= MOST_PER_RUN


def _merged(old: _SortedKeys, new: _SortedKeys) -> _SortedKeys:
    order = np.argsort(np.concatenate([old.first, new.first]), kind="stable")
    return _SortedKeys(
        first=np.concatenate([old.first, new.first])[order],
        second=np.concatenate([old.second, new.second])[order],
        numbers=np.concatenate([old.numbers, new.numbers])[order],
        stop=new.stop,
    )


SHARD_BYTES = 2**26  # so much is encoded between commits, and lost at most if the process is killed


class SampleStore:
    """A snapshot of the store, open for reading: ``store[i]`` is the i-th sample. Numbers stay what they are when
    shards are added later. Costs little to send to another process, which maps the same files.

    Opening looks at the manifest and at the shards' sizes. A shard's keys are checked when keys are first looked up,
    its index when one of its samples is first asked for, a sample's bytes each time they are read: so damage is found
    before anything that is damaged is used.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, before: SampleStore | None = None) -> None:
        """Use `SampleStore.open`. ``before`` is an earlier snapshot, whose open files serve this one too."""
        self.folder = folder
        self.fingerprint = manifest.fingerprint
        self._manifest = manifest
        self._opened: deque[Shard] = deque() if before is None else before._opened
        self._key_index: KeyIndex = KeyIndex() if before is None else before._key_index
        users = None if before is None else before._users
        self._users: SharedLock = users if users and users.held else join_users(folder / USERS, create=folder.is_dir())
        known: list[Shard] = [] if before is None else before._shards
        new = [Shard(folder / entry.name, entry, self._opened) for entry in manifest.entries[len(known) :]]
        for shard in new:
            shard.check_size()
        self._shards: list[Shard] = [*known, *new]
        self._starts = list(accumulate((entry.num_samples for entry in manifest.entries), initial=0))

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str | None) -> SampleStore:
        """The store as its manifest says; empty where there is none. ``fingerprint`` None takes any encoder's.

        Raises `StoreError` if it is damaged, or belongs to another encoder or another version of Luthier.
        """
        with suppress(OSError):
            os.utime(folder / ABOUT)
        return cls(folder, read_manifest(folder, fingerprint, disk=Disk()))

    def refresh(self) -> SampleStore:
        """The store with what was committed since; the same object if nothing was. Numbers stay what they are.

        Raises `StoreError` if what this snapshot has is not in the store any more.
        """
        now = read_manifest(self.folder, self.fingerprint, disk=Disk(), known=self._manifest)
        if now.digest == self._manifest.digest:
            return self
        known = self._manifest.entries
        if known and not (self.folder / MANIFEST).exists():
            raise store_gone(self.folder)
        if now.entries[: len(known)] != known:
            raise StoreError(
                f"{self.folder / MANIFEST}: the store was changed while it was in use: it had "
                f"{counted(len(known), 'shard')}, "
                f"the first {len(known)} of the {len(now.entries)} that it has now are others",
                hint="start again",
            )
        return SampleStore(self.folder, now, before=self)

    def __reduce__(self) -> tuple[object, ...]:
        return SampleStore, (self.folder, self._manifest)

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: bytes) -> bool:
        return self.index_of(key) is not None

    def __getitem__(self, index: int) -> Sample:
        return self.read(index, NOWHERE)

    def read(self, index: int, address: Address) -> Sample:
        """A sample with its row's address. Raises `StoreError` if its bytes are damaged, or the store is gone."""
        if not 0 <= index < self._starts[-1]:
            raise self._beyond(f"sample {index}")
        shard = bisect_right(self._starts, index) - 1
        return self._shards[shard].read(index - self._starts[shard], address)

    def notes(self, index: int) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of a sample's row, and how often."""
        shard = bisect_right(self._starts, index) - 1
        return self._shards[shard].notes(index - self._starts[shard])

    def lookup(self, keys: NDArray[np.uint8]) -> Ints:
        """int64[n]: the numbers of the samples with the keys uint8[n, KEY_BYTES]; -1 where there is none.

        Raises `StoreError` if a shard's keys are damaged.
        """
        index = self._key_index
        if index.num_samples < len(self):
            first = self._starts.index(index.num_samples)
            self._key_index = index = index.extended(shard.keys() for shard in self._shards[first:])
        return index.lookup(keys)

    def index_of(self, key: bytes) -> int | None:
        """The number of the sample with this key, if it is in the store. For many keys use `lookup`."""
        if not len(self):
            return None
        found = int(self.lookup(np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES))[0])
        return None if found < 0 else found

    def have_media(self, sample_ids: Ints) -> NDArray[np.bool_]:
        """bool[n]: whether these samples have images, videos or audio."""
        found = np.zeros(len(sample_ids), dtype=np.bool_)
        for shard, places, inside in self._by_shard(sample_ids):
            found[places] = shard.index.has_media[inside] > 0
            shard.release()
        return found

    def keys_of(self, sample_ids: Ints) -> NDArray[np.uint8]:
        """uint8[n, KEY_BYTES]: the keys of these samples."""
        keys = np.zeros((len(sample_ids), KEY_BYTES), dtype=np.uint8)
        for shard, places, inside in self._by_shard(sample_ids):
            keys[places] = shard.keys_at(inside)
            shard.release()
        return keys

    def release(self) -> None:
        """Let go of the memory that reading took."""
        for shard in self._opened:
            shard.release()

    def verify(self) -> None:
        """Read every byte. Raises `StoreError` if one is not as it was written."""
        for shard in self._shards:
            shard.verify()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards, in the order of their samples."""
        return tuple(self._shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; those that leaves share are counted once."""
        return sum(entry.num_tokens for entry in self._manifest.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self._manifest.entries)

    @cached_property
    def leaf_bounds(self) -> Ints:
        """int64[n + 1]: sample ``i`` has the leaves ``leaf_bounds[i]:leaf_bounds[i + 1]``."""
        return bounds_of(joined([np.diff(shard.index.leaf_bounds) for shard in self._shards]))

    @cached_property
    def leaf_lengths(self) -> Ints:
        """int64[l]: tokens from root to leaf."""
        return joined([shard.index.leaf_lengths for shard in self._shards])

    @cached_property
    def leaf_targets(self) -> Ints:
        """int64[l]: targets that the leaf's segment counts."""
        return joined([shard.index.leaf_targets for shard in self._shards])

    def leaf_held(self, sample_ids: Ints) -> Ints:
        """int64[…], of each leaf of these samples, one sample behind the other, how many of its first tokens are those
        of the leaf before it (`layout.held_of_leaves`)."""
        counts = np.diff(self.leaf_bounds)[sample_ids]
        bounds = bounds_of(counts)
        held = np.zeros(int(bounds[-1]), dtype=np.int64)
        trees = np.flatnonzero(counts > 1)
        for shard, places, numbers in self._by_shard(sample_ids[trees]):
            index = shard.index
            branches, of_trees = take_groups(index.branch_bounds, numbers)
            found = held_of_leaves(index.branch_parents[branches], index.branch_lengths[branches], of_trees)
            held[take_groups(bounds, trees[places])[0]] = found
        return held

    @cached_property
    def verdicts(self) -> NDArray[np.float32]:
        """float32[n]: what `Sample.verdict` says, NaN where it says nothing."""
        return np.concatenate([np.zeros(0, np.float32), *(shard.index.verdicts for shard in self._shards)])

    @cached_property
    def root_lengths(self) -> Ints:
        """int64[n]: tokens of each sample's first branch, which is the prompt where continuations are compared."""
        return joined([shard.index.branch_lengths[shard.index.branch_bounds[:-1]] for shard in self._shards])

    @property
    def keys(self) -> NDArray[np.uint8]:
        """uint8[n, KEY_BYTES]: every sample's key (`store.format.row_key`), 32 bytes each; `keys_of` gives some."""
        return np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *(shard.keys() for shard in self._shards)])

    def _beyond(self, what: str) -> Exception:
        """For numbers that this snapshot does not have: whoever opened a store after it was deleted has none."""
        gone = not (self.folder / MANIFEST).exists()
        return store_gone(self.folder) if gone else IndexError(f"{what} of {len(self)}")

    def _by_shard(self, sample_ids: Ints) -> Iterator[tuple[Shard, Ints, Ints]]:
        """Each shard that has some of the samples; which of ``sample_ids`` these are; their numbers in the shard."""
        if not len(sample_ids):
            return
        if sample_ids.min() < 0 or sample_ids.max() >= len(self):
            raise self._beyond(f"samples {sample_ids.min()} to {sample_ids.max()}")
        starts = np.array(self._starts, dtype=np.int64)
        shard_of = np.searchsorted(starts, sample_ids, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        cuts = np.flatnonzero(np.diff(shard_of[order])) + 1
        for places in np.split(order, cuts):
            shard = int(shard_of[places[0]])
            yield self._shards[shard], places, sample_ids[places] - starts[shard]


class StoreWriter:
    """Adds samples to a store. What was added is in the store after `commit`, or once `SHARD_BYTES` are together."""

    def __init__(
        self, folder: Path, *, fingerprint: str, disk: Disk | None = None, about: Mapping[str, str] | None = None
    ) -> None:
        """Create the folder if need be. ``about`` tells people what made the store (model, template …); the first
        writer's is kept. Raises `StoreError` if the folder cannot be created."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._disk = Disk() if disk is None else disk
        self._pending: dict[bytes, EncodedSample] = {}
        self._pending_bytes = 0
        self._disk.make_folder(folder)
        self._users = join_users(folder / USERS)
        if not (folder / ABOUT).exists():
            told = {"luthier": __version__, "format": FORMAT, "fingerprint": fingerprint, **(about or {})}
            with self._disk.locked(folder / LOCK):
                if not (folder / ABOUT).exists():
                    self._disk.publish(folder / ABOUT, [json.dumps(told, indent=1).encode()], durable=False)

    def add(self, key: bytes, sample: EncodedSample) -> None:
        """Add a sample under its key; a key that is pending already keeps its sample."""
        assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes, not {len(key)}"
        if key in self._pending:
            return
        self._pending[key] = sample
        self._pending_bytes += len(sample.payload)
        if self._pending_bytes >= SHARD_BYTES:
            self.commit()

    def commit(self) -> None:
        """Write what is pending, then name it in the manifest. Raises `StoreError`; the store is then as before or,
        if only the last step failed, as after; either way what is pending can be committed again."""
        if not self._pending:
            return
        shard = build_shard(list(self._pending), list(self._pending.values()))
        self._disk.publish(self._folder / shard.entry.name, shard.chunks())
        with self._disk.locked(self._folder / LOCK):
            self._name(shard)
        self._pending = {}
        self._pending_bytes = 0

    def _name(self, shard: NewShard) -> None:
        entries = read_manifest(self._folder, self._fingerprint, disk=self._disk).entries
        if shard.entry in entries:
            return
        if not (self._folder / shard.entry.name).exists():  # somebody cleaned up where locks are not shared
            self._disk.publish(self._folder / shard.entry.name, shard.chunks())
        write_manifest(self._folder, self._fingerprint, [*entries, shard.entry], disk=self._disk)
