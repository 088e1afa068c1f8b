"""Which segments share a row, and in which order the rows come: plans, made of integers only."""

from __future__ import annotations

from luthier.packing.epoch import EpochPlan, PlanSummary, describe, plan_epoch, segments_of, straggler_factor
from luthier.packing.mixture import MixtureSettings, row_order
from luthier.packing.packer import WindowPacker
from luthier.packing.planned import MicroBatchPlan, Planned
from luthier.packing.realised import SourceShare, count_by_source, realised_mixture, shares_of, source_counts
from luthier.packing.settings import PATCH_COST, PlanSettings, Segments, SegmentTable, Units
from luthier.packing.split import Pieces, split_segments
from luthier.packing.units import completion_room, draw_partners, held_tokens, unit_table
from luthier.packing.window import plan_packs

__all__ = [
    "PATCH_COST",
    "EpochPlan",
    "MicroBatchPlan",
    "MixtureSettings",
    "Pieces",
    "PlanSettings",
    "PlanSummary",
    "Planned",
    "SegmentTable",
    "Segments",
    "SourceShare",
    "Units",
    "WindowPacker",
    "completion_room",
    "count_by_source",
    "describe",
    "draw_partners",
    "held_tokens",
    "plan_epoch",
    "plan_packs",
    "realised_mixture",
    "row_order",
    "segments_of",
    "shares_of",
    "source_counts",
    "split_segments",
    "straggler_factor",
    "unit_table",
]
