"""Preference pairs to a loss and to what is reported. P pairs."""

from __future__ import annotations

import torch

from luthier.config.choices import RowKind
from luthier.config.loss_rows import Loss
from luthier.config.objective import loss_of
from luthier.objectives.measures import Measure, Measures, SequenceLoss, measure
from luthier.objectives.pair_formulas import NO_BASELINES, PairBaselines, PairSettings
from luthier.objectives.pair_scores import PairScores


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
