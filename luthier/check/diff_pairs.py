"""Which row of one run description is which row of another."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from luthier.errors import RowError
from luthier.records import Address
from luthier.sources import RowBytes, Source
from luthier.sources.rows import decode_row

ROW_BITS = 40  # of a packed place: rows of a file; the rest numbers the file

AnyRow = RowBytes | RowError


class Pairing(StrEnum):
    """How rows are matched."""

    ADDRESS = "by address: both sides read the same rows of the same files"
    CONTENT = "by content, in whatever order: the two sides read different files, or other rows of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a row stands on one side, and the source that knows how to read it."""

    address: Address
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A row and its places; None on the side that has no such row. ``row`` is None where only ``b`` has it."""

    row: AnyRow | None
    a: Place | None
    b: Place | None


def pairing_of(a: Sequence[Source], b: Sequence[Source]) -> Pairing:
    """By address if both sides read the same rows of the same unchanged files, else by content."""
    same = [_reading(source) for source in a] == [_reading(source) for source in b]
    return Pairing.ADDRESS if same else Pairing.CONTENT


def pairs(a: Sequence[Source], b: Sequence[Source], *, sample: int | None = None) -> Iterator[Pair]:
    """All rows of both sides, matched: those of ``a`` in their order, then those that only ``b`` has.

    ``sample`` takes the rows with the smallest digests, about so many (rows that repeat come together): the same rows
    in every file that holds them. By address nothing is kept in memory; by content 16 bytes for each row of ``b``.
    Raises what reading the sources raises.
    """
    match pairing_of(a, b):
        case Pairing.ADDRESS:
            yield from _by_address(a, b, _limit(a, sample, _raw_digest))
        case Pairing.CONTENT:
            yield from _by_content(a, b, _limit(a, sample, _content_digest))
        case unknown:
            raise AssertionError(f"unknown pairing {unknown!r}")


def _reading(source: Source) -> tuple[object, ...]:
    # an origin holds its files with their sizes and times of change; the seed matters only where a sample is taken
    limit = source.config.max_rows
    return source.origin, limit, None if limit is None else source.seed


def _by_address(a: Sequence[Source], b: Sequence[Source], limit: int | None) -> Iterator[Pair]:
    for one, other in zip(a, b, strict=True):
        for row in one.row_bytes():
            if limit is None or _raw_digest(row) <= limit:
                address = _address(row)
                yield Pair(row=row, a=Place(address=address, source=one), b=Place(address=address, source=other))


def _by_content(a: Sequence[Source], b: Sequence[Source], limit: int | None) -> Iterator[Pair]:
    index = _ContentIndex(b, limit)
    for source in a:
        for row in source.row_bytes():
            digest = _content_digest(row)
            if limit is None or digest <= limit:
                yield Pair(row=row, a=Place(address=_address(row), source=source), b=index.take(digest))
    for place in index.left():
        yield Pair(row=None, a=None, b=place)


class _ContentIndex:
    """The rows of one side by digest: where each stands, and which were taken."""

    def __init__(self, sources: Sequence[Source], limit: int | None) -> None:
        self._files: dict[tuple[int, str], int] = {}
        self._sources = sources
        digests, places = array("Q"), array("Q")
        for number, source in enumerate(sources):
            for row in source.row_bytes():
                digest = _content_digest(row)
                if limit is None or digest <= limit:
                    address = _address(row)
                    file = self._files.setdefault((number, address.file), len(self._files))
                    digests.append(digest)
                    places.append(file << ROW_BITS | address.row)
        found = np.array(digests, dtype=np.uint64)
        order = np.argsort(found, kind="stable")  # rows that repeat keep their order
        self._digests = found[order]
        self._places = np.array(places, dtype=np.uint64)[order]
        self._taken = np.zeros(len(found), dtype=np.bool_)
        self._repeats: Counter[int] = Counter()  # how often a digest was taken, for digests that come again
        self._keys = list(self._files)

    def take(self, digest: int) -> Place | None:
        """The first row with this digest that was not taken yet."""
        start = int(np.searchsorted(self._digests, np.uint64(digest), side="left"))
        if start < len(self._taken) and self._taken[start]:
            self._repeats[digest] += 1
            start += self._repeats[digest]
        if start >= len(self._taken) or int(self._digests[start]) != digest:
            return None
        self._taken[start] = True
        return self._place(start)

    def left(self) -> Iterator[Place]:
        """The rows that nobody took, in the order of their files."""
        remaining = np.flatnonzero(~self._taken)
        for number in remaining[np.argsort(self._places[remaining])].tolist():
            yield self._place(number)

    def _place(self, number: int) -> Place:
        packed = int(self._places[number])
        source, file = self._keys[packed >> ROW_BITS]
        return Place(address=Address(file=file, row=packed & (1 << ROW_BITS) - 1), source=self._sources[source])


def _limit(sources: Sequence[Source], sample: int | None, digest: Callable[[AnyRow], int]) -> int | None:
    """The largest digest of a sample; None takes all rows."""
    if sample is None:
        return None
    smallest = heapq.nsmallest(sample, (digest(row) for source in sources for row in source.row_bytes()))
    return smallest[-1] if len(smallest) == sample else None


def _raw_digest(row: AnyRow) -> int:
    return _hash(str(row.args).encode("utf-8", "backslashreplace") if isinstance(row, RowError) else row.raw)


def _content_digest(row: AnyRow) -> int:
    """What a row says, however its JSON is spaced and its keys are ordered."""
    if isinstance(row, RowError):
        return _raw_digest(row)
    try:
        return _hash(msgspec.json.encode(decode_row(row).data, order="deterministic"))
    except (RowError, OverflowError):
        return _hash(row.raw)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _address(row: AnyRow) -> Address:
    assert row.address is not None, "rows that are read have an address"
    return row.address
