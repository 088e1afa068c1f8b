"""The weights of a checkpoint, put back into the model that wrote them, or the adapter that did.

transformers' Trainer matches the names in the file with the names of the modules and passes over those that it does not
find. For models whose files name or shape things otherwise than their modules do, that is most of them: a multimodal
model's decoder (``model.layers`` in the file, ``model.language_model.layers`` in the model), experts that the file has
one by one and the model as one tensor. Such a run would go on from its first weights, with the optimizer of its last.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn

from luthier.errors import CheckpointError
from luthier.models.adapters import saves_embeddings
from luthier.models.sharding import unsharded_class

_HINT = "go on from another checkpoint, with output.resume, or begin anew, with output.overwrite: true"


def restore_weights(model: nn.Module, checkpoint: Path) -> None:
    """Read all weights of a model, or of an adapter, from a folder that `save_pretrained` wrote, in place, and draw no
    random numbers. Only safetensors are read.

    Raises `CheckpointError` if the folder has not all that the model has, or something that the model has not.
    """
    if isinstance(model, PeftModel):
        _restore_adapter(model, checkpoint)
    else:
        _restore_model(model, checkpoint)


def _restore_model(model: Any, checkpoint: Path) -> None:
    with torch.random.fork_rng():
        saved, info = unsharded_class(model).from_pretrained(
            checkpoint,
            config=deepcopy(model.config),
            dtype=model.dtype,
            output_loading_info=True,
            use_safetensors=True,
            local_files_only=True,
        )
    found = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    if found:
        listed = "; ".join(f"{kind}: {len(keys)} ({', '.join(keys[:5])} …)" for kind, keys in found.items())
        raise CheckpointError(
            f"the weights in {checkpoint} are not those of this {unsharded_class(model).__name__}: {listed}", hint=_HINT
        )
    model.load_state_dict(saved.state_dict())


def _restore_adapter(model: PeftModel, checkpoint: Path) -> None:
    saved = load_file(checkpoint / SAFETENSORS_WEIGHTS_NAME)
    present = {name: tuple(weight.shape) for name, weight in _saved_weights(model).items()}
    there = {name: tuple(weight.shape) for name, weight in saved.items()}
    differing = sorted(name for name in present.keys() | there.keys() if present.get(name) != there.get(name))
    if differing:
        listed = ", ".join(f"{name} {there.get(name)} there, {present.get(name)} here" for name in differing[:5])
        raise CheckpointError(
            f"the weights in {checkpoint} are not those of this adapter: {len(differing)} differ ({listed} …)",
            hint=_HINT,
        )
    set_peft_model_state_dict(model, saved)


def _saved_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=saves_embeddings(model))
    return found
