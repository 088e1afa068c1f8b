"""Portions as they are read: one file after the other, or by number from the sources' indexes. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from luthier.encoding.portions import Ints, ReadPortion
from luthier.errors import RowError
from luthier.sources import RowBytes, Source

# A portion of the files: its message to a worker is cheap beside its work, and so many of them fit into memory that no
# worker waits. Rows that need no encoding are looked up this many at a time.
PORTION_BYTES = 500_000
PORTION_ROWS = 2_000


class ReadsRows(Protocol):
    """What resolving needs of `sources.RowIndex`."""

    def __len__(self) -> int:
        """Rows there are."""

    def read(self, numbers: Ints) -> list[RowBytes | RowError]:
        """The rows with these numbers, in this order."""


def read_in_order(sources: Sequence[Source]) -> Iterator[ReadPortion]:
    """All rows of all sources, in the order of the files."""
    first = 0
    for number, source in enumerate(sources):
        for rows in some_at_a_time(source.row_bytes()):
            yield ReadPortion(
                rows=np.arange(first, first + len(rows), dtype=np.int64),
                source_ids=np.full(len(rows), number, dtype=np.int64),
                read=rows,
            )
            first += len(rows)


def read_by_number(indexes: Sequence[ReadsRows], portions: Iterable[Ints]) -> Iterator[ReadPortion]:
    """The rows with these global numbers: a source's first number + the row's number in its index."""
    ends = np.cumsum([len(index) for index in indexes], dtype=np.int64)
    for rows in portions:
        outside = rows[(rows < 0) | (rows >= ends[-1])]
        assert not len(outside), f"row {outside[0]} of {ends[-1]}"
        source_ids = np.searchsorted(ends, rows, side="right").astype(np.int64)
        read: list[RowBytes | RowError | None] = [None] * len(rows)
        for source in np.unique(source_ids).tolist():
            places = np.flatnonzero(source_ids == source)
            index = indexes[source]
            numbers = rows[places] - (ends[source] - len(index))
            for place, row in zip(places.tolist(), index.read(numbers), strict=True):
                read[place] = row
        yield ReadPortion(rows=rows, source_ids=source_ids, read=[row for row in read if row is not None])


def some_at_a_time(rows: Iterator[RowBytes | RowError]) -> Iterator[list[RowBytes | RowError]]:
    """Rows in lists that are each worth a portion."""
    some: list[RowBytes | RowError] = []
    num_bytes = 0
    for row in rows:
        some.append(row)
        if isinstance(row, RowBytes):
            num_bytes += len(row.raw)
        if num_bytes >= PORTION_BYTES or len(some) >= PORTION_ROWS:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some
