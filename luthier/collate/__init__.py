"""Packs to batches: the one collator, and the one place that shifts labels.

Read in this order: collator.
"""

from __future__ import annotations

from luthier.collate.collator import collate

__all__ = ["collate"]
