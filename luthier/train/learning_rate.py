"""The learning rate's schedule where the number of steps is an estimate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from luthier.loader.plan import StreamPlan


def put_on_progress(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: StreamPlan) -> None:
    """Ask the schedule not for the number of steps done, but for as many of ``horizon`` as the run's progress is."""

    def on_progress(multiplier: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda steps_done: multiplier(steps.progress(steps_done) * steps.horizon)

    scheduler.lr_lambdas = [on_progress(multiplier) for multiplier in scheduler.lr_lambdas]
