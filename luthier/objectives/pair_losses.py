"""Preference pairs to a loss and to what is reported: of compared answers, and of rewards. P pairs, S segments."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from luthier.config.choices import RowKind
from luthier.config.loss_rows import Loss
from luthier.config.objective import loss_of
from luthier.objectives.measures import Measure, Measures, SequenceLoss, measure
from luthier.objectives.pair_formulas import NO_BASELINES, PairBaselines, PairScores, PairSettings


def pair_loss_sum(
    scores: PairScores, name: str, settings: PairSettings, baselines: PairBaselines = NO_BASELINES
) -> SequenceLoss:
    """The sum over pairs of ``weight x (loss + sft_weight x nll per token of the chosen answer)``, with measures.

    Raises `UserError` where there is no loss ``name``.
    """
    row = loss_of(RowKind.PAIR, name)
    losses_P = row.compute(scores, settings, baselines)
    if settings.sft_weight:
        losses_P = losses_P + settings.sft_weight * scores.mean_chosen_nll_P
    if scores.weights_P is not None:
        losses_P = losses_P * scores.weights_P
    measures = _measures(scores, row, settings.beta)
    return SequenceLoss(loss_sum=losses_P.sum(), losses_U=losses_P.detach(), measures=measures)


def _measures(scores: PairScores, row: Loss, beta: float) -> Measures:
    chosen_P, rejected_P = _rewards(scores, row, beta)
    nll = measure(scores.chosen_nll_P)
    return {
        "rewards/chosen": measure(chosen_P),
        "rewards/rejected": measure(rejected_P),
        "rewards/accuracies": measure(chosen_P > rejected_P),
        "rewards/margins": measure(chosen_P - rejected_P),
        "logps/chosen": measure(scores.chosen_P),
        "logps/rejected": measure(scores.rejected_P),
        "nll": Measure(total=nll.total, count=scores.chosen_lengths_P.sum().double()),
    }


def _rewards(scores: PairScores, row: Loss, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss takes for the answers' rewards: beta times log-ratios, or per-token log-probabilities (SimPO)."""
    if row.reference:
        return beta * scores.chosen_ratios_P.detach(), beta * scores.rejected_ratios_P.detach()
    if row.per_token:
        return beta * scores.chosen_mean_P.detach(), beta * scores.rejected_mean_P.detach()
    return beta * scores.chosen_P.detach(), beta * scores.rejected_P.detach()


# --------------------------------------------------------------------------------------------------------------------
# Reward models: losses of the rewards of pairs. S segments, P pairs.


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
