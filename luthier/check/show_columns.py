"""A row as columns of numbers: read from a pack as the store has it, or back from the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from luthier.check.show_media import placed_media
from luthier.collation import paths_of_row
from luthier.layout import leaves
from luthier.records import IGNORE_INDEX, Batch, MediaItem, Pack, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """One row without its padding. ``labels`` and ``weights`` are shifted: they are of the next token.

    ``axes`` are positions in time, height and width, a list each, of models that have these. ``losses`` say of
    segments, by number, why their media could not be had: padding stands in their place.
    """

    ids: list[int]
    labels: list[int]
    weights: list[float]
    positions: list[int]
    starts: list[int]
    addresses: list[str]
    num_padding: int
    media: tuple[MediaItem, ...] = ()
    axes: list[list[int]] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)


def pack_columns(pack: Pack) -> Columns:
    """The segments of a pack, one behind the other."""
    lengths = [len(segment) for segment in pack.segments]
    return Columns(
        ids=[int(i) for segment in pack.segments for i in segment.input_ids],
        labels=[label for segment in pack.segments for label in _labels(segment)],
        weights=[weight for segment in pack.segments for weight in _weights(segment)],
        positions=[position for length in lengths for position in range(length)],
        starts=[sum(lengths[:number]) for number in range(len(lengths))],
        addresses=[str(segment.address) for segment in pack.segments],
        num_padding=0,
        media=placed_media(pack.segments),
    )


def batch_columns(batch: Batch, packs: Sequence[Pack] = ()) -> list[Columns]:
    """The rows of a batch. ``packs`` are what it was made of: tensors do not say where its media items stand."""
    rows: list[Columns] = []
    before = 0
    is_shared = batch.labels_BT.numel() == 0
    losses = {loss.group: f"its media cannot be had any more: {loss.reason}: {loss.detail}" for _, loss in batch.lost}
    for row, starts in enumerate(batch.segment_starts):
        own = range(before, before + len(starts))
        before += len(starts)
        groups = _trees_of(batch, row) if is_shared else list(own)  # media are lost by tree, or by segment
        lost = {number: losses[group] for number, group in enumerate(groups) if group in losses}
        make = _tree_row if is_shared else _batch_row
        rows.append(
            make(
                batch,
                row,
                addresses=[str(batch.addresses[number]) for number in own],
                media=_media_left(packs[row], lost) if packs else (),
                losses=lost,
            )
        )
    return rows


def _batch_row(
    batch: Batch, row: int, *, addresses: list[str], media: tuple[MediaItem, ...], losses: dict[int, str]
) -> Columns:
    starts = list(batch.segment_starts[row])
    positions, axes = _positions(batch, row)
    if "attention_mask" in batch.model_inputs:
        size = int(batch.model_inputs["attention_mask"][row].sum())
    else:  # packed: padding at the end is a segment that `segment_starts` does not name
        size = next((i for i in range(starts[-1] + 1, len(positions)) if positions[i] == 0), len(positions))
    return Columns(
        ids=batch.model_inputs["input_ids"][row, :size].tolist(),
        labels=batch.labels_BT[row, :size].tolist(),
        weights=[1.0] * size if batch.weights_BT is None else batch.weights_BT[row, :size].tolist(),
        positions=positions[:size],
        starts=starts,
        addresses=addresses,
        num_padding=len(positions) - size,
        media=media,
        axes=[axis[:size] for axis in axes],
        losses=losses,
    )


def _tree_row(
    batch: Batch, row: int, *, addresses: list[str], media: tuple[MediaItem, ...], losses: dict[int, str]
) -> Columns:
    """A row of trees as the sequences that lead to their leaves, one behind the other: shared tokens stand in each."""
    paths = paths_of_row(batch, row)
    width = batch.model_inputs["input_ids"].shape[1]
    positions, axes = _positions(batch, row)
    before = sum(len(starts) for starts in batch.segment_starts[:row])
    labels, weights = [], []
    targets = batch.targets
    for number, path in enumerate(paths, before):
        mine = (targets.segments_K == number).numpy()
        places = np.searchsorted(path, targets.positions_K.numpy()[mine])
        own = np.full(len(path), IGNORE_INDEX, dtype=np.int64)
        own[places] = targets.ids_K.numpy()[mine]
        weighed = np.ones(len(path), dtype=np.float32)
        if targets.weights_K is not None:
            weighed[places] = targets.weights_K.numpy()[mine]
        labels.append(own)
        weights.append(weighed)
    in_row = np.concatenate(paths) - row * width
    sizes = [len(path) for path in paths]
    ids = batch.model_inputs["input_ids"][row].numpy()
    return Columns(
        ids=ids[in_row].tolist(),
        labels=np.concatenate(labels).tolist(),
        weights=np.concatenate(weights).tolist(),
        positions=[positions[place] for place in in_row],
        starts=[sum(sizes[:number]) for number in range(len(sizes))],
        addresses=addresses,
        num_padding=width - sum(branch.length for branch in batch.branches[row]),
        media=media,
        axes=[[axis[place] for place in in_row] for axis in axes],
        losses=losses,
    )


def _trees_of(batch: Batch, row: int) -> list[int]:
    """For each segment of a row the number of its tree in the batch."""
    before = sum(branch.parent < 0 for branches in batch.branches[:row] for branch in branches)
    roots = np.cumsum([branch.parent < 0 for branch in batch.branches[row]]) - 1 + before
    return [int(roots[leaf]) for leaf in leaves(batch.branches[row])]


def _positions(batch: Batch, row: int) -> tuple[list[int], list[list[int]]]:
    """Positions in the text and, behind them, those on several axes: [B, T], [1 + A, B, T] packed, [A, B, T] padded."""
    found = batch.model_inputs["position_ids"]
    if found.ndim == 2:
        return found[row].tolist(), []
    axes: list[list[int]] = found[:, row].tolist()
    if "attention_mask" in batch.model_inputs:
        return list(range(found.shape[-1])), axes
    return axes[0], axes[1:]


def _media_left(pack: Pack, lost: dict[int, str]) -> tuple[MediaItem, ...]:
    kept = [
        Segment(input_ids=segment.input_ids, target=segment.target) if number in lost else segment
        for number, segment in enumerate(pack.segments)
    ]
    return placed_media(kept)


def _labels(segment: Segment) -> list[int]:
    ids, target = segment.input_ids.tolist(), segment.target.tolist()
    return [*(i if wanted else IGNORE_INDEX for i, wanted in zip(ids[1:], target[1:], strict=True)), IGNORE_INDEX]


def _weights(segment: Segment) -> list[float]:
    return [1.0] * len(segment) if segment.weight is None else [*segment.weight.tolist()[1:], 1.0]
