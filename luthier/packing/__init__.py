"""Which segments share a row, and in which order the rows come: plans, made of integers only."""

from __future__ import annotations

from luthier.packing.epoch import (
    EpochPlan,
    PlanSummary,
    SourceShare,
    count_by_source,
    describe,
    plan_epoch,
    realised_mixture,
    shares_of,
    source_counts,
    straggler_factor,
)
from luthier.packing.order import EpochOrder, MixtureSettings, RowOrder
from luthier.packing.packer import Pieces, WindowPacker, is_at_once, plan_packs, split_segments
from luthier.packing.planned import MicroBatchPlan, Planned
from luthier.packing.planner import EpochPlanner, GrowingTable, PlannerPlace, RowSegments, TableRows
from luthier.packing.settings import (
    PATCH_COST,
    PlanSettings,
    Segments,
    SegmentTable,
    UnitKind,
    completion_room,
    draw_partners,
    held_tokens,
    unit_table,
)

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
