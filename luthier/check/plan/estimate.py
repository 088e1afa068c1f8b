"""Time and memory of a run, before any model is loaded: estimates, from exact counts and a few assumptions.

    operations = tokens x (2 forward + 2 backward through it + 2 for the gradients of what is trained) x body
               + targets x the same x head
               + attention: 4 x queries x pairs of tokens that see each other, three times
    time       = operations / (devices x peak x utilisation) x straggler factor

With all weights trained this is the usual 6 N D. docs/cli.md says what each number of the memory is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Offload
from luthier.config.objective import OBJECTIVES
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import AdapterType, Packing, Precision, RunConfig, TrainConfig
from luthier.errors import ModelError, UserError
from luthier.packing.epoch import EpochPlan
from luthier.packing.settings import SegmentTable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from luthier.encoding.tokenizer import Tokenizer

UTILISATION = 0.4  # of a data sheet's peak: what well-kept training of dense models reaches
UTILISATION_MEASURED = 0.6  # of the rate of a large matrix product
RESERVE_BYTES = 3 << 29  # 1.5 GiB: the CUDA context, libraries' workspaces, gaps between allocations
LOSS_CHUNK_BYTES = 1 << 26  # what the loss copies to float32 at a time

Ints = NDArray[np.int64]

# Bytes of optimizer state for each byte (of weights) or number (of 8-bit and 4-bit ones) that is trained.
_STATES = {"adam_mini": 1.0, "adam": 2.0, "ademamix": 3.0, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0, "radam": 2.0}
_NEARLY_STATELESS = ("adafactor", "sgd", "lomo", "adalomo")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpochWork:
    """What one epoch computes. ``attended``: int64, lengths of the stretches that attend to themselves, padding too.

    ``tokens`` counts padding. ``largest_tokens`` and ``largest_targets`` are of the largest micro-batch.
    """

    tokens: int
    targets: int
    attended: Ints
    steps: int
    largest_tokens: int
    largest_targets: int

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
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on each device at the worst moment. ``casts``: 16-bit copies of 32-bit weights, and the largest quantized
    weight made whole, while they compute."""

    weights: int
    casts: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    reserve: int

    @property
    def total(self) -> int:
        return sum(
            (self.weights, self.casts, self.gradients, self.optimizer, self.activations, self.logits, self.reserve)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a whole run will take, about. ``operations`` are floating point operations of all devices together."""

    device: Device
    num_devices: int
    utilisation: float
    in_16_bits: bool
    parameters: int
    trainable: int
    operations: float
    seconds: float
    tokens_per_second: float
    memory: Memory
    memory_total: int
    assumptions: str


def estimate_run(
    config: RunConfig,
    shape: ModelShape,
    work: EpochWork,
    device: Device,
    *,
    total_steps: int,
    num_devices: int = 1,
    straggler_factor: float = 1.0,
    utilisation: float | None = None,
) -> Estimate:
    """The estimate of training alone: evaluation, saving and loading are not in it. Raises `ModelError`."""
    if OBJECTIVES[config.objective.name].on_policy:
        raise ModelError("answers are drawn while it trains, and how long they will be is not known before")
    on_gpu = not device.name.startswith("cpu")
    in_16_bits = computes_in_16_bits(config, on_gpu=on_gpu)
    utilisation = utilisation or (UTILISATION_MEASURED if device.is_measured else UTILISATION)
    epochs = total_steps / work.steps
    operations = epochs * operations_of(shape, work, config)
    seconds = operations / (num_devices * device.peak * utilisation) * straggler_factor
    memory = memory_of(shape, work, config, on_gpu=on_gpu)
    of_peak = "the measured rate of a matrix product" if device.is_measured else "the data sheet's peak"
    return Estimate(
        device=device,
        num_devices=num_devices,
        utilisation=utilisation,
        in_16_bits=in_16_bits,
        parameters=shape.parameters,
        trainable=shape.trainable,
        operations=operations,
        seconds=seconds,
        tokens_per_second=epochs * work.tokens / seconds,
        memory=memory,
        memory_total=memory.total,
        assumptions=f"{utilisation:.0%} of {of_peak}; attention within segments only; a whole model on each device; "
        "without loading, evaluation and saving",
    )


def computes_in_16_bits(config: RunConfig, *, on_gpu: bool) -> bool:
    """Whether ``train.precision`` means 16-bit matrix products on such a device."""
    match config.train.precision:
        case Precision.AUTO:
            return on_gpu
        case Precision.BF16 | Precision.FP16:
            return True
        case Precision.FP32:
            return False
        case _:
            raise AssertionError(f"unknown precision {config.train.precision!r}")


def operations_of(shape: ModelShape, work: EpochWork, config: RunConfig) -> float:
    """Floating point operations of one epoch. Recomputing activations is one more forward pass."""
    forwards = 2 if config.train.gradient_checkpointing else 1
    backward = _backward_share(shape, config)
    per_token = 2.0 * (forwards * shape.body + backward * shape.body + shape.trained_body)
    per_target = 2.0 * shape.head * (2 + shape.trains_head)
    attention = sum(4.0 * shape.queries * _pairs(work.attended, window) for window in shape.windows)
    return work.tokens * per_token + work.targets * per_target + attention * (forwards + 2 * backward)


def memory_of(shape: ModelShape, work: EpochWork, config: RunConfig, *, on_gpu: bool) -> Memory:
    """Bytes on one device; every device holds the whole model."""
    in_16_bits = computes_in_16_bits(config, on_gpu=on_gpu)
    is_offloaded = on_gpu and Offload.OPTIMIZER in config.train.offload  # to another memory than this
    return Memory(
        weights=shape.weight_bytes,
        casts=(2 * shape.trainable if in_16_bits and shape.is_single else 0)
        + (2 if in_16_bits else 4) * shape.largest_quantized,
        gradients=0 if OPTIMIZERS[config.train.optim].in_backward else shape.gradient_bytes,
        optimizer=0 if is_offloaded else round(optimizer_bytes(config.train, shape)),
        activations=_activation_bytes(shape, work.largest_tokens, config, in_16_bits=in_16_bits),
        logits=2 * (2 if in_16_bits else 4) * work.largest_targets * shape.vocabulary + LOSS_CHUNK_BYTES,
        reserve=RESERVE_BYTES if on_gpu else 0,
    )


def optimizer_bytes(train: TrainConfig, shape: ModelShape) -> float:
    """Bytes of an optimizer's state, which follows the type of what it trains, or is of 8 or 4 bits a number."""
    name, number = train.optim, shape.gradient_bytes / max(1, shape.trainable)
    if name == "muon" or name.startswith(("galore", "apollo")):
        rest = shape.trainable - sum(rows * columns for rows, columns in shape.hidden)
        inner = sum(_hidden_states(train, *sizes) for sizes in shape.hidden)
        return (1.0 if "8bit" in name else number) * (inner + (0 if "adafactor" in name else 2 * rest))
    if any(part in name for part in _NEARLY_STATELESS):
        return 0.0
    if name == "badam":
        return 2.0 * shape.gradient_bytes / max(1, shape.layers)  # those of one decoder layer at a time
    states = next((count for kind, count in _STATES.items() if kind in name), 2.0)
    if "8bit" in name:
        return states * shape.trainable
    return states * shape.trainable / 2 if "4bit" in name else states * shape.gradient_bytes


def _hidden_states(train: TrainConfig, rows: int, columns: int) -> int:
    """Numbers of state for one matrix: Muon's momentum, or two moments of a projected gradient and the projection."""
    if train.optim == "muon":
        return rows * columns
    given: dict[str, Any] = {**OPTIMIZERS[train.optim].settings, **train.optim_args}
    rank, kind = min(rows, columns, int(given["rank"])), given["proj_type"]
    sides: dict[str, int] = {"reverse_std": min(rows, columns), "right": rows, "left": columns, "full": rank}
    kept = max(rows, columns) if isinstance(kind, tuple) else sides.get(kind, max(rows, columns))
    projection = rank * (rows + columns - (0 if kind == "full" else kept))
    return projection + (0 if "adafactor" in train.optim else 2 * rank * kept)


def _activation_bytes(shape: ModelShape, tokens: int, config: RunConfig, *, in_16_bits: bool) -> int:
    """What one micro-batch keeps for its backward pass; recomputing keeps the input of each layer, and one layer."""
    size = 2 if in_16_bits else 4
    # the stream between layers has the type of the weights; norms: what goes in, in 32 bits twice; attention: q, k, v,
    # q and k again after rotation, what comes out; feed-forward: gate, gate after its function, up, their product
    stream = 4 if shape.is_single else size
    norms = 16 if shape.trains_norms or not shape.is_single else 0
    per_layer = shape.width * (4 * stream + norms) + size * (
        3 * shape.queries + 3 * shape.keys + 4 * shape.feed_forward
    )
    if config.train.gradient_checkpointing:
        return tokens * (shape.layers * stream * shape.width + per_layer) + size * shape.kept_whole // shape.layers
    kept = tokens * shape.layers * per_layer * _backward_share(shape, config)
    return round(kept) + size * shape.kept_whole


def _backward_share(shape: ModelShape, config: RunConfig) -> float:
    """Which share of the layers the backward pass goes through: not those below the first one that is trained.

    Beside an adapter all layers are passed, and where activations are recomputed too.
    """
    stops = config.adapter.type is AdapterType.FREEZE and not config.train.gradient_checkpointing
    return shape.trained_body / max(1, shape.body) if stops else 1.0


def _pairs(lengths: Ints, window: int | None) -> float:
    """Pairs (token, token before it or itself) of all stretches: l (l + 1) / 2, fewer where a layer looks less far."""
    lengths = lengths.astype(np.float64)
    if window is None:
        return float((lengths * (lengths + 1) / 2).sum())
    seen = np.minimum(lengths, window)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * window).sum())


# --------------------------------------------------------------------------------------------------------------------
# What devices can compute: a table of the usual ones, and a measurement for all others.


GIB = 2**30
TERA = 10**12
_SECONDS_MEASURED = 0.3
_SIZE_ON_CPU, _SIZE_ON_GPU = 1024, 8192  # of the matrices that are multiplied: large enough that only that counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device. ``peak`` is floating point operations a second; ``is_measured``: of a matrix product, else of its
    data sheet, dense. ``memory_bytes`` None: not known."""

    name: str
    peak: float
    memory_bytes: int | None
    is_measured: bool


# name: (dense 16-bit TFLOP/s with 32-bit accumulation, 32-bit TFLOP/s without tensor cores, GiB), of the data sheets
_TABLE: Mapping[str, tuple[float, float, int]] = {
    "b200": (2250, 75, 180), "h200": (989, 67, 141), "h100-pcie": (756, 51, 80), "h100": (989, 67, 80),
    "a100": (312, 19.5, 80), "a10": (125, 31.2, 24), "l40s": (362, 91.6, 48), "l4": (121, 30.3, 24),
    "rtx4090": (165, 82.6, 24), "rtx3090": (71, 35.6, 24), "mi300x": (1307, 163.4, 192),
}  # fmt: skip
DEVICE_NAMES = tuple(_TABLE)


def check_name(name: str | None) -> None:
    """Raises `UserError` for a device that is not in the table."""
    if name is not None and name not in _TABLE:
        hint = f"known are {', '.join(DEVICE_NAMES)}; without --device the one that is here is taken"
        raise UserError(f"the table of peak speeds has no device {name!r} in the table of peaks", hint=hint)


def device_named(name: str, *, in_16_bits: bool) -> Device:
    """A device of the table. Raises `UserError` for others."""
    check_name(name)
    half, single, memory = _TABLE[name]
    return Device(name=name, peak=(half if in_16_bits else single) * TERA, memory_bytes=memory * GIB, is_measured=False)


def present_device(kind: str, *, in_16_bits: bool) -> Device:
    """The ``cuda`` or ``cpu`` device of this machine: by its name if the table has it, else measured for a moment."""
    import torch

    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        if (known := table_name(properties.name)) is not None:
            peak = device_named(known, in_16_bits=in_16_bits).peak
            return Device(name=properties.name, peak=peak, memory_bytes=properties.total_memory, is_measured=False)
    name, memory = f"cpu, threads: {torch.get_num_threads()}", None
    if kind == "cuda":
        name, memory = properties.name, properties.total_memory
    return Device(name=name, peak=_measured_rate(kind, in_16_bits=in_16_bits), memory_bytes=memory, is_measured=True)


def table_name(device: str) -> str | None:
    """``"NVIDIA H100 80GB HBM3"`` -> ``"h100"``; None for a device that the table does not have."""
    words = device.lower().replace("-", " ").split()
    said = "".join(words)
    for name in _TABLE:
        model, _, form = name.partition("-")
        if (model in words or (model.startswith("rtx") and model in said)) and (not form or form in words):
            return name
    return None


def _measured_rate(kind: str, *, in_16_bits: bool) -> float:
    """Operations a second in products of two square matrices: the median, for others may use the machine too."""
    import torch

    size = _SIZE_ON_GPU if kind == "cuda" else _SIZE_ON_CPU
    left = torch.ones(size, size, dtype=torch.bfloat16 if in_16_bits else torch.float32, device=kind)

    def seconds() -> float:
        started = time.perf_counter()
        left @ left
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds()  # the first one loads the library
    end, found = time.perf_counter() + _SECONDS_MEASURED, [seconds()]
    while time.perf_counter() < end:
        found.append(seconds())
    return 2 * size**3 / statistics.median(found)


# --------------------------------------------------------------------------------------------------------------------
# What a model's size says of its cost. Read off modules without weights (torch's meta device).


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as it is trained, adapter and all.

    parameters, trainable    numbers of parameters; tied ones count once
    weight_bytes             of all parameters, of quantized ones with their scales
    is_single                whether weights that are not quantized are kept in 32 bits
    largest_quantized        numbers of the largest quantized weight, which is whole while it computes; 0: there is none
    kept_whole               numbers of all quantized weights, where autograd keeps them whole for the backward pass
    trains_norms             whether norms are trained, which keeps what they multiply
    gradient_bytes           of those that are trained
    hidden                   rows and columns of each trained matrix of a linear layer, but the head
    body, trained_body       parameters that each token is multiplied with, without the head; of experts, the chosen
    head                     parameters of the head, which is computed at targets only
    trains_head              whether the head has gradients
    width, feed_forward      of the residual stream, and inside the feed-forward (all chosen experts together)
    queries, keys            heads x their width, of queries and of keys
    windows                  of each layer: how many tokens back it looks; None: all, 0: it has no attention
    """

    parameters: int
    trainable: int
    weight_bytes: int
    is_single: bool
    largest_quantized: int
    kept_whole: int
    trains_norms: bool
    gradient_bytes: int
    hidden: tuple[tuple[int, int], ...]
    body: int
    trained_body: int
    head: int
    trains_head: bool
    width: int
    feed_forward: int
    queries: int
    keys: int
    vocabulary: int
    windows: tuple[int | None, ...]

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
    table = (int(config.vocab_size), int(width))
    everything = list(model.named_parameters())
    whole = [one for _, one in everything if not (one.requires_grad and quantized) and id(one) not in quantized]
    matrices = [(name, one) for name, one in everything if one.ndim > 1 and tuple(one.shape) != table]
    return ModelShape(
        parameters=sum(one.numel() for _, one in everything),
        trainable=sum(one.numel() for _, one in everything if one.requires_grad),
        weight_bytes=sum(quantized.get(id(one), _num_bytes(one)) for _, one in everything),
        is_single=sum(map(_num_bytes, whole)) > 3 * sum(one.numel() for one in whole),
        kept_whole=sum(one.numel() for _, one in everything if id(one) in quantized) if keeps_whole else 0,
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
        queries=heads * head_width,
        keys=(said.get("num_key_value_heads") or heads) * head_width,
        vocabulary=table[0],
        windows=tuple(_windows(said, layers)),
    )


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
    if said.get("moe_intermediate_size") and said.get("num_experts_per_tok"):
        return int(said["moe_intermediate_size"]) * int(said["num_experts_per_tok"])
    return int(said.get("intermediate_size") or 4 * width) * int(said.get("num_experts_per_tok") or 1)


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
