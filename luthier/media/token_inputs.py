"""Model inputs along the tokens: T tokens of one sample, from their ids and the outputs for its media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def kinds(processor: Any, input_ids: Ids, features: Mapping[str, Any]) -> NDArray[np.int64]:
    """int64[T]: 0 text, 1 image, 2 video, 3 audio, by the processor's own rule (``mm_token_type_ids``)."""
    return np.asarray(processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int64)


def expert_kinds(processor: Any, input_ids: Ids, features: Mapping[str, Any]) -> NDArray[np.int64]:
    """int64[T]: the same with the tokens around an item counted in, by which ERNIE 4.5 VL routes to experts."""
    return np.asarray(processor.create_moe_mm_token_type_ids(input_ids[None].tolist())[0], dtype=np.int64)


def seen_images(processor: Any, input_ids: Ids, features: Mapping[str, Any]) -> NDArray[np.int64]:
    """int64[T, images, tiles]: which tiles of which pictures a token attends to across (Mllama).

    A picture is seen from its token on up to the next picture's; pictures next to each other are seen together, by what
    the last of them is seen by. ``<image><image>ab<image>c`` -> 1, 1 and 2, 1 and 2, 1 and 2, 3, 3.
    """
    places = np.flatnonzero(input_ids == processor.image_token_id)
    tiles = processor.image_processor.max_image_tiles
    seen = np.zeros((len(input_ids), len(places), tiles), dtype=np.int64)
    if len(places) == 0:
        return seen
    shown = np.asarray(features["aspect_ratio_mask"])[0].sum(axis=-1)
    ends = [*places[1:].tolist(), len(input_ids)]
    for image in range(len(places) - 2, -1, -1):
        if places[image] + 1 == places[image + 1]:
            ends[image] = ends[image + 1]
    for image, (start, end) in enumerate(zip(places, ends, strict=True)):
        seen[start:end, image, : shown[image]] = 1
    return seen
