"""What `luthier verify` puts to the test: rows of the sources, their samples, encoded now or read from the store, and
the batches that training reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.check.selection import collation_of
from luthier.check.verify.batches import PART, BatchJudge, BatchRules
from luthier.config.choices import MixtureBy, Packing
from luthier.config.schema import RunConfig
from luthier.errors import BudgetError, RowDropped, RowError, UserError
from luthier.ledger import Ledger
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.loader.reader import BatchReader, PlannedMicroBatch
from luthier.loader.settings import Loaded, eval_settings, media_of, plan_of_run, shares_prompts, units_of
from luthier.media.families import Features
from luthier.packing import UnitKind
from luthier.packing.epoch import plan_epoch
from luthier.preparation import Prepared, PreparedSet
from luthier.preparation.segments import cut_sample
from luthier.records import Address, Batch, MediaItem, Row, Sample
from luthier.sources import RowBytes
from luthier.sources.origins import resolve_sources
from luthier.sources.source import Source, open_sources

FIRST_BATCHES, MOST_ENCODED = 2, 20_000  # that training compares; positions of encoders in one of them


class SampleMaker(Protocol):
    """What verification puts to the test: `luthier.encoding.encoder.Encoder`, or anything that encodes as it should."""

    def encode(self, row: Row) -> Sample:
        """The token tree of a row; raises `RowError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """A row as it was read, or the error that says why it could not be, with what its source makes of it."""

    source: Source
    item: RowBytes | RowError
    address: Address

    def convert(self) -> Row:
        """The record; raises `RowError`."""
        if isinstance(self.item, RowError):
            raise self.item
        return self.source.convert(self.source.reader.read(self.item))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChoice:
    """Which rows are verified: all, or those of ``numbers`` (counted from 0 over all sources) of ``num_rows``."""

    numbers: frozenset[int] | None = None
    num_rows: int | None = None

    def __contains__(self, number: int) -> bool:
        return self.numbers is None or number in self.numbers


def open_split(config: RunConfig, split: str) -> list[Source]:
    """The sources of one side of a run's data. Raises `UserError` if there is none, `SourceError` if one is missing."""
    train, evaluation = resolve_sources(config.data)
    chosen = train if split == "train" else evaluation
    if not chosen and split == "eval" and config.data.eval_split:
        raise UserError(
            "this run names no data for evaluation: data.eval_split holds out some of its training rows",
            hint="they are among the rows that --split train verifies",
            key="data.eval_split",
        )
    if not chosen:
        raise UserError(f"this run names no data for {split}", hint=f"name some with data.{split}", key=f"data.{split}")
    return open_sources(chosen, seed=config.runtime.seed)


def choose_rows(sources: Sequence[Source], size: int | None, *, seed: int) -> RowChoice:
    """A seeded sample of ``size`` rows of all sources, without replacement; all, if ``size`` is None.

    To sample, the rows are counted first: they are read once more, decoded they are not.
    """
    if size is None:
        return RowChoice()
    num_rows = sum(1 for source in sources for _ in source.row_bytes())
    numbers = random.Random(seed).sample(range(num_rows), min(size, num_rows))
    return RowChoice(numbers=frozenset(numbers), num_rows=num_rows)


def read_rows(sources: Sequence[Source]) -> Iterator[SourceRow]:
    """Every row of the sources, in order, none of them decoded yet."""
    for source in sources:
        for item in source.row_bytes():
            assert item.address is not None, f"{source.name}: a row's error has no address: {item}"
            yield SourceRow(source=source, item=item, address=item.address)


class StoredSamples:
    """The prepared samples of a split, in the order in which its rows are read."""

    def __init__(self, sets: Sequence[PreparedSet]) -> None:
        """The sets that the rows went to: two, where some of the training rows are held out."""
        self._sets = sets
        self._next = [0] * len(sets)

    @classmethod
    def of_split(cls, prepared: Prepared, config: RunConfig, split: str) -> StoredSamples:
        """The samples of a split that has sources."""
        held_out = prepared.eval
        if split == "eval":
            assert held_out is not None, "the split has sources"
            return cls([held_out])
        _, eval_sources = resolve_sources(config.data)
        return cls([prepared.train] if held_out is None or eval_sources else [prepared.train, held_out])

    def at(self, address: Address) -> Sample | None:
        """The sample of the next row that was read, None if preparation lost it. Ask once for each row, in order."""
        for number, prepared in enumerate(self._sets):
            place = self._next[number]
            if place < len(prepared) and prepared.address(place) == address:
                self._next[number] += 1
                return prepared[place]
        return None


class RunBatches:
    """The micro-batches of a run, or of an evaluation, as one process reads them.

    rules       how segments are laid out in them
    epoch       that of the micro-batch that `planned` gave last
    takes_all   once `planned` is through: whether it went to the end of that epoch
    """

    epoch, takes_all = 0, False

    def __init__(self, loaded: Loaded, *, held_out: bool, plan: StreamPlan | None = None) -> None:
        """``plan``: the run's own, if it is there."""
        config, index = loaded.config, loaded.held_out if held_out else loaded.train
        assert index is not None, "the split has rows"
        self._config, self._index, how = config, index, collation_of(loaded)
        self._rows = NumberedRows.of_index(index) if plan is None else plan.rows
        self._plan = None if held_out else plan or plan_of_run(config, self._rows, num_ranks=1)
        media = media_of(config, loaded.encoder.tokenizer.files.folder)
        self._reader = BatchReader(index.prepared.store, how, shared=shares_prompts(config), media=media)
        self.rules = BatchRules(
            packed=how.packed,
            pad_token_id=how.pad_token_id,
            max_length=config.data.max_length,
            units=index.units,
            cut_freely=config.train.packing is Packing.SPLIT,
            by_axes=media is not None and media.scheme is not None,
        )

    @cached_property
    def meant(self) -> NDArray[np.void]:
        """The segments that there are, of dtype `PART`."""
        index = self._index
        own = slice(None, None, 2 if index.units is UnitKind.FEEDBACK_KL else 1)  # without answers that are drawn
        rows = index.row_ids[own]
        meant = np.zeros(len(rows), dtype=PART)
        meant["source"], meant["file"] = index.source_ids[own], index.prepared.file_ids[rows]
        meant["row"], meant["leaf"] = index.prepared.row_numbers[rows], index.cuts()[0][own]
        meant["tokens"] = index.lengths[own]
        return meant

    def leaves(self) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """All leaves of all rows, of dtype `PART`, and which of them are short enough to be there whole."""
        rows, store = self._index.prepared, self._index.prepared.store
        first = store.leaf_bounds[rows.sample_ids]
        counts = store.leaf_bounds[rows.sample_ids + 1] - first
        row = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        stored = first[row] + number
        found = np.zeros(len(row), dtype=PART)
        found["source"], found["file"], found["row"] = rows.source_ids[row], rows.file_ids[row], rows.row_numbers[row]
        found["leaf"], found["tokens"] = number, store.leaf_lengths[stored]
        stays = (found["tokens"] <= self.rules.max_length) & (store.leaf_targets[stored] > 0)
        if self.rules.units.are_compared:  # all of a row, or nothing
            stays = np.bincount(row, weights=~stays, minlength=len(rows))[row] == 0
        return found, stays

    def planned(self) -> Iterator[PlannedMicroBatch]:
        """Those that have rows, epoch by epoch; each has an ``epoch``, which is whole where ``takes_all`` says so."""
        if self._plan is None:
            plan = plan_epoch(self._rows, eval_settings(self._config), epoch=0)
            yield from (self._rows.of_plan(plan, number, step=0) for number in range(len(plan.planned)))
            self.takes_all = True
            return
        step = 0
        for planned in self._plan.micro_batches(0):
            if planned.step > step and self._plan.ends_epoch(planned.step):
                self.epoch += 1
            step = planned.step
            if not planned.is_blank:
                yield planned
        self.takes_all = self._plan.ends_epoch(step + 1)

    @property
    def takes_all_once(self) -> bool:
        """Whether an epoch is to take every row, and no row twice."""
        by = self._config.data.mixture.by
        return self._plan is None or (by is MixtureBy.EPOCHS and set(self._rows.weights) == {1.0})

    def parts(self, planned: PlannedMicroBatch) -> NDArray[np.void]:
        """The segments of a micro-batch, of dtype `PART`."""
        places = planned.places[planned.places["tail_stop"] == 0]
        parts = np.zeros(len(places), dtype=PART)
        for name in ("source", "file", "row", "leaf"):
            parts[name] = places[name]
        parts["tokens"] = places["head"] + places["stop"] - places["start"]
        return parts

    def read(self, planned: PlannedMicroBatch) -> Batch:
        return self._reader.read(planned)

    def features_of(self, items: Sequence[MediaItem]) -> Features:
        """What the model is to see of some media, each decoded once more."""
        assert self._reader.media is not None, "the model takes media"
        return self._reader.media.features(items)

    def address(self, part: np.void) -> Address:
        return Address(file=self._index.prepared.files[int(part["file"])], row=int(part["row"]))

    def samples_at(self, address: Address) -> list[Sample]:
        """The samples of the rows that were read there."""
        rows = self._index.prepared
        files = [number for number, file in enumerate(rows.files) if file == address.file]
        found = np.flatnonzero((rows.row_numbers == address.row) & np.isin(rows.file_ids, files))
        return [rows[row] for row in found.tolist()]


def fault_of_first_batches(loaded: Loaded, plan: StreamPlan) -> str | None:
    """What the first micro-batches of a run have that its rows do not say, in words; None: nothing.

    Rows that are questions have no such batches, and those with very much to see or to hear are not decoded twice.
    """
    if loaded.config.objective.kind.on_policy:
        return None
    batches = RunBatches(loaded, held_out=False, plan=plan)
    judge = BatchJudge(batches.rules, batches.samples_at, batches.features_of)
    for planned in islice(batches.planned(), FIRST_BATCHES):
        if int(planned.places["encoder"].sum()) <= MOST_ENCODED:
            for fault in judge.faults(batches.read(planned)):
                return f"the first batches are not what their rows say, which is a fault of Luthier: {fault}"
    return None


class TrainingAccount:
    """What training would do with the rows that are verified: which it loses, and whether it would begin with the rest.

    ``refusal`` says why it would not begin, as soon as that is known; ``ledger`` also counts the rows of which
    ``data.max_length`` leaves nothing.
    """

    def __init__(self, config: RunConfig) -> None:
        self.ledger = Ledger()
        self.refusal: str | None = None
        self._data, self._units = config.data, units_of(config)

    def lose(self, error: RowError) -> None:
        """A row that encoding refuses."""
        self.ledger.lose(error)

    def keep(self, sample: Sample) -> str | None:
        """A row that is encoded; the reason for which training drops it all the same, None if it stays."""
        self.ledger.keep()
        try:
            lost = self._lost_to_length(sample)
        except UserError as error:
            self.refusal = self.refusal or error.message
            return None
        if lost is not None:
            self.ledger.lose_kept(lost)
        return None if lost is None else lost.reason

    def close(self, *, num_rows: int | None) -> str | None:
        """Decide, and return a warning where that cannot be done: a sample of ``num_rows`` rows may be unlike the rest.

        Of a sample it is certain that training refuses to begin when it alone has more losses than all rows may have.
        """
        allowed, lost = self._data.max_drop, self.ledger.lost
        try:
            self.ledger.check(max_drop=allowed)
        except BudgetError as error:
            most = allowed * num_rows if num_rows is not None and allowed < 1 else allowed
            if num_rows is not None and allowed < 1 and lost <= most:
                return f"training may not begin, if the other rows are like this sample: {error.message}"
            self.refusal = self.refusal or error.message
        if self.ledger.read and not self.ledger.prepared and num_rows in (None, self.ledger.read):
            self.refusal = self.refusal or f"no row is left to train on: {self.ledger.reasons()}"
        return None

    def _lost_to_length(self, sample: Sample) -> RowError | None:
        """Why nothing of a sample stays within ``data.max_length``; raises `UserError` as training does."""
        data = self._data
        if len(sample.input_ids) <= data.max_length:  # no leaf is longer than the whole tree
            return None
        try:
            cut_sample(sample, max_length=data.max_length, overflow=data.overflow, units=self._units)
        except RowDropped as lost:
            return lost
        return None
