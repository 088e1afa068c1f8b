"""The decoder layers of a model, compiled: one after the other, each a graph of its own, the same for all of a kind.

The rest stays as it is. So the output layer can be tapped, and attention that is told where segments begin runs between
the graphs: where a row is cut changes with every batch, and a graph that knew it would be compiled anew each time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.errors import ModelError
from luthier.models.adapters import decoder_layers


def compile_layers(model: PreTrainedModel | PeftModel) -> int:
    """Compile each decoder layer in place, when it first runs, and return how many there are. Weights keep their names.

    Raises `ModelError` where the model has no list of decoder layers.
    """
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = decoder_layers(plain)
    if layers is None:
        raise ModelError(
            f"train.torch_compile is set, and {type(plain).__name__} has no list of decoder layers",
            hint="set train.torch_compile: false",
        )
    for layer in layers:
        layer.compile()
    return len(layers)


def forget_graphs() -> None:
    """Compile anew at the next call. Whoever tried the model on a few rows does so: lengths that were seen to change
    are left open in the graphs, and those of training may never change."""
    torch.compiler.reset()


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Within it compiled layers run as they are: in generation each layer's cache would be a graph of its own."""
    if not any(module._compiled_call_impl is not None for module in model.modules()):
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
