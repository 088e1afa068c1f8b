"""A shard: one file of encoded samples. Written once, whole; never changed.

    magic                                         8 bytes
    payload of sample 0, of sample 1, …           one run of bytes each, a multiple of 4 bytes long
    index: the arrays of `ShardIndex`, in order   each starts at a multiple of 8 bytes from the index's start

A payload is ``input_ids`` int32[T], then ``target`` as bits (little-endian, to a multiple of 4 bytes), then ``weight``
float32[T] if the sample has weights. So reading a sample touches one run of bytes, whose checksum is in the index.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import StoreError
from luthier.records import Address, Branch, Sample

MAGIC = b"LUTSHRD2"
KEY_BYTES = 32
REBUILD = "delete the folder of the store: its samples will be encoded again"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """A sample as it will stand in a shard, with what planning needs to know of its leaves.

    ``leaf_targets`` does not count a leaf's first token, which never is a target. ``notes`` is the JSON of the
    sample's, or nothing.
    """

    payload: bytes
    num_tokens: int
    has_weight: bool
    branches: tuple[tuple[int, int], ...]
    leaf_lengths: tuple[int, ...]
    leaf_targets: tuple[int, ...]
    notes: bytes = b""

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """The notes as they were."""
        return read_counts(self.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """What the manifest says of a shard."""

    name: str
    sha256: str
    size: int
    index_start: int
    index_sha256: str
    num_samples: int
    num_branches: int
    num_leaves: int
    num_tokens: int
    num_note_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardIndex:
    """n samples, b branches, l leaves, c bytes. ``…_bounds`` say which run of bytes, branches or leaves is whose."""

    keys: NDArray[np.uint8]  # [n, 32]
    payload_bounds: NDArray[np.int64]  # [n + 1], from the file's start
    num_tokens: NDArray[np.int32]  # [n]
    checksums: NDArray[np.uint32]  # [n], CRC-32 of the payload
    has_weight: NDArray[np.uint8]  # [n]
    branch_bounds: NDArray[np.int64]  # [n + 1]
    branch_parents: NDArray[np.int32]  # [b]
    branch_lengths: NDArray[np.int32]  # [b]
    leaf_bounds: NDArray[np.int64]  # [n + 1]
    leaf_lengths: NDArray[np.int32]  # [l]
    leaf_targets: NDArray[np.int32]  # [l]
    note_bounds: NDArray[np.int64]  # [n + 1]
    note_bytes: NDArray[np.uint8]  # [c], the samples' notes as JSON


def freeze_sample(sample: Sample) -> EncodedSample:
    """A sample as bytes; `Shard.read` is the way back (all but the address, which belongs to the row)."""
    assert not sample.media, "samples with media cannot be stored yet"
    bits = np.packbits(sample.target, bitorder="little").tobytes()
    parts = [sample.input_ids.astype("<i4", copy=False).tobytes(), bits, b"\0" * (-len(bits) % 4)]
    if sample.weight is not None:
        parts.append(sample.weight.astype("<f4", copy=False).tobytes())
    leaves = [(len(target), int(np.count_nonzero(target[1:]))) for target in _leaf_targets(sample)]
    return EncodedSample(
        payload=b"".join(parts),
        num_tokens=len(sample.input_ids),
        has_weight=sample.weight is not None,
        branches=tuple((branch.parent, branch.length) for branch in sample.branches),
        leaf_lengths=tuple(length for length, _ in leaves),
        leaf_targets=tuple(num_targets for _, num_targets in leaves),
        notes=msgspec.json.encode(dict(sample.notes)) if sample.notes else b"",
    )


def read_counts(encoded: bytes) -> tuple[tuple[str, int], ...]:
    """Names and numbers from their JSON, which may be missing."""
    return tuple(msgspec.json.decode(encoded, type=dict[str, int]).items()) if encoded else ()


def build_shard(keys: Sequence[bytes], samples: Sequence[EncodedSample]) -> tuple[ShardEntry, list[bytes]]:
    """The manifest's entry and the file's bytes. The name follows from the content."""
    index = _index_of(keys, samples)
    index_bytes = b"".join(_index_chunks(index))
    chunks = [MAGIC, *(sample.payload for sample in samples), index_bytes]
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    entry = ShardEntry(
        name=f"shard-{digest.hexdigest()[:32]}.bin",
        sha256=digest.hexdigest(),
        size=sum(map(len, chunks)),
        index_start=int(index.payload_bounds[-1]),
        index_sha256=hashlib.sha256(index_bytes).hexdigest(),
        num_samples=len(samples),
        num_branches=len(index.branch_parents),
        num_leaves=len(index.leaf_lengths),
        num_tokens=int(index.num_tokens.sum()),
        num_note_bytes=len(index.note_bytes),
    )
    return entry, [MAGIC, b"".join(sample.payload for sample in samples), index_bytes]


class Shard:
    """A shard open for reading. The index is checked when it is opened, each payload when it is read."""

    def __init__(self, path: Path, entry: ShardEntry) -> None:
        """Map the file. Raises `StoreError` if it is missing, cut short, or its index is damaged."""
        self.path = path
        self.entry = entry
        self._bytes = _map(path, entry)
        found = hashlib.sha256(self._bytes[entry.index_start :]).hexdigest()
        if self._bytes[: len(MAGIC)] != MAGIC or found != entry.index_sha256:
            raise _damaged(path, "its index", entry.index_sha256, found)
        self.index = _read_index(self._bytes, entry)

    def read(self, number: int, address: Address) -> Sample:
        """The sample; its arrays are read-only views of the file. Raises `StoreError` if its bytes are damaged."""
        index = self.index
        start, stop = int(index.payload_bounds[number]), int(index.payload_bounds[number + 1])
        payload = self._bytes[start:stop]
        if zlib.crc32(payload) != index.checksums[number]:
            raise _damaged(self.path, f"sample {number}", int(index.checksums[number]), zlib.crc32(payload))
        num_tokens = int(index.num_tokens[number])
        bits_start = 4 * num_tokens
        bits = np.frombuffer(payload, np.uint8, count=(num_tokens + 7) // 8, offset=bits_start)
        weight_start = bits_start + -(-len(bits) // 4) * 4
        branches = slice(int(index.branch_bounds[number]), int(index.branch_bounds[number + 1]))
        parents, lengths = index.branch_parents[branches].tolist(), index.branch_lengths[branches].tolist()
        return Sample(
            input_ids=np.frombuffer(payload, "<i4", count=num_tokens),
            target=np.unpackbits(bits, count=num_tokens, bitorder="little").view(np.bool_),
            weight=np.frombuffer(payload, "<f4", offset=weight_start) if index.has_weight[number] else None,
            branches=tuple(
                Branch(parent=parent, length=length) for parent, length in zip(parents, lengths, strict=True)
            ),
            notes=self.notes(number),
            address=address,
        )

    def notes(self, number: int) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of the sample's row, and how often."""
        start, stop = self.index.note_bounds[number : number + 2].tolist()
        return read_counts(self.index.note_bytes[start:stop].tobytes())

    def verify(self) -> None:
        """Read the whole file. Raises `StoreError` if one bit of it is not as it was written."""
        found = hashlib.sha256(self._bytes).hexdigest()
        if found != self.entry.sha256:
            raise _damaged(self.path, "its content", self.entry.sha256, found)


def _leaf_targets(sample: Sample) -> list[NDArray[np.bool_]]:
    if len(sample.branches) == 1:
        return [sample.target]
    return [segment.target for segment in sample.segments()]


def _map(path: Path, entry: ShardEntry) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise StoreError(f"{path}: a shard of the store cannot be read: {error}", hint=REBUILD) from error
    if len(mapped) != entry.size:
        raise _damaged(path, "its size", entry.size, len(mapped))
    return mapped


def _damaged(path: Path, what: str, expected: object, found: object) -> StoreError:
    return StoreError(f"{path}: the shard is damaged: {what} should be {expected}, but is {found}", hint=REBUILD)


def _index_of(keys: Sequence[bytes], samples: Sequence[EncodedSample]) -> ShardIndex:
    branches = np.array([branch for sample in samples for branch in sample.branches], dtype=np.int32).reshape(-1, 2)
    return ShardIndex(
        keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES),
        payload_bounds=len(MAGIC) + _bounds([len(sample.payload) for sample in samples]),
        num_tokens=np.array([sample.num_tokens for sample in samples], dtype=np.int32),
        checksums=np.array([zlib.crc32(sample.payload) for sample in samples], dtype=np.uint32),
        has_weight=np.array([sample.has_weight for sample in samples], dtype=np.uint8),
        branch_bounds=_bounds([len(sample.branches) for sample in samples]),
        branch_parents=branches[:, 0],
        branch_lengths=branches[:, 1],
        leaf_bounds=_bounds([len(sample.leaf_lengths) for sample in samples]),
        leaf_lengths=np.array([n for sample in samples for n in sample.leaf_lengths], dtype=np.int32),
        leaf_targets=np.array([n for sample in samples for n in sample.leaf_targets], dtype=np.int32),
        note_bounds=_bounds([len(sample.notes) for sample in samples]),
        note_bytes=np.frombuffer(b"".join(sample.notes for sample in samples), np.uint8),
    )


def _bounds(counts: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _shapes(
    num_samples: int, num_branches: int, num_leaves: int, num_note_bytes: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    n, b, leaves = num_samples, num_branches, num_leaves
    return {
        "keys": ("u1", (n, KEY_BYTES)),
        "payload_bounds": ("<i8", (n + 1,)),
        "num_tokens": ("<i4", (n,)),
        "checksums": ("<u4", (n,)),
        "has_weight": ("u1", (n,)),
        "branch_bounds": ("<i8", (n + 1,)),
        "branch_parents": ("<i4", (b,)),
        "branch_lengths": ("<i4", (b,)),
        "leaf_bounds": ("<i8", (n + 1,)),
        "leaf_lengths": ("<i4", (leaves,)),
        "leaf_targets": ("<i4", (leaves,)),
        "note_bounds": ("<i8", (n + 1,)),
        "note_bytes": ("u1", (num_note_bytes,)),
    }


def _index_chunks(index: ShardIndex) -> Iterator[bytes]:
    arrays = {field.name: getattr(index, field.name) for field in fields(index)}
    shapes = _shapes(len(index.keys), len(index.branch_parents), len(index.leaf_lengths), len(index.note_bytes))
    for name, (dtype, shape) in shapes.items():
        assert arrays[name].shape == shape, f"{name}: {arrays[name].shape} != {shape}"
        data = arrays[name].astype(dtype, copy=False).tobytes()
        yield data + b"\0" * (-len(data) % 8)


def _read_index(mapped: mmap.mmap, entry: ShardEntry) -> ShardIndex:
    arrays: dict[str, Any] = {}
    place = entry.index_start
    shapes = _shapes(entry.num_samples, entry.num_branches, entry.num_leaves, entry.num_note_bytes)
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(mapped, dtype, count=count, offset=place).reshape(shape)
        place += -(-arrays[name].nbytes // 8) * 8
    return ShardIndex(**arrays)
