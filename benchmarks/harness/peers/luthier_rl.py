"""Steps of Luthier that learn from drawn answers. Argument: the job, a JSON file (see benchmarks/rl.py)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from step_costs import StepCosts

import luthier
from luthier.training.report.events import Started
from luthier.training.rollouts.drawing import Rollouts
from luthier.training.trainer import Trainer

PARTS: tuple[tuple[str, type, str], ...] = (
    ("drawing", Rollouts, "_drawn"),
    ("learning", Trainer, "_learn"),
    ("learning", Trainer, "update"),
    ("step", Trainer, "_take_step"),
)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    costs, seconds = StepCosts(), {name: [0.0] for name, _, _ in PARTS}
    for name, owner, method in PARTS:
        setattr(owner, method, timed(getattr(owner, method), seconds[name]))
    take_step = Trainer._take_step

    def counted(*args: Any, **keys: Any) -> Any:
        found = take_step(*args, **keys)
        for each in seconds.values():
            each.append(0.0)  # the next step's
        return found

    Trainer._take_step = counted  # type: ignore[method-assign]
    luthier.train(job["run"], on_event=lambda event: costs.begin() if isinstance(event, Started) else None)
    costs.facts |= {name: each[: job["steps"]] for name, each in seconds.items()}
    costs.tell(version("luthier"), job["steps"])


def timed(real: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same, which adds the CPU-seconds of its calls to the last number."""

    def call(*args: Any, **keys: Any) -> Any:
        start = time.process_time()
        try:
            return real(*args, **keys)
        finally:
            seconds[-1] += time.process_time() - start

    return call


main()
