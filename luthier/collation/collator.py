"""Packs -> tensors for the model. B rows, T tokens a row (the longest, rounded up), N = B x T.

Labels are shifted here and nowhere else: ``labels_BT[t]`` is the id at ``t + 1``, if that token is a target and in the
same segment.

    segment   q  q  A  A  |  q  B       (A, B targets)
    labels    -  A  A  -  |  B  -

torch is imported where tensors are made, not at the top: the processes that lay out grids do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.collation.grid import CollateSettings, Grid, lay_out
from luthier.layout import cu_seqlens, position_ids, segment_starts
from luthier.records import IGNORE_INDEX, Address, Batch, Pack, Targets, Unit


def collate_packs(
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
    how = CollateSettings(
        packed=packed, pad_token_id=pad_token_id, varlen=varlen, pad_to_multiple_of=pad_to_multiple_of
    )
    addresses = tuple(segment.address for pack in packs for segment in pack.segments)
    return to_batch(lay_out(packs, how), how, addresses=addresses)


def to_batch(
    grid: Grid,
    how: CollateSettings,
    *,
    addresses: tuple[Address, ...] = (),
    sources: tuple[int, ...] = (),
    units: tuple[Unit, ...] = (),
) -> Batch:
    """The batch that a grid stands for: int64 where torch and transformers want it, positions counted out.

    ``addresses`` and ``sources`` are those of its segments, row by row; ``units`` say which belong together.
    """
    import torch

    shape = grid.ids_BT.shape
    labels_BT = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    np.copyto(labels_BT[:, :-1], grid.ids_BT[:, 1:], where=grid.learned_BT[:, :-1])
    inputs = _packed_inputs(grid, varlen=how.varlen) if how.packed else _padded_inputs(grid)
    arrays = {"input_ids": grid.ids_BT.astype(np.int64), **inputs}
    return Batch(
        model_inputs={
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()
        },
        labels_BT=torch.from_numpy(labels_BT),
        weights_BT=None if grid.weights_BT is None else torch.from_numpy(grid.weights_BT),
        num_targets=int(np.count_nonzero(grid.learned_BT)),
        segment_starts=tuple(tuple(segment_starts(row).tolist()) for row in grid.lengths),
        addresses=addresses,
        sources=sources,
        targets=_targets(grid),
        units=units,
    )


def _targets(grid: Grid) -> Targets:
    import torch

    positions_K = np.flatnonzero(grid.learned_BT)  # never in a row's last column, so the next token is of the same row
    width = grid.ids_BT.shape[1]
    starts = [row * width + start for row, of_row in enumerate(grid.lengths) for start in segment_starts(of_row)]
    weights = None if grid.weights_BT is None else torch.from_numpy(grid.weights_BT.reshape(-1)[positions_K])
    return Targets(
        positions_K=torch.from_numpy(positions_K),
        ids_K=torch.from_numpy(grid.ids_BT.reshape(-1)[positions_K + 1].astype(np.int64)),
        segments_K=torch.from_numpy(np.searchsorted(starts, positions_K, side="right") - 1),
        weights_K=weights,
    )


def _padded_inputs(grid: Grid) -> dict[str, NDArray[Any]]:
    columns = np.arange(grid.ids_BT.shape[1], dtype=np.int64)
    sizes = np.array([size for (size,) in grid.lengths])
    mask_BT = (columns < sizes[:, None]).astype(np.int64)
    return {"attention_mask": mask_BT, "position_ids": np.repeat(columns[None], len(sizes), axis=0)}


def _packed_inputs(grid: Grid, *, varlen: bool) -> dict[str, Any]:
    width = grid.ids_BT.shape[1]
    # the tail is a segment: no token of the row attends to it, and its own positions stay small
    with_tails = [[*row, tail] if (tail := width - sum(row)) else row for row in grid.lengths]
    flat = [length for row in with_tails for length in row]
    inputs: dict[str, Any] = {"position_ids": position_ids(flat).reshape(grid.ids_BT.shape), "use_cache": False}
    if varlen:
        boundaries = cu_seqlens(flat)
        inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
        inputs |= {"max_length_q": max(flat), "max_length_k": max(flat)}
    return inputs
