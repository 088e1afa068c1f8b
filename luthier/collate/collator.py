"""Packs -> tensors for the model. B rows, T tokens a row (the longest, rounded up), N = B x T.

Labels are shifted here and nowhere else: ``labels_BT[t]`` is the id at ``t + 1``, if that token is a target and in the
same segment.

    segment   q  q  A  A  |  q  B       (A, B targets)
    labels    -  A  A  -  |  B  -
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.layout import cu_seqlens, position_ids, segment_starts
from luthier.records import IGNORE_INDEX, Batch, Pack


def collate(
    packs: Sequence[Pack], *, packed: bool, pad_token_id: int, varlen: bool = False, pad_to_multiple_of: int = 1
) -> Batch:
    """One batch of B rows, one row a pack.

    Padded (``packed=False``; packs of one segment): right padding, ``attention_mask`` int64[B, T].
    Packed: ``position_ids`` that restart with each segment, no ``attention_mask`` and ``use_cache=False``, which is how
    transformers knows segments apart. Padding at a row's end is a segment of its own. ``varlen`` adds what
    FlashAttention's varlen kernels take, over the N tokens of the flattened batch: ``cu_seq_lens_q/k`` int32[n + 1]
    and ``max_length_q/k`` int.

    Raises AssertionError for an empty batch, an empty pack, or several segments in a padded row.
    """
    assert packs and all(len(pack) for pack in packs), "a batch needs packs, and a pack needs tokens"
    assert packed or all(len(pack.segments) == 1 for pack in packs), "a padded row holds one segment"
    assert packed or not varlen, "varlen is for packed rows"
    lengths = [[len(segment) for segment in pack.segments] for pack in packs]
    sizes = [sum(row) for row in lengths]
    width = -(-max(sizes) // pad_to_multiple_of) * pad_to_multiple_of
    ids_BT = np.full((len(packs), width), pad_token_id, dtype=np.int64)
    labels_BT = np.full((len(packs), width), IGNORE_INDEX, dtype=np.int64)
    for row, pack in enumerate(packs):
        ids = np.concatenate([segment.input_ids for segment in pack.segments])
        ids_BT[row, : sizes[row]] = ids
        labels_BT[row, : sizes[row] - 1] = np.where(_targets(pack, lengths[row])[1:], ids[1:], IGNORE_INDEX)
    model_inputs = _packed_inputs(lengths, width, varlen=varlen) if packed else _padded_inputs(sizes, width)
    return Batch(
        model_inputs={"input_ids": torch.from_numpy(ids_BT), **model_inputs},
        labels_BT=torch.from_numpy(labels_BT),
        weights_BT=_weights(packs, labels_BT),
        num_targets=int(np.count_nonzero(labels_BT != IGNORE_INDEX)),
        segment_starts=tuple(tuple(segment_starts(row).tolist()) for row in lengths),
        addresses=tuple(segment.address for pack in packs for segment in pack.segments),
    )


def _targets(pack: Pack, lengths: list[int]) -> NDArray[np.bool_]:
    target = np.concatenate([segment.target for segment in pack.segments])
    target[segment_starts(lengths)] = False  # what would predict it is another segment's last token
    return target


def _padded_inputs(sizes: list[int], width: int) -> dict[str, Any]:
    columns = np.arange(width, dtype=np.int64)
    mask_BT = (columns < np.array(sizes)[:, None]).astype(np.int64)
    positions_BT = np.repeat(columns[None], len(sizes), axis=0)
    return {"attention_mask": torch.from_numpy(mask_BT), "position_ids": torch.from_numpy(positions_BT)}


def _packed_inputs(lengths: list[list[int]], width: int, *, varlen: bool) -> dict[str, Any]:
    # the tail is a segment: no token of the row attends to it, and its own positions stay small
    with_tails = [[*row, tail] if (tail := width - sum(row)) else row for row in lengths]
    flat = [length for row in with_tails for length in row]
    positions_BT = position_ids(flat).reshape(len(lengths), width)
    model_inputs: dict[str, Any] = {"position_ids": torch.from_numpy(positions_BT), "use_cache": False}
    if varlen:
        boundaries = torch.from_numpy(cu_seqlens(flat))
        model_inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
        model_inputs |= {"max_length_q": max(flat), "max_length_k": max(flat)}
    return model_inputs


def _weights(packs: Sequence[Pack], labels_BT: NDArray[np.int64]) -> torch.Tensor | None:
    """float32[B, T], shifted like the labels; None where every label weighs 1."""
    if all(segment.weight is None for pack in packs for segment in pack.segments):
        return None
    weights_BT = np.ones(labels_BT.shape, dtype=np.float32)
    for row, pack in enumerate(packs):
        weight = np.concatenate(
            [np.ones(len(s), dtype=np.float32) if s.weight is None else s.weight for s in pack.segments]
        )
        weights_BT[row, : len(weight) - 1] = weight[1:]
    weights_BT[labels_BT == IGNORE_INDEX] = 1.0  # a weight without a target says nothing
    return None if (weights_BT == 1).all() else torch.from_numpy(weights_BT)
