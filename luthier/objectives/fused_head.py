"""A head and its cross-entropy by a kernel of another library, with the gradients of `hidden_loss` and `token_scores`.

K targets, V vocabulary, D hidden size. Heads that a kernel would round where the chunks do not are not given to it, see
`unfit`; so are losses that it does not know, which is for the callers to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from luthier.objectives.head import (
    KERNEL_DTYPES,
    AnyHead,
    Head,
    KernelAnswer,
    KernelTask,
    LossKernel,
    hand_over_,
    scaled_,
)


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
