"""A run whose rows arrive while it trains: its data, as far as it is here, and its batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.errors import UserError
from luthier.ledger import Ledger
from luthier.loader.feed import FeedReader
from luthier.loader.live_plan import StreamPlan
from luthier.loader.live_rows import LiveRows, LiveSegments, LiveSettings
from luthier.loader.run_order import RunOrder, held_out_rows, mixture_of
from luthier.packing import PlanSettings, SegmentTable
from luthier.preparation.portions import ResolvedPortion
from luthier.preparation.prepared import PreparedSet, SourceInfo
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address
from luthier.store.store import SampleStore, store_folder
from luthier.train.set_names import distinct_names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveData:
    """Both sides of a run's data: the training rows as they come, the held-out ones complete."""

    rows: LiveRows
    order: RunOrder
    eval: SegmentIndex | None
    fingerprint: str

    @property
    def train(self) -> LiveSegments:
        """The training segments that are here."""
        return self.rows.segments

    @property
    def eval_table(self) -> SegmentTable | None:
        """The held-out segments, for planning."""
        return None if self.eval is None else self.eval.table()

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the training data sets, by their number."""
        return _names(self.rows.settings.sources)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """Names of those that the held-out segments are from."""
        return () if self.eval is None else _names(self.eval.prepared.sources)

    @property
    def ledger(self) -> dict[str, Any]:
        """What became of the rows that have come so far."""
        return self.rows.ledger.to_json()

    def address(self, row: int) -> Address:
        """Where the row was read that a segment is of, as `StreamPlan.trained_rows` numbers it."""
        place = self.train.places(np.array([row]))[0]
        return self.train.address(int(place["file"]), int(place["row"]))

    def plan(self, config: RunConfig, settings: PlanSettings) -> StreamPlan:
        """The steps of the run. Waits for the rows that decide the first."""
        return StreamPlan(
            self.rows, settings, self.order, num_epochs=config.train.num_train_epochs, max_steps=config.train.max_steps
        )


def open_live_data(config: RunConfig, reader: FeedReader) -> LiveData:
    """The data that a feed hands over. Waits for the held-out rows. Raises what stopped the feed, and `UserError`."""
    facts = reader.facts()
    store = SampleStore.open(store_folder(config.data.store, facts.encoder), fingerprint=facts.encoder)
    own_eval = bool(config.data.eval or config.data.eval_use)
    held_out = held_out_rows(
        sum(facts.num_rows), None if own_eval else config.data.eval_split, seed=config.runtime.seed
    )
    evaluation = _evaluation(config, reader, store, own_eval=own_eval)
    live = LiveSettings(
        num_rows=sum(facts.num_rows),
        sources=facts.sources,
        max_length=config.data.max_length,
        overflow=config.data.overflow,
        max_drop=config.data.max_drop,
    )
    same = None if evaluation is None or own_eval else evaluation.prepared.sample_ids
    order = RunOrder.of_sources(
        facts.num_rows, mixture_of(config, facts.weights), seed=config.runtime.seed, held_out=held_out
    )
    parts = [facts.identity, facts.encoder, repr(order.mixture), repr(held_out.tolist()[:100])]
    return LiveData(
        rows=LiveRows(reader.portions("train"), store, live, held_out=same),
        order=order,
        eval=evaluation,
        fingerprint=hashlib.sha256("\0".join(parts).encode()).hexdigest(),
    )


def _names(sources: tuple[SourceInfo, ...]) -> tuple[str, ...]:
    return distinct_names([source.name for source in sources], len(sources))


def _evaluation(config: RunConfig, reader: FeedReader, store: SampleStore, *, own_eval: bool) -> SegmentIndex | None:
    facts = reader.facts()
    portions = list(reader.portions("eval", facts.num_eval_portions))
    if not portions:
        return None
    rows = _prepared_of(portions, store.refresh(), facts.eval_sources if own_eval else facts.sources)
    index = SegmentIndex(rows, max_length=config.data.max_length, overflow=config.data.overflow)
    if not len(index):
        raise UserError(
            f"no evaluation row is left at data.max_length={config.data.max_length}",
            hint="raise data.max_length, or set data.overflow: split",
        )
    return index


def _prepared_of(portions: list[ResolvedPortion], store: SampleStore, sources: tuple[SourceInfo, ...]) -> PreparedSet:
    ledger = Ledger()
    for portion in portions:
        ledger.add(portion.ledger)
    kept = [portion.sample_ids >= 0 for portion in portions]

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(portion, name)[keep] for portion, keep in zip(portions, kept, strict=True)])

    return PreparedSet(
        store=store,
        sample_ids=column("sample_ids"),
        source_ids=column("source_ids").astype(np.int32),
        file_ids=column("file_ids").astype(np.int32),
        row_numbers=column("row_numbers"),
        files=tuple(name for portion in portions for name in portion.new_files),
        sources=sources,
        ledger=ledger,
    )
