"""How a model is told which tokens of a batch see each other. B rows, T tokens a row.

way           what the model gets beside ids and positions                     trees   cost of attention
segments      a plan for `train.attention`                                     yes     sum of squares of segments
positions     nothing: transformers sees that positions restart                no      square of the row
masks         a mask for each kind of layer, made by `layout.tree_mask`        yes     square of the row
blocks        the same for FlexAttention, on a GPU                             yes     blocks in which some pair is seen
padded        a mask of padding; rows of one segment                           no      square of the row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from luthier.errors import ModelError
from luthier.layout import ancestors, segment_ids, tree_mask
from luthier.records import Batch
from luthier.train.attention import PLAN, plan_attention


class Isolation(StrEnum):
    """What keeps the segments of a row apart."""

    SEGMENTS = "segments"
    POSITIONS = "positions"
    MASKS = "masks"
    BLOCKS = "blocks"
    PADDED = "padded"


Windows = Mapping[str, int | None]
"""For each kind of layer of a model its sliding window; None: the whole of what is before."""


def attention_inputs(
    batch: Batch,
    isolation: Isolation,
    *,
    windows: Windows,
    additive: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """``batch.model_inputs`` with what this way of isolation needs, on ``device``.

    ``windows`` (`layer_windows`) is read by masks and blocks: where a model has two kinds of layer they are a dict.
    Masks are [B, 1, T, T], bool, or under ``additive`` (the model's attention is ``eager``, which adds them to scores)
    float32 of 0 and the least number.

    Raises AssertionError for token trees or several segments in a row, where the way cannot keep them apart.
    """
    inputs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in batch.model_inputs.items()}
    width = inputs["input_ids"].shape[1]
    match isolation:
        case Isolation.SEGMENTS:
            inputs |= {PLAN: plan_attention(batch.branches, width=width), "use_cache": False}
            inputs.pop("attention_mask", None)
        case Isolation.POSITIONS:
            assert not _has_trees(batch), "positions cannot say what the branches of a tree share"
        case Isolation.MASKS:
            masks = {kind: _mask(batch, window, width, additive=additive) for kind, window in windows.items()}
            on_device = {kind: mask.to(device) for kind, mask in masks.items()}
            inputs |= {"attention_mask": _one_or_all(on_device), "use_cache": False}
        case Isolation.BLOCKS:
            blocks = {kind: _block_mask(batch, window, width, device) for kind, window in windows.items()}
            inputs |= {"attention_mask": _one_or_all(blocks), "use_cache": False}
        case Isolation.PADDED:
            assert all(len(row) == 1 for row in batch.branches), "a padded row holds one segment"
        case _:
            raise AssertionError(isolation)
    return inputs


def tree_mask_mod(batch: Batch, *, window: int | None, device: torch.device | str) -> Callable[..., torch.Tensor]:
    """`layout.tree_mask` as FlexAttention asks for it: ``(b, h, q, kv) -> bool``. Padding sees padding."""
    width = batch.model_inputs["input_ids"].shape[1]
    num_nodes = max(map(len, batch.branches))
    on_path_BNN = np.zeros((len(batch.branches), num_nodes + 1, num_nodes + 1), dtype=np.bool_)
    node_BT = np.full((len(batch.branches), width), num_nodes)
    on_path_BNN[:, num_nodes, num_nodes] = True  # padding is a node of its own
    for row, branches in enumerate(batch.branches):
        of_tokens = segment_ids([branch.length for branch in branches])
        node_BT[row, : len(of_tokens)] = of_tokens
        for node, path in enumerate(ancestors(branches)):
            on_path_BNN[row, node, [*path, node]] = True
    node_of, on_path = torch.from_numpy(node_BT).to(device), torch.from_numpy(on_path_BNN).to(device)
    position = batch.model_inputs["position_ids"].to(device)

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        distance = position[b, q] - position[b, kv]
        found: torch.Tensor = on_path[b, node_of[b, q], node_of[b, kv]] & (distance >= 0)
        return found if window is None else found & (distance < window)

    return seen


def layer_windows(model: nn.Module) -> dict[str, int | None]:
    """The kinds of attention layer that a model of transformers has, by its config.

    {"full_attention": None}; Gemma 3: {"sliding_attention": 512, "full_attention": None}

    Raises `ModelError` for kinds that are no plain causal attention: recurrent, convolutional, chunked, sparse.
    """
    model_config: Any = model.config
    text = model_config.get_text_config()
    entries = text.to_dict()
    window: int | None = entries.get("sliding_window")
    if not entries.get("use_sliding_window", True):
        window = None
    kinds = entries.get("layer_types")
    if not kinds:
        chunk = entries.get("attention_chunk_size")
        kinds = ["chunked_attention" if chunk else "sliding_attention" if window else "full_attention"]
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted(set(kinds) - set(known)):
        raise ModelError(
            f"{type(model).__name__} has layers of {', '.join(unknown)}, whose reach no mask of ours can say",
            hint="set train.packing: none",
        )
    return {kind: known[kind] for kind in dict.fromkeys(kinds)}


def _one_or_all(by_kind: Mapping[str, Any]) -> Any:
    # of two kinds of layer models take a dict; one that has a single kind may not know what a dict is
    return dict(by_kind) if len(by_kind) > 1 else next(iter(by_kind.values()))


def _has_trees(batch: Batch) -> bool:
    return any(branch.parent >= 0 for row in batch.branches for branch in row)


def _block_mask(batch: Batch, window: int | None, width: int, device: torch.device | str) -> BlockMask:
    seen = tree_mask_mod(batch, window=window, device=device)
    return create_block_mask(seen, B=len(batch.branches), H=None, Q_LEN=width, KV_LEN=width, device=str(device))


def _mask(batch: Batch, window: int | None, width: int, *, additive: bool) -> torch.Tensor:
    seen_BTT = np.stack([tree_mask(row, width=width, window=window) for row in batch.branches])
    mask = torch.from_numpy(seen_BTT)[:, None]
    if not additive:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
