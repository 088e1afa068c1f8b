"""The token store: encoded samples on disk, found by the content of their rows.

    <store>/lock                one writer at a time changes the manifest
    <store>/manifest.json       names the shards; replaced as a whole, last of all
    <store>/shard-<hash>.bin    samples (`luthier.encoding.shard`)

A key is a digest of a row's bytes and of everything else that decides its sample (`row_key`), so a sample is encoded
once, however often, in whichever file or run its row comes again. Readers see the manifest before a commit or after
it, never a mix. Several processes may add to a store at the same time: shards have names of their own, and the
manifests are merged under the lock; should two have encoded the same row, the first to commit is read.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.disk import Disk
from luthier.encoding.shard import KEY_BYTES, REBUILD, EncodedSample, Shard, ShardEntry, build_shard
from luthier.errors import StoreError
from luthier.records import NOWHERE, Address, Sample

FORMAT = 2
MANIFEST = "manifest.json"
LOCK = "lock"
SHARD_BYTES = 2**26  # so much is encoded between commits, and lost at most if the process is killed


def row_key(raw: bytes, *, fingerprint: str, conversion: str) -> bytes:
    """The key of a row: ``fingerprint`` covers how rows are encoded, ``conversion`` how they are read."""
    digest = hashlib.sha256()
    for part in (fingerprint.encode(), conversion.encode(), raw):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def store_folder(root: Path | None, fingerprint: str) -> Path:
    """Where the samples of one encoder are kept; ``root`` None is ``~/.cache/luthier/store``."""
    base = Path.home() / ".cache" / "luthier" / "store" if root is None else root
    return base / f"v{FORMAT}-{fingerprint[:32]}"


class SampleStore:
    """A snapshot of the store, open for reading: ``store[i]`` is the i-th sample. Numbers stay what they are when
    shards are added later. Costs little to send to another process, which maps the same files."""

    def __init__(self, folder: Path, fingerprint: str, entries: Sequence[ShardEntry]) -> None:
        """Use `SampleStore.open`."""
        self.folder = folder
        self.fingerprint = fingerprint
        self._shards = [Shard(folder / entry.name, entry) for entry in entries]
        self._starts = list(accumulate((entry.num_samples for entry in entries), initial=0))

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str) -> SampleStore:
        """The store as its manifest says; empty where there is none.

        Raises `StoreError` if it is damaged, or belongs to another encoder or another version of Luthier.
        """
        return cls(folder, fingerprint, _read_manifest(folder, fingerprint))

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleStore, (self.folder, self.fingerprint, [shard.entry for shard in self._shards])

    def __len__(self) -> int:
        return self._starts[-1]

    def __contains__(self, key: bytes) -> bool:
        return key in self._index_of_key

    def __getitem__(self, index: int) -> Sample:
        return self.read(index, NOWHERE)

    def read(self, index: int, address: Address) -> Sample:
        """A sample with its row's address. Raises `StoreError` if its bytes are damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._starts, index) - 1
        return self._shards[shard].read(index - self._starts[shard], address)

    def notes(self, index: int) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of a sample's row, and how often."""
        shard = bisect_right(self._starts, index) - 1
        return self._shards[shard].notes(index - self._starts[shard])

    def index_of(self, key: bytes) -> int | None:
        """The number of the sample with this key, if it is in the store."""
        return self._index_of_key.get(key)

    def verify(self) -> None:
        """Read every byte. Raises `StoreError` if one is not as it was written."""
        for shard in self._shards:
            shard.verify()

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; those that leaves share are counted once."""
        return sum(shard.entry.num_tokens for shard in self._shards)

    @property
    def num_bytes(self) -> int:
        """What the shards take on disk."""
        return sum(shard.entry.size for shard in self._shards)

    @cached_property
    def leaf_bounds(self) -> NDArray[np.int64]:
        """int64[n + 1]: sample ``i`` has the leaves ``leaf_bounds[i]:leaf_bounds[i + 1]``."""
        bounds = np.zeros(len(self) + 1, dtype=np.int64)
        counts = [np.diff(shard.index.leaf_bounds) for shard in self._shards]
        np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), out=bounds[1:])
        return bounds

    @cached_property
    def leaf_lengths(self) -> NDArray[np.int64]:
        """int64[l]: tokens from root to leaf."""
        return _joined([shard.index.leaf_lengths for shard in self._shards])

    @cached_property
    def leaf_targets(self) -> NDArray[np.int64]:
        """int64[l]: targets that the leaf's segment counts."""
        return _joined([shard.index.leaf_targets for shard in self._shards])

    @cached_property
    def num_targets(self) -> NDArray[np.int64]:
        """int64[n]: targets of each sample."""
        running = np.zeros(len(self.leaf_targets) + 1, dtype=np.int64)
        np.cumsum(self.leaf_targets, out=running[1:])
        return np.diff(running[self.leaf_bounds])

    @cached_property
    def keys(self) -> NDArray[np.uint8]:
        """uint8[n, KEY_BYTES]: each sample's key (`row_key`), which says what is in it wherever it is stored."""
        return np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *(shard.index.keys for shard in self._shards)])

    @cached_property
    def _index_of_key(self) -> dict[bytes, int]:
        keys = self.keys.tobytes()
        found: dict[bytes, int] = {}
        for number in range(len(self)):
            found.setdefault(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES], number)
        return found


class StoreWriter:
    """Adds samples to a store. What was added is in the store after `commit`, or once `SHARD_BYTES` are together."""

    def __init__(self, folder: Path, *, fingerprint: str, disk: Disk | None = None) -> None:
        """Create the folder if need be. Raises `StoreError` if that cannot be done."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._disk = Disk() if disk is None else disk
        self._pending: dict[bytes, EncodedSample] = {}
        self._pending_bytes = 0
        self._disk.make_folder(folder)

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
        """Write what is pending, then name it in the manifest. Raises `StoreError`; the store is then as before."""
        if not self._pending:
            return
        entry, chunks = build_shard(list(self._pending), list(self._pending.values()))
        self._disk.publish(self._folder / entry.name, chunks)
        with self._disk.locked(self._folder / LOCK):
            entries = _read_manifest(self._folder, self._fingerprint)
            if entry not in entries:
                manifest = _manifest_bytes(self._fingerprint, [*entries, entry])
                self._disk.publish(self._folder / MANIFEST, [manifest])
        self._pending = {}
        self._pending_bytes = 0


def _manifest_bytes(fingerprint: str, entries: Iterable[ShardEntry]) -> bytes:
    content = {"format": FORMAT, "fingerprint": fingerprint, "shards": [asdict(entry) for entry in entries]}
    body = json.dumps(content, indent=1).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body  # the first line vouches for the rest


def _read_manifest(folder: Path, fingerprint: str) -> list[ShardEntry]:
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: the store cannot be read: {error.strerror or error}") from error
    digest, _, body = raw.partition(b"\n")
    found = hashlib.sha256(body).hexdigest()
    if digest != found.encode():
        raise StoreError(
            f"{path}: the manifest is damaged: its digest should be {digest[:64]!r}, but is {found}", hint=REBUILD
        )
    content = json.loads(body)
    for name, mine in (("format", FORMAT), ("fingerprint", fingerprint)):
        if content[name] != mine:
            raise StoreError(f"{path}: the store's {name} is {content[name]}, this run's is {mine}", hint=REBUILD)
    return [ShardEntry(**entry) for entry in content["shards"]]


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64) for part in parts)])
