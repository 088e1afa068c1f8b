"""Which rows are verified, and where their samples come from: encoded now, or read from the store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from luthier.config.schema import RunConfig
from luthier.encoding.prepared import Prepared, PreparedSet
from luthier.errors import RowError, UserError
from luthier.records import Address, Row, Sample
from luthier.sources import RowBytes, Source, open_sources, resolve_sources


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
        )
    if not chosen:
        raise UserError(f"this run names no data for {split}", hint=f"name some with data.{split}")
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
