"""A run's data as training sees it: segments with random access, their table, and a fingerprint of the whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from luthier.config.schema import RunConfig
from luthier.errors import UserError
from luthier.loader.run_settings import units_of
from luthier.packing import PlanSettings, Segments, SegmentTable, Units, describe, plan_epoch
from luthier.preparation.prepared import Prepared, PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address
from luthier.train.result import DataSummary
from luthier.train.set_names import distinct_names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunData:
    """Both sides of the data.

    fingerprint        covers the content of the training segments and their order
    names, eval_names  what the tables' sources are called; not needed where segments are from memory
    """

    train: Segments
    train_table: SegmentTable
    eval: Segments | None
    eval_table: SegmentTable | None
    fingerprint: str
    ledger: dict[str, Any]
    names: tuple[str, ...] = ()
    eval_names: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the training data sets, by their number."""
        return distinct_names(self.names, len(self.train_table.source_weights))

    def address(self, row: int) -> Address:
        """Where a row of the training table was read, by its ``row_ids``."""
        assert isinstance(self.train, SegmentIndex), "segments in memory have no ledger"
        return self.train.prepared.address(row)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """Names of those that the held-out segments are from."""
        table = self.eval_table
        return () if table is None else distinct_names(self.eval_names, len(table.source_weights))


def open_run_data(config: RunConfig, prepared: Prepared, *, encoder_fingerprint: str) -> RunData:
    """The segments of a run, cut to ``data.max_length``.

    Raises `BudgetError` if cutting loses more rows than ``data.max_drop`` allows, `UserError` if a side is left empty
    or a segment is too long under ``data.overflow: error``.
    """
    max_length, overflow, units = config.data.max_length, config.data.overflow, units_of(config)
    train = SegmentIndex(prepared.train, max_length=max_length, overflow=overflow, units=units)
    train.ledger.check(max_drop=config.data.max_drop)
    held_out = None
    if prepared.eval is not None:
        held_out = SegmentIndex(prepared.eval, max_length=max_length, overflow=overflow, units=units)
    for side, index in (("training", train), ("evaluation", held_out)):
        if index is not None:
            _check_some_left(side, index, config)
    return RunData(
        train=train,
        train_table=train.table(),
        eval=held_out,
        eval_table=None if held_out is None else held_out.table(),
        fingerprint=_fingerprint(prepared.train, train.table(), encoder_fingerprint),
        ledger=train.ledger.to_json(),
        names=tuple(source.name for source in prepared.train.sources),
        eval_names=() if prepared.eval is None else tuple(source.name for source in prepared.eval.sources),
    )


def _check_some_left(side: str, index: SegmentIndex, config: RunConfig) -> None:
    if len(index) == 0:
        policy = "split" if index.units is Units.NONE else "truncate, which shortens prompts"
        raise UserError(
            f"no {side} row is left at data.max_length={config.data.max_length}",
            hint=f"raise data.max_length, or set data.overflow: {policy}",
        )


def summarise(table: SegmentTable, settings: PlanSettings) -> DataSummary:
    """The sizes of the first epoch."""
    found = describe(plan_epoch(table, settings, epoch=0), table)
    return DataSummary(
        segments=found.segments,
        tokens=found.tokens,
        target_tokens=found.targets,
        micro_batches=found.micro_batches,
        fill=1 - found.padding,
    )


def _fingerprint(prepared: PreparedSet, table: SegmentTable, encoder_fingerprint: str) -> str:
    digest = hashlib.sha256(encoder_fingerprint.encode())
    digest.update(prepared.store.keys[prepared.sample_ids].tobytes())
    for array in (table.lengths, table.num_targets, table.row_ids, table.source_ids):
        digest.update(array.tobytes())
    digest.update(json.dumps(table.source_weights).encode())
    return digest.hexdigest()
