"""Integers before tensors: positions, cuts and trees as pure functions of numbers and numpy arrays.

Read in this order: trees, cutting, positions.
"""

from __future__ import annotations

from luthier.layout.cutting import Window, cut_segment, plan_windows, take_window, without_targets
from luthier.layout.positions import cu_seqlens, position_ids, segment_ids, segment_starts
from luthier.layout.trees import leaf_segment, leaves

__all__ = [
    "Window",
    "cu_seqlens",
    "cut_segment",
    "leaf_segment",
    "leaves",
    "plan_windows",
    "position_ids",
    "segment_ids",
    "segment_starts",
    "take_window",
    "without_targets",
]
