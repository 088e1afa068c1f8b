"""The sum of token losses from hidden states. K targets, C targets of a chunk, V vocabulary, D hidden size.

A sum's gradient is known, up to one factor, while the logits of a chunk are still there: so the forward pass computes
it too, and the backward pass only multiplies. Three products with the head's weight, and never [K, V].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from luthier.config.choices import RowKind
from luthier.config.objective import LOSSES, loss_of
from luthier.objectives import AnyHead, ChunkedHead, Head, HeadGradients, Softmax, chunks_of, hand_over_, softmax_
from luthier.objectives.loss_sums import (
    EAFT_CANDIDATES,
    TokenLoss,
    TokenQuantities,
    TokenSettings,
    losses_by_source,
    token_losses,
)
from luthier.objectives.token_scores import fused_loss_sum, is_fused, probe_vocabulary

UNSEEN = -100.0  # log-probability of ids that a model never gives: masked ones, or those that it does not have


def divergence(q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float, top_k: int = 0) -> torch.Tensor:
    """Of each target, [C], differentiable by both; ``q_CV`` and ``p_CV`` are log-probabilities, none of them -inf.
    ``top_k`` 0 compares all tokens."""
    assert 0 <= beta <= 1, f"beta {beta}"
    if 0 < top_k < p_CV.shape[1]:
        ids_CK = p_CV.topk(top_k, dim=1).indices
        q_CV, p_CV = _top_and_tail(q_CV, ids_CK), _top_and_tail(p_CV, ids_CK)
    if beta == 0:
        return _kl(p_CV, q_CV)
    if beta == 1:
        return _kl(q_CV, p_CV)
    m_CV = _mixture(q_CV, p_CV, beta)
    return beta * _kl(p_CV, m_CV) + (1 - beta) * _kl(q_CV, m_CV)


def divergence_with_slope(
    q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence, [C], and its derivative by the logits that ``q_CV`` is of, [C, V]."""
    if 0 < top_k < p_CV.shape[1]:
        ids_CK = p_CV.topk(top_k, dim=1).indices
        q_CB = _top_and_tail(q_CV, ids_CK)  # B: the top k and the tail
        values_C, slope_CB = divergence_with_slope(q_CB, _top_and_tail(p_CV, ids_CK), beta)
        # a token of the tail moves it by its share of the tail's probability
        slope_CV = (q_CV - q_CB[:, -1:]).clamp_(max=0).exp_().mul_(slope_CB[:, -1:])
        return values_C, slope_CV.scatter_(1, ids_CK, slope_CB[:, :-1])
    if beta == 0:
        return _kl(p_CV, q_CV), q_CV.exp() - p_CV.exp()
    other_CV = p_CV if beta == 1 else _mixture(q_CV, p_CV, beta)
    gaps_CV, probs_CV = q_CV - other_CV, q_CV.exp()
    reverse_C = (probs_CV * gaps_CV).sum(dim=1)
    # d / d q_i = s (log(q_i / m_i) + constants), s = 1 - beta: the derivative of m cancels between the two terms
    slope_CV = gaps_CV.sub_(reverse_C[:, None]).mul_(probs_CV)
    if beta == 1:
        return reverse_C, slope_CV
    return beta * _kl(p_CV, other_CV) + (1 - beta) * reverse_C, slope_CV.mul_(1 - beta)


def log_probabilities(logits_CV: torch.Tensor, vocabulary: int | None = None) -> torch.Tensor:
    """Of logits, at least `UNSEEN`. ``vocabulary``: as many ids as the other model has. Of two models with the same
    tokens one may have further rows in its output layer, which stand for nothing: they are left out, or never given."""
    known_CV = logits_CV if vocabulary is None else logits_CV[:, :vocabulary]
    logps_CV = known_CV.log_softmax(dim=1).clamp(min=UNSEEN)
    missing = 0 if vocabulary is None else vocabulary - logps_CV.shape[1]
    return torch.nn.functional.pad(logps_CV, (0, missing), value=UNSEEN) if missing else logps_CV


def _top_and_tail(logps_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens, and of all others together: [C, K + 1]."""
    others_CV = logps_CV.scatter(1, ids_CK, float("-inf"))
    tail_C = others_CV.logsumexp(dim=1, keepdim=True).clamp(min=UNSEEN)
    return torch.cat([logps_CV.gather(1, ids_CK), tail_C], dim=1)


def _kl(a_CV: torch.Tensor, b_CV: torch.Tensor) -> torch.Tensor:
    """KL(a || b)."""
    return (a_CV.exp() * (a_CV - b_CV)).sum(dim=1)


def _mixture(q_CV: torch.Tensor, p_CV: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(p_CV + math.log(beta), q_CV + math.log1p(-beta))


PLAIN = TokenSettings()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceHidden:
    """What the reference model has to say of the same K targets: its hidden states there, and its head."""

    hidden_KD: torch.Tensor
    head: Head


def hidden_loss_sum(
    hidden_KD: torch.Tensor,
    head: AnyHead,
    ids_K: torch.Tensor,
    weights_K: torch.Tensor | None = None,
    *,
    settings: TokenSettings = PLAIN,
    reference: ReferenceHidden | None = None,
    sources_K: torch.Tensor | None = None,
    num_sources: int = 1,
) -> TokenLoss:
    """The sum of ``weight x loss`` over K targets: `token_loss_sum` without its logits, for any token loss.

    ``ids_K`` int64, ``weights_K`` float32; ``sources_K``, int64, says which of ``num_sources`` data sets a target is
    of. ``reference`` is needed by losses with a KL term, and only there. The gradient can be asked for once. A
    head's kernel computes plain cross-entropy.
    """
    row = loss_of(RowKind.ANSWER, settings.loss)
    assert hidden_KD.ndim == 2 and ids_K.shape == hidden_KD.shape[:1], f"{hidden_KD.shape} and {ids_K.shape}"
    assert weights_K is None or weights_K.shape == ids_K.shape, f"{weights_K.shape} and {ids_K.shape}"
    assert row.reference == (reference is not None), f"{row.name} {'needs a' if row.reference else 'has no'} reference"
    if isinstance(head, Head) and row.is_plain and is_fused(head, ids_K):
        loss_sum, losses_K, correct_K = fused_loss_sum(
            hidden_KD,
            head,
            ids_K,
            weights_K,
            label_smoothing=settings.label_smoothing,
            z_loss=settings.z_loss,
        )
    elif isinstance(head, Head):
        loss_sum, losses_K, correct_K = _LossSum.apply(
            hidden_KD,
            head.weight_VD,
            head.bias_V,
            head,
            ids_K,
            _HeadTask(weights_K, settings, reference, torch.is_grad_enabled()),
        )
    else:
        differentiable_K, correct_K = _losses_by_function(hidden_KD, head, ids_K, settings, reference)
        weighted_K = differentiable_K if weights_K is None else differentiable_K * weights_K
        loss_sum, losses_K = weighted_K.sum(), weighted_K.detach()
    by_source = losses_by_source(losses_K, sources_K, num_sources)
    return TokenLoss(
        loss_sum=loss_sum, num_targets=len(ids_K), num_correct=correct_K.sum(dtype=torch.int64), by_source=by_source
    )


@dataclass(frozen=True, slots=True, eq=False)
class _HeadTask:
    """What is computed of the head's logits, none of it differentiated."""

    weights_K: torch.Tensor | None
    settings: TokenSettings
    reference: ReferenceHidden | None
    grad_enabled: bool


class _LossSum(torch.autograd.Function):
    """Loss and gradient in one pass: d loss / d logits from the loss's derivatives by a few numbers a target."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        head: Head,
        ids_K: torch.Tensor,
        task: _HeadTask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, settings, weights_K = head.compute_dtype, task.settings, task.weights_K
        work = ChunkedHead(head, hidden_KD, dtype=dtype)
        judge = _judge(task.reference)
        needs = ctx.needs_input_grad[:3]
        gradients = HeadGradients(work, hidden_KD, needs) if task.grad_enabled and any(needs) else None
        losses_K = torch.empty(len(ids_K), dtype=work.exact, device=hidden_KD.device)
        correct_K = torch.empty(len(ids_K), dtype=torch.bool, device=hidden_KD.device)
        for rows in chunks_of(len(ids_K), _widest(len(head.weight_VD), judge)):
            logits_CV, slope_CV = work.logits(rows)
            reference_CV = None if judge is None else log_probabilities(judge.logits(rows)[0], logits_CV.shape[1])
            chunk = _LogitChunk.of(logits_CV, ids_K[rows], reference_CV, settings)
            weights_C = None if weights_K is None else weights_K[rows].to(work.exact)
            losses_K[rows], slopes = chunk.losses(settings, weights_C)
            correct_K[rows] = chunk.softmax.correct_C
            if gradients is not None:
                gradients.add(rows, chunk.logit_gradient_(slopes, ids_K[rows]), slope_CV)
        ctx.gradients = None if gradients is None else gradients.result()
        ctx.mark_non_differentiable(losses_K, correct_K)
        return losses_K.sum(), losses_K, correct_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: object, grad_sum: torch.Tensor, _losses: torch.Tensor, _correct: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *hand_over_(ctx, grad_sum), None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _LogitChunk:
    """One chunk of targets on the way from logits to losses to the logits' gradient, in one [C, V] memory.

    ``kl_slope_CV``: with a reference, the derivative of the divergence from it by the logits.
    """

    softmax: Softmax
    quantities: TokenQuantities
    kl_slope_CV: torch.Tensor | None
    takes_mean: bool

    @staticmethod
    def of(
        logits_CV: torch.Tensor, ids_C: torch.Tensor, reference_CV: torch.Tensor | None, settings: TokenSettings
    ) -> _LogitChunk:
        zeros_C, takes_mean = logits_CV.new_zeros(len(ids_C)), _takes_mean(settings)
        mean_logits_C = logits_CV.mean(dim=1) if takes_mean else zeros_C
        kl_C, slope_CV = zeros_C, None
        if reference_CV is not None:
            mine_CV = log_probabilities(logits_CV)
            kl_C, slope_CV = divergence_with_slope(mine_CV, reference_CV, settings.beta, settings.top_k)
        softmax = softmax_(logits_CV, ids_C)
        quantities = TokenQuantities(
            logps_C=softmax.logps_C,
            lse_C=softmax.lse_C,
            mean_logits_C=mean_logits_C,
            kl_C=kl_C,
            entropy_C=_top_entropy(softmax.numerators_CV) if LOSSES.named(settings.loss).needs_entropy else zeros_C,
        )
        return _LogitChunk(softmax, quantities, slope_CV, takes_mean)

    def losses(
        self, settings: TokenSettings, weights_C: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Weighted losses [C], and their derivatives by logps, lse, mean_logits and kl, [C] each."""
        known = self.quantities
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_()
                for value in (known.logps_C, known.lse_C, known.mean_logits_C, known.kl_C)
            ]
            logps_C, lse_C, mean_logits_C, kl_C = leaves
            quantities = TokenQuantities(
                logps_C=logps_C, lse_C=lse_C, mean_logits_C=mean_logits_C, kl_C=kl_C, entropy_C=known.entropy_C
            )
            losses_C = token_losses(quantities, settings)
            losses_C = losses_C if weights_C is None else losses_C * weights_C
            slopes = torch.autograd.grad(losses_C.sum(), leaves, materialize_grads=True)
        return losses_C.detach(), slopes

    def logit_gradient_(self, slopes: tuple[torch.Tensor, ...], ids_C: torch.Tensor) -> torch.Tensor:
        """[C, V], in the softmax's memory: d logp = onehot - p, d lse = p, d mean = 1 / V."""
        by_logp_C, by_lse_C, by_mean_C, by_kl_C = slopes
        share_C = (by_lse_C - by_logp_C) / self.softmax.sums_C
        grad_CV = self.softmax.numerators_CV.mul_(share_C[:, None])
        if self.kl_slope_CV is not None:
            grad_CV.addcmul_(self.kl_slope_CV, by_kl_C[:, None])
        if self.takes_mean:
            grad_CV += by_mean_C[:, None] / grad_CV.shape[1]
        return grad_CV.scatter_add_(1, ids_C[:, None], by_logp_C[:, None])


def _takes_mean(settings: TokenSettings) -> bool:
    """Whether the loss may depend on the mean of the logits; of a plugin's nobody else knows."""
    return settings.label_smoothing > 0 or settings.loss in LOSSES.added()


def _losses_by_function(
    hidden_KD: torch.Tensor,
    head: AnyHead,
    ids_K: torch.Tensor,
    settings: TokenSettings,
    reference: ReferenceHidden | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of K targets, differentiable through a head that is a function, and whether each is ranked first."""
    assert not isinstance(head, Head)
    judge = _judge(reference)
    needs_entropy = LOSSES.named(settings.loss).needs_entropy

    def losses(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        ids_C, logits_CV = ids_K[rows], head(hidden_KD[rows])
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        lse_C, zeros_C = logits_CV.logsumexp(dim=1), logits_CV.new_zeros(len(ids_C))
        kl_C = zeros_C
        if judge is not None:
            reference_CV = log_probabilities(judge.logits(rows)[0], logits_CV.shape[1])
            kl_C = divergence(log_probabilities(logits_CV), reference_CV, settings.beta, settings.top_k)
        quantities = TokenQuantities(
            logps_C=logits_CV.gather(1, ids_C[:, None]).squeeze(1) - lse_C,
            lse_C=lse_C,
            mean_logits_C=logits_CV.mean(dim=1) if _takes_mean(settings) else zeros_C,
            kl_C=kl_C,
            entropy_C=_top_entropy(logits_CV.detach().softmax(dim=1)) if needs_entropy else zeros_C,
        )
        return token_losses(quantities, settings), logits_CV.detach().argmax(dim=1) == ids_C

    chunks = list(chunks_of(len(ids_K), _widest(probe_vocabulary(head, hidden_KD), judge))) or [slice(0, 0)]
    parts = [checkpoint(losses, rows, use_reentrant=False) for rows in chunks]
    losses_K, correct_K = (torch.cat(column) for column in zip(*parts, strict=True))
    return losses_K, correct_K


def _judge(reference: ReferenceHidden | None) -> ChunkedHead | None:
    if reference is None:
        return None
    return ChunkedHead(reference.head, reference.hidden_KD, dtype=reference.head.compute_dtype)


def _widest(vocabulary: int, judge: ChunkedHead | None) -> int:
    """The larger vocabulary, by which chunks are cut: both heads have a buffer for as many rows then."""
    return vocabulary if judge is None else max(vocabulary, len(judge.weight_VD))


def _top_entropy(numerators_CV: torch.Tensor) -> torch.Tensor:
    """Entropy of the likeliest tokens among themselves, [C], from numbers proportional to probabilities."""
    top_CN: torch.Tensor = numerators_CV.topk(min(EAFT_CANDIDATES, numerators_CV.shape[1]), dim=1).values
    entropy_C: torch.Tensor = torch.special.entr(top_CN / top_CN.sum(dim=1, keepdim=True)).sum(dim=1)
    return entropy_C
