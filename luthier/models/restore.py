"""The weights of a checkpoint, put back into the model that wrote them.

transformers' Trainer matches the names in the file with the names of the modules and passes over those that it does not
find. For models whose files name or shape things otherwise than their modules do, that is most of them: a multimodal
model's decoder (``model.layers`` in the file, ``model.language_model.layers`` in the model), experts that the file has
one by one and the model as one tensor. Such a run would go on from its first weights, with the optimizer of its last.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from luthier.errors import CheckpointError
from luthier.models.sharding import unsharded_class


def restore_weights(model: nn.Module, checkpoint: Path) -> bool:
    """Read all weights of the model from a folder that `save_pretrained` wrote, in place, and draw no random numbers.

    Returns whether it did: an adapter's weights are not a model's. Raises `CheckpointError` if the folder has not all
    that the model has, or something that the model has not.
    """
    if not isinstance(model, PreTrainedModel):
        return False
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
            f"the weights in {checkpoint} are not those of this {unsharded_class(model).__name__}: {listed}",
            hint="go on from another checkpoint, with output.resume, or begin anew, with output.overwrite: true",
        )
    model.load_state_dict(saved.state_dict())
    return True
