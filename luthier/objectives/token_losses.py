"""Losses of single tokens: what fine-tuning and pretraining minimise. C targets of a chunk, V vocabulary.

Each is a function of a few numbers a target, and a row of `config.loss_rows`; `hidden_loss` and its chunks know none of
them. Sums over targets, divided by the number of targets of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from luthier.config.objective import LOSSES
from luthier.objectives.loss_call import computed_losses
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
    mean_logits_C  mean of the logits over the vocabulary
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
    own              numbers of a plugin's loss, by their keys
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
