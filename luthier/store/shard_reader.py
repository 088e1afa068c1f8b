"""Reading a shard. Nothing is read before it is needed, and nothing is used before it is checked."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import zlib
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.errors import StoreError
from luthier.records import Address, Branch, MediaItem, Sample
from luthier.store.disk import REPAIR
from luthier.store.format import KEY_BYTES, MAGIC, ShardEntry, ShardIndex, media_from_bytes, read_counts, read_index

MOST_OPEN = 384  # each open shard costs a file descriptor, of which a process often has 1024


class Shard:
    """A shard for reading. The keys are checked when first asked for, the index when first used, each payload
    whenever it is read; its size was checked by whoever made this object (`check_size`)."""

    def __init__(self, path: Path, entry: ShardEntry, opened: deque[Shard]) -> None:
        """``opened`` are the shards whose files are mapped, the longest open first."""
        self.path = path
        self.entry = entry
        self._opened = opened
        self._parts: tuple[mmap.mmap, ShardIndex] | None = None
        self._index_is_sound = False
        self._keys_are_sound = False

    def check_size(self) -> None:
        """Raises `StoreError` if the file is missing or was cut."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if size != self.entry.size:
            raise _damaged(self.path, "its size", self.entry.size, size)

    def keys(self) -> NDArray[np.uint8]:
        """uint8[n, KEY_BYTES], read and checked anew. Raises `StoreError` if they are damaged."""
        entry = self.entry
        section = self._section(entry.index_start, entry.keys_stop)
        found = hashlib.sha256(section).hexdigest()
        if found != entry.keys_digest:
            raise _damaged(self.path, "its index", f"{entry.keys_digest} (keys)", found)
        self._keys_are_sound = True
        return np.frombuffer(section, np.uint8, offset=entry.keys_start - entry.index_start).reshape(-1, KEY_BYTES)

    def keys_at(self, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """uint8[m, KEY_BYTES]: the keys of some samples. Raises `StoreError` if the shard's keys are damaged."""
        if not self._keys_are_sound:
            self.keys()
        return self.index.keys[numbers]

    @property
    def index(self) -> ShardIndex:
        """The index. Raises `StoreError` if it is damaged."""
        return self._open()[1]

    def read(self, number: int, address: Address) -> Sample:
        """The sample; its arrays are read-only. Raises `StoreError` if its bytes are damaged."""
        mapped, index = self._open()
        start, stop = index.payload_bounds[number : number + 2].tolist()
        payload = mapped[start:stop]
        checksum = int(index.checksums[number])
        if zlib.crc32(payload) != checksum:
            raise _damaged(self.path, f"sample {number}", checksum, zlib.crc32(payload))
        num_tokens = int(index.num_tokens[number])
        bits_start = 4 * num_tokens
        bits = np.frombuffer(payload, np.uint8, count=(num_tokens + 7) // 8, offset=bits_start)
        weight_start = bits_start + -(-len(bits) // 4) * 4
        turns, (media, for_rewards) = _tail(payload[weight_start + 4 * num_tokens * int(index.has_weight[number]) :])
        verdict = float(index.verdicts[number])
        first, last = index.branch_bounds[number : number + 2].tolist()
        parents, lengths = index.branch_parents[first:last].tolist(), index.branch_lengths[first:last].tolist()
        return Sample(
            input_ids=np.frombuffer(payload, "<i4", count=num_tokens),
            target=np.unpackbits(bits, count=num_tokens, bitorder="little").view(np.bool_),
            weight=np.frombuffer(payload, "<f4", count=num_tokens, offset=weight_start)
            if index.has_weight[number]
            else None,
            branches=tuple(
                Branch(parent=parent, length=length) for parent, length in zip(parents, lengths, strict=True)
            ),
            notes=self.notes(number),
            verdict=None if math.isnan(verdict) else verdict,
            prompt_turns=turns,
            media=media,
            for_rewards=for_rewards,
            address=address,
        )

    def notes(self, number: int) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of the sample's row, and how often."""
        _, index = self._parts or self._open()
        start, stop = index.note_bounds[number : number + 2].tolist()
        return read_counts(index.note_bytes[start:stop].tobytes()) if start != stop else ()

    def verify(self) -> None:
        """Read the whole file. Raises `StoreError` if one bit of it is not as it was written."""
        self.check_size()
        self._index_is_sound = False
        self.close()
        self.keys()
        mapped, index = self._open()
        bounds = index.payload_bounds.tolist()
        with memoryview(mapped) as view:
            for number, expected in enumerate(index.checksums.tolist()):
                found = zlib.crc32(view[bounds[number] : bounds[number + 1]])
                if found != expected:
                    raise _damaged(self.path, f"sample {number}", expected, found)
        self.close()

    def release(self) -> None:
        """Let go of the memory that reading took, not of the file: what is needed again is read again."""
        if self._parts is not None:
            with suppress(AttributeError, OSError):  # a system without it keeps the pages until they are wanted
                self._parts[0].madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the file, once no array of it is in use."""
        self._parts = None
        if self._opened and self._opened[-1] is self:
            self._opened.pop()
        else:
            with suppress(ValueError):
                self._opened.remove(self)

    def _open(self) -> tuple[mmap.mmap, ShardIndex]:
        if self._parts is None:
            if not self._index_is_sound:
                self._check_index()
            mapped = self._map()
            self._parts = parts = mapped, read_index(mapped, self.entry)
            while len(self._opened) >= MOST_OPEN:
                # the newest, not the oldest: shards are mostly gone through in order, again and again, and then the
                # oldest is wanted next
                self._opened[-1].close()
            self._opened.append(self)
            return parts
        return self._parts

    def _check_index(self) -> None:
        # read, not mapped: the pages of a map would count as this process's memory
        magic = self._section(0, len(MAGIC))
        found = hashlib.sha256(self._section(self.entry.keys_stop, self.entry.size)).hexdigest()
        if magic != MAGIC or found != self.entry.table_digest:
            raise _damaged(self.path, "its index", (MAGIC, self.entry.table_digest), (magic, found))
        self._index_is_sound = True

    def _section(self, start: int, stop: int) -> bytes:
        try:
            with self.path.open("rb", buffering=0) as file:
                parts = []
                while start < stop and (part := os.pread(file.fileno(), stop - start, start)):
                    parts.append(part)
                    start += len(part)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return b"".join(parts)

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise _unreadable(self.path, error) from error
        if len(mapped) != self.entry.size:
            raise _damaged(self.path, "its size", self.entry.size, len(mapped))
        return mapped


def _tail(payload: bytes) -> tuple[tuple[int, ...], tuple[tuple[MediaItem, ...], str]]:
    """The prompt turns, and the media with what rewards may read, at a payload's end."""
    if not payload:
        return (), ((), "")
    num_turns, num_bytes = np.frombuffer(payload, "<i4", count=2).tolist()
    turns = np.frombuffer(payload, "<i4", count=num_turns, offset=8)
    start = 8 + turns.nbytes
    return tuple(turns.tolist()), media_from_bytes(payload[start : start + num_bytes])


def store_gone(folder: Path) -> StoreError:
    """What to raise where samples are wanted of a store that was there when they were planned, and has no manifest."""
    return StoreError(
        f"{folder}: the store is gone, it was deleted while it was in use",
        hint="the same command prepares the rows again and goes on from the newest checkpoint; leave data.store alone "
        "while a run reads it",
    )


def _unreadable(path: Path, error: Exception) -> StoreError:
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        return store_gone(path.parent)
    return StoreError(f"{path}: a shard of the store cannot be read: {error}", hint=REPAIR)


def _damaged(path: Path, what: str, expected: object, found: object) -> StoreError:
    return StoreError(f"{path}: the shard is damaged: {what} should be {expected}, but is {found}", hint=REPAIR)
