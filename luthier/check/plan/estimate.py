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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luthier.check.plan.work import EpochWork, ModelShape
from luthier.config.choices import AdapterType, Offload, Precision
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.schema import RunConfig, TrainConfig
from luthier.errors import ModelError, UserError
from luthier.records import Ints

UTILISATION = 0.4  # of a data sheet's peak: what well-kept training of dense models reaches
UTILISATION_MEASURED = 0.6  # of the rate of a large matrix product


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
    if config.objective.kind.on_policy:
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


def operations_of(shape: ModelShape, work: EpochWork, config: RunConfig) -> float:
    """Floating point operations of one epoch. Recomputing activations is one more forward pass."""
    forwards = 2 if config.train.gradient_checkpointing else 1
    backward = backward_share(shape, config)
    per_token = 2.0 * (forwards * shape.body + backward * shape.body + shape.trained_body)
    per_target = 2.0 * shape.head * (2 + shape.trains_head)
    attention = sum(4.0 * shape.queries * _pairs(work.attended, window) for window in shape.windows)
    return work.tokens * per_token + work.targets * per_target + attention * (forwards + 2 * backward)


def _pairs(lengths: Ints, window: int | None) -> float:
    """Pairs (token, token before it or itself) of all stretches: l (l + 1) / 2, fewer where a layer looks less far."""
    lengths = lengths.astype(np.float64)
    if window is None:
        return float((lengths * (lengths + 1) / 2).sum())
    seen = np.minimum(lengths, window)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * window).sum())


# --------------------------------------------------------------------------------------------------------------------
# The memory that a run needs on a device.


RESERVE_BYTES = 3 << 29  # 1.5 GiB: the CUDA context, libraries' workspaces, gaps between allocations
LOSS_CHUNK_BYTES = 1 << 26  # what the loss copies to float32 at a time

# Bytes of optimizer state for each byte (of weights) or number (of 8-bit and 4-bit ones) that is trained.
_STATES = {"adam_mini": 1.0, "adam": 2.0, "ademamix": 3.0, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0, "radam": 2.0}
_NEARLY_STATELESS = ("adafactor", "sgd", "lomo", "adalomo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on each device at the worst moment. ``casts``: 16-bit copies of 32-bit weights, and the largest quantized
    weight made whole, while they compute. ``encoders``: what those of images and audio keep, besides activations."""

    weights: int
    casts: int
    gradients: int
    optimizer: int
    activations: int
    encoders: int
    logits: int
    reserve: int

    @property
    def total(self) -> int:
        kept = self.activations + self.encoders
        return self.weights + self.casts + self.gradients + self.optimizer + kept + self.logits + self.reserve


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


def memory_of(shape: ModelShape, work: EpochWork, config: RunConfig, *, on_gpu: bool) -> Memory:
    """Bytes on one device; every device holds the whole model."""
    in_16_bits = computes_in_16_bits(config, on_gpu=on_gpu)
    is_offloaded = on_gpu and Offload.OPTIMIZER in config.train.offload  # to another memory than this
    return Memory(
        weights=shape.weight_bytes,
        casts=_cast_bytes(shape, config, in_16_bits=in_16_bits),
        gradients=0 if OPTIMIZERS[config.train.optim].in_backward else shape.gradient_bytes,
        optimizer=0 if is_offloaded else round(optimizer_bytes(config.train, shape)),
        activations=_activation_bytes(shape, work.largest_tokens, config, in_16_bits=in_16_bits, on_gpu=on_gpu),
        encoders=_encoder_bytes(shape, work.largest_encoded, config, in_16_bits=in_16_bits, on_gpu=on_gpu),
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


def _cast_bytes(shape: ModelShape, config: RunConfig, *, in_16_bits: bool) -> int:
    """16-bit copies of 32-bit weights: of those that are trained, and of frozen ones below an adapter, too, which the
    backward pass needs; of these one layer at a time where layers are computed again. Besides, of single weights:
    the largest quantized one made whole, and for DoRA the sum whose norm it takes, in 32 bits, with both parts."""
    whole = (2 if in_16_bits else 4) * shape.largest_quantized
    if config.adapter.use_dora:
        whole += 3 * 4 * max((into * out for _, into, out, _ in shape.adapted), default=0)
    if not in_16_bits:
        return whole
    frozen = (shape.body - shape.trained_body) * bool(shape.adapted) * shape.is_single
    held = frozen // shape.layers if config.train.gradient_checkpointing else frozen
    trained = shape.trainable - shape.trained_experts
    return whole + 2 * (held + (trained if shape.is_single or shape.adapted else 0))


def _activation_bytes(shape: ModelShape, tokens: int, config: RunConfig, *, in_16_bits: bool, on_gpu: bool) -> int:
    """What one micro-batch keeps for its backward pass. Recomputing keeps the input of each layer, one layer, and the
    gradient of what is widest in it."""
    size, recomputes = 2 if in_16_bits else 4, config.train.gradient_checkpointing
    stream = 4 if shape.is_single else size  # the stream between layers has the type of the weights
    made_whole = size * (shape.kept_whole + shape.made_anew)
    # q and k after rotation, v (which is a part of what came before, where one matrix makes all three), what comes out
    attention = size * (2 + shape.in_one) * (shape.queries + shape.keys)
    if shape.adapted:
        beside, made = _adapter_bytes(shape, config, in_16_bits=in_16_bits, on_gpu=on_gpu)
        # norms keep what goes in, in 32 bits but for torch's own on a CPU; frozen weights, not what they multiply
        in_norms = stream if shape.norms_by_torch and not on_gpu else 4
        in_norms *= shape.norms * shape.width + (shape.queries + shape.keys) * shape.norms_heads
        inside = (shape.kept_inside - 1) * shape.feed_forward + shape.experts * shape.width
        per_layer = in_norms + attention + size * inside + beside // shape.layers
        made_whole += made
    else:
        # norms: what goes in, in 32 bits, and before it is scaled. What the first matrices of attention and of the
        # feed-forward read: once, or where it is in 32 bits as a copy for each of q, k, v, gate and up. Experts are not
        # cast: what they compute, what they read and what they give has the type of their weights.
        copies = shape.readers if size < stream else 2
        norms = (4 if shape.norms_by_torch else 4 + stream) if shape.trains_norms or not shape.is_single else 4
        in_heads = (4 + size) * (shape.queries + shape.keys) * shape.norms_heads
        inside = shape.kept_inside * shape.feed_forward + 2 * shape.experts * shape.width
        per_layer = shape.width * (shape.norms * norms + copies * size) + in_heads + attention
        per_layer += (stream if shape.experts else size) * inside
    if recomputes:
        widest = size * shape.feed_forward
        return tokens * (shape.layers * stream * shape.width + per_layer + widest) + made_whole // shape.layers
    return round(tokens * shape.layers * per_layer * backward_share(shape, config)) + made_whole


def _encoder_bytes(shape: ModelShape, positions: int, config: RunConfig, *, in_16_bits: bool, on_gpu: bool) -> int:
    """What encoders of images and audio keep of so many positions; of several that which keeps most, since it is not
    known here whose positions they are. A frozen encoder keeps nothing, unless an adapter is in it: what it reads has
    no gradient, and a projector is behind it."""
    size, found = 2 if in_16_bits else 4, [0]
    for one in shape.encoders:
        kept = round(positions * size * one.around)
        if one.trained or one.adapted:
            layers = replace(
                shape,
                kept_whole=0, made_anew=0, read_by_experts=0, experts=0, trains_norms=one.trained, norms=one.norms,
                norms_by_torch=one.norms_by_torch, norms_heads=one.norms_heads,
                adapted=() if one.trained else one.adapted, width=one.width, feed_forward=one.feed_forward,
                kept_inside=one.kept_inside, in_one=one.in_one, queries=one.queries, keys=one.keys,
                windows=(None,) * one.layers, readers=one.readers,
            )  # fmt: skip
            kept += _activation_bytes(layers, positions, config, in_16_bits=in_16_bits, on_gpu=on_gpu)
        found.append(kept)
    return max(found)


def _adapter_bytes(shape: ModelShape, config: RunConfig, *, in_16_bits: bool, on_gpu: bool) -> tuple[int, int]:
    """What adapters keep beside frozen weights: bytes for each token, and bytes that no number of tokens changes.

    Where an adapter's type is that of its input, those that share an input keep it once. PEFT makes a copy for each
    adapter in 32 bits of an input in 16, but on a GPU not beside weights of bitsandbytes. Dropout keeps for each
    adapter what it let through, and its mask: a byte on a GPU, 32 bits elsewhere.
    """
    size, adapter, mask = 2 if in_16_bits else 4, config.adapter, 1 if on_gpu else 4
    inputs, outputs, ranks, between, squares, shared = np.array(  # what attention gives is kept already
        [(into, out, rank, (into + out) * rank, into * out, into * (first and not into == shape.queries != shape.width))
         for _, into, out, rank, first in _with_firsts(shape.adapted)]
    ).sum(axis=0).tolist()  # fmt: skip
    drops = mask * inputs if adapter.lora_dropout else 0
    copies = bool(drops) or (in_16_bits and not (on_gpu and shape.largest_quantized and not shape.kept_whole))
    read = inputs if copies else shared
    match adapter.type:
        case AdapterType.VERA:  # its matrices are frozen: what its vectors multiply, and 16-bit copies of matrices
            return size * (ranks + outputs) + drops, 2 * between if in_16_bits else 0
        case AdapterType.OFT:  # rotations are made by a series of products of small blocks
            return size * read, 4 * 4 * inputs * adapter.oft_block_size
    kept = size * (ranks + read + shape.read_by_experts) + drops
    if not adapter.use_dora:
        return kept, 0
    return kept + 2 * size * outputs, size * squares if drops else 0  # after dropout the weight is multiplied again


def _with_firsts(adapted: tuple[tuple[str, int, int, int], ...]) -> Iterator[tuple[str, int, int, int, bool]]:
    """Adapted layers, and whether each is the first of its module with inputs of its width, which others share."""
    seen: set[tuple[str, int]] = set()
    for parent, into, out, rank in adapted:
        yield parent, into, out, rank, (parent, into) not in seen
        seen.add((parent, into))


def backward_share(shape: ModelShape, config: RunConfig) -> float:
    """Which share of the layers the backward pass goes through: not those below the first one that is trained.

    Beside an adapter all layers are passed, and where activations are recomputed too.
    """
    stops = config.adapter.type is AdapterType.FREEZE and not config.train.gradient_checkpointing
    return shape.trained_body / max(1, shape.body) if stops else 1.0


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
        raise UserError(f"the table of peak speeds has no device {name!r}", hint=hint)


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
