"""Other libraries' kernels for an output head and its cross-entropy in one. K targets, V vocabulary, D hidden size.

They give the loss of each target, the id that the logits rank first, and gradients of the head's inputs, from matrices
of one 16-bit or 32-bit type. What else a loss may need (entropies, other losses, a reference's distribution) they do
not, and that is left to the chunks of `head`, whichever kernel a run has.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of the hidden states, the weight and the bias."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelTask:
    """The losses of K targets, at least one: the logits are ``softcap x tanh((hidden @ weight.T + bias) / softcap)``.

    hidden_KD, weight_VD, bias_V  of one of `KERNEL_DTYPES`; the bias, the softcap may be None
    label_smoothing, z_loss       as in `TokenSettings`
    counts_K                      float32: what each target's loss counts in the gradients, at most 1; None: 1
    needs                         which `Gradients` are asked for
    """

    hidden_KD: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    ids_K: torch.Tensor
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    counts_K: torch.Tensor | None = None
    needs: tuple[bool, bool, bool] = (False, False, False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelAnswer:
    """``losses_K`` float32, whatever they count; ``predicted_K`` int64, the first of equals; gradients that are needed,
    of the sum of ``counts x loss``, in the types of the task."""

    losses_K: torch.Tensor
    predicted_K: torch.Tensor
    gradients: Gradients


class LossKernel(Protocol):
    """A kernel. ``name``: the library and its version, for the run's log."""

    @property
    def name(self) -> str: ...

    def __call__(self, task: KernelTask) -> KernelAnswer:
        """Raises what its library raises: a kernel is tried (`training.losses.kernels`) before it is used."""
        ...


class LigerKernel:
    """Liger's fused linear cross-entropy (arXiv:2410.10989): in chunks too, with one kernel from logits to gradient.

    It knows what each target counts before it sums the weight's gradient, so one pass does for any weights. In 16 bits
    that gradient is summed in float32 and rounded once, where `head` leaves a float32 weight's as it is.
    """

    def __init__(self) -> None:
        """Raises `ImportError` where the package or Triton is not installed, or has no such function."""
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward
        from triton.errors import TritonError

        self._refusal: type[Exception] = TritonError
        self.name = f"liger-kernel {metadata.version('liger-kernel')}"
        self._forward: Callable[..., Any] = fused_linear_cross_entropy_forward

    def __call__(self, task: KernelTask) -> KernelAnswer:
        """See `LossKernel`."""
        try:
            losses_K, predicted_K, gradients = self._run(task)
        except self._refusal as error:
            raise RuntimeError(f"{self.name}: {error}") from error
        hidden_KD, weight_VD, bias_V = (
            gradient if is_needed else None for gradient, is_needed in zip(gradients, task.needs, strict=True)
        )
        return KernelAnswer(losses_K=losses_K, predicted_K=predicted_K, gradients=(hidden_KD, weight_VD, bias_V))

    def _run(self, task: KernelTask) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        # all operands have the type of the computation already
        with torch.no_grad(), torch.autocast(task.hidden_KD.device.type, enabled=False):
            losses_K, _, _, predicted_K, *gradients = self._forward(
                task.hidden_KD,
                task.weight_VD,
                task.ids_K,
                bias=task.bias_V,
                softcap=task.softcap,
                label_smoothing=task.label_smoothing,
                lse_square_scale=task.z_loss,
                reduction="none",
                return_predicted_tokens=True,
                accum_dtype=torch.float32,
                token_grad_output=task.counts_K,
                compute_gradients=any(task.needs),
                weight_requires_grad=task.needs[1],
            )
        return losses_K, predicted_K, gradients


def liger_is_installed() -> bool:
    """Whether the package is there; it is imported by a run that uses it, which takes seconds."""
    return importlib.util.find_spec("liger_kernel") is not None


def runs_on(device: torch.device) -> bool:
    """Whether kernels of Triton run on a device: a GPU, or a CPU under Triton's interpreter (``TRITON_INTERPRET=1``),
    which is slow and for tests."""
    if device.type != "cpu" or importlib.util.find_spec("triton") is None:
        return device.type == "cuda"
    from triton import knobs

    return bool(knobs.runtime.interpret)
