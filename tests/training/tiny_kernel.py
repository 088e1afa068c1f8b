"""Kernels for the output head: one that is right in plain torch, and Liger's under Triton's interpreter.

Tests of what a kernel has to do ask `kernel_under_test`, so that a process with ``TRITON_INTERPRET=1`` asks the same of
Liger's (`test_train_liger`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from luthier.objectives import KernelAnswer, KernelTask, LigerKernel, LossKernel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Lie = Callable[[KernelAnswer], KernelAnswer]


class PlainKernel:
    """The formula by autograd. ``lie`` changes what it answers; ``tasks`` are those it got."""

    name = "plain 1.0"

    def __init__(self, lie: Lie = lambda answer: answer) -> None:
        self.lie, self.tasks = lie, list[KernelTask]()

    def __call__(self, task: KernelTask) -> KernelAnswer:
        self.tasks.append(task)
        operands = (task.hidden_KD, task.weight_VD, task.bias_V)
        assert len({one.dtype for one in operands if one is not None}) == 1
        leaves = [None if one is None else one.detach().float().requires_grad_() for one in operands]
        with torch.enable_grad():
            losses_K, logits_KV = _losses(task, *leaves)
            counted = losses_K.sum() if task.counts_K is None else losses_K @ task.counts_K
            asked = [leaf for leaf, is_needed in zip(leaves, task.needs, strict=True) if is_needed and leaf is not None]
            found = iter(torch.autograd.grad(counted, asked) if asked else ())
        gradients: Any = tuple(
            next(found).to(operand.dtype) if is_needed and operand is not None else None
            for operand, is_needed in zip(operands, task.needs, strict=True)
        )
        predicted_K = logits_KV.detach().argmax(dim=1)
        return self.lie(KernelAnswer(losses_K=losses_K.detach(), predicted_K=predicted_K, gradients=gradients))


def kernel_under_test(monkeypatch: pytest.MonkeyPatch) -> LossKernel:
    if not IS_INTERPRETED:
        return PlainKernel()
    _complete_interpreter(monkeypatch)
    return LigerKernel()


def _losses(
    task: KernelTask, hidden_KD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    products_KV = (hidden_KD @ weight_VD.T).to(task.hidden_KD.dtype).float()  # as a product in 16 bits is rounded
    logits_KV = products_KV if bias_V is None else products_KV + bias_V
    if task.softcap is not None:
        logits_KV = task.softcap * torch.tanh(logits_KV / task.softcap)
    lse_K = logits_KV.logsumexp(dim=1)
    nll_K = lse_K - logits_KV.gather(1, task.ids_K[:, None]).squeeze(1)
    spread_K = lse_K - logits_KV.mean(dim=1)
    smoothing = task.label_smoothing
    return (1 - smoothing) * nll_K + smoothing * spread_K + task.z_loss * lse_K.square(), logits_KV


def _complete_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter has no ``tanh``, and leaves floating numbers as Python's, which have no ``to``."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import cross_entropy
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(cross_entropy, "tanh", lambda x: 2 / (1 + tl.exp(-2 * x)) - 1)
