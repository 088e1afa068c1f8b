"""Which segments share a row, and in which order the rows come: plans, made of integers only."""

from __future__ import annotations

from luthier.packing.epoch import EpochPlan, PlanSummary, describe, plan_epoch, straggler_factor
from luthier.packing.order import EpochOrder, MixtureSettings, RowOrder
from luthier.packing.packer import WindowPacker, is_at_once
from luthier.packing.planned import MicroBatchPlan, Planned
from luthier.packing.planner import EpochPlanner, GrowingTable, PlannerPlace, RowSegments, TableRows
from luthier.packing.realised import SourceShare, count_by_source, realised_mixture, shares_of, source_counts
from luthier.packing.settings import PATCH_COST, PlanSettings, Segments, SegmentTable, UnitKind
from luthier.packing.split import Pieces, split_segments
from luthier.packing.units import completion_room, draw_partners, held_tokens, unit_table
from luthier.packing.window import plan_packs

__all__ = [
    "PATCH_COST",
    "EpochOrder",
    "EpochPlan",
    "EpochPlanner",
    "GrowingTable",
    "MicroBatchPlan",
    "MixtureSettings",
    "Pieces",
    "PlanSettings",
    "PlanSummary",
    "Planned",
    "PlannerPlace",
    "RowOrder",
    "RowSegments",
    "SegmentTable",
    "Segments",
    "SourceShare",
    "TableRows",
    "UnitKind",
    "WindowPacker",
    "completion_room",
    "count_by_source",
    "describe",
    "draw_partners",
    "held_tokens",
    "is_at_once",
    "plan_epoch",
    "plan_packs",
    "realised_mixture",
    "shares_of",
    "source_counts",
    "split_segments",
    "straggler_factor",
    "unit_table",
]
