"""What of a row's key its source decides, and keys as arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier import sources as sources_room
from luthier.encoding.shard import KEY_BYTES
from luthier.sources import Source


def key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """uint8[n, KEY_BYTES] of n keys."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def conversion_of(source: Source) -> str:
    """All that decides what a row's bytes mean: the settled layout, and the code that reads them."""
    return json.dumps([asdict(source.reader.layout), _sources_version()], sort_keys=True)


@cache
def _sources_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(sources_room.__path__[0]).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
