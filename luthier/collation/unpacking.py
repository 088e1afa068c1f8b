"""A batch of packed rows or token trees as padded rows of one segment, for models that nothing else keeps apart.

S segments, T tokens a row before and W after (the longest segment), K targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.layout import ancestors, leaves, segment_starts
from luthier.records import IGNORE_INDEX, Batch, Branch, Targets

if TYPE_CHECKING:
    import torch


def unpacked(batch: Batch, *, pad_token_id: int) -> Batch:
    """The same segments, targets and units in S rows of W tokens, right-padded under an ``attention_mask``.

    What branches share is repeated for each of them. Padding between segments is left behind.
    """
    import torch

    paths = [path for row in range(len(batch.branches)) for path in paths_of_row(batch, row)]
    sizes = np.array([len(path) for path in paths])
    shape = (len(paths), int(sizes.max()))
    mask_SW = np.arange(shape[1]) < sizes[:, None]
    ids_SW = np.full(shape, pad_token_id, dtype=np.int64)
    ids_SW[mask_SW] = batch.model_inputs["input_ids"].reshape(-1).numpy()[np.concatenate(paths)]
    positions_K = _positions(batch.targets, paths, width=shape[1])
    labels_SW = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    labels_SW.view(-1)[positions_K] = batch.targets.ids_K
    weights_K = batch.targets.weights_K
    weights_SW = None if weights_K is None else torch.ones(shape)
    if weights_SW is not None and weights_K is not None:
        weights_SW.view(-1)[positions_K] = weights_K
    return replace(
        batch,
        model_inputs={
            "input_ids": torch.from_numpy(ids_SW),
            "attention_mask": torch.from_numpy(mask_SW.astype(np.int64)),
            "position_ids": torch.arange(shape[1]).repeat(shape[0], 1),
        },
        labels_BT=labels_SW,
        weights_BT=weights_SW,
        segment_starts=((0,),) * len(paths),
        targets=replace(batch.targets, positions_K=positions_K),
        branches=tuple((Branch(parent=-1, length=int(size)),) for size in sizes),
    )


def paths_of_row(batch: Batch, row: int) -> list[NDArray[np.int64]]:
    """For each segment of a row the places of its tokens in the flattened batch, ascending."""
    branches = batch.branches[row]
    lengths = [branch.length for branch in branches]
    starts = segment_starts(lengths) + row * batch.model_inputs["input_ids"].shape[1]
    spans = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    before = ancestors(branches)
    return [np.concatenate([spans[node] for node in (*before[leaf], leaf)]) for leaf in leaves(branches)]


def _positions(targets: Targets, paths: list[NDArray[np.int64]], *, width: int) -> torch.Tensor:
    import torch

    bounds = np.searchsorted(targets.segments_K.numpy(), np.arange(len(paths) + 1))
    positions_K = targets.positions_K.numpy()
    found = [
        segment * width + np.searchsorted(path, positions_K[bounds[segment] : bounds[segment + 1]])
        for segment, path in enumerate(paths)
    ]
    return torch.from_numpy(np.concatenate(found))
