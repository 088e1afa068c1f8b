"""The family ``postcard``: models whose processor cuts a picture into squares, with a mark behind every row of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import luthier


def postcard_shapes(settings: luthier.Settings, headers: Sequence[luthier.ImageHeader]) -> dict[str, Any]:
    """Squares in a limited number of columns: ``card_shapes`` int64[N, 2], rows and columns."""
    shapes = []
    for item in headers:
        columns = min(settings["max_columns"], math.ceil(item.width / settings["patch_size"]))
        shapes.append((max(1, round(columns * item.height / item.width)), columns))
    return {"card_shapes": np.array(shapes, dtype=np.int64)}


def postcard_string(settings: luthier.Settings, measured: dict[str, Any], index: int) -> str:
    """What the processor writes for one picture."""
    rows, columns = (int(side) for side in measured["card_shapes"][index])
    return ("<card>" * columns + "<row>") * rows


POSTCARD = luthier.Family(
    name="postcard",
    processors=("PostcardProcessor",),
    model_types=("postcard",),
    image=luthier.Rule(measure=postcard_shapes, replace=postcard_string, placeholder="image_token"),
    batching={"pixel_values": luthier.CAT, "card_shapes": luthier.CAT},
    modules=luthier.Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",)),
    version="1",
)
