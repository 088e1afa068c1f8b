"""Which segments share a row, and in which order the rows come: plans, made of integers only.

Read in this order: best_fit_kernel, best_fit, epoch.
"""

from __future__ import annotations

from luthier.packing.best_fit import plan_packs
from luthier.packing.epoch import (
    EpochPlan,
    MicroBatchPlan,
    PlanSettings,
    PlanSummary,
    SegmentTable,
    describe,
    plan_epoch,
)

__all__ = [
    "EpochPlan",
    "MicroBatchPlan",
    "PlanSettings",
    "PlanSummary",
    "SegmentTable",
    "describe",
    "plan_epoch",
    "plan_packs",
]
