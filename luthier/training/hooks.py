"""How a run talks, and how all its ranks agree to stop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import TrainerCallback

from luthier.training.report.events import EventListener
from luthier.training.signals import StopSignals
from luthier.training.streams import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Hooks:
    """How a run talks, how it is told to stop, and the caller's own callbacks, which come behind ours."""

    tell: EventListener
    stop: StopAgreement
    callbacks: tuple[TrainerCallback, ...] = ()


class StopAgreement:
    """Whether any rank got a signal: all ranks must leave the loop after the same step."""

    def __init__(self, signals: StopSignals, world: World) -> None:
        self.signals = signals
        self.world = world
        self.signal: int | None = None

    def agreed(self) -> bool:
        """Asked once after each step, on all ranks. ``signal`` is what was agreed on."""
        received = self.signals.received or 0
        if self.world.size > 1:
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            flag = torch.tensor(received, device=device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            received = int(flag)
        if received:
            self.signal = received
        return self.signal is not None
