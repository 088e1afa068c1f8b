"""Reward models: the Bradley-Terry loss of the rewards of pairs. S segments, P pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from luthier.objectives.measures import SequenceLoss, measure


def reward_loss_sum(
    rewards_S: torch.Tensor,
    pairs_P2: torch.Tensor,
    *,
    margins_P: torch.Tensor | None = None,
    weights_P: torch.Tensor | None = None,
    center_rewards: float = 0.0,
) -> SequenceLoss:
    """The sum over pairs of ``-log sigmoid(rc - rd - margin) + center_rewards (rc + rd)^2``, with measures.

    Bradley and Terry 1952; margins as in Llama 2 (arXiv:2307.09288), centring as in arXiv:2312.09244. ``pairs_P2``
    int64: segment of the chosen answer, segment of the rejected one.
    """
    chosen_P, rejected_P = rewards_S[pairs_P2].unbind(dim=1)
    gap_P = chosen_P - rejected_P
    losses_P = -F.logsigmoid(gap_P if margins_P is None else gap_P - margins_P)
    if center_rewards:
        losses_P = losses_P + center_rewards * (chosen_P + rejected_P).square()
    if weights_P is not None:
        losses_P = losses_P * weights_P
    measures = {
        "rewards/chosen": measure(chosen_P),
        "rewards/rejected": measure(rejected_P),
        "rewards/accuracies": measure(gap_P > 0),
        "rewards/margins": measure(gap_P),
    }
    return SequenceLoss(loss_sum=losses_P.sum(), losses_U=losses_P.detach(), measures=measures)
