"""Packs -> tensors for the model. B rows, T tokens a row (the longest, rounded up), N = B x T.

Labels are shifted here and nowhere else: ``labels_BT[t]`` is the id at ``t + 1``, if that token is a target and in the
same segment.

    segment   q  q  A  A  |  q  B       (A, B targets)
    labels    -  A  A  -  |  B  -

torch is imported where tensors are made, not at the top: the processes that lay out grids do without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from luthier.collation import CollateSettings, Grid, MediaInputs, lay_out, lay_out_trees
from luthier.config.loading import load_sections
from luthier.layout import (
    ancestors,
    cu_seqlens,
    leaves,
    position_ids,
    segment_starts,
    tree_follows,
    tree_leaves,
    tree_positions,
)
from luthier.media import MediaSource
from luthier.media.processors.processor import MediaProcessor
from luthier.packing.packer import plan_packs
from luthier.records import IGNORE_INDEX, Address, Batch, Branch, LostMedia, Pack, Sample, Segment, Targets, Unit

if TYPE_CHECKING:
    import torch


def collate(
    samples: Sequence[Sample | Segment],
    *,
    layout: Literal["packed", "padded"] = "packed",
    capacity: int | None = None,
    pad_token_id: int = 0,
    varlen: bool = False,
    pad_to_multiple_of: int = 1,
    media: MediaInputs | None = None,
) -> Batch:
    """One batch of these samples, B rows of T tokens; a sample's token tree becomes one segment for each leaf.

    ``packed``: all segments in one row, one after the other; with ``capacity`` in rows of at most so many tokens, by
    best fit. Segments are kept apart by positions that restart: no ``attention_mask``, ``use_cache=False``.
    ``varlen`` adds what FlashAttention's varlen kernels take (``cu_seq_lens_q`` …).
    ``padded``: one segment a row, right-padded under an ``attention_mask`` int64[B, T].

    ``pad_token_id`` may be any id that the model has: padding is neither attended to nor learned. T is rounded up to
    ``pad_to_multiple_of``. Segments are shortened nowhere.

    ``media`` (`luthier.media_inputs`) decodes the samples' images, videos and audio and adds what a multimodal model
    gets: features, token types, positions of several axes. Segments whose media cannot be had are in ``batch.lost``.
    ``batch.model_inputs`` have the names that the model has for them (``decoder_input_ids`` beside an encoder).

    Raises ``ValueError`` for no samples at all, for arguments that contradict each other, and for samples with media
    without ``media``; `UserError` where a segment is longer than ``capacity``.
    """
    segments = [
        segment
        for sample in samples
        for segment in ([sample] if isinstance(sample, Segment) else sample.segments())
        if len(segment)
    ]
    if not segments:
        raise ValueError("there is no token to collate")
    if layout not in ("packed", "padded"):
        raise ValueError(f"layout is 'packed' or 'padded', not {layout!r}")
    packed = layout == "packed"
    if not packed and (varlen or capacity is not None):
        raise ValueError("varlen and capacity are for layout='packed'")
    if media is None and any(segment.media for segment in segments):
        raise ValueError("these samples have media: give media=luthier.media_inputs(processor, model.config)")
    if media is not None and packed and media.processor.family.decoder_names:
        raise ValueError(f"layout='padded' for {media.processor.family.name}: {media.processor.family.reason}")
    batch = collate_packs(
        _packs(segments, capacity) if packed else [Pack(segments=(segment,)) for segment in segments],
        packed=packed,
        pad_token_id=pad_token_id,
        varlen=varlen,
        pad_to_multiple_of=pad_to_multiple_of,
        media=media,
    )
    # a decoder beside an encoder calls its inputs otherwise; inside of the package ids are ``input_ids``
    return batch if media is None else replace(batch, model_inputs=media.processor.family.named(batch.model_inputs))


def media_inputs(model: Any, model_config: Any = None, **options: Any) -> MediaInputs:
    """What `collate` and `Loader` need for samples with media: a model's folder; or transformers' processor and the
    model's config. ``options`` are those of the section ``media`` of a run (``roots`` …).

    Raises `ModelError` for a folder or a processor that is none, `ConfigError` for options that cannot be.
    """
    media = load_sections(media=options).media
    if isinstance(model, str | Path):
        return MediaInputs(MediaSource.of_folder(Path(model), media))
    processor = model
    if model_config is None:
        raise TypeError("a processor does not say how its model counts positions: give model.config too")
    described = model_config if isinstance(model_config, Mapping) else model_config.to_dict()
    made = MediaProcessor.of(processor, media, model_type=str(described.get("model_type", "")))
    return MediaInputs.of(made, media, described)


def _packs(segments: list[Segment], capacity: int | None) -> list[Pack]:
    if capacity is None:
        return [Pack(segments=tuple(segments))]
    plan = plan_packs([len(segment) for segment in segments], capacity)
    return [Pack(segments=tuple(segments[i] for i in pack)) for pack in plan]


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
    return batch_of_packs(packs, how, media)


def batch_of_packs(packs: Sequence[Pack], how: CollateSettings, media: MediaInputs | None) -> Batch:
    """See `collate_packs`."""
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
    return {"attention_mask": mask_BT, "position_ids": columns * mask_BT}  # padding makes no row longer


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


# ---------------------- Some segments of a batch as a batch of their own, for passes over the model that need no others


_TEXT_INPUTS = frozenset(
    {
        "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "input_ids", "max_length_k", "max_length_q", "position_ids",
        "use_cache",
    }
)  # fmt: skip


def beyond_text(batch: Batch) -> set[str]:
    """The inputs that a batch of text has not: `only_segments` can be had of none with some, as the features of media
    are not told apart by segment."""
    return batch.model_inputs.keys() - _TEXT_INPUTS


def only_segments(batch: Batch, kept: Collection[int], *, pad_token_id: int) -> Batch:
    """The segments that ``kept`` names, numbered anew in their old order, with what their branches share.

    Units keep those of their segments that are left, and go where none is. Rows without any are left out.

        prompt -> own answer, another answer;  kept: the second   ->   prompt -> another answer

    Raises AssertionError where nothing is kept, and for a batch with media.
    """
    assert kept and not beyond_text(batch), "some segments, of text"
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
    return _with_targets(found, _kept_targets(batch, rows, kept, width=grid.ids_BT.shape[1]))


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


def _kept_targets(batch: Batch, rows: Sequence[_SelectedRow], kept: Collection[int], *, width: int) -> Targets:
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
            "position_ids": torch.from_numpy(np.arange(shape[1]) * mask_SW),
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
