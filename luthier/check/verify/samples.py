"""Which rows are verified, and where their samples come from: encoded now, or read from the store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from luthier.config.choices import Overflow
from luthier.config.schema import RunConfig
from luthier.errors import BudgetError, RowDropped, RowError, UserError
from luthier.layout.cutting import plan_windows
from luthier.layout.trees import cut_prompt
from luthier.ledger import Ledger
from luthier.loader.settings import units_of
from luthier.packing.settings import UnitKind
from luthier.preparation.prepared import Prepared, PreparedSet
from luthier.records import Address, Row, Sample
from luthier.sources import RowBytes, Source, open_sources, resolve_sources
from luthier.writing import counted


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
        most, overflow = self._data.max_length, self._data.overflow
        if len(sample.input_ids) <= most:  # no leaf is longer than the whole tree
            return None
        leaves = list(sample.segments())
        longest = max(len(leaf) for leaf in leaves)
        if longest <= most:
            return None
        too_long = RowDropped(
            "too_long", f"{counted(longest, 'token')}, data.max_length is {most}", address=sample.address
        )
        if self._units is not UnitKind.NONE and overflow is Overflow.TRUNCATE:
            prompt = sample.branches[0].length
            kept = cut_prompt(sample.prompt_turns, prompt, room=most - (longest - prompt))
            return too_long if kept is None else None
        drops = overflow in (Overflow.DROP, Overflow.KEEP_ANSWER)
        if self._units is not UnitKind.NONE and drops:
            return too_long
        if drops:
            return None if any(len(leaf) <= most for leaf in leaves) else too_long
        windows = [window for leaf in leaves for window in plan_windows(leaf, max_length=most, overflow=overflow)]
        if any(window.num_targets for window in windows):
            return None
        what = f"no target within data.max_length={counted(most, 'token')}"
        return RowDropped("no_target_left", what, address=sample.address)
