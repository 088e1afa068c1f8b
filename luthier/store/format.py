"""The files of a store: shards of encoded samples, the manifest that vouches for them, and what all of it is called.

A shard is written once, whole, and never changed:

    magic                                         8 bytes
    payload of sample 0, of sample 1, …           one run of bytes each, a multiple of 4 bytes long
    zeros                                         to a multiple of 8 bytes
    index: the arrays of `ShardIndex`, in order   each filled with zeros to a multiple of 8 bytes

A payload is ``input_ids`` int32[T], then ``target`` as bits (little-endian, to a multiple of 4 bytes), then ``weight``
float32[T] if the sample has weights. If it has prompt turns, media or what rewards may read, there follow how many
turns and how many bytes of the others there are, int32[2], then ``prompt_turns`` int32[…], then the others
(`media_to_bytes`). So reading a sample touches one run of bytes, whose checksum is in the index. The index is vouched
for by the manifest, with one digest for the keys and one for the rest: to look keys up, only they are read. So every
byte is covered, and none is hashed twice.

The manifest says which shards a store has, in which order. It is replaced as a whole; its first line vouches for it.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import StoreError
from luthier.packing import bounds_of
from luthier.records import Audio, AudioHeader, Image, ImageHeader, MediaItem, Sample, Video, VideoHeader
from luthier.store.disk import REPAIR, Disk

if TYPE_CHECKING:
    from hashlib import _Hash


MAGIC = b"LUTSHRD5"
KEY_BYTES = 32
QUESTION = -1  # in the place of a number of targets: the model answers the row in the run
WRITE_BYTES = 2**22  # payloads are joined to so much before they are written: few calls, and no second copy of all


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """A sample as it will stand in a shard, with what planning needs to know of its leaves.

    ``leaf_targets`` does not count a leaf's first token, which never is a target; it is `QUESTION` of a row without an
    answer, which needs none. ``leaf_encoders``: what encoders run
    through for a leaf's media (`MediaItem.encoder_length`), () of text. ``in_folder``: some of its media are files that
    are named from the folder of the row's own file, so that in another folder the same row names others. ``notes`` is
    the JSON of the sample's, or nothing. ``verdict`` is NaN where the sample has none.
    """

    payload: bytes
    num_tokens: int
    has_weight: bool
    has_media: bool = False
    in_folder: bool = False
    branches: tuple[tuple[int, int], ...]
    leaf_lengths: tuple[int, ...]
    leaf_targets: tuple[int, ...]
    leaf_encoders: tuple[int, ...] = ()
    notes: bytes = b""
    verdict: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """What the manifest says of a shard."""

    name: str
    size: int
    index_start: int  # where the payloads end
    keys_digest: str  # of the index's zeros and keys
    table_digest: str  # of the rest of the index
    num_samples: int
    num_branches: int
    num_leaves: int
    num_tokens: int
    num_note_bytes: int

    @property
    def keys_start(self) -> int:
        return self.index_start + -self.index_start % 8

    @property
    def keys_stop(self) -> int:
        """Where the last key ends, and the rest of the index begins."""
        return self.keys_start + KEY_BYTES * self.num_samples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardIndex:
    """n samples, b branches, l leaves, c bytes. ``…_bounds`` say which run of bytes, branches or leaves is whose."""

    keys: NDArray[np.uint8]  # [n, 32]
    payload_bounds: NDArray[np.int64]  # [n + 1], from the file's start
    num_tokens: NDArray[np.int32]  # [n]
    checksums: NDArray[np.uint32]  # [n], CRC-32 of the payload
    has_weight: NDArray[np.uint8]  # [n]
    has_media: NDArray[np.uint8]  # [n]
    verdicts: NDArray[np.float32]  # [n], NaN: the sample has none
    branch_bounds: NDArray[np.int64]  # [n + 1]
    branch_parents: NDArray[np.int32]  # [b]
    branch_lengths: NDArray[np.int32]  # [b]
    leaf_bounds: NDArray[np.int64]  # [n + 1]
    leaf_lengths: NDArray[np.int32]  # [l]
    leaf_targets: NDArray[np.int32]  # [l]
    leaf_encoders: NDArray[np.int32]  # [l]
    note_bounds: NDArray[np.int64]  # [n + 1]
    note_bytes: NDArray[np.uint8]  # [c], the samples' notes as JSON


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewShard:
    """A shard that is not on the disk yet. Its name follows from its content."""

    entry: ShardEntry
    payloads: Sequence[bytes]
    index: bytes

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, in some pieces."""
        yield MAGIC
        piece: list[bytes] = []
        num_bytes = 0
        for payload in self.payloads:
            piece.append(payload)
            num_bytes += len(payload)
            if num_bytes >= WRITE_BYTES:
                yield b"".join(piece)
                piece, num_bytes = [], 0
        yield b"".join([*piece, self.index])


def freeze_sample(sample: Sample) -> EncodedSample:
    """A sample as bytes; `Shard.read` is the way back (all but the address, which belongs to the row)."""
    bits = np.packbits(sample.target, bitorder="little").tobytes()
    parts = [sample.input_ids.astype("<i4", copy=False).tobytes(), bits, b"\0" * (-len(bits) % 4)]
    if sample.weight is not None:
        parts.append(sample.weight.astype("<f4", copy=False).tobytes())
    if sample.prompt_turns or sample.media or sample.for_rewards:
        media = media_to_bytes(sample.media, sample.for_rewards)
        parts.append(np.array([len(sample.prompt_turns), len(media), *sample.prompt_turns], dtype="<i4").tobytes())
        parts += [media, b"\0" * (-len(media) % 4)]
    leaf_lengths, leaf_targets = measure_leaves(sample)
    return EncodedSample(
        payload=b"".join(parts),
        num_tokens=len(sample.input_ids),
        has_weight=sample.weight is not None,
        has_media=bool(sample.media),
        in_folder=any(item.media.root == sample.address.folder for item in sample.media),
        branches=tuple((branch.parent, branch.length) for branch in sample.branches),
        leaf_lengths=leaf_lengths,
        leaf_targets=(QUESTION,) * len(leaf_targets) if sample.for_rewards and not any(leaf_targets) else leaf_targets,
        leaf_encoders=measure_encoders(sample),
        notes=msgspec.json.encode(dict(sample.notes)) if sample.notes else b"",
        verdict=math.nan if sample.verdict is None else sample.verdict,
    )


def read_counts(encoded: bytes) -> tuple[tuple[str, int], ...]:
    """Names and numbers from their JSON, which may be missing."""
    return tuple(msgspec.json.decode(encoded, type=dict[str, int]).items()) if encoded else ()


def build_shard(keys: Sequence[bytes], samples: Sequence[EncodedSample]) -> NewShard:
    """The manifest's entry and the file's bytes. The same samples make the same shard."""
    index = _index_of(keys, samples)
    index_start = int(index.payload_bounds[-1])
    sections = list(_index_sections(index))
    key_bytes = b"\0" * (-index_start % 8) + sections[0]
    table = b"".join(sections[1:])
    keys_digest, table_digest = hashlib.sha256(key_bytes), hashlib.sha256(table)
    # the table has a checksum of every payload, so the two digests speak for the whole file
    name = hashlib.sha256(keys_digest.digest() + table_digest.digest()).hexdigest()[:32]
    entry = ShardEntry(
        name=f"shard-{name}.bin",
        size=index_start + len(key_bytes) + len(table),
        index_start=index_start,
        keys_digest=keys_digest.hexdigest(),
        table_digest=table_digest.hexdigest(),
        num_samples=len(samples),
        num_branches=len(index.branch_parents),
        num_leaves=len(index.leaf_lengths),
        num_tokens=int(index.num_tokens.sum(dtype=np.int64)),
        num_note_bytes=len(index.note_bytes),
    )
    return NewShard(entry=entry, payloads=[sample.payload for sample in samples], index=key_bytes + table)


def read_index(mapped: Any, entry: ShardEntry) -> ShardIndex:
    """The index as views of a shard's bytes."""
    arrays: dict[str, Any] = {}
    place = entry.keys_start
    shapes = _shapes(entry.num_samples, entry.num_branches, entry.num_leaves, entry.num_note_bytes)
    for name, (dtype, shape) in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        array = np.frombuffer(mapped, dtype, count=count, offset=place)
        arrays[name] = array.reshape(shape)
        place += array.nbytes + -array.nbytes % 8
    return ShardIndex(**arrays)


def _index_of(keys: Sequence[bytes], samples: Sequence[EncodedSample]) -> ShardIndex:
    branches = np.array([branch for sample in samples for branch in sample.branches], dtype=np.int32).reshape(-1, 2)
    return ShardIndex(
        keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES),
        payload_bounds=len(MAGIC) + bounds_of([len(sample.payload) for sample in samples]),
        num_tokens=np.array([sample.num_tokens for sample in samples], dtype=np.int32),
        checksums=np.array([zlib.crc32(sample.payload) for sample in samples], dtype=np.uint32),
        has_weight=np.array([sample.has_weight for sample in samples], dtype=np.uint8),
        has_media=np.array([sample.has_media for sample in samples], dtype=np.uint8),
        verdicts=np.array([sample.verdict for sample in samples], dtype=np.float32),
        branch_bounds=bounds_of([len(sample.branches) for sample in samples]),
        branch_parents=branches[:, 0],
        branch_lengths=branches[:, 1],
        leaf_bounds=bounds_of([len(sample.leaf_lengths) for sample in samples]),
        leaf_lengths=np.array([n for sample in samples for n in sample.leaf_lengths], dtype=np.int32),
        leaf_targets=np.array([n for sample in samples for n in sample.leaf_targets], dtype=np.int32),
        leaf_encoders=_encoders(samples),
        note_bounds=bounds_of([len(sample.notes) for sample in samples]),
        note_bytes=np.frombuffer(b"".join(sample.notes for sample in samples), np.uint8),
    )


def _encoders(samples: Sequence[EncodedSample]) -> NDArray[np.int32]:
    found = [sample.leaf_encoders or (0,) * len(sample.leaf_lengths) for sample in samples]
    return np.array([number for of_sample in found for number in of_sample], dtype=np.int32)


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
        "has_media": ("u1", (n,)),
        "verdicts": ("<f4", (n,)),
        "branch_bounds": ("<i8", (n + 1,)),
        "branch_parents": ("<i4", (b,)),
        "branch_lengths": ("<i4", (b,)),
        "leaf_bounds": ("<i8", (n + 1,)),
        "leaf_lengths": ("<i4", (leaves,)),
        "leaf_targets": ("<i4", (leaves,)),
        "leaf_encoders": ("<i4", (leaves,)),
        "note_bounds": ("<i8", (n + 1,)),
        "note_bytes": ("u1", (num_note_bytes,)),
    }


def _index_sections(index: ShardIndex) -> Iterator[bytes]:
    arrays = {field.name: getattr(index, field.name) for field in fields(index)}
    shapes = _shapes(len(index.keys), len(index.branch_parents), len(index.leaf_lengths), len(index.note_bytes))
    for name, (dtype, shape) in shapes.items():
        assert arrays[name].shape == shape, f"{name}: {arrays[name].shape} != {shape}"
        data = arrays[name].astype(dtype, copy=False).tobytes()
        yield data + b"\0" * (-len(data) % 8)


# --------------------------------------------------------------------------------------------------------------------
# Media items as bytes of a store, and the way back: references, headers and places, never pixels.


MEDIA = {"image": Image, "video": Video, "audio": Audio}
HEADERS = {"image": ImageHeader, "video": VideoHeader, "audio": AudioHeader}


def media_to_bytes(items: Sequence[MediaItem], for_rewards: str = "") -> bytes:
    """The items and, behind them, what rewards may read of the row; nothing for neither."""
    parts = [*(_plain(item) for item in items), *([for_rewards] if for_rewards else [])]
    return msgspec.msgpack.encode(parts) if parts else b""


def media_from_bytes(encoded: bytes) -> tuple[tuple[MediaItem, ...], str]:
    """Read what `media_to_bytes` wrote."""
    parts = msgspec.msgpack.decode(encoded) if encoded else []
    for_rewards = parts.pop() if parts and isinstance(parts[-1], str) else ""
    return tuple(map(_item, parts)), for_rewards


def _plain(item: MediaItem) -> list[object]:
    kind = next(kind for kind, of_kind in MEDIA.items() if isinstance(item.media, of_kind))
    numbers = [item.start, item.length, item.encoder_length, item.opening, item.closing, item.counts_together]
    return [kind, _values(item.media), _values(item.header), *numbers]


def _values(record: Any) -> dict[str, object]:
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: _values(value) if isinstance(value, AudioHeader) else value for name, value in found.items()}


def _item(plain: list[Any]) -> MediaItem:
    kind, media, header, start, length, encoder_length, *marks = plain
    if isinstance(media["source"], list):
        media["source"] = tuple(media["source"])
    if media.get("window") is not None:
        media["window"] = tuple(media["window"])
    if header.get("audio") is not None:
        header["audio"] = AudioHeader(**header["audio"])
    return MediaItem(
        media=MEDIA[kind](**media),
        header=HEADERS[kind](**header),
        start=start,
        length=length,
        encoder_length=encoder_length,
        **dict(zip(("opening", "closing", "counts_together"), marks, strict=False)),  # older stores do not say
    )


# --------------------------------------------------------------------------------------------------------------------
# What planning needs to know of a sample's leaves, without laying out their tokens.


def measure_leaves(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens from root to leaf, and targets that the leaf's segment counts, leaf by leaf: `Sample.segments` in numbers.

    A leaf's first token is never counted, for nothing predicts it.
    """
    target, branches = sample.target, sample.branches
    if len(branches) == 1:
        return (len(target),), (int(np.count_nonzero(target[1:])),)
    if not all(branch.length for branch in branches):
        segments = sample.segments()
        return tuple(map(len, segments)), tuple(int(np.count_nonzero(segment.target[1:])) for segment in segments)
    lengths: list[int] = []  # from the root to the branch's end
    counts: list[int] = []
    is_leaf = [True] * len(branches)
    start = 0
    for branch in branches:
        stop = start + branch.length
        if branch.parent < 0:
            lengths.append(branch.length)
            counts.append(int(np.count_nonzero(target[start + 1 : stop])))
        else:
            lengths.append(lengths[branch.parent] + branch.length)
            counts.append(int(np.count_nonzero(target[start:stop])))
            is_leaf[branch.parent] = False
        start = stop
    leaf_targets = []
    for leaf in [number for number, is_one in enumerate(is_leaf) if is_one]:
        total, node = 0, leaf
        while node >= 0:  # the first leaf of a branch takes its targets, and those of all before it
            total += counts[node]
            counts[node] = 0
            node = branches[node].parent
        leaf_targets.append(total)
    return tuple(length for length, is_one in zip(lengths, is_leaf, strict=True) if is_one), tuple(leaf_targets)


def measure_encoders(sample: Sample) -> tuple[int, ...]:
    """What encoders run through for the media of each leaf, those that leaves share counted in each; () of text."""
    if not sample.media:
        return ()
    return tuple(sum(item.encoder_length for item in segment.media) for segment in sample.segments())


def joined(parts: Sequence[NDArray[np.integer]]) -> NDArray[np.int64]:
    """Numbers one behind the other, also if there are none."""
    return np.concatenate([np.zeros(0, np.int64), *(part.astype(np.int64, copy=False) for part in parts)])


# --------------------------------------------------------------------------------------------------------------------
# The manifest.


FORMAT = 5
MANIFEST = "manifest.json"
LOCK = "lock"  # held while the manifest is read, changed and replaced


class ManifestDamaged(StoreError):
    """The manifest is not as it was written: which shards the store has is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """``digest`` is what the first line says: two manifests with the same one are the same."""

    fingerprint: str
    entries: tuple[ShardEntry, ...] = ()
    digest: str = ""


class _ManifestContent(msgspec.Struct, kw_only=True):
    format: int
    fingerprint: str
    shards: msgspec.Raw


def read_manifest(folder: Path, fingerprint: str | None, *, disk: Disk, known: Manifest | None = None) -> Manifest:
    """What the store has; nothing where there is no manifest. ``known`` is given back if it still holds.

    Raises `ManifestDamaged` if it is damaged, and `StoreError` if it cannot be read or belongs to another version of
    Luthier, or to another encoder than ``fingerprint`` (None: any).
    """
    path = folder / MANIFEST
    raw = disk.read(path)
    if raw is None:
        return Manifest(fingerprint=fingerprint or "")
    first, _, body = raw.partition(b"\n")
    found = hashlib.sha256(body).hexdigest()
    if first != found.encode():
        raise ManifestDamaged(
            f"{path}: the manifest is damaged: its digest should be {first[:64]!r}, but is {found}", hint=REPAIR
        )
    if known is not None and known.digest == found:
        return known
    try:
        content = msgspec.json.decode(body, type=_ManifestContent)
        _check(path, "format", content.format, FORMAT)
        _check(path, "fingerprint", content.fingerprint, fingerprint or content.fingerprint)
        entries = msgspec.json.decode(content.shards, type=tuple[ShardEntry, ...])
    except msgspec.MsgspecError as error:
        raise StoreError(f"{path}: the manifest was not written by Luthier: {error}", hint=REPAIR) from error
    return Manifest(fingerprint=content.fingerprint, entries=entries, digest=found)


def write_manifest(folder: Path, fingerprint: str, entries: Sequence[ShardEntry], *, disk: Disk) -> None:
    """Replace the manifest; hold `LOCK`. Raises `StoreError`."""
    shards = [msgspec.json.encode(entry) for entry in entries]
    head = b'{"format": %d, "fingerprint": %s, "shards": [\n' % (FORMAT, msgspec.json.encode(fingerprint))
    body = head + b",\n".join(shards) + b"\n]}\n"
    disk.publish(folder / MANIFEST, [hashlib.sha256(body).hexdigest().encode() + b"\n" + body])


def _check(path: Path, name: str, found: object, mine: object) -> None:
    if found != mine:
        hint = "choose another folder with data.store, or delete this one: its samples will be encoded again"
        raise StoreError(f"{path}: the store's {name} is {found}, this run's is {mine}", hint=hint)


# --------------------------------------------------------------------------------------------------------------------
# What rows and stores are called: the key of a row, the folder of an encoder's samples, the files in it.


ABOUT = "about.json"
USERS = "users"
WORK = "shared-work"
UNITS = "units"  # in a store: results of stretches of files, by the digest of their bytes
SPOOL = "spool"  # beside the stores: rows of files that can only be read from their beginning
BLOBS = "media"  # beside the stores: files that rows hold themselves, by the digest of their bytes
FEEDS = "feeds"  # beside the stores: what is handed to runs that train while their rows are prepared


def row_key(raw: bytes, *, fingerprint: str, conversion: str) -> bytes:
    """The key of a row: ``fingerprint`` covers how rows are encoded, ``conversion`` how they are read."""
    digest = _key_prefix(fingerprint, conversion).copy()
    digest.update(raw)
    return digest.digest()


def key_in_folder(key: bytes, folder: bytes) -> bytes:
    """The key of a row that names files of media from its folder (`digest_of_folder`): its bytes do not tell which."""
    return hashlib.sha256(key + folder).digest()


def digest_of_folder(folder: str) -> bytes:
    """Of where a folder is, and of how it is spelled, as samples spell their files from there."""
    return hashlib.sha256(os.fsencode(f"{os.path.abspath(folder)}\0{folder}")).digest()


def cache_folder() -> Path:
    """What Luthier keeps for later runs: ``~/.cache/luthier``, or below the folder in ``XDG_CACHE_HOME``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "luthier"


def default_root() -> Path:
    """Where stores are unless ``data.store`` says otherwise."""
    return cache_folder() / "store"


def store_folder(root: Path | None, fingerprint: str) -> Path:
    """Where the samples of one encoder are kept; ``root`` None is `default_root`."""
    return (default_root() if root is None else root) / f"v{FORMAT}-{fingerprint[:32]}"


@lru_cache(maxsize=64)
def _key_prefix(fingerprint: str, conversion: str) -> _Hash:
    # lengths in front, so that no two (fingerprint, conversion, row) are spelled the same
    digest = hashlib.sha256()
    for part in (fingerprint.encode(), conversion.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest
