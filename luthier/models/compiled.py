"""The decoder layers of a model, compiled: one after the other, each a graph of its own, the same for all of a kind.

The rest stays as it is. So the output layer can be tapped, and attention that is told where segments begin runs between
the graphs: where a row is cut changes with every batch, and a graph that knew it would be compiled anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from luthier.errors import ModelError
from luthier.models.adapters import decoder_layers


def compile_layers(model: PreTrainedModel | PeftModel, *, recomputed: bool = False) -> int:
    """Compile each decoder layer in place, when it first runs, and return how many there are. Weights keep their names.

    ``recomputed``: training will ask the layers to compute their activations twice (gradient checkpointing).

    Raises `ModelError` where the model has no list of decoder layers.
    """
    layers = compilable_layers(model)
    for layer in layers:
        if recomputed and isinstance(layer, GradientCheckpointingLayer):
            layer.forward = _Recomputed(layer)
        else:
            layer.compile()
    return len(layers)


def compilable_layers(model: PreTrainedModel | PeftModel) -> nn.ModuleList:
    """The layers that are compiled. Raises `ModelError` where the model has no list of decoder layers."""
    plain: object = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = decoder_layers(plain)
    if layers is None:
        raise ModelError(
            f"train.torch_compile is set, and {type(plain).__name__} has no list of decoder layers",
            hint="set train.torch_compile: false",
        )
    return layers


def forget_graphs() -> None:
    """Compile anew at the next call. Whoever tried the model on a few rows does so: lengths that were seen to change
    are left open in the graphs, and those of training may never change."""
    torch.compiler.reset()


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within it compiled layers run as they are: in generation each layer's cache would be a graph of its own."""
    is_compiled = any(map(_is_compiled, model.modules()))
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        yield


class _Recomputed:
    """A layer's forward, its checkpoint around the graphs. In transformers' layers it is within: Dynamo cannot leave
    a checkpoint that it traces, and where attention runs between graphs it gives up the whole layer and says nothing.
    """

    def __init__(self, layer: GradientCheckpointingLayer) -> None:
        self.layer = layer
        without_checkpoint: Any = type(layer).forward.__wrapped__
        self.forward: Any = torch.compile(without_checkpoint.__get__(layer))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer.training and self.layer.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self.forward(*args, **kwargs)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(module.forward, _Recomputed)
