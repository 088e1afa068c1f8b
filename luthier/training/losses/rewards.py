"""``rm``: a reward model from pairs. S segments, P pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from luthier.models.passes import ModelPass
from luthier.objectives import reward_loss_sum
from luthier.records import Batch
from luthier.training.losses.compared_losses import micro_loss, pairs_of, weights_of
from luthier.training.losses.parts import ObjectiveParts
from luthier.training.losses.step_losses import BothLosses, MicroLoss, Stateless, Tell
from luthier.training.report.result import ACCURACIES, MARGINS, REWARDS


def reward_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """The losses of a run, the same on held-out rows."""
    objective, num_sources = parts.config.objective, max(parts.num_sources)
    losses = RewardLosses(forward=forward, name=objective.loss_name, numbers=objective.numbers, num_sources=num_sources)
    return losses, losses


@dataclass(kw_only=True, slots=True, eq=False)
class RewardLosses(Stateless):
    """``rm``: the reward of the chosen answer above that of the rejected one."""

    forward: ModelPass
    name: str = "bradley_terry"
    numbers: Mapping[str, float] = field(default_factory=dict)
    num_sources: int = 1

    @property
    def measured(self) -> tuple[str, ...]:
        """See `StepLosses`."""
        return (*REWARDS, ACCURACIES, MARGINS)

    def num_units(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch.units)

    def loss(self, model: nn.Module, batch: Batch) -> MicroLoss:
        """See `StepLosses`."""
        rewards_S = self.forward.rewards(model, batch)
        found = reward_loss_sum(
            rewards_S,
            pairs_of(batch).to(rewards_S.device),
            margins_P=torch.tensor([unit.verdict for unit in batch.units], device=rewards_S.device),
            weights_P=weights_of(batch, rewards_S.device),
            name=self.name,
            numbers=self.numbers,
        )
        return micro_loss(found, rewards_S.sum() * 0, batch, self.num_sources)
