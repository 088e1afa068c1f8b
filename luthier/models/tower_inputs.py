"""Features that an encoder made beforehand, from the batch's flat inputs to what models of transformers take."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from luthier.media.feature_files import ENCODER_OUTPUTS, is_encoded


def with_encoder_outputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with one ``mm_encoder_outputs`` in the place of all that belong to it.

        mm_encoder_outputs.image.pooler_output.0   ->   mm_encoder_outputs["image"].pooler_output == (features,)

    A number is a place in a tuple; uint16 is bfloat16 (`media.feature_files`).
    """
    tree: dict[str, Any] = {}
    for name, value in inputs.items():
        if is_encoded(name):
            *path, last = name.split(".")[1:]
            branch = tree
            for step in path:
                branch = branch.setdefault(step, {})
            branch[last] = value.view(torch.bfloat16) if value.dtype is torch.uint16 else value
    others = {name: value for name, value in inputs.items() if not is_encoded(name)}
    if not tree:
        return others
    outputs = {kind: SimpleNamespace(**{key: _field(v) for key, v in fields.items()}) for kind, fields in tree.items()}
    return {**others, ENCODER_OUTPUTS: outputs}


def _field(value: Any) -> Any:
    """{"0": a, "1": b} -> (a, b)"""
    if not isinstance(value, dict):
        return value
    return tuple(_field(value[place]) for place in sorted(value, key=int))
