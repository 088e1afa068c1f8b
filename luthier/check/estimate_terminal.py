"""An estimate of time and memory in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luthier.check.devices import GIB, Device
from luthier.check.estimate import Estimate, Memory

_PARTS = ("weights", "casts", "gradients", "optimizer", "activations", "logits", "reserve")
_SHOWN_FROM = 0.005  # of the whole


def estimate_table(estimate: Estimate) -> Group:
    """What the run will take, and under which assumptions."""
    title = Text.assemble(("Estimate", "bold"), ("  not exact, unlike the plan", "dim"))
    parts: list[RenderableType] = [title, Padding(_numbers(estimate), (0, 0, 0, 2))]
    parts.append(Padding(Text(f"assumed: {estimate.assumptions}", style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def duration(seconds: float) -> str:
    """``42 s``, ``3.5 min``, ``2.1 h``, ``4.0 days``."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(num_bytes: int) -> str:
    """``1.5 GiB``, ``310 MiB``."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _numbers(estimate: Estimate) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("device", _device(estimate.device, estimate.num_devices))
    trained = "" if estimate.trainable == estimate.parameters else f", {_short(estimate.trainable)} of them trained"
    table.add_row("parameters", f"{_short(estimate.parameters)}{trained}")
    bits = "16" if estimate.in_16_bits else "32"
    table.add_row("operations", f"{estimate.operations:.2g}, in {bits} bits")
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s, padding counted"
    table.add_row("time", Text.assemble("about ", (duration(estimate.seconds), "bold"), f"  ({speed})"))
    table.add_row("memory", _memory(estimate.memory, estimate.device))
    return table


def _device(device: Device, number: int) -> str:
    how = "measured" if device.is_measured else "data sheet"
    times = "" if number == 1 else f"{number} × "
    return f"{times}{device.name}  ({device.peak / 1e12:,.3g} TFLOP/s, {how})"


def _memory(memory: Memory, device: Device) -> Text:
    parts = {name: getattr(memory, name) for name in _PARTS}
    listed = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part >= _SHOWN_FROM * memory.total)
    fits = device.memory_bytes is None or memory.total <= device.memory_bytes
    of = "" if device.memory_bytes is None else f" of {size(device.memory_bytes)}"
    told = Text.assemble("about ", (size(memory.total), "bold" if fits else "bold red"), f"{of}  ({listed})")
    return told if fits else told.append("  more than the device has", style="red")


def _short(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return str(number)
