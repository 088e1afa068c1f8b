"""Losses as sums: of single tokens, which fine-tuning and pretraining minimise, and of whole answers.

Those of tokens first. C targets of a chunk, V vocabulary. Each is a function of a few numbers a target, and a row of
`config.loss_rows`; `hidden_loss` and its chunks know none of them. Sums over targets, divided by the number of targets
of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from luthier.config.choices import RowKind
from luthier.config.loss_rows import Loss
from luthier.config.objective import LOSSES, loss_of
from luthier.objectives import Measure, Measures, SequenceLoss, computed_losses, measure
from luthier.objectives.pair_formulas import NO_BASELINES, PairBaselines, PairScores, PairSettings
from luthier.records import IGNORE_INDEX

# --------------------------------------------------------------------------------------------------------------------
# Cross-entropy over targets, as a sum. N tokens, V vocabulary, K targets, C rows of a chunk.
#
# Computed in float32 whatever the logits' type is, a chunk of rows at a time: the float32 copy never has more than
# `CHUNK_ELEMENTS` numbers, and between forward and backward only K log-normalisers are kept beside the logits.


CHUNK_ELEMENTS = 2**24  # 64 MiB of float32: large enough to keep a GPU busy, small beside any model's activations


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLoss:
    """Sums over the targets of one micro-batch; add them up over a step, then divide once.

    loss_sum     float32 scalar, differentiable
    num_targets  labels that are not IGNORE_INDEX; weights scale the loss, not this count
    num_correct  int64 scalar: targets that the logits rank first
    by_source    where the caller told S sources apart, float64[2, S]: the sum of losses and the number of targets of
                 each; they add up to ``loss_sum`` and ``num_targets``
    """

    loss_sum: torch.Tensor
    num_targets: int
    num_correct: torch.Tensor
    by_source: torch.Tensor | None = None


def token_loss_sum(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    sources_N: torch.Tensor | None = None,
    num_sources: int = 1,
) -> TokenLoss:
    """The sum of ``weight x cross-entropy`` over targets; labels are already shifted.

    ``sources_N``, int64, says which of ``num_sources`` data sets each token is of; without it nothing is told apart.

    Equals torch's ``cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=…)`` where weights are None,
    with the gradient in the logits' type. Label smoothing e mixes the one-hot target with the uniform distribution,
    ``(1 - e) onehot + e / V`` (Szegedy et al. 2016, arXiv:1512.00567).
    """
    assert logits_NV.ndim == 2 and labels_N.shape == logits_NV.shape[:1], f"{logits_NV.shape} and {labels_N.shape}"
    assert weights_N is None or weights_N.shape == labels_N.shape, f"{weights_N.shape} and {labels_N.shape}"
    assert 0 <= label_smoothing < 1, f"label_smoothing {label_smoothing}"
    rows_K = torch.nonzero(labels_N != IGNORE_INDEX).squeeze(1)
    labels_K = labels_N[rows_K]
    weights_K = None if weights_N is None else weights_N[rows_K].float()
    by_source = sources_K = None
    if sources_N is not None:
        assert sources_N.shape == labels_N.shape, f"{sources_N.shape} and {labels_N.shape}"
        sources_K = sources_N[rows_K]
        by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=logits_NV.device)
    loss_sum, num_correct = _ChunkedCrossEntropy.apply(
        logits_NV, rows_K, labels_K, weights_K, label_smoothing, sources_K, by_source
    )
    return TokenLoss(loss_sum=loss_sum, num_targets=len(rows_K), num_correct=num_correct, by_source=by_source)


def losses_by_source(losses_K: torch.Tensor, sources_K: torch.Tensor | None, num_sources: int) -> torch.Tensor | None:
    """`TokenLoss.by_source` of K losses, weighted already; None where nobody told sources apart."""
    if sources_K is None:
        return None
    by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=losses_K.device)
    return by_source.index_add_(1, sources_K, torch.stack([losses_K, torch.ones_like(losses_K)]).double())


class _ChunkedCrossEntropy(torch.autograd.Function):
    """loss = w [lse(x) - (1 - e) x_label - e mean(x)]; d loss / dx = w [softmax(x) - (1 - e) onehot - e / V].

    What the sources lose is written into ``by_source`` on the way: it is counted, not differentiated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        rows_K: torch.Tensor,
        labels_K: torch.Tensor,
        weights_K: torch.Tensor | None,
        smoothing: float,
        sources_K: torch.Tensor | None,
        by_source: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        num_correct = torch.zeros((), dtype=torch.int64, device=logits_NV.device)
        lse_K = torch.empty(len(rows_K), dtype=torch.float32, device=logits_NV.device)
        for chunk in _chunks(len(rows_K), logits_NV.shape[1]):
            logits_CV = logits_NV[rows_K[chunk]].float()
            labels_C = labels_K[chunk]
            lse_K[chunk] = torch.logsumexp(logits_CV, dim=1)
            loss_C = lse_K[chunk] - (1 - smoothing) * logits_CV.gather(1, labels_C[:, None]).squeeze(1)
            if smoothing:
                loss_C -= smoothing * logits_CV.mean(dim=1)
            loss_sum += loss_C.sum() if weights_K is None else loss_C @ weights_K[chunk]
            if by_source is not None and sources_K is not None:
                weighted_C = loss_C if weights_K is None else loss_C * weights_K[chunk]
                counted_2C = torch.stack([weighted_C, torch.ones_like(loss_C)]).double()
                by_source.index_add_(1, sources_K[chunk], counted_2C)
            num_correct += (logits_CV.argmax(dim=1) == labels_C).sum()
        ctx.save_for_backward(logits_NV, rows_K, labels_K, weights_K, lse_K)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NV, rows_K, labels_K, weights_K, lse_K = ctx.saved_tensors
        grad_NV = torch.zeros_like(logits_NV)
        for chunk in _chunks(len(rows_K), logits_NV.shape[1]):
            grad_CV = logits_NV[rows_K[chunk]].float()
            grad_CV.sub_(lse_K[chunk, None]).exp_()
            if ctx.smoothing:
                grad_CV -= ctx.smoothing / grad_CV.shape[1]
            label_share = grad_CV.new_full((len(grad_CV), 1), ctx.smoothing - 1)
            grad_CV.scatter_add_(1, labels_K[chunk][:, None], label_share)
            grad_CV *= grad_loss if weights_K is None else grad_loss * weights_K[chunk, None]
            grad_NV[rows_K[chunk]] = grad_CV.to(grad_NV.dtype)
        return grad_NV, None, None, None, None, None, None


def _chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return (slice(start, start + size) for start in range(0, num_rows, size))


EAFT_CANDIDATES = 20  # the entropy of so many likeliest tokens stands for that of all; at most log 20 = 3.0 nats
EAFT_SCALE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenQuantities:
    """What a token's loss may depend on; all float32[C], differentiable unless said otherwise.

    logps_C        log-probability of the target
    lse_C          log of the sum of exp(logits)
    mean_logits_C  mean of the logits over the vocabulary; zeros for Luthier's own losses without label smoothing
    kl_C           KL(reference || policy) over the vocabulary, or what the settings' ``beta`` makes of it
                   (`hidden_loss.divergence`); zeros without a reference
    entropy_C      of the `EAFT_CANDIDATES` likeliest tokens, renormalised; not differentiable, zeros where not needed
    """

    logps_C: torch.Tensor
    lse_C: torch.Tensor
    mean_logits_C: torch.Tensor
    kl_C: torch.Tensor
    entropy_C: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSettings:
    """Which token loss, and its numbers.

    label_smoothing  share of the target's probability that is spread over the vocabulary (arXiv:1512.00567)
    z_loss           weight of ``lse^2``, which keeps logits from drifting (arXiv:2204.02311)
    alpha            of ``eaft`` the power of the entropy; of ``asft`` the weight of the KL to the reference
    beta             of the divergence from the reference: 0 is KL(reference || policy)
    top_k            of the reference's tokens that it compares, with all others as one more; 0 compares all
    own              all numbers of a plugin's loss, by their keys
    """

    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    alpha: float = 1.0
    beta: float = 0.0
    top_k: int = 0
    own: Mapping[str, float] = field(default_factory=dict)


def token_losses(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    """The loss of each target, [C], with the z-loss."""
    loss = LOSSES.named(settings.loss)
    losses_C = computed_losses(loss, quantities.logps_C, "target", quantities, settings)
    if settings.z_loss:
        losses_C = losses_C + settings.z_loss * quantities.lse_C.square()
    return losses_C


def cross_entropy(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    smoothing = settings.label_smoothing
    if not smoothing:
        return -quantities.logps_C
    # against (1 - e) onehot + e / V:  (1 - e) (-log p) + e (lse - mean logit)
    spread_C = quantities.lse_C - quantities.mean_logits_C
    return (1 - smoothing) * -quantities.logps_C + smoothing * spread_C


def dft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = cross_entropy(quantities, settings)
    return quantities.logps_C.detach().exp() * nll_C


def eaft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = cross_entropy(quantities, settings)
    return (quantities.entropy_C / EAFT_SCALE) ** settings.alpha * nll_C


def asft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    return dft(quantities, settings) + settings.alpha * quantities.kl_C


def gkd(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    return quantities.kl_C


# ----------------------------------------------------------------------------------------------------------------------
# Losses of whole answers: single ones that were found good or bad, by their log-ratios, and pairs. R rows.
#
# r is ``log policy - log reference`` of an answer. Losses are summed over rows, and the trainer divides by the number
# of rows of the whole step; what rows are compared with is estimated over the whole step too, and handed in.


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
    own         all numbers of a plugin's loss, by their keys
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
        return beta * scores.chosen_ratios_P, beta * scores.rejected_ratios_P
    if row.per_token:
        return beta * scores.chosen_mean_P, beta * scores.rejected_mean_P
    return beta * scores.chosen_P, beta * scores.rejected_P


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
