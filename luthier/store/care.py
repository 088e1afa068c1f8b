"""Care for stores: which there are, what of them can go, whether one is sound, and a store as a table."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from luthier.errors import StoreError, UserError
from luthier.store import SampleStore
from luthier.store.disk import TEMPORARY, Disk, join_users
from luthier.store.format import (
    ABOUT,
    FEEDS,
    LOCK,
    MANIFEST,
    SPOOL,
    UNITS,
    USERS,
    WORK,
    ManifestDamaged,
    read_manifest,
    write_manifest,
)
from luthier.store.shard_reader import Shard
from luthier.writing import only_user, whole_file

if TYPE_CHECKING:
    import pyarrow as pa

# --------------------------------------------------------------------------------------------------------------------
# Which stores there are, what made them, and when they were last used.

STORE_NAME = re.compile(r"v\d+-[0-9a-f]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreInfo:
    """A store as it stands. ``problem``: why its manifest cannot be read; the numbers are then 0."""

    folder: Path
    about: dict[str, str | int]  # what its first writer told
    num_samples: int
    num_tokens: int
    num_shards: int
    num_bytes: int  # of all files in the folder
    last_use: float  # seconds since 1970
    in_use: bool
    problem: str | None


def list_stores(root: Path) -> list[StoreInfo]:
    """The stores in a folder, or the one that it is; the one used last comes first. Raises `StoreError`."""
    return sorted((_describe(folder) for folder in store_folders(root)), key=lambda info: -info.last_use)


def store_folders(root: Path) -> list[Path]:
    """The folders of the stores in ``root``, or ``root`` if it is one. Raises `StoreError`."""
    if (root / MANIFEST).exists() or (STORE_NAME.fullmatch(root.name) and root.is_dir()):
        return [root]
    try:
        return sorted(path for path in root.iterdir() if STORE_NAME.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root}: the folder of stores cannot be read: {error.strerror or error}") from error


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if it is gone."""
    if not path.is_dir():
        with suppress(OSError):
            return path.lstat().st_size
        return 0
    return sum(
        size_of(Path(folder) / name) for folder, _, names in os.walk(path, onerror=lambda _: None) for name in names
    )


def _describe(folder: Path) -> StoreInfo:
    num_samples = num_tokens = num_shards = 0
    problem = None
    try:
        entries = read_manifest(folder, None, disk=Disk()).entries
        num_samples = sum(entry.num_samples for entry in entries)
        num_tokens = sum(entry.num_tokens for entry in entries)
        num_shards = len(entries)
    except StoreError as error:
        problem = error.message
    about: dict[str, str | int] = {}
    with suppress(OSError, msgspec.MsgspecError):  # it is for people, and may be missing
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=dict[str, str | int])
    with only_user(folder / USERS, create=False) as alone:
        in_use = not alone
    return StoreInfo(
        folder=folder,
        about=about,
        num_samples=num_samples,
        num_tokens=num_tokens,
        num_shards=num_shards,
        num_bytes=size_of(folder),
        last_use=max(_time(folder / ABOUT), _time(folder / MANIFEST)) or _time(folder),
        in_use=in_use,
        problem=problem,
    )


def _time(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


# --------------------------------------------------------------------------------------------------------------------
# What can go: leftovers of processes that died, and stores that nobody needs.


FEED_SECONDS = 86_400.0  # a feed that goes on writes more often


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """A file or folder that went, or would go."""

    path: Path
    num_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaning:
    """What `clean_stores` did. ``in_use``: stores that it left alone."""

    removed: tuple[Removed, ...]
    in_use: tuple[Path, ...]


def clean_stores(
    root: Path, *, older_than: float | None = None, max_bytes: int | None = None, dry_run: bool = False
) -> Cleaning:
    """Remove unfinished files, shards that no manifest names, and shared work of processes that ended; stores not used
    for ``older_than`` seconds; and stores beyond ``max_bytes`` in all, the one used least recently first.

    A store that is in use is left alone, whatever its age. Raises `StoreError` if something cannot be removed.
    """
    removed: list[Removed] = []
    in_use: list[Path] = []
    stores = list_stores(root)
    going = _stores_to_remove(stores, older_than=older_than, max_bytes=max_bytes)
    for path, reason in chain(_left_in(root), _unused(root, older_than)):
        removed.append(_remove(path, reason, dry_run=dry_run))
    for info in stores:
        with only_user(info.folder / USERS, create=not dry_run) as alone:
            if not alone:
                in_use.append(info.folder)
            elif info.folder in going:
                removed.append(_remove(info.folder, going[info.folder], dry_run=dry_run))
            else:
                for path, reason in chain(_leftovers(info.folder), _old(info.folder / UNITS, older_than)):
                    removed.append(_remove(path, reason, dry_run=dry_run))
    return Cleaning(removed=tuple(removed), in_use=tuple(in_use))


def _stores_to_remove(
    stores: Sequence[StoreInfo], *, older_than: float | None, max_bytes: int | None
) -> dict[Path, str]:
    """Which stores should go, and why; ``stores`` as from `list_stores`."""
    going = {}
    left = sum(info.num_bytes for info in stores)
    now = time.time()
    for info in reversed(stores):
        age = now - info.last_use
        if info.in_use:
            continue
        if older_than is not None and age > older_than:
            going[info.folder] = f"not used for {age / 86400:.0f} days"
        elif max_bytes is not None and left > max_bytes:
            going[info.folder] = "least recently used, and all together are too large"
        else:
            continue
        left -= info.num_bytes
    return going


def _left_in(root: Path) -> Iterator[tuple[Path, str]]:
    if root.is_dir() and store_folders(root) != [root]:
        yield from ((root / name, "half removed") for name in sorted(os.listdir(root)) if name.startswith(TEMPORARY))


def _unused(root: Path, older_than: float | None) -> Iterator[tuple[Path, str]]:
    """What lies beside the stores: portions that a killed run's feed left, and rows of files that were spooled."""
    yield from _old(root / FEEDS, FEED_SECONDS if older_than is None else min(older_than, FEED_SECONDS))
    yield from _old(root / SPOOL, older_than)


def _old(folder: Path, older_than: float | None) -> Iterator[tuple[Path, str]]:
    if older_than is None or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        last_use = stat.st_mtime if path.is_dir() else max(stat.st_atime, stat.st_mtime)  # looking reads folders
        age = time.time() - last_use
        if age > older_than:
            yield path, f"not used for {age / 86400:.0f} days"


def _leftovers(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        named: set[str] | None = {entry.name for entry in read_manifest(folder, None, disk=Disk()).entries}
    except StoreError:  # damaged, or another version's: which shards belong to it is not known
        named = None
    for path in sorted(folder.iterdir()):
        if path.name.startswith(TEMPORARY):
            yield path, "never finished"
        elif path.name == WORK:
            yield path, "shared work of processes that ended"
        elif named is not None and path.match("shard-*.bin") and path.name not in named:
            yield path, "in no manifest"
        elif path.is_dir():
            yield from ((inner, "never finished") for inner in sorted(path.glob(f"{TEMPORARY}*")))


def _remove(path: Path, reason: str, *, dry_run: bool) -> Removed:
    removed = Removed(path=path, num_bytes=size_of(path), reason=reason)
    if not dry_run:
        Disk().take_away(path)
    return removed


# --------------------------------------------------------------------------------------------------------------------
# Is a store sound? And if not, how it becomes so: what is damaged is dropped, and encoded again when it is needed.


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """What is wrong with a file, and how many samples are lost with it (None: of a manifest that is not known)."""

    name: str
    detail: str
    num_samples: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHealth:
    """What `verify_store` found. ``repaired``: what is damaged is not in the store any more."""

    folder: Path
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    damaged: tuple[Damage, ...] = ()
    repaired: bool = False


def verify_store(
    folder: Path, *, repair: bool = False, on_shard: Callable[[int, int], None] = lambda done, total: None
) -> StoreHealth:
    """Read every byte of a store; ``on_shard(done, total)`` is called after each shard.

    ``repair`` takes what is damaged out of the store, so that its rows are encoded again. Raises `StoreError` if that
    cannot be done, as while others use the store, and if another version of Luthier made it.
    """
    users = join_users(folder / USERS, create=folder.is_dir())
    health = _examine(folder, on_shard)
    users.close()
    if not health.damaged or not repair:
        return health
    with only_user(folder / USERS) as alone:
        if not alone:
            raise StoreError(f"{folder}: others use this store", hint="repair it when their runs have ended")
        _drop(folder, {damage.name for damage in health.damaged})
    return replace(health, repaired=True)


def _examine(folder: Path, on_shard: Callable[[int, int], None]) -> StoreHealth:
    try:
        entries = read_manifest(folder, None, disk=Disk()).entries
    except ManifestDamaged as error:
        damage = Damage(name=MANIFEST, detail=error.message, num_samples=None)
        return StoreHealth(folder=folder, damaged=(damage,))
    damaged = []
    for number, entry in enumerate(entries):
        try:
            Shard(folder / entry.name, entry, deque()).verify()
        except StoreError as error:
            damaged.append(Damage(name=entry.name, detail=error.message, num_samples=entry.num_samples))
        on_shard(number + 1, len(entries))
    return StoreHealth(
        folder=folder,
        num_shards=len(entries),
        num_samples=sum(entry.num_samples for entry in entries),
        num_bytes=sum(entry.size for entry in entries),
        damaged=tuple(damaged),
    )


def _drop(folder: Path, damaged: set[str]) -> None:
    disk = Disk()
    with disk.locked(folder / LOCK):
        if MANIFEST not in damaged:
            manifest = read_manifest(folder, None, disk=disk)
            sound = [entry for entry in manifest.entries if entry.name not in damaged]
            write_manifest(folder, manifest.fingerprint, sound, disk=disk)
        for name in damaged:  # shards without a manifest are removed by gc
            disk.remove(folder / name)


# --------------------------------------------------------------------------------------------------------------------
# A store as a table that other tools read.


SAMPLES_AT_ONCE = 512  # also the rows of a row group: some 10 MB of long samples


def export_store(
    folder: Path, target: Path, *, on_samples: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Write all samples of a store as parquet, in its order; how many there are.

    Columns: ``row_key`` (hex), ``input_ids``, ``target``, ``weight`` (null where all targets count 1), ``branches``
    (``parent``, ``length``), ``notes`` (a map), ``verdict`` (null where rows are not compared). The file is whole or
    not there. Raises `StoreError` if a sample is damaged, and `UserError` if ``target`` cannot be written.
    """
    import pyarrow.parquet as pq

    store = SampleStore.open(folder, fingerprint=None)
    if not len(store):
        raise StoreError(f"{folder}: there is no store here, or nothing in it", hint="`luthier store ls` lists stores")
    schema = _schema()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            whole_file(target, durable=False) as file,
            pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for start in range(0, len(store), SAMPLES_AT_ONCE):
                stop = min(start + SAMPLES_AT_ONCE, len(store))
                writer.write_batch(_batch(store, start, stop, schema))
                on_samples(stop, len(store))
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}", hint="name a file in a folder you may write to"
        ) from error
    return len(store)


def _schema() -> pa.Schema:
    import pyarrow as pa

    branch = pa.struct([("parent", pa.int32()), ("length", pa.int32())])
    return pa.schema(
        [
            pa.field("row_key", pa.string(), nullable=False),
            pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("target", pa.list_(pa.bool_()), nullable=False),
            pa.field("weight", pa.list_(pa.float32())),
            pa.field("branches", pa.list_(branch), nullable=False),
            pa.field("notes", pa.map_(pa.string(), pa.int64()), nullable=False),
            pa.field("verdict", pa.float32()),
        ]
    )


def _batch(store: SampleStore, start: int, stop: int, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    samples = [store[number] for number in range(start, stop)]
    columns: dict[str, object] = {
        "row_key": [key.tobytes().hex() for key in store.keys_of(np.arange(start, stop))],
        "input_ids": [sample.input_ids for sample in samples],
        "target": [sample.target for sample in samples],
        "weight": [sample.weight for sample in samples],
        "branches": [
            [{"parent": branch.parent, "length": branch.length} for branch in sample.branches] for sample in samples
        ],
        "notes": [list(sample.notes) for sample in samples],
        "verdict": [sample.verdict for sample in samples],
    }
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
