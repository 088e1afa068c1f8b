"""What computes a run's output head: chunks of our own, or another library's kernel, proven on the run's own model.

N tokens, K targets, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from luthier.config.objective import LOSSES, OBJECTIVES
from luthier.config.schema import HeadKernel as Policy
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, install_hint
from luthier.models.head_tap import OutputHead, score_targets
from luthier.objectives import TokenSettings, token_settings
from luthier.objectives.head import AnyHead, Head
from luthier.objectives.head_kernels import LigerKernel, liger_is_installed, runs_on
from luthier.objectives.kernel_proof import kernel_problem
from luthier.train.objective_parts import ObjectiveParts

TARGETS_TRIED = 48  # of fewer the rounding of 16 bits would not average out
_STRIDE = 104_729  # a prime larger than steps between neighbouring ids: other ids for the same hidden states


def choose_kernel(
    parts: ObjectiveParts, model: nn.Module, head: OutputHead, inputs: Mapping[str, Any], tell: Callable[[str], None]
) -> OutputHead:
    """The head with the kernel that computes it in this run, if any; ``inputs`` are those of one small batch.

    Raises `ModelError` where ``train.head_kernel`` names a kernel that is not there, or not as good as the chunks.
    """
    asked, unknown_loss = parts.config.train.head_kernel, _unknown_loss(parts.config)
    match asked:
        case Policy.CHUNKED:
            return head
        case Policy.AUTO:
            is_tried = parts.device.type == "cuda" and liger_is_installed() and head.tapped
            if not is_tried or unknown_loss is not None:
                return head
        case Policy.LIGER:
            if (absence := _absence(parts.device)) is not None:
                raise _refused(asked, absence)
            if unknown_loss is not None:
                tell(f"head kernel: chunked, as {asked} does not know the loss {unknown_loss}")
                return head
        case _:
            raise AssertionError(asked)
    try:
        kernel = LigerKernel()
        problem = _problem(parts, model, replace(head, kernel=kernel), inputs)
    except ImportError as error:
        problem = f"liger-kernel cannot be imported: {error}"
    if problem is None:
        tell(f"head kernel: {kernel.name}, as good as the chunks on the first row")
        return replace(head, kernel=kernel)
    if asked is Policy.AUTO:
        tell(f"head kernel: chunked, not liger: {problem}")
        return head
    raise _refused(asked, problem)


def kernel_name(head: OutputHead | None) -> str | None:
    """What computes the head, for the report; None: there is no head."""
    if head is None:
        return None
    return "chunked" if head.kernel is None else head.kernel.name


def _absence(device: torch.device) -> str | None:
    if not liger_is_installed():
        return "liger-kernel is not installed"
    return None if runs_on(device) else f"its kernels need a GPU, and the model is on the {device.type}"


def _problem(parts: ObjectiveParts, model: nn.Module, head: OutputHead, inputs: Mapping[str, Any]) -> str | None:
    """What the kernel does otherwise than the chunks, on the hidden states of a row and in the types of training."""
    if not head.tapped:
        return head.note or "the model makes its own logits"
    next_N = inputs["input_ids"].flatten().roll(-1)
    positions_N = torch.arange(len(next_N), device=next_N.device)
    settings = token_settings(parts.config.objective) if _is_of_tokens(parts.config) else TokenSettings()
    times = -(-TARGETS_TRIED // len(next_N))

    # here and not afterwards: a sharded weight is whole while its layer runs
    def score(hidden_ND: torch.Tensor, logits_of: AnyHead) -> str | None:
        if not isinstance(logits_of, Head):
            return f"the output layer is {_class_of(head)}, and a kernel needs its weight"
        strides_K = torch.arange(times, device=next_N.device).repeat_interleave(len(next_N)) * _STRIDE
        ids_K = (next_N.repeat(times) + strides_K) % len(logits_of.weight_VD)
        return kernel_problem(hidden_ND.repeat(times, 1), logits_of, ids_K, settings=settings)

    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(next_N.device.type, parts.autocast, enabled=parts.autocast is not None):
            return score_targets(model, inputs, positions_N, score, head=head).scores
    finally:
        model.train(training)


def _unknown_loss(config: RunConfig) -> str | None:
    """The run's loss of single tokens, where kernels do not know it."""
    name = config.objective.loss_name
    return name if _is_of_tokens(config) and not LOSSES.named(name).is_plain else None


def _is_of_tokens(config: RunConfig) -> bool:
    return OBJECTIVES[config.objective.name].by_token


def _class_of(head: OutputHead) -> str:
    return f"{type(head.layer).__module__.partition('.')[0]}'s {type(head.layer).__name__}"


def _refused(asked: Policy, problem: str) -> ModelError:
    return ModelError(
        f"train.head_kernel is {asked}, but {problem}",
        hint=f"set train.head_kernel: auto, or chunked; or {install_hint('kernels')}",
    )
