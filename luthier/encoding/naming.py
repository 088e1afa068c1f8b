"""What rows and stores are called: the key of a row, the folder of an encoder's samples, the files in it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from luthier.encoding.manifest import FORMAT

if TYPE_CHECKING:
    from hashlib import _Hash

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
