"""The manifest of a store: which shards it has, in which order. Replaced as a whole; its first line vouches for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from luthier.encoding.disk import Disk
from luthier.encoding.shard import ShardEntry
from luthier.encoding.shard_reader import REPAIR
from luthier.errors import StoreError

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


class _Content(msgspec.Struct, kw_only=True):
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
        content = msgspec.json.decode(body, type=_Content)
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
