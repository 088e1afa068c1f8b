"""Packs laid out as rows and columns, in numpy alone. B rows, T tokens a row (the longest, rounded up).

A `Grid` is what travels from a worker process to the trainer: five bytes a token, where the tensors that the model
gets take twenty-four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.layout import segment_starts
from luthier.records import Pack


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
    learned_BT   bool: the token at ``t + 1`` is to be predicted at ``t``; False in the last column
    weights_BT   float32, of what is predicted at ``t``; None: 1.0 everywhere
    lengths      per row, the tokens of each of its segments; what they leave of T is padding
    """

    ids_BT: NDArray[np.int32]
    learned_BT: NDArray[np.bool_]
    weights_BT: NDArray[np.float32] | None
    lengths: tuple[tuple[int, ...], ...]


def lay_out(packs: Sequence[Pack], how: CollateSettings) -> Grid:
    """One row a pack, padded on the right.

    Raises AssertionError for an empty batch, an empty pack, or several segments in a padded row.
    """
    assert packs and all(len(pack) for pack in packs), "a batch needs packs, and a pack needs tokens"
    assert how.packed or all(len(pack.segments) == 1 for pack in packs), "a padded row holds one segment"
    assert how.packed or not how.varlen, "varlen is for packed rows"
    lengths = tuple(tuple(len(segment) for segment in pack.segments) for pack in packs)
    sizes = [sum(row) for row in lengths]
    width = -(-max(sizes) // how.pad_to_multiple_of) * how.pad_to_multiple_of
    ids_BT = np.empty((len(packs), width), dtype=np.int32)
    targets_BT = np.empty((len(packs), width), dtype=np.bool_)
    for row, (pack, size) in enumerate(zip(packs, sizes, strict=True)):
        np.concatenate([segment.input_ids for segment in pack.segments], out=ids_BT[row, :size])
        np.concatenate([segment.target for segment in pack.segments], out=targets_BT[row, :size])
        targets_BT[row, segment_starts(lengths[row])] = False  # what would predict it is another segment's last token
        ids_BT[row, size:] = how.pad_token_id
        targets_BT[row, size:] = False
    learned_BT = np.zeros_like(targets_BT)
    learned_BT[:, :-1] = targets_BT[:, 1:]
    return Grid(ids_BT=ids_BT, learned_BT=learned_BT, weights_BT=_weights(packs, sizes, learned_BT), lengths=lengths)


def blank_grid(how: CollateSettings) -> Grid:
    """Two tokens of padding and nothing to learn: what fills a step's slot for which there is no micro-batch."""
    # two, not one: some models drop the last position before they compute a loss, and nothing is left of one
    return Grid(
        ids_BT=np.full((1, 2), how.pad_token_id, dtype=np.int32),
        learned_BT=np.zeros((1, 2), dtype=np.bool_),
        weights_BT=None,
        lengths=((2,),),
    )


def _weights(packs: Sequence[Pack], sizes: Sequence[int], learned_BT: NDArray[np.bool_]) -> NDArray[np.float32] | None:
    if all(segment.weight is None for pack in packs for segment in pack.segments):
        return None
    weights_BT = np.ones(learned_BT.shape, dtype=np.float32)
    for row, (pack, size) in enumerate(zip(packs, sizes, strict=True)):
        of_tokens = [np.ones(len(s), dtype=np.float32) if s.weight is None else s.weight for s in pack.segments]
        weights_BT[row, : size - 1] = np.concatenate(of_tokens)[1:]
    weights_BT[~learned_BT] = 1.0  # a weight without a target says nothing
    return None if (weights_BT == 1).all() else weights_BT
