"""Packs laid out as rows and columns, in numpy alone. B rows, T tokens a row (the longest, rounded up).

A `Grid` is what travels from a worker process to the trainer: five bytes a token, where the tensors that the model
gets take twenty-four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.layout.trees import join_trees, segment_starts, token_weights
from luthier.records import Branch, LostMedia, MediaItem, Pack, Sample, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateSettings:
    """How packs become tensors; `collator.collate_packs` says what each means."""

    packed: bool
    pad_token_id: int
    varlen: bool = False
    pad_to_multiple_of: int = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Grid:
    """The content of a micro-batch.

    ids_BT       int32
    learned_BT   bool: the token at ``t`` is to be predicted, from the one that it follows in its segment
    weights_BT   float32, of the token at ``t``; None: 1.0 everywhere
    lengths      per row, the tokens of each of its segments; what they leave of T is padding
    parents      of a grid of shared trees (`lay_out_trees`), whose ``lengths`` are those of branches: per row, which
                 branch of the row each one continues, -1 for a root; None where every segment is whole
    media        per row, for each of its segments (or trees) the media items, by where they stand in the row
    inputs       what the model gets of the media: features, and positions of several axes; () of text
    lost         segments (or trees) whose media could not be had: padding stands in their place
    """

    ids_BT: NDArray[np.int32]
    learned_BT: NDArray[np.bool_]
    weights_BT: NDArray[np.float32] | None
    lengths: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...] | None = None
    media: tuple[tuple[tuple[MediaItem, ...], ...], ...] = ()
    inputs: tuple[tuple[str, NDArray[Any]], ...] = ()
    lost: tuple[LostMedia, ...] = ()

    @property
    def has_media(self) -> bool:
        """Whether an item stands in it."""
        return any(items for row in self.media for items in row)

    @property
    def branches(self) -> tuple[tuple[Branch, ...], ...]:
        """Per row its branches; a whole segment is a root that nothing continues."""
        parents = self.parents or tuple((-1,) * len(row) for row in self.lengths)
        return tuple(
            tuple(Branch(parent=parent, length=length) for parent, length in zip(*row, strict=True))
            for row in zip(parents, self.lengths, strict=True)
        )


def lay_out(packs: Sequence[Pack], how: CollateSettings) -> Grid:
    """One row a pack, padded on the right.

    Raises AssertionError for an empty batch, an empty pack, or several segments in a padded row.
    """
    assert packs and all(len(pack) for pack in packs), "a batch needs packs, and a pack needs tokens"
    assert how.packed or all(len(pack.segments) == 1 for pack in packs), "a padded row holds one segment"
    assert how.packed or not how.varlen, "varlen is for packed rows"
    lengths = tuple(tuple(len(segment) for segment in pack.segments) for pack in packs)
    return _filled([pack.segments for pack in packs], how, lengths=lengths, parents=None)


def lay_out_trees(rows: Sequence[Sequence[Sample]], how: CollateSettings) -> Grid:
    """The *shared* layout: each token of a sample once, however many leaves it leads to; the samples of a row packed.

    Raises AssertionError for an empty batch, a sample without tokens, or settings for padded rows or varlen, which
    cannot say what a tree shares.
    """
    assert rows and all(row and all(len(tree.input_ids) for tree in row) for row in rows), "a batch needs tokens"
    assert how.packed and not how.varlen, "trees share attention, which padded rows and varlen kernels cannot say"
    branches = [join_trees(tree.branches for tree in row) for row in rows]
    return _filled(
        rows,
        how,
        lengths=tuple(tuple(branch.length for branch in row) for row in branches),
        parents=tuple(tuple(branch.parent for branch in row) for row in branches),
    )


def blank_grid(how: CollateSettings) -> Grid:
    """Two tokens of padding and nothing to learn: what fills a step's slot for which there is no micro-batch."""
    # two, not one: some models drop the last position before they compute a loss, and nothing is left of one
    return Grid(
        ids_BT=np.full((1, 2), how.pad_token_id, dtype=np.int32),
        learned_BT=np.zeros((1, 2), dtype=np.bool_),
        weights_BT=None,
        lengths=((2,),),
        media=(((),),),
    )


def _filled(
    rows: Sequence[Sequence[Segment | Sample]],
    how: CollateSettings,
    *,
    lengths: tuple[tuple[int, ...], ...],
    parents: tuple[tuple[int, ...], ...] | None,
) -> Grid:
    sizes = [sum(row) for row in lengths]
    width = -(-max(sizes) // how.pad_to_multiple_of) * how.pad_to_multiple_of
    ids_BT = np.full((len(rows), width), how.pad_token_id, dtype=np.int32)
    learned_BT = np.zeros((len(rows), width), dtype=np.bool_)
    for row, (pieces, size) in enumerate(zip(rows, sizes, strict=True)):
        np.concatenate([piece.input_ids for piece in pieces], out=ids_BT[row, :size])
        np.concatenate([piece.target for piece in pieces], out=learned_BT[row, :size])
        roots = slice(None) if parents is None else np.array(parents[row]) < 0
        starts = segment_starts(lengths[row])[roots]
        learned_BT[row, starts[starts < size]] = False  # what would predict it is another segment's last token
    return Grid(
        ids_BT=ids_BT,
        learned_BT=learned_BT,
        weights_BT=_weights(rows, sizes, learned_BT),
        lengths=lengths,
        parents=parents,
        media=tuple(map(_media, rows)),
    )


def _media(pieces: Sequence[Segment | Sample]) -> tuple[tuple[MediaItem, ...], ...]:
    if not any(piece.media for piece in pieces):
        return ((),) * len(pieces)
    starts = segment_starts([len(piece.input_ids) for piece in pieces]).tolist()
    return tuple(
        tuple(replace(item, start=item.start + start) for item in piece.media)
        for piece, start in zip(pieces, starts, strict=True)
    )


def _weights(
    rows: Sequence[Sequence[Segment | Sample]], sizes: Sequence[int], learned_BT: NDArray[np.bool_]
) -> NDArray[np.float32] | None:
    if all(piece.weight is None for pieces in rows for piece in pieces):
        return None
    weights_BT = np.ones(learned_BT.shape, dtype=np.float32)
    for row, (pieces, size) in enumerate(zip(rows, sizes, strict=True)):
        np.concatenate([token_weights(piece) for piece in pieces], out=weights_BT[row, :size])
    weights_BT[~learned_BT] = 1.0  # a weight without a target says nothing
    return None if (weights_BT == 1).all() else weights_BT
