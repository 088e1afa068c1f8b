"""A row as columns of numbers: read from a pack as the store has it, or back from the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from luthier.check.show_media import placed_media
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
    losses = {loss.group: f"its media cannot be had any more: {loss.reason}: {loss.detail}" for _, loss in batch.lost}
    for row, starts in enumerate(batch.segment_starts):
        own = range(before, before + len(starts))
        before += len(starts)
        lost = {number - own.start: losses[number] for number in own if number in losses}
        rows.append(
            _batch_row(
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
