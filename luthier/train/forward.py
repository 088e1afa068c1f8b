"""One micro-batch through the model to sums. B rows, T tokens a row, P positions kept, V vocabulary, N = B x P."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from luthier.objectives import TokenLoss
from luthier.records import IGNORE_INDEX, Batch

LossFunction = Callable[..., TokenLoss]


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can compute its logits at chosen positions only (``logits_to_keep`` of its forward)."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in inspect.signature(plain.forward).parameters


def batch_loss(
    model: nn.Module,
    batch: Batch,
    loss: LossFunction,
    *,
    device: torch.device,
    keep: bool,
    label_smoothing: float = 0.0,
    num_sources: int = 1,
) -> TokenLoss:
    """Sums over the batch's targets. ``model`` may be wrapped (DDP, compiled); ``keep``: see `keeps_logits`.

    With ``num_sources`` above 1 the sums are told apart by ``batch.sources``.

    With ``keep`` the head is computed only where some row has a target: prompts and padding cost no logits. The model
    does that itself, so scaling and soft-capping after its head are as they are.
    """
    inputs = {name: _to(value, device) for name, value in batch.model_inputs.items()}
    inputs["use_cache"] = False
    labels_BP, weights_BP = batch.labels_BT, batch.weights_BT
    sources_BP = source_of_tokens(batch) if num_sources > 1 else None
    if keep:
        kept_P = torch.nonzero((labels_BP != IGNORE_INDEX).any(dim=0)).squeeze(1)
        if len(kept_P) == 0:  # a blank: the graph must still reach every parameter
            kept_P = torch.zeros(1, dtype=torch.int64)
        inputs["logits_to_keep"] = kept_P.to(device)
        labels_BP = labels_BP[:, kept_P]
        weights_BP = None if weights_BP is None else weights_BP[:, kept_P]
        sources_BP = None if sources_BP is None else sources_BP[:, kept_P]
    logits_BPV = model(**inputs).logits
    assert logits_BPV.shape[:2] == labels_BP.shape, f"logits {tuple(logits_BPV.shape)}, labels {tuple(labels_BP.shape)}"
    told_apart: dict[str, Any] = {}
    if sources_BP is not None:
        told_apart = {"sources_N": sources_BP.reshape(-1).to(device), "num_sources": num_sources}
    return loss(
        logits_BPV.flatten(0, 1),
        labels_BP.reshape(-1).to(device),
        None if weights_BP is None else weights_BP.reshape(-1).to(device),
        label_smoothing=label_smoothing,
        **told_apart,
    )


def source_of_tokens(batch: Batch) -> torch.Tensor:
    """int64[B, T]: the source of each token's segment; padding counts to the segment before it, which costs nothing.

    Zeros where the batch has no sources: it is a blank.
    """
    if not batch.sources:
        return torch.zeros_like(batch.labels_BT)
    width = batch.labels_BT.shape[1]
    starts = [row * width + start for row, of_row in enumerate(batch.segment_starts) for start in of_row]
    lengths = torch.tensor([*starts, batch.labels_BT.numel()]).diff()
    return torch.tensor(batch.sources).repeat_interleave(lengths).view_as(batch.labels_BT)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
