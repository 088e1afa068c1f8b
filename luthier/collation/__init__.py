"""Packs to batches: the one collator, and the one place that shifts labels.

Read in this order: grid, collator, unpacking, interface.
"""

from __future__ import annotations

from luthier.collation.collator import collate_packs, collate_trees, to_batch
from luthier.collation.grid import CollateSettings, Grid, blank_grid, lay_out, lay_out_trees
from luthier.collation.unpacking import unpacked

__all__ = [
    "CollateSettings",
    "Grid",
    "blank_grid",
    "collate_packs",
    "collate_trees",
    "lay_out",
    "lay_out_trees",
    "to_batch",
    "unpacked",
]
