"""What each optimizer step of a trainer costs, and what it computed. For scripts that run a peer's own trainer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

KIB = 1024


class StepCosts(TrainerCallback):
    """Notes the clocks after each step, loss and gradient norm as the trainer logs them, and memory."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"wall": [], "cpu": [], "targets": [], "losses": [], "norms": []}

    def count(self, num_targets: int) -> None:
        """To be called once a step."""
        self.facts["targets"].append(num_targets)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.logged(float(logs["loss"]), float(logs["grad_norm"]))

    def begin(self) -> None:
        """Model and rows are loaded; memory is counted from here."""
        forget_peak_memory()
        self.facts["before"] = memory("VmRSS")

    def step_ends(self) -> None:
        """One more is done."""
        self.facts["wall"].append(time.perf_counter())
        self.facts["cpu"].append(time.process_time())

    def logged(self, loss: float, norm: float) -> None:
        """What the trainer says of its last step."""
        self.facts["losses"].append(loss)
        self.facts["norms"].append(norm)

    def tell(self, version: str, kept: int) -> None:
        """Print all of it as the last line of the script; ``kept`` rows were left to train."""
        print(json.dumps({**self.facts, "peak": memory("VmHWM"), "version": version, "kept": kept}), flush=True)


def forget_peak_memory() -> None:
    """``VmHWM`` begins anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(name: str) -> int:
    """Bytes of this process that are in memory: ``VmRSS`` now, ``VmHWM`` at most."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise OSError(f"/proc/self/status says nothing of {name}")
