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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from luthier.check.plan.memory import Memory, backward_share, computes_in_16_bits, memory_of
from luthier.check.plan.work import EpochWork, Ints, ModelShape
from luthier.config.objective import OBJECTIVES
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, UserError

if TYPE_CHECKING:
    pass

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
