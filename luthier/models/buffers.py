"""Values that a model computes when it is made and keeps in no file, such as positions of patches: buffers that are not
persistent.

transformers makes a model without memory, reads its weights, and leaves such buffers unset (`torch.empty`), for the
class to set them once more in its ``_init_weights``. Its own classes do. A class that comes with a model's files was
mostly written when buffers were left alone, and would compute with what happens to be in memory.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel

from luthier.errors import ModelError
from luthier.models.older_code import older_names


def restore_buffers(model: PreTrainedModel) -> int:
    """Set the buffers that no file has, of a model whose class is not transformers' own, as its class computes them;
    returns how many there are. The model is made a second time for it, with buffers alone in memory.

    Raises `ModelError` for a buffer that the class then does not compute, or not in that size.
    """
    unsaved = dict(model.named_non_persistent_buffers())
    if type(model).__module__.startswith("transformers.") or not unsaved:
        return 0
    with older_names(model.config), torch.random.fork_rng(), init_empty_weights(include_buffers=False):
        made = dict(type(model)(deepcopy(model.config)).named_buffers())
    for name, buffer in unsaved.items():
        value = made.get(name)
        if value is None or value.is_meta or value.shape != buffer.shape:
            raise ModelError(
                f"{type(model).__name__} does not compute its buffer {name!r} when it is made, and no file has it",
                hint="save it with the weights (persistent=True), or set it in the class's _init_weights",
            )
        buffer.copy_(value)
    return len(unsaved)
