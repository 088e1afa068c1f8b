"""Packs to batches: the one collator, and the one place that shifts labels.

Read in this order: grid, collator, interface.
"""

from __future__ import annotations

from luthier.collation.collator import collate_packs, to_batch
from luthier.collation.grid import CollateSettings, Grid, blank_grid, lay_out

__all__ = ["CollateSettings", "Grid", "blank_grid", "collate_packs", "lay_out", "to_batch"]
