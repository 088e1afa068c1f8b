"""Packs -> tensors for the model. B rows, T tokens a row (the longest, rounded up), N = B x T.

Labels are shifted here and nowhere else: ``labels_BT[t]`` is the id at ``t + 1``, if that token is a target and in the
same segment.

    segment   q  q  A  A  |  q  B       (A, B targets)
    labels    -  A  A  -  |  B  -

torch is imported where tensors are made, not at the top: the processes that lay out grids do without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.collation.grid import CollateSettings, Grid, lay_out, lay_out_trees
from luthier.collation.media_inputs import MediaInputs
from luthier.layout import cu_seqlens, position_ids, segment_starts, tree_follows, tree_leaves, tree_positions
from luthier.records import IGNORE_INDEX, Address, Batch, LostMedia, Pack, Sample, Targets, Unit


def collate_packs(
    packs: Sequence[Pack],
    *,
    packed: bool,
    pad_token_id: int,
    varlen: bool = False,
    pad_to_multiple_of: int = 1,
    media: MediaInputs | None = None,
) -> Batch:
    """One batch of B rows, one row a pack.

    Padded (``packed=False``; packs of one segment): right padding, ``attention_mask`` int64[B, T].
    Packed: ``position_ids`` that restart with each segment, no ``attention_mask`` and ``use_cache=False``, which is how
    transformers knows segments apart. Padding at a row's end is a segment of its own. ``varlen`` adds what
    FlashAttention's varlen kernels take, over the N tokens of the flattened batch: ``cu_seq_lens_q/k`` int32[n + 1]
    and ``max_length_q/k`` int. ``media`` adds what a multimodal model gets besides.

    Raises AssertionError for an empty batch, an empty pack, or several segments in a padded row.
    """
    how = CollateSettings(
        packed=packed, pad_token_id=pad_token_id, varlen=varlen, pad_to_multiple_of=pad_to_multiple_of
    )
    addresses = tuple(segment.address for pack in packs for segment in pack.segments)
    grid = lay_out(packs, how)
    return to_batch(grid if media is None else media.fill(grid, how), how, addresses=addresses)


def collate_trees(
    rows: Sequence[Sequence[Sample]],
    *,
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    units: tuple[Unit, ...] = (),
    media: MediaInputs | None = None,
) -> Batch:
    """One batch in the *shared* layout: each token of a sample's tree once, the samples of a row one after the other.

    A branch's positions go on after its parent's end, and ``batch.branches`` says what a token may see; no input of
    the model says it, so attention must be told (`models.attention`). ``targets`` is the same list as for the unrolled
    segments, but for positions: at the end of a branch, one for each continuation. There can be no labels then, and
    ``labels_BT`` is empty.

    Raises AssertionError for an empty batch or a sample without tokens.
    """
    how = CollateSettings(packed=True, pad_token_id=pad_token_id, pad_to_multiple_of=pad_to_multiple_of)
    leaves = [len(tree_leaves(sample.branches)[0]) for row in rows for sample in row]
    samples = [sample for row in rows for sample in row]
    addresses = tuple(sample.address for sample, count in zip(samples, leaves, strict=True) for _ in range(count))
    grid = lay_out_trees(rows, how)
    return to_batch(grid if media is None else media.fill(grid, how), how, addresses=addresses, units=units)


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

    inputs = _packed_inputs(grid, varlen=how.varlen) if how.packed else _padded_inputs(grid)
    arrays = {"input_ids": grid.ids_BT.astype(np.int64), **inputs, **dict(grid.inputs)}
    labels_BT, weights_BT = _labels(grid)
    targets, starts = _shared_targets(grid) if grid.parents is not None else _targets(grid)
    lost = _lost_segments(grid)
    gone = {number for _, segments in lost for number in segments}
    return Batch(
        model_inputs={
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()
        },
        labels_BT=torch.from_numpy(labels_BT),
        weights_BT=None if weights_BT is None else torch.from_numpy(weights_BT),
        num_targets=int(np.count_nonzero(grid.learned_BT)),
        segment_starts=starts,
        addresses=addresses,
        sources=sources,
        targets=targets,
        units=tuple(unit for unit in units if gone.isdisjoint(unit.segments)),
        branches=grid.branches,
        lost=tuple((addresses[segments[0]], loss) for loss, segments in lost),
    )


def _lost_segments(grid: Grid) -> list[tuple[LostMedia, tuple[int, ...]]]:
    """What is lost, each with the numbers of its segments: a tree is lost with all its leaves."""
    if grid.parents is None or not grid.lost:
        return [(loss, (loss.group,)) for loss in grid.lost]
    tree_of: list[int] = []  # of each segment
    before = 0
    for branches in grid.branches:
        root = np.cumsum([branch.parent < 0 for branch in branches]) - 1 + before  # parents stand before their children
        tree_of += root[tree_leaves(branches)[0]].tolist()
        before = int(root[-1]) + 1
    return [(loss, tuple(n for n, tree in enumerate(tree_of) if tree == loss.group)) for loss in grid.lost]


def _labels(grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    if grid.parents is not None:  # a position that several branches follow has several next tokens
        return np.empty((0, 0), dtype=np.int64), None
    labels_BT = np.full(grid.ids_BT.shape, IGNORE_INDEX, dtype=np.int64)
    np.copyto(labels_BT[:, :-1], grid.ids_BT[:, 1:], where=grid.learned_BT[:, 1:])
    if grid.weights_BT is None:
        return labels_BT, None
    weights_BT = np.ones_like(grid.weights_BT)
    weights_BT[:, :-1] = grid.weights_BT[:, 1:]
    return labels_BT, weights_BT


def _targets(grid: Grid) -> tuple[Targets, tuple[tuple[int, ...], ...]]:
    tokens_K = np.flatnonzero(grid.learned_BT)  # never in a row's first column, so what it follows is of the same row
    width = grid.ids_BT.shape[1]
    starts = tuple(tuple(segment_starts(row).tolist()) for row in grid.lengths)
    flat = [row * width + start for row, of_row in enumerate(starts) for start in of_row]
    segments_K = np.searchsorted(flat, tokens_K, side="right") - 1
    return _listed(grid, tokens_K, positions_K=tokens_K - 1, segments_K=segments_K), starts


def _shared_targets(grid: Grid) -> tuple[Targets, tuple[tuple[int, ...], ...]]:
    width = grid.ids_BT.shape[1]
    tokens, positions, segments, starts = [], [], [], []
    num_segments = 0
    for row, branches in enumerate(grid.branches):
        leaves, leaf_T = tree_leaves(branches)
        tokens_k = np.flatnonzero(grid.learned_BT[row, : len(leaf_T)])
        tokens_k = tokens_k[np.argsort(leaf_T[tokens_k], kind="stable")]  # by segment, and on its path
        tokens.append(row * width + tokens_k)
        positions.append(row * width + tree_follows(branches)[tokens_k])
        segments.append(num_segments + leaf_T[tokens_k])
        starts.append(tuple(segment_starts(grid.lengths[row])[leaves].tolist()))
        num_segments += len(leaves)
    found = _listed(
        grid,
        np.concatenate(tokens),
        positions_K=np.concatenate(positions),
        segments_K=np.concatenate(segments),
    )
    return found, tuple(starts)


def _listed(
    grid: Grid, tokens_K: NDArray[np.int64], *, positions_K: NDArray[np.int64], segments_K: NDArray[np.int64]
) -> Targets:
    import torch

    return Targets(
        positions_K=torch.from_numpy(positions_K),
        ids_K=torch.from_numpy(grid.ids_BT.reshape(-1)[tokens_K].astype(np.int64)),
        segments_K=torch.from_numpy(segments_K),
        weights_K=None if grid.weights_BT is None else torch.from_numpy(grid.weights_BT.reshape(-1)[tokens_K]),
    )


def _padded_inputs(grid: Grid) -> dict[str, NDArray[np.generic]]:
    columns = np.arange(grid.ids_BT.shape[1], dtype=np.int64)
    sizes = np.array([size for (size,) in grid.lengths])
    mask_BT = (columns < sizes[:, None]).astype(np.int64)
    return {"attention_mask": mask_BT, "position_ids": np.repeat(columns[None], len(sizes), axis=0)}


def _packed_inputs(grid: Grid, *, varlen: bool) -> dict[str, object]:
    width = grid.ids_BT.shape[1]
    if grid.parents is not None:
        tails = [np.arange(width - sum(row)) for row in grid.lengths]
        rows = [np.concatenate(row) for row in zip(map(tree_positions, grid.branches), tails, strict=True)]
        return {"position_ids": np.stack(rows), "use_cache": False}
    # the tail is a segment: no token of the row attends to it, and its own positions stay small
    with_tails = [[*row, tail] if (tail := width - sum(row)) else row for row in grid.lengths]
    flat = [length for row in with_tails for length in row]
    inputs: dict[str, object] = {"position_ids": position_ids(flat).reshape(grid.ids_BT.shape), "use_cache": False}
    if varlen:
        boundaries = cu_seqlens(flat)
        inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
        inputs |= {"max_length_q": max(flat), "max_length_k": max(flat)}
    return inputs
