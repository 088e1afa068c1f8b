"""A portion: some consecutive rows of an order, or of the files, that are resolved together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError, plain_error, row_error
from luthier.ledger import Ledger
from luthier.records import Address
from luthier.sources import RowBytes, Source
from luthier.store.shard import KEY_BYTES

Ints = NDArray[np.int64]

_COLUMNS = ("rows", "sample_ids", "source_ids", "file_ids", "row_numbers")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadPortion:
    """n rows as they were read. ``rows``: their global numbers, ``source_ids``: which source each is from."""

    rows: Ints
    source_ids: Ints
    read: Sequence[RowBytes | RowError]


@dataclass(frozen=True, kw_only=True, slots=True)
class LostRow:
    """A row that is not trained: its place in the portion, why (with its address), and its bytes if it has any."""

    place: int
    error: RowError
    raw: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolvedPortion:
    """n rows whose samples are in the store, or that are lost.

    rows         int64[n], global numbers
    sample_ids   int64[n], the row's sample in the store; -1: the row is lost
    keys         uint8[n, 32], the keys of the rows; zeros where a row could not be read
    source_ids   int64[n], index into the sources
    file_ids     int64[n], index into the files seen so far: all ``new_files`` up to this portion, one after the other
    row_numbers  int64[n], counted from 1 in each file
    new_files    files that no portion before this one had
    ledger       what became of these rows, nothing else
    lost         the lost ones, in order
    id_digests   uint64[n] as `sources.row_ids.id_digests`, or empty
    """

    rows: Ints
    sample_ids: Ints
    keys: NDArray[np.uint8]
    source_ids: Ints
    file_ids: Ints
    row_numbers: Ints
    new_files: tuple[str, ...]
    ledger: Ledger
    lost: tuple[LostRow, ...]
    id_digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return len(self.rows)

    def to_bytes(self) -> bytes:
        """The portion as a message for another process."""
        message: dict[str, object] = {name: getattr(self, name).tobytes() for name in _COLUMNS}
        message["keys"] = self.keys.tobytes()
        message["id_digests"] = self.id_digests.tobytes()
        message["new_files"] = self.new_files
        message["ledger"] = self.ledger.to_json()
        message["lost"] = [(row.place, plain_error(row.error), row.error.address, row.raw) for row in self.lost]
        return msgspec.msgpack.encode(message)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Self:
        """Read what `to_bytes` wrote; the arrays are read-only."""
        message = msgspec.msgpack.decode(encoded)
        return cls(
            **{name: np.frombuffer(message[name], np.int64) for name in _COLUMNS},
            keys=np.frombuffer(message["keys"], np.uint8).reshape(-1, KEY_BYTES),
            id_digests=np.frombuffer(message["id_digests"], np.uint64),
            new_files=tuple(message["new_files"]),
            ledger=Ledger.from_json(message["ledger"]),
            lost=tuple(
                LostRow(place=place, error=row_error(error, Address(**address)), raw=raw)
                for place, error, address, raw in message["lost"]
            ),
        )


# --------------------------------------------------------------------------------------------------------------------
# Portions as they are read: one file after the other, or by number from the sources' indexes. Nothing is decoded.


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
