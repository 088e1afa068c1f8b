"""Weights, gradients and optimizer state divided among W ranks, a decoder layer at a time (FSDP, arXiv:2304.11277; here
torch's `fully_shard`).

Each rank holds a W-th of every weight. The weights of a layer are gathered when it runs, forwards and backwards, and
given up again. What is in no layer (embeddings, last norm, output layer) is one group, which stays gathered from its
first use to the end of the backward pass: the head is used by losses of ours, outside of any module's own forward, and
its weight may be the embedding too. Gradients are added up and divided in each micro-batch, so that no rank ever holds
those of the whole model.

What is saved is never divided: files are those of a run in one process, and either kind of run goes on from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import TrainableTokensWrapper
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from luthier.config.choices import Sharding
from luthier.errors import CheckpointError, ModelError, UserError
from luthier.models import is_multimodal, output_layer, plain_model, unsharded_class
from luthier.models.adapter_files import saves_embeddings, set_matrices
from luthier.models.adapters import decoder_layers
from luthier.writing import counted

# What accelerate's launcher sets where somebody else is to divide the work; none of it is followed here.
_OTHER_WAYS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism of its own",
}


def refuse_other_ways(environment: Mapping[str, str]) -> None:
    """Raise `UserError` where the launcher wants the model divided in a way that runs here do not know."""
    for name, way in _OTHER_WAYS.items():
        if environment.get(name, "").lower() in ("1", "true", "yes"):
            raise UserError(
                f"the environment asks for {way} ({name}={environment[name]}), which no run here follows",
                hint="start the run with torchrun and set runtime.sharding: fsdp, or leave the variable out",
            )


def place(model: PreTrainedModel | PeftModel, device: torch.device, asked: Sharding) -> str | None:
    """Put the model where it is trained, in place, and say what became of the wish to divide it; None: there is none.

    Raises `ModelError` as `shard` does.
    """
    match asked:
        case Sharding.NONE:
            model.to(device)
            return None
        case Sharding.FSDP if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            shard(model, device)
            return f"sharded over {counted(torch.distributed.get_world_size(), 'rank')}, a decoder layer at a time"
        case Sharding.FSDP:
            model.to(device)
            return "not sharded, though runtime.sharding is fsdp: there is one process; torchrun starts several"
        case _:
            raise AssertionError(asked)


def shard(model: PreTrainedModel | PeftModel, device: torch.device) -> None:
    """Divide the model among all ranks, in place; every rank has to hold the same weights. Parameters become DTensors,
    and ``load_state_dict`` takes whole weights, which every rank has to have. Raises as `divisible_layers`.
    """
    layers = divisible_layers(model)
    plain = plain_model(model)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    plain.set_reduce_scatter_unused_params(True)  # an expert that no token of one rank chose, and one of another did
    if plain.can_generate():
        register_fsdp_forward_method(plain, "generate")
    plain.register_load_state_dict_pre_hook(_take_parts)


def divisible_layers(model: PreTrainedModel | PeftModel) -> nn.ModuleList:
    """The layers that a model is divided by.

    Raises `ModelError` for models with towers, and where no weight of any decoder layer is trained: torch adds up the
    gradients when the backward pass leaves a layer.
    """
    plain = plain_model(model)
    layers = decoder_layers(plain)
    name = type(plain).__name__
    if is_multimodal(plain.config) or layers is None:
        what = "has parts beside its decoder" if layers is not None else "has no list of decoder layers"
        raise ModelError(
            f"runtime.sharding is fsdp, and {name} {what}; Luthier does not know how to shard such a model",
            hint="set runtime.sharding: none",
        )
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if trained and not any(parameter.requires_grad for parameter in layers.parameters()):
        raise ModelError(
            f"runtime.sharding is fsdp, and no decoder layer of {name} is trained: there is next to nothing to shard",
            hint="set runtime.sharding: none, or train a layer (adapter.freeze_trainable_layers)",
        )
    if any(isinstance(module, TrainableTokensWrapper) for module in model.modules()):
        ends = (plain.get_input_embeddings(), output_layer(plain))  # a reward model has no output layer
        tables = [path.rpartition(".")[2] for path, module in plain.named_modules() if module in ends]
        raise ModelError(
            f"runtime.sharding is fsdp, and rows of new tokens are trained beside the embedding of {name}, which "
            "then cannot be sharded",
            hint=f"set runtime.sharding: none, or adapter.modules_to_save: [{', '.join(tables)}]",
        )
    return layers


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` has divided it."""
    return isinstance(plain_model(model), FSDPModule)


def gather_all(model: nn.Module) -> None:
    """Have every rank hold all weights until `give_up_gathered`, so that forward passes need no other rank: each may
    make as many as it likes. Nothing happens to a model that is whole. Every rank has to ask at once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


def give_up_gathered(model: nn.Module) -> None:
    """Put every group into its parts again: after forward passes without a backward pass, the last one is whole."""
    plain = plain_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(module is not plain, recurse=False)
            module.reshard()


def replicate(part: nn.Module, *, like: nn.Module) -> None:
    """Have each rank hold all weights of a small part that a model gets when it is divided already. They become
    DTensors as the others are, for optimizers and norms take no mixture; `local_copy` is what is computed with, and
    `average_replicated` is to be called before each update. Nothing happens beside a model that is whole."""
    if not is_sharded(like):
        return
    mesh = next(weight.device_mesh for weight in like.parameters() if isinstance(weight, DTensor))
    for name, weight in list(part.named_parameters(recurse=False)):
        whole = distribute_tensor(weight.detach(), mesh, [Replicate()], src_data_rank=None)
        part.register_parameter(name, nn.Parameter(whole))


def local_copy(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is, or this rank's copy of one that each rank holds."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def average_replicated(model: nn.Module) -> None:
    """Average the gradients of what `replicate` has had each rank hold, as those of all that is divided are by now. The
    ranks' backward passes come to such a weight in different orders, so they cannot meet there. Every rank has to ask
    at once."""
    for weight in model.parameters():
        if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor) and weight.placements[0].is_replicate():
            share = weight.grad.to_local()
            torch.distributed.all_reduce(share, group=weight.device_mesh.get_group())
            share.div_(weight.device_mesh.size())


def begin_alike(model: PreTrainedModel | PeftModel) -> bool:
    """Give all ranks the trained weights of the first, where each of them trains a whole model that has an encoder of
    media. Returns whether that is so: `average_gradients` is then to be called before each update.

    DDP cannot be used there. It waits for a gradient of every weight, and an encoder has one only where a rank's rows
    have media of its kind. Every rank has to ask at once.
    """
    if not torch.distributed.is_initialized() or is_sharded(model) or not is_multimodal(model.config):
        return False
    for weight in model.parameters():
        if weight.requires_grad:
            torch.distributed.broadcast(weight.detach(), src=0)
    return torch.distributed.get_world_size() > 1


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of a model that is whole on each rank; a rank without one counts as 0. What no rank has a
    gradient of stays without, as in one process: 0 would let an optimizer go on with its momentum and weight decay.
    Every rank has to ask at once.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return
    reached = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32, device=weights[0].device)
    torch.distributed.all_reduce(reached)
    for weight, count in zip(weights, reached.tolist(), strict=True):
        if count:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.distributed.all_reduce(weight.grad)
            weight.grad.div_(torch.distributed.get_world_size())


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """All weights by name, whole, on the CPU; weights that are one keep being one. Every rank has to ask at once;
    without ``keep`` it only takes part, and gets {}. Of an adapter's base only what PEFT may save with it.
    """
    weights = model.state_dict(keep_vars=True)
    wanted = _saved_with_adapter(model, weights) if isinstance(model, PeftModel) else None
    gathered: dict[int, torch.Tensor] = {}
    found = {}
    for name, weight in weights.items():
        if wanted is not None and id(weight) not in wanted:
            continue
        if id(weight) not in gathered:
            gathered[id(weight)] = _kept(undivided(weight), keep=keep)
        found[name] = gathered[id(weight)]
    return found if keep else {}


def whole_optimizer_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, object]:
    """``optimizer.state_dict()`` as a run in one process has it, on the CPU. Every rank has to ask at once."""

    def gathered(value: object) -> object:
        return _kept(undivided(value), keep=keep) if isinstance(value, torch.Tensor) else value

    state = optimizer.state_dict()
    of_weights = {
        number: {name: gathered(value) for name, value in values.items()} for number, values in state["state"].items()
    }
    return {**state, "state": of_weights}


def whole_gradient_norm(norm: Any) -> Any:
    """The norm over all ranks; what is no part of anything is left as it is."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def undivided(value: torch.Tensor) -> torch.Tensor:
    """What the ranks hold of a weight, put together, where it is in parts. Every rank has to ask at once."""
    value = value.detach()
    gathered: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return gathered


def load_in_parts(optimizer: torch.optim.Optimizer) -> None:
    """From here on ``optimizer.load_state_dict`` takes what `whole_optimizer_state` gave."""
    optimizer.register_load_state_dict_pre_hook(_in_parts)


def _take_parts(module: nn.Module, weights: dict[str, Any], prefix: str, *_: object) -> None:
    for name, held in module.state_dict(prefix=prefix).items():
        if name in weights:
            weights[name] = part_of(weights[name], held)


def _in_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, object]:
    weights: dict[int, torch.Tensor] = {}
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        weights |= zip(saved["params"], group["params"], strict=True)
    parts = {
        number: {
            # Adam's moments have the weight's shape; the number of its steps has none
            name: part_of(v, weights[number]) if isinstance(v, torch.Tensor) and v.shape == weights[number].shape else v
            for name, v in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": parts}


def _saved_with_adapter(model: PeftModel, weights: dict[str, torch.Tensor]) -> set[int]:
    """What PEFT saves, trained or not (VeRA's matrices are not); what else is trained; and the embeddings, which PEFT
    saves too if they have grown."""
    named = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    plain = model.get_base_model()
    ends = [end for end in (plain.get_input_embeddings(), plain.get_output_embeddings()) if end is not None]
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    of_ends = {id(parameter) for end in ends for parameter in end.parameters()}
    return trained | of_ends | {id(weight) for weight in named.values()}


def _kept(gathered: torch.Tensor, *, keep: bool) -> torch.Tensor:
    return gathered.cpu() if keep else gathered.new_empty(0)


def part_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole value, where ``like`` is divided; else the value."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    # every rank has the whole, so nothing is sent
    return distribute_tensor(value.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)


# --------------------------------------------------------------------------------------------------------------------
# The weights of a checkpoint, put back into the model that wrote them, or the adapter that did.
#
# transformers' Trainer matches the names in the file with the names of the modules and passes over those that it does
# not find. For models whose files name or shape things otherwise than their modules do, that is most of them: a
# multimodal model's decoder (``model.layers`` in the file, ``model.language_model.layers`` in the model), experts
# that the file has one by one and the model as one tensor. Such a run would go on from its first weights, with the
# optimizer of its last.


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
    own: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=saves_embeddings(model))
    present = {name: tuple(weight.shape) for name, weight in own.items()}
    there = {name: tuple(weight.shape) for name, weight in saved.items()}
    differing = sorted(name for name in present.keys() | there.keys() if present.get(name) != there.get(name))
    if differing:
        listed = ", ".join(f"{name} {there.get(name)} there, {present.get(name)} here" for name in differing[:5])
        raise CheckpointError(
            f"the weights in {checkpoint} are not those of this adapter: {len(differing)} differ ({listed} …)",
            hint=_HINT,
        )
    set_peft_model_state_dict(model, saved)
    set_matrices(model, saved)


# ---- The decoder layers of a model, compiled: one after the other, each a graph of its own, the same for all of a kind


def compile_layers(model: PreTrainedModel | PeftModel, *, recomputed: bool) -> int:
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
    layers = decoder_layers(plain_model(model))
    if layers is None:
        raise ModelError(
            f"train.torch_compile is set, and {type(plain_model(model)).__name__} has no list of decoder layers",
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
