"""Some segments of a batch as a batch of their own, for passes over the model that need no others.

S segments, K targets, N = B x T tokens of the flattened batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.collation.collator import to_batch
from luthier.collation.grid import CollateSettings, Grid
from luthier.layout import ancestors, leaves, segment_starts
from luthier.records import IGNORE_INDEX, Batch, Branch, Targets, Unit

if TYPE_CHECKING:
    import torch


_TEXT_INPUTS = frozenset(
    {
        "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "input_ids", "max_length_k", "max_length_q", "position_ids",
        "use_cache",
    }
)  # fmt: skip


def has_only_text(batch: Batch) -> bool:
    """Whether `only_segments` can be had of it: the features of media are not told apart by segment."""
    return batch.model_inputs.keys() <= _TEXT_INPUTS


def only_segments(batch: Batch, kept: Collection[int], *, pad_token_id: int) -> Batch:
    """The segments that ``kept`` names, numbered anew in their old order, with what their branches share.

    Units keep those of their segments that are left, and go where none is. Rows without any are left out.

        prompt -> own answer, another answer;  kept: the second   ->   prompt -> another answer

    Raises AssertionError where nothing is kept, and for a batch with media.
    """
    assert kept and has_only_text(batch), "some segments, of text"
    rows = list(_rows(batch, kept))
    grid = _grid(batch, rows, pad_token_id)
    how = CollateSettings(
        packed="attention_mask" not in batch.model_inputs,
        pad_token_id=pad_token_id,
        varlen="cu_seq_lens_q" in batch.model_inputs,
    )
    found = to_batch(
        grid,
        how,
        addresses=tuple(where for number, where in enumerate(batch.addresses) if number in kept),
        sources=tuple(source for number, source in enumerate(batch.sources) if number in kept),
        units=tuple(_units(batch, kept)),
    )
    return _with_targets(found, _targets(batch, rows, kept, width=grid.ids_BT.shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SelectedRow:
    """What is left of a row: the old places of its tokens, int64, and its branches, by length and parent."""

    places: NDArray[np.int64]
    lengths: tuple[int, ...]
    parents: tuple[int, ...]


def _rows(batch: Batch, kept: Collection[int]) -> Iterator[_SelectedRow]:
    width = batch.model_inputs["input_ids"].shape[1]
    before_row = 0  # segments
    for row, branches in enumerate(batch.branches):
        ends, before = leaves(branches), ancestors(branches)
        wanted = [leaf for number, leaf in enumerate(ends, before_row) if number in kept]
        before_row += len(ends)
        if not wanted:
            continue
        nodes = sorted({node for leaf in wanted for node in (*before[leaf], leaf)})
        starts = segment_starts([branch.length for branch in branches]) + row * width
        yield _SelectedRow(
            places=np.concatenate([np.arange(starts[n], starts[n] + branches[n].length) for n in nodes]),
            lengths=tuple(branches[n].length for n in nodes),
            parents=tuple(nodes.index(branches[n].parent) if branches[n].parent >= 0 else -1 for n in nodes),
        )


def _grid(batch: Batch, rows: Sequence[_SelectedRow], pad_token_id: int) -> Grid:
    ids_N = batch.model_inputs["input_ids"].reshape(-1).numpy()
    shape = (len(rows), max(len(row.places) for row in rows))
    ids_BT = np.full(shape, pad_token_id, dtype=np.int32)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row.places)] = ids_N[row.places]
    return Grid(
        ids_BT=ids_BT,
        learned_BT=np.zeros(shape, dtype=np.bool_),  # targets are taken over as they are
        weights_BT=None,
        lengths=tuple(row.lengths for row in rows),
        parents=tuple(row.parents for row in rows) if _is_shared(batch) else None,
    )


def _is_shared(batch: Batch) -> bool:
    return batch.labels_BT.numel() == 0


def _targets(batch: Batch, rows: Sequence[_SelectedRow], kept: Collection[int], *, width: int) -> Targets:
    import torch

    new_N = np.full(batch.model_inputs["input_ids"].numel(), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        new_N[row.places] = number * width + np.arange(len(row.places))
    segments_K, order = batch.targets.segments_K.numpy(), np.array(sorted(kept), dtype=np.int64)
    left_k = np.flatnonzero(np.isin(segments_K, order))
    weights_K = batch.targets.weights_K
    return Targets(
        positions_K=torch.from_numpy(new_N[batch.targets.positions_K.numpy()[left_k]]),
        ids_K=batch.targets.ids_K[left_k],
        segments_K=torch.from_numpy(np.searchsorted(order, segments_K[left_k])),
        weights_K=None if weights_K is None else weights_K[left_k],
    )


def _with_targets(batch: Batch, targets: Targets) -> Batch:
    labels_BT, weights_BT = batch.labels_BT, None
    if not _is_shared(batch):
        labels_BT = _placed(labels_BT, targets, targets.ids_K)
        if targets.weights_K is not None:
            weights_BT = _placed(targets.weights_K.new_ones(labels_BT.shape), targets, targets.weights_K)
    return replace(batch, labels_BT=labels_BT, weights_BT=weights_BT, num_targets=len(targets.ids_K), targets=targets)


def _placed(grid_BT: torch.Tensor, targets: Targets, values_K: torch.Tensor) -> torch.Tensor:
    return grid_BT.reshape(-1).index_put((targets.positions_K,), values_K).reshape(grid_BT.shape)


def _units(batch: Batch, kept: Collection[int]) -> Iterator[Unit]:
    number_of = {segment: number for number, segment in enumerate(sorted(kept))}
    for unit in batch.units:
        left = [place for place, segment in enumerate(unit.segments) if segment in number_of]
        if left:
            yield replace(
                unit,
                segments=tuple(number_of[unit.segments[place]] for place in left),
                leaves=tuple(unit.leaves[place] for place in left) if unit.leaves else (),
            )


# ----------------------------------------------------------------------------------- packed rows as rows of one segment


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
