"""What can go: leftovers of processes that died, and stores that nobody needs."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from luthier.encoding.disk import TEMPORARY, Disk, only_user
from luthier.encoding.manifest import read_manifest
from luthier.encoding.naming import FEEDS, SPOOL, UNITS, USERS, WORK
from luthier.encoding.store_listing import StoreInfo, list_stores, size_of, store_folders
from luthier.encoding.work_list import anybody_at_work
from luthier.errors import StoreError

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
    """Remove unfinished files, shards that no manifest names, and work lists of processes that ended; stores not used
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
            if not alone or _work_goes_on(info.folder):
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


def _work_goes_on(folder: Path) -> bool:
    """Whether another node is at work here, of which the lock says nothing where each node has its own locks."""
    disk = Disk()
    lists = [folder / WORK / name for name in disk.names(folder / WORK)]
    return any(anybody_at_work(path, now=time.time_ns()) for path in lists)


def _remove(path: Path, reason: str, *, dry_run: bool) -> Removed:
    removed = Removed(path=path, num_bytes=size_of(path), reason=reason)
    if not dry_run:
        disk = Disk()
        aside = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")  # at once: nobody finds half of it
        if disk.move_folder(path, aside):
            disk.remove(aside)
    return removed
