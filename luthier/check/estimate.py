"""Time and memory of a run, before any model is loaded: estimates, from exact counts and a few assumptions.

    operations = tokens x (2 forward + 2 backward through it + 2 for the gradients of what is trained) x body
               + targets x the same x head
               + attention: 4 x queries x pairs of tokens that see each other, three times
    time       = operations / (devices x peak x utilisation) x straggler factor

With all weights trained this is the usual 6 N D. docs/cli.md says what each number of the memory is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.check.devices import Device
from luthier.check.model_shape import ModelShape
from luthier.config.schema import AdapterType, Packing, Precision, RunConfig
from luthier.packing import EpochPlan, SegmentTable

UTILISATION = 0.4  # of a data sheet's peak: what well-kept training of dense models reaches
UTILISATION_MEASURED = 0.6  # of the rate of a large matrix product
RESERVE_BYTES = 3 << 29  # 1.5 GiB: the CUDA context, libraries' workspaces, gaps between allocations
LOSS_CHUNK_BYTES = 1 << 26  # what the loss copies to float32 at a time

Ints = NDArray[np.int64]

# Bytes of optimizer state for each byte (of weights) or number (of 8-bit and 4-bit ones) that is trained.
_STATES = {"adam": 2.0, "ademamix": 3.0, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0, "radam": 2.0}
_NEARLY_STATELESS = ("adafactor", "sgd", "lomo", "adalomo", "galore", "apollo")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
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
    def of_plan(cls, plan: EpochPlan, table: SegmentTable) -> Work:
        """The work of an epoch's plan, which has at least one micro-batch."""
        planned = plan.planned
        lengths = planned.lengths(table.lengths)
        of_rows = np.add.reduceat(lengths, plan.pack_bounds[:-1])
        widest = np.maximum.reduceat(of_rows, plan.batch_bounds[:-1])
        num_rows = np.diff(plan.batch_bounds)
        # a piece of plain text learns all but its first token
        targets = table.num_targets[planned.segment_ids] if plan.starts is None else np.maximum(lengths - 1, 0)
        of_batches = np.add.reduceat(targets, plan.pack_bounds[plan.batch_bounds[:-1]])
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
    """Bytes on each device at the worst moment. ``casts``: 16-bit copies of 32-bit weights, while they compute."""

    weights: int
    casts: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it."""
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
    work: Work,
    device: Device,
    *,
    total_steps: int,
    num_devices: int = 1,
    straggler_factor: float = 1.0,
    utilisation: float | None = None,
) -> Estimate:
    """The estimate of training alone: evaluation, saving and loading are not in it."""
    on_gpu = not device.name.startswith("cpu")
    in_16_bits = computes_in_16_bits(config, on_gpu=on_gpu)
    if utilisation is None:
        utilisation = UTILISATION_MEASURED if device.is_measured else UTILISATION
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


def operations_of(shape: ModelShape, work: Work, config: RunConfig) -> float:
    """Floating point operations of one epoch. Recomputing activations is one more forward pass."""
    forwards = 2 if config.train.gradient_checkpointing else 1
    backward = _backward_share(shape, config)
    per_token = 2.0 * (forwards * shape.body + backward * shape.body + shape.trained_body)
    per_target = 2.0 * shape.head * (2 + shape.trains_head)
    attention = sum(4.0 * shape.queries * _pairs(work.attended, window) for window in shape.windows)
    return work.tokens * per_token + work.targets * per_target + attention * (forwards + 2 * backward)


def memory_of(shape: ModelShape, work: Work, config: RunConfig, *, on_gpu: bool) -> Memory:
    """Bytes on one device; every device holds the whole model."""
    in_16_bits = computes_in_16_bits(config, on_gpu=on_gpu)
    return Memory(
        weights=shape.weight_bytes,
        casts=2 * shape.trainable if in_16_bits and _is_single(shape) else 0,
        gradients=shape.gradient_bytes,
        optimizer=round(optimizer_bytes(config.train.optim, shape)),
        activations=_activation_bytes(shape, work.largest_tokens, config, in_16_bits=in_16_bits),
        logits=2 * (2 if in_16_bits else 4) * work.largest_targets * shape.vocabulary + LOSS_CHUNK_BYTES,
        reserve=RESERVE_BYTES if on_gpu else 0,
    )


def optimizer_bytes(name: str, shape: ModelShape) -> float:
    """Bytes of an optimizer's state, which follows the type of what it trains, or is of 8 or 4 bits a number."""
    if any(part in name for part in _NEARLY_STATELESS):
        return 0.0
    states = next((count for kind, count in _STATES.items() if kind in name), 2.0)
    if "8bit" in name:
        return states * shape.trainable
    return states * shape.trainable / 2 if "4bit" in name else states * shape.gradient_bytes


def _activation_bytes(shape: ModelShape, tokens: int, config: RunConfig, *, in_16_bits: bool) -> int:
    """What one micro-batch keeps for its backward pass; recomputing keeps the input of each layer, and one layer."""
    size = 2 if in_16_bits else 4
    # the stream between layers has the type of the weights; norms: what goes in, in 32 bits twice; attention: q, k, v,
    # q and k again after rotation, what comes out; feed-forward: gate, gate after its function, up, their product
    stream = 4 if _is_single(shape) else size
    per_layer = shape.width * (4 * stream + 16) + size * (3 * shape.queries + 3 * shape.keys + 4 * shape.feed_forward)
    if config.train.gradient_checkpointing:
        return tokens * (shape.layers * stream * shape.width + per_layer)
    return round(tokens * shape.layers * per_layer * _backward_share(shape, config))


def _backward_share(shape: ModelShape, config: RunConfig) -> float:
    """Which share of the layers the backward pass goes through: not those below the first one that is trained.

    Beside an adapter all layers are passed, and where activations are recomputed too.
    """
    stops = config.adapter.type is AdapterType.FREEZE and not config.train.gradient_checkpointing
    return shape.trained_body / max(1, shape.body) if stops else 1.0


def _is_single(shape: ModelShape) -> bool:
    """Whether weights are kept in 32 bits."""
    return shape.weight_bytes > 3 * shape.parameters


def _pairs(lengths: Ints, window: int | None) -> float:
    """Pairs (token, token before it or itself) of all stretches: l (l + 1) / 2, fewer where a layer looks less far."""
    lengths = lengths.astype(np.float64)
    if window is None:
        return float((lengths * (lengths + 1) / 2).sum())
    seen = np.minimum(lengths, window)
    return float((seen * (seen + 1) / 2 + (lengths - seen) * window).sum())
