"""Packs to batches: the one collator, and the one place that shifts labels."""

from __future__ import annotations

from luthier.collation.collator import (
    batch_of_packs,
    collate_packs,
    collate_trees,
    has_only_text,
    only_segments,
    paths_of_row,
    to_batch,
    unpacked,
)
from luthier.collation.grid import CollateSettings, Grid, MediaInputs, blank_grid, lay_out, lay_out_trees

__all__ = [
    "CollateSettings",
    "Grid",
    "MediaInputs",
    "batch_of_packs",
    "blank_grid",
    "collate_packs",
    "collate_trees",
    "has_only_text",
    "lay_out",
    "lay_out_trees",
    "only_segments",
    "paths_of_row",
    "to_batch",
    "unpacked",
]
