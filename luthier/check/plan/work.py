"""What estimates follow from: the work of an epoch, and a model's shape, read off modules without weights (torch's meta
device)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from luthier.config.choices import Packing
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.packing import PATCH_COST, SegmentTable
from luthier.packing.epoch import EpochPlan
from luthier.records import Ints

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from luthier.check.plan.encoder_shapes import Adapted, EncoderShape
    from luthier.encoding.tokenizer import Tokenizer

_OF_HEADS = ("q_norm.weight", "k_norm.weight")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochWork:
    """What one epoch computes. ``attended``: int64, lengths of the stretches that attend to themselves, padding too.

    ``tokens`` counts padding. ``largest_tokens`` and ``largest_targets`` are of the largest micro-batch,
    ``largest_encoded`` are the most positions (patches, frames) that encoders run through for one.
    """

    tokens: int
    targets: int
    attended: Ints
    steps: int
    largest_tokens: int
    largest_targets: int
    largest_encoded: int = 0

    @classmethod
    def of_plan(cls, plan: EpochPlan, table: SegmentTable) -> EpochWork:
        """The work of an epoch's plan, which has at least one micro-batch."""
        planned = plan.planned
        lengths = planned.lengths(table.lengths)
        of_rows = np.add.reduceat(lengths, planned.pack_bounds[:-1])
        widest = np.maximum.reduceat(of_rows, planned.batch_bounds[:-1])
        num_rows = np.diff(planned.batch_bounds)
        # a piece of plain text learns all but its first token
        targets = table.num_targets[planned.segment_ids] if planned.starts is None else np.maximum(lengths - 1, 0)
        of_batches = np.add.reduceat(targets, planned.pack_bounds[planned.batch_bounds[:-1]])
        is_padded = plan.settings.packing is Packing.NONE
        return cls(
            tokens=int((widest * num_rows).sum()),
            targets=int(targets.sum()),
            attended=np.repeat(widest, num_rows) if is_padded else lengths,
            steps=plan.num_steps,
            largest_tokens=int((widest * num_rows).max()),
            largest_targets=int(of_batches.max()),
            largest_encoded=_largest_encoded(plan, table),
        )


def _largest_encoded(plan: EpochPlan, table: SegmentTable) -> int:
    planned = plan.planned
    if table.extra_costs is None or planned.starts is not None:
        return 0
    of_batches = np.add.reduceat(table.extra_costs[planned.segment_ids], planned.pack_bounds[planned.batch_bounds[:-1]])
    return round(float(of_batches.max()) / PATCH_COST)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as it is trained, adapter and all.

    parameters, trainable    numbers of parameters; tied ones count once
    weight_bytes             of all parameters, of quantized ones with their scales
    is_single                whether weights that are not quantized are kept in 32 bits
    largest_quantized        numbers of the largest quantized weight, which is whole while it computes; 0: there is none
    kept_whole               numbers of all quantized weights, where autograd keeps them whole for the backward pass
    made_anew                numbers of the weights that LoRA changes and not the layers: experts' in one tensor, and
                             those named like them. PEFT adds up both each time, and autograd keeps the sum
    read_by_experts          numbers that these are multiplied with, for each token in all layers
    trains_norms             whether norms are trained, which keeps what they multiply
    norms                    norms of the residual stream in a layer
    norms_by_torch           whether they are torch's own `LayerNorm`, which keeps its input and nothing more
    norms_heads              whether queries and keys have norms of their own
    adapted                  of each linear layer with an adapter: the module that holds it, its inputs, outputs, rank
    gradient_bytes           of those that are trained
    hidden                   rows and columns of each trained matrix of a linear layer, but the head
    body, trained_body       parameters that each token is multiplied with, without the head; of experts, the chosen
    head                     parameters of the head, which is computed at targets only
    trains_head              whether the head has gradients
    width, feed_forward      of the residual stream, and inside the feed-forward (all chosen experts together)
    kept_inside              how many tensors as wide as the feed-forward a step keeps in it, if it is trained
    experts                  how many experts each token goes through; 0: there are none
    trained_experts          numbers of those weights of experts that are trained and in one tensor for all experts
    in_one                   whether queries, keys and values are made by one matrix, and are kept as one
    queries, keys            heads x their width, of queries and of keys
    windows                  of each layer: how many tokens back it looks; None: all, 0: it has no attention
    readers                  how many matrices of a layer read the stream
    encoders                 of images and audio, which are in ``parameters`` and ``body`` and in nothing else here
    """

    parameters: int
    trainable: int
    weight_bytes: int
    is_single: bool
    largest_quantized: int
    kept_whole: int
    made_anew: int
    read_by_experts: int
    trains_norms: bool
    norms: int
    norms_by_torch: bool
    norms_heads: bool
    adapted: tuple[tuple[str, int, int, int], ...]
    gradient_bytes: int
    hidden: tuple[tuple[int, int], ...]
    body: int
    trained_body: int
    head: int
    trains_head: bool
    width: int
    feed_forward: int
    kept_inside: int
    experts: int
    trained_experts: int
    in_one: bool
    queries: int
    keys: int
    vocabulary: int
    windows: tuple[int | None, ...]
    readers: int = 5
    encoders: tuple[EncoderShape, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.windows)


def shape_of_run(config: RunConfig, tokenizer: Tokenizer) -> ModelShape:
    """Of the model that a run trains, with its adapter and its new tokens. Raises `ModelError`."""
    from luthier.models.adapters import apply_adapter
    from luthier.models.model import build_weightless
    from luthier.models.quantized import bytes_when_quantized
    from luthier.models.vocabulary import Vocabulary

    vocabulary = Vocabulary.of(tokenizer)
    model = build_weightless(config, vocabulary)
    # an adapter to go on from is taken for a new one, and no weights are there for one to be made of
    fresh = config.adapter.model_copy(update={"name_or_path": None, "init_lora_weights": True})
    new_ids = vocabulary.new_ids if config.adapter.name_or_path is None else ()  # an older adapter has its own rows
    section = config.model.quantization
    bytes_of = bytes_when_quantized(model, section, config.adapter.modules_to_save)
    adapted = apply_adapter(model, fresh, new_ids=new_ids)
    return shape_of(adapted, bytes_of, keeps_whole=section.type.library == "torchao")


def shape_of(
    model: PreTrainedModel, quantized: Mapping[int, int] = MappingProxyType({}), *, keeps_whole: bool = False
) -> ModelShape:
    """The shape of a decoder. ``quantized``: by ``id`` of a weight what it takes in few bits; ``keeps_whole``: as
    torchao does, whose layers keep what they made of it for the backward pass.

    Raises `ModelError` for a model whose config does not say it in the usual words.
    """
    config = model.config.get_text_config()
    try:
        width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    except AttributeError as error:
        raise ModelError(f"the shape of {type(model).__name__} is not known: {error}") from error
    said: Mapping[str, Any] = config.to_dict()
    head_width = said.get("head_dim") or width // heads
    active = _share_of_experts(said)
    experts = int(said["num_experts_per_tok"]) if active < 1 else 0
    queries, keys = heads * head_width, (said.get("num_key_value_heads") or heads) * head_width
    table = (int(config.vocab_size), int(width))
    everything = list(model.named_parameters())
    whole = [one for _, one in everything if not (one.requires_grad and quantized) and id(one) not in quantized]
    matrices = [(name, one) for name, one in everything if one.ndim > 1 and tuple(one.shape) != table]
    fused, (adapted, encoders) = list(_fused(model)), _apart(model)
    norms = list(_stream_norms(everything, width))
    return ModelShape(
        norms=len(norms) // layers or 2,
        norms_by_torch=any(
            type(model.get_submodule(name.removesuffix(".weight"))).__name__ == "LayerNorm" for name in norms
        ),
        norms_heads=any(name.endswith("q_norm.weight") for name, _ in everything),
        adapted=adapted,
        encoders=encoders,
        parameters=sum(one.numel() for _, one in everything),
        trainable=sum(one.numel() for _, one in everything if one.requires_grad),
        weight_bytes=sum(quantized.get(id(one), _num_bytes(one)) for _, one in everything),
        is_single=sum(map(_num_bytes, whole)) > 3 * sum(one.numel() for one in whole),
        kept_whole=sum(one.numel() for _, one in everything if id(one) in quantized) if keeps_whole else 0,
        made_anew=sum(one.numel() for one, _ in fused),
        read_by_experts=sum(inputs * (experts if one.ndim > 2 else 1) for one, inputs in fused),
        trains_norms=any(one.requires_grad and one.ndim == 1 and "norm" in name for name, one in everything),
        largest_quantized=max((one.numel() for _, one in everything if id(one) in quantized), default=0),
        gradient_bytes=sum(_num_bytes(one) for _, one in everything if one.requires_grad),
        hidden=tuple((len(one), one.shape[1]) for _, one in matrices if one.requires_grad and one.ndim == 2),
        body=_count(matrices, active),
        trained_body=_count([(name, one) for name, one in matrices if one.requires_grad], active),
        head=table[0] * table[1],
        trains_head=any(one.requires_grad for _, one in everything if tuple(one.shape) == table),
        width=width,
        feed_forward=_feed_forward(said, width),
        kept_inside=4 if experts else _kept_inside(said, [one for _, one in matrices], width, layers),
        experts=experts,
        trained_experts=sum(
            one.numel() for name, one in everything if one.requires_grad and one.ndim > 2 and ".experts." in name
        ),
        in_one=any(len(one) == queries + 2 * keys and one.shape[-1] == width for _, one in matrices),
        queries=queries,
        keys=keys,
        vocabulary=table[0],
        windows=tuple(_windows(said, layers)),
    )


def _stream_norms(everything: list[tuple[str, torch.nn.Parameter]], width: int) -> Iterator[str]:
    """Names of the weights of norms that are as wide as the stream, those of queries and keys left out."""
    for name, one in everything:
        if name.endswith("norm.weight") and one.numel() == width and not name.endswith(_OF_HEADS):
            yield name


def _apart(model: PreTrainedModel) -> tuple[Adapted, tuple[EncoderShape, ...]]:
    from luthier.check.plan.encoder_shapes import apart

    return apart(model, tuple(_adapted(model)))


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, int, int, int]]:
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.oft import Linear as OftLinear
    from peft.tuners.vera import Linear as VeraLinear

    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | OftLinear | VeraLinear):
            rank = 0 if isinstance(module, OftLinear) else max(module.r.values(), default=0)
            yield name.rpartition(".")[0], module.in_features, module.out_features, rank


def _fused(model: PreTrainedModel) -> Iterator[tuple[torch.Tensor, int]]:
    """Weights that a LoRA is beside which PEFT adds to them each time, experts' in one tensor among them, and how many
    inputs one of them has."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            yield module.get_param(), module.in_features


def _num_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _count(matrices: list[tuple[str, torch.nn.Parameter]], active: float) -> int:
    return round(sum(one.numel() * (active if ".experts." in name else 1) for name, one in matrices))


def _share_of_experts(said: Mapping[str, Any]) -> float:
    """Which share of the experts a token is sent to; 1 where there are none."""
    number = next((said[name] for name in _NUM_EXPERTS if said.get(name)), None)
    chosen = said.get("num_experts_per_tok")
    return chosen / number if number and chosen else 1.0


def _feed_forward(said: Mapping[str, Any], width: int) -> int:
    """Numbers between the matrices of a layer's feed-forward part, for each token: of those experts that it goes
    through, shared ones among them. A mean over layers, some of which may have no experts."""
    chosen = int(said.get("num_experts_per_tok") or 1)
    whole = int(said.get("intermediate_size") or 4 * width)
    if not (said.get("moe_intermediate_size") and said.get("num_experts_per_tok")):
        return whole * chosen
    one, layers = int(said["moe_intermediate_size"]), int(said["num_hidden_layers"])
    shared = int(said.get("shared_expert_intermediate_size") or one * int(said.get("n_shared_experts") or 0))
    dense = min(layers, int(said.get("first_k_dense_replace") or len(said.get("mlp_only_layers") or ())))
    return (dense * whole + (layers - dense) * (one * chosen + shared)) // layers


ONE_STEP = {"gelu", "gelu_pytorch_tanh", "relu", "silu", "swish"}  # activations that keep their input alone


def _kept_inside(said: Mapping[str, Any], matrices: list[torch.nn.Parameter], width: int, layers: int) -> int:
    """With a gate: the gate, what its function makes of it, what it is multiplied with, and their product. Without one:
    what goes into the function and what comes out, and three more of a function that is written as a formula."""
    inside = int(said.get("intermediate_size") or 4 * width)
    sizes = [one.numel() for one in matrices if inside in one.shape or 2 * inside in one.shape]
    if sum(sizes) > 2.5 * layers * width * inside:
        return 4
    names = [said.get(name) for name in ("hidden_act", "hidden_activation", "activation_function")]
    return 2 if ONE_STEP.intersection(filter(None, names)) else 5


def _windows(said: Mapping[str, Any], layers: int) -> Iterator[int | None]:
    window = said.get("sliding_window")
    for kind in said.get("layer_types") or ["full_attention"] * layers:
        match kind:
            case "sliding_attention" | "chunked_attention":
                yield window
            case "linear_attention" | "conv" | "mamba":
                yield 0
            case _:
                yield None
