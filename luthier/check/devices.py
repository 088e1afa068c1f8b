"""What devices can compute: a table of the usual ones, and a measurement for all others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from luthier.errors import UserError

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
        raise UserError(f"there is no device {name!r} in the table of peaks", hint=hint)


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
        known = table_name(properties.name)
        if known is not None:
            peak = device_named(known, in_16_bits=in_16_bits).peak
            return Device(name=properties.name, peak=peak, memory_bytes=properties.total_memory, is_measured=False)
        rate = _measured_rate("cuda", in_16_bits=in_16_bits)
        return Device(name=properties.name, peak=rate, memory_bytes=properties.total_memory, is_measured=True)
    rate = _measured_rate("cpu", in_16_bits=in_16_bits)
    return Device(name=f"cpu, {torch.get_num_threads()} threads", peak=rate, memory_bytes=None, is_measured=True)


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
