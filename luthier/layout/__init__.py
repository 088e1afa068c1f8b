"""Integers before tensors: positions, cuts and trees as pure functions of numbers and numpy arrays.

Read in this order: trees, cutting, prompts, positions, forests.
"""

from __future__ import annotations

from luthier.layout.cutting import Window, cut_segment, plan_windows, take_window, without_targets
from luthier.layout.forests import ancestors, join_trees, tree_follows, tree_leaves, tree_mask, tree_positions
from luthier.layout.positions import cu_seqlens, position_ids, segment_ids, segment_starts
from luthier.layout.prompts import cut_prompt, prompt_tree, span_of, splice
from luthier.layout.trees import leaf_segment, leaves

__all__ = [
    "Window",
    "ancestors",
    "cu_seqlens",
    "cut_prompt",
    "cut_segment",
    "join_trees",
    "leaf_segment",
    "leaves",
    "plan_windows",
    "position_ids",
    "prompt_tree",
    "segment_ids",
    "segment_starts",
    "span_of",
    "splice",
    "take_window",
    "tree_follows",
    "tree_leaves",
    "tree_mask",
    "tree_positions",
    "without_targets",
]
