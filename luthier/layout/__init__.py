"""Integers before tensors: positions, cuts and trees as pure functions of numbers and numpy arrays."""

from __future__ import annotations

from luthier.layout.cutting import SegmentCut, cut_segment, plan_windows, take_window, without_targets
from luthier.layout.mrope import mrope_positions, packed_mrope
from luthier.layout.position_schemes import Canvas, MediaGrids, PositionScheme, TokenType, position_scheme, token_types
from luthier.layout.trees import (
    ancestors,
    cu_seqlens,
    cut_prompt,
    held_of_leaves,
    join_trees,
    leaf_segment,
    leaves,
    position_ids,
    prompt_tree,
    seen_blocks,
    segment_ids,
    segment_starts,
    span_of,
    splice,
    tree_follows,
    tree_leaves,
    tree_mask,
    tree_of_runs,
    tree_positions,
)

__all__ = [
    "Canvas",
    "MediaGrids",
    "PositionScheme",
    "SegmentCut",
    "TokenType",
    "ancestors",
    "cu_seqlens",
    "cut_prompt",
    "cut_segment",
    "held_of_leaves",
    "join_trees",
    "leaf_segment",
    "leaves",
    "mrope_positions",
    "packed_mrope",
    "plan_windows",
    "position_ids",
    "position_scheme",
    "prompt_tree",
    "seen_blocks",
    "segment_ids",
    "segment_starts",
    "span_of",
    "splice",
    "take_window",
    "token_types",
    "tree_follows",
    "tree_leaves",
    "tree_mask",
    "tree_of_runs",
    "tree_positions",
    "without_targets",
]
