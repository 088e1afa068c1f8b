"""Losses of whole answers: single ones that were found good or bad, by their log-ratios, and pairs. R rows.

r is ``log policy - log reference`` of an answer. Losses are summed over rows, and the trainer divides by the number of
rows of the whole step; what rows are compared with is estimated over the whole step too, and handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from luthier.config.choices import RowKind
from luthier.config.loss_rows import Loss
from luthier.config.objective import loss_of
from luthier.objectives.loss_call import computed_losses
from luthier.objectives.measures import Measure, Measures, SequenceLoss, measure
from luthier.objectives.pair_formulas import NO_BASELINES, PairBaselines, PairScores, PairSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeedbackScores:
    """Log-probabilities of the answers of R rows, each the sum over the answer's targets.

    logps_R      float32, of the policy, differentiable
    ref_logps_R  float32, of the reference, constant
    desirable_R  bool
    lengths_R    int64, numbers of targets
    weights_R    float32, what each row counts in the loss, or None: 1.0
    """

    logps_R: torch.Tensor
    ref_logps_R: torch.Tensor
    desirable_R: torch.Tensor
    lengths_R: torch.Tensor
    weights_R: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackSettings:
    """The numbers of these losses: KTO's lambdas are the two weights.

    sft_weight  what a good answer's cross-entropy per token counts beside the loss; no lambda scales it
    own         numbers of a plugin's loss, by their keys
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    sft_weight: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackBaselines:
    """What rewards are compared with, from the whole step.

    kl     ``kto``: `kl_baseline` of the summed `kl_measure` of all micro-batches and ranks
    delta  ``bco``: the running mean of rewards, `RunningMean.mean`
    """

    kl: float = 0.0
    delta: float = 0.0


def feedback_loss_sum(
    scores: FeedbackScores, name: str, settings: FeedbackSettings, baselines: FeedbackBaselines
) -> SequenceLoss:
    """The sum over rows of ``weight x (lambda x loss + sft_weight x nll per token of a good answer)``, with measures.

    Raises `UserError` where there is no loss ``name``.
    """
    ratios_R = scores.logps_R - scores.ref_logps_R
    good_R = scores.desirable_R
    signs_R = torch.where(good_R, 1.0, -1.0).to(ratios_R.dtype)
    row = loss_of(RowKind.VERDICT, name)
    losses_R = computed_losses(row, ratios_R, "row", ratios_R, signs_R, settings, baselines)
    losses_R = losses_R * torch.where(good_R, settings.desirable_weight, settings.undesirable_weight)
    if settings.sft_weight:
        mean_nll_R = -scores.logps_R / scores.lengths_R.clamp(min=1)
        losses_R = losses_R + settings.sft_weight * torch.where(good_R, mean_nll_R, 0.0)
    if scores.weights_R is not None:
        losses_R = losses_R * scores.weights_R
    rewards_R = settings.beta * ratios_R
    measures = {
        "rewards/chosen": measure(rewards_R, good_R),
        "rewards/rejected": measure(rewards_R, ~good_R),
        "logps/chosen": measure(scores.logps_R, good_R),
        "logps/rejected": measure(scores.logps_R, ~good_R),
        "nll": _nll(scores, good_R),
    }
    return SequenceLoss(loss_sum=losses_R.sum(), losses_U=losses_R.detach(), measures=measures)


def kl_measure(logps_R: torch.Tensor, ref_logps_R: torch.Tensor) -> Measure:
    """Sum and count of the log-ratios of R continuations that belong to other prompts: add up over the whole step."""
    return measure(logps_R - ref_logps_R)


def kl_baseline(step: Measure) -> float:
    """KTO's estimate of KL(policy, reference) from a whole step: the mean, at least 0; 0 where nothing was counted."""
    return max(step.mean, 0.0) if step.count else 0.0


def _nll(scores: FeedbackScores, good_R: torch.Tensor) -> Measure:
    """Per target of the good answers."""
    answers, targets = measure(-scores.logps_R, good_R), measure(scores.lengths_R, good_R)
    return Measure(total=answers.total, count=targets.total)


def kto(
    ratios_R: torch.Tensor, signs_R: torch.Tensor, settings: FeedbackSettings, baselines: FeedbackBaselines
) -> torch.Tensor:
    return torch.sigmoid(-signs_R * settings.beta * (ratios_R - baselines.kl))


def apo_zero_unpaired(
    ratios_R: torch.Tensor, signs_R: torch.Tensor, settings: FeedbackSettings, _: FeedbackBaselines
) -> torch.Tensor:
    return torch.sigmoid(-signs_R * settings.beta * ratios_R)


def bco(
    ratios_R: torch.Tensor, signs_R: torch.Tensor, settings: FeedbackSettings, baselines: FeedbackBaselines
) -> torch.Tensor:
    return -F.logsigmoid(signs_R * (settings.beta * ratios_R - baselines.delta))


# --------------------------------------------------------------------------------------------------------------------
# Losses of pairs and of rewards: the formulas of `pair_formulas`, weighted and summed. P pairs.


def pair_loss_sum(
    scores: PairScores, name: str, settings: PairSettings, baselines: PairBaselines = NO_BASELINES
) -> SequenceLoss:
    """The sum over pairs of ``weight x (loss + sft_weight x nll per token of the chosen answer)``, with measures.

    Raises `UserError` where there is no loss ``name``.
    """
    row = loss_of(RowKind.PAIR, name)
    losses_P = computed_losses(row, scores.chosen_P, "pair", scores, settings, baselines)
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
    told = {**row.numbers, **(numbers or {})}
    losses_P = computed_losses(row, gap_P, "pair", chosen_P, rejected_P, wanted_P, told)
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
