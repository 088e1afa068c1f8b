"""What of a row's key its source decides, and keys as arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.shard import KEY_BYTES
from luthier.records import SAMPLES_VERSION
from luthier.sources import Source


def key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """uint8[n, KEY_BYTES] of n keys."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def conversion_of(source: Source) -> str:
    """All that decides what a row's bytes mean: the settled layout, and the version of the code that reads them."""
    return json.dumps([asdict(source.reader.layout), SAMPLES_VERSION], sort_keys=True)
