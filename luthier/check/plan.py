"""What a run will cost, exactly, before any model is loaded: rows, tokens, targets, packs, steps, padding, balance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luthier.check.estimate import Estimate
from luthier.check.history import HistoryCost
from luthier.check.media_counts import MediaCount, MediaItems, packing_refusal
from luthier.config.schema import Overflow, Packing, RunConfig
from luthier.loader.rows import RowTable
from luthier.loader.run_settings import eval_settings, train_settings, warmup_steps
from luthier.packing import (
    EpochPlan,
    PlanSettings,
    PlanSummary,
    SourceShare,
    Units,
    describe,
    plan_epoch,
    realised_mixture,
    straggler_factor,
)
from luthier.preparation.segments import SegmentIndex

NUM_LONGEST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRow:
    """A row among the longest: where it is, and the tokens and targets of its longest segment."""

    address: str
    tokens: int
    targets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlan:
    """What the first epoch takes from one source; a row counts as often as it is seen."""

    name: str
    taken: SourceShare


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """One side of the data, cut to ``data.max_length``: ``epoch`` is what its first epoch consists of.

    ``straggler_factor``: the most work of a rank over the mean, on average over all synchronisations; 1.0 is even.
    ``media``: the items of all segments, where they were counted.
    """

    rows: int
    segments: int
    tokens: int
    targets: int
    epoch: PlanSummary
    straggler_factor: float
    sources: tuple[SourcePlan, ...]
    longest: tuple[LongRow, ...]
    ledger: dict[str, Any]
    media: tuple[MediaCount, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The whole run on ``num_ranks`` devices. ``more_steps``: of a run of few steps, settings that would each give it
    more. ``unmet``: what is asked of the run and will not happen, as it is so short. ``no_packing``: why segments of
    this model cannot share a row, though the run packs them. ``shares_prompts``: tokens of a prompt that two answers
    share are counted once. ``history``: what a template that rewrites it costs in training; None: nothing. ``clock``:
    what rows are told of today by a template that has one.
    """

    train: DataPlan
    eval: DataPlan | None
    packing: Packing
    max_length: int
    overflow: Overflow
    units: Units
    num_ranks: int
    rows_per_micro_batch: int
    micro_batches_per_step: int
    epochs: float
    max_steps: int | None
    total_steps: int
    warmup_steps: int
    more_steps: tuple[str, ...] = ()
    no_packing: str | None = None
    shares_prompts: bool = False
    history: HistoryCost | None = None
    clock: str | None = None
    unmet: tuple[str, ...] = ()
    estimate: Estimate | None = None
    no_estimate: str | None = None


def plan_run(
    config: RunConfig,
    train: SegmentIndex,
    held_out: SegmentIndex | None,
    *,
    total_steps: int,
    num_ranks: int = 1,
    first_epoch: EpochPlan | None = None,
    history: HistoryCost | None = None,
    more_steps: tuple[str, ...] = (),
) -> RunPlan:
    """The plan of a run over segments cut by `SegmentIndex`.

    ``total_steps`` and ``first_epoch`` come from the run's plan, which knows of mixtures; without it, every source
    comes as often as its weight says.
    """
    settings = train_settings(config, num_ranks=num_ranks)
    return RunPlan(
        train=plan_data(train, settings, first_epoch),
        eval=None if held_out is None else plan_data(held_out, eval_settings(config, num_ranks=num_ranks)),
        packing=config.train.packing,
        max_length=config.data.max_length,
        overflow=config.data.overflow,
        units=settings.units,
        shares_prompts=settings.shared and settings.units.are_compared,
        history=history,
        num_ranks=num_ranks,
        rows_per_micro_batch=settings.rows_per_micro_batch,
        micro_batches_per_step=settings.micro_batches_per_step,
        epochs=config.train.num_train_epochs,
        max_steps=config.train.max_steps,
        total_steps=total_steps,
        more_steps=more_steps,
        warmup_steps=warmup_steps(config.train, total_steps),
    )


def with_media(
    plan: RunPlan, train: SegmentIndex, held_out: SegmentIndex | None, *, model_config: Mapping[str, Any]
) -> RunPlan:
    """The plan with its media counted, and what the model's family says of packing. Segments with media are read."""
    of_eval = plan.eval
    if of_eval is not None and held_out is not None:
        of_eval = replace(of_eval, media=MediaItems.of_index(held_out).counts())
    return replace(
        plan,
        train=replace(plan.train, media=MediaItems.of_index(train).counts()),
        eval=of_eval,
        no_packing=packing_refusal(model_config) if plan.packing.is_packed else None,
    )


def plan_data(index: SegmentIndex, settings: PlanSettings, first_epoch: EpochPlan | None = None) -> DataPlan:
    """One side of the data, planned for its first epoch."""
    table = index.table()
    plan = first_epoch if first_epoch is not None else plan_epoch(RowTable.of_index(index), settings, epoch=0)
    names = [source.name for source in index.prepared.sources]
    return DataPlan(
        rows=len(np.unique(index.row_ids)),
        segments=len(index),
        tokens=int(index.lengths.sum()),
        targets=int(index.num_targets.sum()),
        epoch=describe(plan, table),
        straggler_factor=straggler_factor(plan, table, settings, settings.num_ranks),
        sources=tuple(
            SourcePlan(name=name, taken=taken) for name, taken in zip(names, realised_mixture(plan, table), strict=True)
        ),
        longest=longest_rows(index),
        ledger=index.ledger.to_json(),
    )


def longest_rows(index: SegmentIndex, count: int = NUM_LONGEST) -> tuple[LongRow, ...]:
    """The rows with the longest segments, longest first, each row once."""
    found: dict[int, int] = {}  # row -> its longest segment; dicts keep the order
    own_lengths = np.where(index.num_targets > 0, index.lengths, 0)  # not the completions of other rows
    for segment in np.argsort(-own_lengths, kind="stable").tolist():
        found.setdefault(int(index.row_ids[segment]), segment)
        if len(found) == count:
            break
    return tuple(
        LongRow(
            address=str(index.prepared.address(row)),
            tokens=int(index.lengths[segment]),
            targets=int(index.num_targets[segment]),
        )
        for row, segment in found.items()
    )
