"""Which stores there are, what made them, and when they were last used."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from luthier.encoding.disk import Disk, only_user
from luthier.encoding.manifest import MANIFEST, read_manifest
from luthier.encoding.naming import ABOUT, USERS
from luthier.errors import StoreError

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
