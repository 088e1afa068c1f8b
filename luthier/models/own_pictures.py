"""Models that look at pictures across (Llama 3.2 Vision): a row sees its own pictures and no filling of its batch.

transformers' layer shows a token that has no picture yet *all* vision tokens of its row, unmasked (only its MLP is left
out), blank pictures included, which fill the row up to the most pictures of the batch; and of a row without pictures it
makes one that sees blanks, where alone it would skip the layer. Hooks make both what they are alone.

B rows, T tokens, N pictures, V vision tokens of one picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

MASK = "cross_attention_mask"
ATTENTION = "cross_attn"


def see_own_pictures(model: PreTrainedModel) -> int:
    """Hook all layers of a model that attend across, those with a ``cross_attn``; returns how many there are."""
    rows = _Rows()
    # what adapters wrap is called by its ``forward``, which runs no hooks; what is inside of it is called
    inner = model.get_submodule(model.base_model_prefix)
    inner.register_forward_pre_hook(rows.note, with_kwargs=True)
    layers = {
        name.removesuffix(f".{ATTENTION}"): attention
        for name, attention in inner.named_modules()
        if name.endswith(f".{ATTENTION}")
    }
    for name, attention in layers.items():
        attention.register_forward_pre_hook(rows.hide_filling, with_kwargs=True)
        inner.get_submodule(name).register_forward_hook(rows.skip, with_kwargs=True)
    return len(layers)


class _Rows:
    """What the rows of the batch in the model are; kept for the backward pass, where layers may run again."""

    def __init__(self) -> None:
        self.shown_BN: torch.Tensor | None = None
        self.are_filled = self.are_blind = False  # whether there are fillings; rows without pictures

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Which pictures are there: those that a token of the row looks at."""
        mask_BTNt = kwargs.get(MASK)
        self.shown_BN = None if mask_BTNt is None else mask_BTNt.bool().any(dim=3).any(dim=1)
        self.are_filled = self.shown_BN is not None and not bool(self.shown_BN.all())
        self.are_blind = self.shown_BN is not None and not bool(self.shown_BN.any(dim=1).all())

    def hide_filling(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pictures that are not there are masked for tokens that would see everything."""
        mask_B1TK = kwargs.get("attention_mask")
        if self.shown_BN is None or mask_B1TK is None or not self.are_filled:
            return None
        filling_BN = ~self.shown_BN & self.shown_BN.any(dim=1, keepdim=True)  # a row of fillings alone is skipped
        filling_BK = filling_BN.repeat_interleave(mask_B1TK.shape[-1] // filling_BN.shape[1], dim=1)
        hidden = mask_B1TK.masked_fill(filling_BK[:, None, None, :], torch.finfo(mask_B1TK.dtype).min)
        return args, {**kwargs, "attention_mask": hidden}

    def skip(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Rows without pictures pass the layer unchanged."""
        if self.shown_BN is None or not self.are_blind:
            return None
        before = args[0] if args else kwargs["hidden_states"]
        sees_B11 = self.shown_BN.any(dim=1)[:, None, None]
        return torch.where(sees_B11, output, before)
