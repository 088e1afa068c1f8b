"""Log-probabilities of targets from hidden states. K targets, C targets of a chunk, V vocabulary, D hidden size.

What losses over whole answers need (preferences, feedback): what a token's gradient is becomes known only when all its
answer's tokens are scored. So the forward pass keeps the hidden states and K log-normalisers, and the backward pass
computes the logits again, chunk by chunk: four products with the head's weight instead of three, and never [K, V].
Under a frozen head (adapters) they are two: what the loss says of a target only scales the gradient of its own hidden
state, which is therefore computed while the logits are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from luthier.objectives.fused_head import fused_logps, is_fused
from luthier.objectives.head import AnyHead, ChunkedHead, Head, HeadGradients, chunks_of, softmax_


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """What the model thinks of each of K targets.

    logps_K    float32, differentiable: log-probability of the target
    correct_K  bool: the model ranks the target first
    entropy_K  float32: entropy of the distribution it is drawn from, in nats; None where nobody asked
    """

    logps_K: torch.Tensor
    correct_K: torch.Tensor
    entropy_K: torch.Tensor | None = None


def token_scores(hidden_KD: torch.Tensor, head: AnyHead, ids_K: torch.Tensor, *, entropy: bool = False) -> TokenScores:
    """Score ``ids_K`` (int64) by the logits that ``head`` makes of ``hidden_KD``, one row a target.

    Equals ``logits.float().log_softmax(-1)`` gathered at the ids, with the gradients of the hidden states and, where
    they require one, of the head's weight and bias. A head that is a function is run under activation checkpointing;
    one with a kernel by the kernel, unless entropies are asked for.
    """
    assert hidden_KD.ndim == 2 and ids_K.shape == hidden_KD.shape[:1], f"{hidden_KD.shape} and {ids_K.shape}"
    if not isinstance(head, Head):
        return _scores_by_function(hidden_KD, head, ids_K, entropy=entropy)
    if is_fused(head, ids_K) and not entropy:
        logps_K, correct_K = fused_logps(hidden_KD, head, ids_K)
        return TokenScores(logps_K=logps_K, correct_K=correct_K)
    logps_K, correct_K, entropy_K = _ChunkedScores.apply(
        hidden_KD, head.weight_VD, head.bias_V, ids_K, head, entropy, torch.is_grad_enabled()
    )
    return TokenScores(logps_K=logps_K, correct_K=correct_K, entropy_K=entropy_K if entropy else None)


class _ChunkedScores(torch.autograd.Function):
    """logp = x_id - lse(x); d logp / dx = onehot - softmax(x)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_K: torch.Tensor,
        head: Head,
        entropy: bool,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.dtype = head.compute_dtype
        work = ChunkedHead(head, hidden_KD, dtype=ctx.dtype)
        logps_K = torch.empty(len(ids_K), dtype=work.exact, device=hidden_KD.device)
        lse_K, entropy_K = torch.empty_like(logps_K), torch.empty_like(logps_K if entropy else logps_K[:0])
        correct_K = torch.empty(len(ids_K), dtype=torch.bool, device=hidden_KD.device)
        ctx.last = ctx.unscaled_KD = None
        needs = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        gradients = HeadGradients(work, hidden_KD, needs) if needs == (True, False, False) else None
        for rows in work.chunks():
            logits_CV, slope_CV = work.logits(rows)
            softmax = softmax_(logits_CV, ids_K[rows])
            logps_K[rows], lse_K[rows], correct_K[rows] = softmax.logps_C, softmax.lse_C, softmax.correct_C
            if entropy:
                entropy_K[rows] = softmax.entropy()
            if gradients is not None:
                unscaled_CV = softmax.numerators_CV.div_(-softmax.sums_C[:, None])
                ones_C1 = torch.ones_like(softmax.sums_C[:, None])
                gradients.add(rows, unscaled_CV.scatter_add_(1, ids_K[rows, None], ones_C1), slope_CV)
            elif any(needs) and rows == slice(0, len(ids_K)):
                # all in one chunk: its memory is ours anyway, and the backward pass saves a product
                ctx.last = (softmax.numerators_CV.div_(softmax.sums_C[:, None]), slope_CV)
        if gradients is not None:
            ctx.unscaled_KD = gradients.result()[0]
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, ids_K, lse_K)
        ctx.head = (head.scale, head.softcap)
        ctx.mark_non_differentiable(correct_K, entropy_K)
        return logps_K, correct_K, entropy_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_K: torch.Tensor, _correct: torch.Tensor, _entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        if ctx.unscaled_KD is not None:
            return ctx.unscaled_KD * grad_K[:, None].to(ctx.unscaled_KD.dtype), None, None, None, None, None, None
        hidden_KD, weight_VD, bias_V, ids_K, lse_K = ctx.saved_tensors
        scale, softcap = ctx.head
        head = Head(weight_VD=weight_VD, bias_V=bias_V, scale=scale, softcap=softcap)
        work = ChunkedHead(head, hidden_KD, dtype=ctx.dtype)
        gradients = HeadGradients(work, hidden_KD, ctx.needs_input_grad[:3])
        for rows in work.chunks():
            if ctx.last is None:
                logits_CV, slope_CV = work.logits(rows)
                probs_CV = logits_CV.sub_(lse_K[rows, None]).exp_()
            else:
                (probs_CV, slope_CV), ctx.last = ctx.last, None
            grad_C1 = grad_K[rows, None]
            probs_CV.mul_(-grad_C1).scatter_add_(1, ids_K[rows, None], grad_C1)
            gradients.add(rows, probs_CV, slope_CV)
        return *gradients.result(), None, None, None, None


def _scores_by_function(hidden_KD: torch.Tensor, head: AnyHead, ids_K: torch.Tensor, *, entropy: bool) -> TokenScores:
    assert not isinstance(head, Head)

    def scores(hidden_CD: torch.Tensor, ids_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_CV = head(hidden_CD)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        all_CV = logits_CV.log_softmax(dim=1)
        known_CV = all_CV.detach()
        entropy_C = torch.special.entr(known_CV.exp()).sum(dim=1) if entropy else known_CV.new_empty(0)
        return all_CV.gather(1, ids_C[:, None]).squeeze(1), known_CV.argmax(dim=1) == ids_C, entropy_C

    vocabulary = probe_vocabulary(head, hidden_KD)
    parts = [
        checkpoint(scores, hidden_KD[rows], ids_K[rows], use_reentrant=False)
        for rows in chunks_of(len(ids_K), vocabulary)
    ]
    if not parts:
        parts = [scores(hidden_KD, ids_K)]
    logps_K, correct_K, entropy_K = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(logps_K=logps_K, correct_K=correct_K, entropy_K=entropy_K if entropy else None)


def probe_vocabulary(head: AnyHead, hidden_KD: torch.Tensor) -> int:
    """V of a head that is a function, by running it on no row at all."""
    assert not isinstance(head, Head)
    with torch.no_grad():
        return int(head(hidden_KD[:0]).shape[-1])


# --------------------------------------------------------------------------------------------------------------------
# How much what is written looks like the model's own writing. K targets, C targets of a chunk, V vocabulary.


def log_square_sums(hidden_KD: torch.Tensor, head: AnyHead) -> torch.Tensor:
    """``log sum p^2`` over the vocabulary at each target, float32[K], constant.

    It is the log of the probability that a token drawn from the model has on average, which WPO (arXiv:2406.11827)
    measures a target's own against.
    """
    with torch.no_grad():
        parts = list(_by_weights(hidden_KD, head) if isinstance(head, Head) else _by_function(hidden_KD, head))
    return torch.cat(parts) if parts else hidden_KD.new_empty(0, dtype=torch.float32)


def _by_weights(hidden_KD: torch.Tensor, head: Head) -> list[torch.Tensor]:
    work = ChunkedHead(head, hidden_KD, dtype=head.compute_dtype)
    return [_of(work.logits(rows)[0]) for rows in work.chunks()]


def _by_function(hidden_KD: torch.Tensor, head: AnyHead) -> list[torch.Tensor]:
    assert not isinstance(head, Head)
    vocabulary = probe_vocabulary(head, hidden_KD)
    logits = (head(hidden_KD[rows]) for rows in chunks_of(len(hidden_KD), vocabulary))
    return [_of(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))) for logits_CV in logits]


def _of(logits_CV: torch.Tensor) -> torch.Tensor:
    # sum p^2 = sum exp(2 x) / (sum exp(x))^2
    lse_C = logits_CV.logsumexp(dim=1)
    return logits_CV.mul(2).logsumexp(dim=1) - 2 * lse_C
