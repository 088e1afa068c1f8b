"""The loss that balances experts, in a run: what is counted before a step, and added to its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from luthier.models import sharding
from luthier.models.routers import Reduce, Routers
from luthier.models.submodules import evaluating
from luthier.records import Batch
from luthier.training.losses.step_losses import StepLosses
from luthier.training.losses.verdicts import FeedbackLosses

ROUTER_LOSS = "router_aux_loss"


class RouterBalance:
    """Of a run whose model has ``routers``; of another it adds nothing."""

    def __init__(self, losses: StepLosses) -> None:
        self._forward, self._routers = losses.forward, losses.forward.routers
        # completions of other rows, by which feedback is compared, are measured and not learned
        self._computed = losses.own if isinstance(losses, FeedbackLosses) else _whole
        self._sum, self._steps = 0.0, 0

    @property
    def measured(self) -> tuple[str, ...]:
        return () if self._routers is None else (ROUTER_LOSS,)

    def begin_step(self, model: nn.Module, batches: Sequence[Batch], reduce: Reduce) -> None:
        """Count what routers choose in all micro-batches of a step, on all ranks, in forward passes of their own:
        without dropout, and without drawing random numbers."""
        if (routers := self._routers) is None:
            return
        routers.step = None
        if len(batches) == 1 and not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
            return  # the micro-batch is the whole step, and counts itself
        try:
            with evaluating(model), torch.no_grad(), torch.random.fork_rng(), routers.counting(with_gradients=False):
                for batch in batches:
                    self._forward.counted(model, self._computed(batch))
        finally:
            sharding.give_up_gathered(model)
        self._note(routers, reduce)

    def counting(self) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch."""
        return nullcontext() if self._routers is None else self._routers.counting(with_gradients=True)

    def loss(self) -> torch.Tensor | float:
        """What the micro-batch that was counted last adds to the step's loss."""
        if (routers := self._routers) is None:
            return 0.0
        if routers.step is None:
            self._note(routers, lambda sums: sums)
        return routers.coefficient * routers.loss(routers.taken())

    def _note(self, routers: Routers, reduce: Reduce) -> None:
        routers.step_begins(routers.taken(), reduce)
        assert routers.step is not None
        self._sum += float(routers.loss(routers.step))
        self._steps += 1

    def drain(self) -> dict[str, float]:
        """The mean over the steps since the last time, by its name in logs."""
        if not self._steps:
            return {}
        mean, self._sum, self._steps = self._sum / self._steps, 0.0, 0
        return {ROUTER_LOSS: mean}


def _whole(batch: Batch) -> Batch:
    return batch
