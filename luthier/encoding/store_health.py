"""Is a store sound? And if not, how it becomes so: what is damaged is dropped, and encoded again when it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from luthier.encoding.disk import Disk, Hold, only_user
from luthier.encoding.manifest import LOCK, MANIFEST, ManifestDamaged, read_manifest, write_manifest
from luthier.encoding.naming import USERS
from luthier.encoding.shard_reader import Shard
from luthier.errors import StoreError


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
    hold = Hold(folder / USERS, create=folder.is_dir())
    health = _examine(folder, on_shard)
    hold.close()
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
