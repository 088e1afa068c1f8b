"""Log-probabilities of targets from hidden states. K targets, C targets of a chunk, V vocabulary, D hidden size.

What losses over whole answers need (preferences, feedback): what a token's gradient is becomes known only when all its
answer's tokens are scored. So the forward pass keeps the hidden states and K log-normalisers, and the backward pass
computes the logits again, chunk by chunk: four products with the head's weight instead of three, and never [K, V].
Under a frozen head (adapters) they are two: what the loss says of a target only scales the gradient of its own hidden
state, which is therefore computed while the logits are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from luthier.objectives import (
    KERNEL_DTYPES,
    AnyHead,
    ChunkedHead,
    Head,
    HeadGradients,
    KernelAnswer,
    KernelTask,
    LossKernel,
    chunks_of,
    hand_over_,
    scaled_,
    softmax_,
)

# ---- A head and its cross-entropy by a kernel of another library, with the gradients of the chunks
#
# K targets, V vocabulary, D hidden size. Heads that a kernel would round where the chunks do not are not given to it,
# see `unfit`; so are losses that it does not know, which is for the callers to say.


def is_fused(head: AnyHead, ids_K: torch.Tensor) -> bool:
    """Whether the head's kernel computes these targets."""
    return isinstance(head, Head) and head.kernel is not None and len(ids_K) > 0 and unfit(head) is None


def unfit(head: Head) -> str | None:
    """Why no kernel can compute this head exactly; None: one can."""
    dtype, scale = head.compute_dtype, head.scale
    if dtype not in KERNEL_DTYPES:
        return f"the output layer computes in {str(dtype).removeprefix('torch.')}"
    is_power_of_two = math.frexp(abs(scale))[0] == 0.5
    if scale != 1 and not (is_power_of_two and dtype != torch.float16):  # float16 has too few small numbers
        return f"its logits are multiplied by {scale:g}, which cannot be done to its inputs without rounding them"
    return None


def fused_loss_sum(
    hidden_KD: torch.Tensor,
    head: Head,
    ids_K: torch.Tensor,
    weights_K: torch.Tensor | None,
    *,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of ``weight x cross-entropy``, differentiable once; its terms float32[K]; whether each id ranks first."""
    terms = _Terms.of(head, label_smoothing=label_smoothing, z_loss=z_loss)
    loss_sum, losses_K, correct_K = _FusedLossSum.apply(
        hidden_KD, head.weight_VD, head.bias_V, ids_K, weights_K, terms, torch.is_grad_enabled()
    )
    return loss_sum, losses_K, correct_K


def fused_logps(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each id, float32[K], differentiable; whether each id ranks first."""
    logps_K, correct_K = _FusedLogps.apply(
        hidden_KD, head.weight_VD, head.bias_V, ids_K, _Terms.of(head), torch.is_grad_enabled()
    )
    return logps_K, correct_K


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Terms:
    """All of a task but its tensors; ``dtype`` is that of the products, in the backward pass too."""

    kernel: LossKernel
    dtype: torch.dtype
    scale: float
    softcap: float | None
    label_smoothing: float
    z_loss: float

    @staticmethod
    def of(head: Head, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> _Terms:
        assert head.kernel is not None and unfit(head) is None, unfit(head)
        return _Terms(
            kernel=head.kernel,
            dtype=head.compute_dtype,
            scale=head.scale,
            softcap=head.softcap,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    def run(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        ids_K: torch.Tensor,
        needs: tuple[bool, bool, bool],
        counts_K: torch.Tensor | None = None,
    ) -> KernelAnswer:
        """The kernel's answer, with the gradients of hidden states, weight and bias as they are, in their types."""
        hidden_KD, weight_VD, bias_V = (None if one is None else one.detach().to(self.dtype) for one in inputs)
        assert hidden_KD is not None and weight_VD is not None
        if self.scale != 1:  # scale x (h W + b) = (scale x h) W + scale x b, exact for powers of two
            hidden_KD = hidden_KD * self.scale
            bias_V = None if bias_V is None else bias_V * self.scale
        answer = self.kernel(
            KernelTask(
                hidden_KD=hidden_KD,
                weight_VD=weight_VD,
                bias_V=bias_V,
                ids_K=ids_K,
                softcap=self.softcap,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                counts_K=counts_K,
                needs=needs,
            )
        )
        of_hidden, of_weight, of_bias = answer.gradients
        scaled = (_times(of_hidden, self.scale), of_weight, _times(of_bias, self.scale))
        of_hidden, of_weight, of_bias = (
            None if gradient is None or one is None else gradient.to(one.dtype)
            for gradient, one in zip(scaled, inputs, strict=True)
        )
        return KernelAnswer(
            losses_K=answer.losses_K, predicted_K=answer.predicted_K, gradients=(of_hidden, of_weight, of_bias)
        )


class _FusedLossSum(torch.autograd.Function):
    """Loss and gradient in one pass; the backward pass multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_K: torch.Tensor,
        weights_K: torch.Tensor | None,
        terms: _Terms,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        needs = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        counts_K, ctx.largest = (None, None) if weights_K is None else _at_most_one(weights_K.float())
        answer = terms.run((hidden_KD, weight_VD, bias_V), ids_K, needs, counts_K)
        ctx.gradients = answer.gradients if any(needs) else None
        losses_K = answer.losses_K if weights_K is None else answer.losses_K * weights_K
        correct_K = answer.predicted_K == ids_K
        ctx.mark_non_differentiable(losses_K, correct_K)
        return losses_K.sum(), losses_K, correct_K

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum: torch.Tensor, _losses: torch.Tensor, _correct: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        factor = grad_sum if ctx.largest is None else grad_sum * ctx.largest
        return *hand_over_(ctx, factor), None, None, None, None


class _FusedLogps(torch.autograd.Function):
    """logp = -loss. Under a frozen head the gradient is computed at once, and what a target counts scales that of its
    own hidden state; else the kernel runs again in the backward pass, which knows what each target counts."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        ids_K: torch.Tensor,
        terms: _Terms,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        at_once = (needs[0], False, False) if not any(needs[1:]) else (False, False, False)
        answer = terms.run((hidden_KD, weight_VD, bias_V), ids_K, at_once)
        ctx.unscaled_KD, ctx.terms = answer.gradients[0], terms
        if any(needs) and not any(at_once):
            ctx.save_for_backward(hidden_KD, weight_VD, bias_V, ids_K)
        correct_K = answer.predicted_K == ids_K
        ctx.mark_non_differentiable(correct_K)
        return -answer.losses_K, correct_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_K: torch.Tensor, _correct: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.unscaled_KD is not None:
            scaled_KD = ctx.unscaled_KD * -grad_K[:, None].to(ctx.unscaled_KD.dtype)
            return scaled_KD, None, None, None, None, None
        hidden_KD, weight_VD, bias_V, ids_K = ctx.saved_tensors
        counts_K, largest = _at_most_one(-grad_K)
        answer = ctx.terms.run((hidden_KD, weight_VD, bias_V), ids_K, ctx.needs_input_grad[:3], counts_K)
        return *scaled_(answer.gradients, largest), None, None, None


def _at_most_one(counts_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[0.002, -0.001] -> [1, -0.5], 0.002``: kernels round counts to their type, which has these; and float16 would
    lose small ones."""
    largest = counts_K.abs().amax()
    return counts_K / torch.where(largest > 0, largest, 1), largest


def _times(gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    return gradient if gradient is None or scale == 1 else gradient * scale


# ---- Scores of tokens


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
