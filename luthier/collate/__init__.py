"""Packs to batches: the one collator, and the one place that shifts labels."""

from __future__ import annotations

from luthier.collate.collator import collate

__all__ = ["collate"]
