"""The manifest of a store: which shards it has, in which order. Replaced as a whole; its first line vouches for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from luthier.errors import StoreError
from luthier.store.disk import Disk
from luthier.store.shard import ShardEntry
from luthier.store.shard_reader import REPAIR

if TYPE_CHECKING:
    from hashlib import _Hash

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


def default_root() -> Path:
    """Where stores are unless ``data.store`` says otherwise."""
    return Path.home() / ".cache" / "luthier" / "store"


def store_folder(root: Path | None, fingerprint: str) -> Path:
    """Where the samples of one encoder are kept; ``root`` None is ``~/.cache/luthier/store``."""
    return (default_root() if root is None else root) / f"v{FORMAT}-{fingerprint[:32]}"


@lru_cache(maxsize=64)
def _key_prefix(fingerprint: str, conversion: str) -> _Hash:
    # lengths in front, so that no two (fingerprint, conversion, row) are spelled the same
    digest = hashlib.sha256()
    for part in (fingerprint.encode(), conversion.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest
