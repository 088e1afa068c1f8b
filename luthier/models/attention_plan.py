"""Which tokens of a batch see which, as plain numbers: what `models.attention` computes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from luthier.layout import ancestors, seen_blocks, segment_starts
from luthier.records import Branch

Block = tuple[int, int]
"""First token of a stretch, and the one behind the last, that see each other both ways."""


class BlockReach(StrEnum):
    """In which layers the tokens of a picture see each other both ways."""

    NOWHERE = "nowhere"
    WINDOWS = "windows"  # in layers with a sliding window (Gemma 4)
    EVERYWHERE = "everywhere"  # (Gemma 3)
    WHOLE = "whole"  # everywhere, and past sliding windows (Gemma 4 Unified)

    def covers(self, window: int | None) -> bool:
        """Whether it does in layers with this window; None: with none."""
        match self:
            case BlockReach.NOWHERE:
                return False
            case BlockReach.WINDOWS:
                return window is not None
            case BlockReach.EVERYWHERE | BlockReach.WHOLE:
                return True
            case _:
                raise AssertionError(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Which tokens of a flattened batch see which. Plain numbers: no layer has to wait for a device to read them.

    lengths   of the stretches, in order; they add up to N
    contexts  for each stretch the numbers of those before it on its path, root first; None: padding, not computed
    blocks    for each stretch those in it; () where there are none at all
    reach     in which layers they are
    """

    lengths: tuple[int, ...]
    contexts: tuple[tuple[int, ...] | None, ...]
    blocks: tuple[tuple[Block, ...], ...] = ()
    reach: BlockReach = BlockReach.NOWHERE

    def blocks_of(self, stretch: int, window: int | None) -> tuple[Block, ...]:
        """Those of a stretch, in layers with this window."""
        return self.blocks[stretch] if self.blocks and self.reach.covers(window) else ()


def plan_attention(
    branches: Sequence[Sequence[Branch]],
    *,
    width: int,
    types_BT: NDArray[np.integer] | None = None,
    reach: BlockReach = BlockReach.NOWHERE,
) -> AttentionPlan:
    """The plan of a batch whose rows, ``width`` tokens wide, are made of these branches; the rest of a row is padding.

    [[whole 3, whole 2]], 6    -> lengths (3, 2, 1), contexts ((), (), None)
    [[root 3, child 2, child 2]], 7 -> lengths (3, 2, 2), contexts ((), (0,), (0,))

    With token types [B, T] (`layout.TokenType`) the tokens of a picture see each other in the layers of ``reach``.
    """
    lengths: list[int] = []
    contexts: list[tuple[int, ...] | None] = []
    blocks: list[tuple[Block, ...]] = []
    for number, row in enumerate(branches):
        before = len(lengths)
        lengths += [branch.length for branch in row]
        contexts += [tuple(before + node for node in path) for path in ancestors(row)]
        if tail := width - sum(branch.length for branch in row):
            assert tail > 0, f"{width - tail} tokens in a row of {width}"
            lengths.append(tail)
            contexts.append(None)
        if types_BT is not None and reach is not BlockReach.NOWHERE:
            blocks += _blocks(types_BT[number], row)
            blocks += [()] * (len(lengths) - len(blocks))  # the padding
    return AttentionPlan(lengths=tuple(lengths), contexts=tuple(contexts), blocks=tuple(blocks), reach=reach)


def _blocks(types_T: NDArray[np.integer], row: Sequence[Branch]) -> list[tuple[Block, ...]]:
    """For each branch of a row its blocks, counted from where it begins."""
    block_T = seen_blocks(types_T, row)
    found = []
    for start, branch in zip(segment_starts([branch.length for branch in row]), row, strict=True):
        of_branch = block_T[start : start + branch.length]
        at = [np.flatnonzero(of_branch == block) for block in np.unique(of_branch[of_branch >= 0])]
        found.append(tuple((int(places[0]), int(places[-1]) + 1) for places in at))
    return found
