"""What a frozen encoder of a model made of media items: one file an item, found again by the item.

<folder>/<first two letters of the key>/<key>.safetensors

An array's name is where the model gets it: ``mm_encoder_outputs.image.pooler_output.0`` is the first entry of the field
``pooler_output`` of what `get_image_features` returns. A number in a name is a place in a tuple. Rows of all arrays lie
along axis 0, so those of several items are joined there. bfloat16, which numpy has not, is kept as uint16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.errors import StoreError
from luthier.media.families.family import Features
from luthier.records import Media, MediaHeader

ENCODER_OUTPUTS = "mm_encoder_outputs"  # transformers' name for the input of computed features
_OUTPUTS = "outputs"  # in names within files


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemFeatures:
    """What is kept of a media item.

    outputs  those of its processor that the model's encoder does not take, or that are needed besides (grids)
    encoded  what the encoder made of the others, by name
    """

    outputs: Features
    encoded: Features

    def to_bytes(self) -> bytes:
        from safetensors.numpy import save

        named = {f"{_OUTPUTS}.{name}": value for name, value in self.outputs.items()} | dict(self.encoded)
        return save({name: np.ascontiguousarray(value) for name, value in named.items()})


@dataclass(frozen=True, slots=True)
class FeatureFiles:
    """The files of one model's encoders under one processor."""

    folder: Path

    def path(self, key: str) -> Path:
        """Where the item with this `item_key` is kept."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def keys(self) -> set[str]:
        """Of all items that are there."""
        return {path.stem for path in self.folder.glob("??/*.safetensors")}

    def read(self, media: Media, header: MediaHeader) -> ItemFeatures | None:
        """None if the item is not there. Raises as `load`."""
        path = self.path(item_key(media, header))
        return self.load(path) if path.is_file() else None

    def load(self, path: Path) -> ItemFeatures:
        """A file of the folder. Raises `StoreError` if it is damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise StoreError(f"{path}: damaged: {error}", hint="remove the file; it is computed again") from error
        return ItemFeatures(
            outputs={
                name.removeprefix(f"{_OUTPUTS}."): value for name, value in arrays.items() if not is_encoded(name)
            },
            encoded={name: value for name, value in arrays.items() if is_encoded(name)},
        )


def item_key(media: Media, header: MediaHeader) -> str:
    """40 hex digits, of the reference and of the header with the version of what it refers to."""
    told = [type(media).__name__, asdict(media), type(header).__name__, asdict(header)]
    return blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()


def is_encoded(name: str) -> bool:
    """Whether an array is an encoder's output."""
    return name.startswith(f"{ENCODER_OUTPUTS}.")


def join_encoded(items: Sequence[Features]) -> dict[str, NDArray[np.generic]]:
    """The encoders' outputs of several items, or groups of them, one after the other; what else they have is left."""
    names = dict.fromkeys(name for item in items for name in item if is_encoded(name))
    return {name: np.concatenate([item[name] for item in items if name in item]) for name in names}
