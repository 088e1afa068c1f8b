"""Reward models: losses of the rewards of pairs. S segments, P pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from luthier.config.choices import RowKind
from luthier.config.objective import loss_of
from luthier.objectives.measures import SequenceLoss, measure


def reward_loss_sum(
    rewards_S: torch.Tensor,
    pairs_P2: torch.Tensor,
    *,
    margins_P: torch.Tensor | None = None,
    weights_P: torch.Tensor | None = None,
    name: str = "bradley_terry",
    numbers: Mapping[str, float] | None = None,
) -> SequenceLoss:
    """The sum over pairs of ``weight x loss``, with measures. ``numbers`` are those of the loss of this name.

    ``pairs_P2`` int64: segment of the chosen answer, segment of the rejected one. Raises `UserError` where there is no
    loss ``name``.
    """
    chosen_P, rejected_P = rewards_S[pairs_P2].unbind(dim=1)
    gap_P = chosen_P - rejected_P
    row = loss_of(RowKind.PAIR, name)
    wanted_P = torch.zeros_like(gap_P) if margins_P is None else margins_P
    losses_P = row.compute(chosen_P, rejected_P, wanted_P, {**row.numbers, **(numbers or {})})
    if weights_P is not None:
        losses_P = losses_P * weights_P
    measures = {
        "rewards/chosen": measure(chosen_P),
        "rewards/rejected": measure(rejected_P),
        "rewards/accuracies": measure(gap_P > 0),
        "rewards/margins": measure(gap_P),
    }
    return SequenceLoss(loss_sum=losses_P.sum(), losses_U=losses_P.detach(), measures=measures)


def bradley_terry(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margins_P: torch.Tensor, numbers: Mapping[str, float]
) -> torch.Tensor:
    """``-log sigmoid(rc - rd - margin) + center_rewards (rc + rd)^2``, [P].

    Bradley and Terry 1952; margins as in Llama 2 (arXiv:2307.09288), centring as in arXiv:2312.09244.
    """
    losses_P = -F.logsigmoid(chosen_P - rejected_P - margins_P)
    if numbers["center_rewards"]:
        losses_P = losses_P + numbers["center_rewards"] * (chosen_P + rejected_P).square()
    return losses_P
