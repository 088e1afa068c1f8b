"""Rows that share an id: a data set that was put together twice, or whose parts overlap, often shows it there first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.records import Address
from luthier.sources.rows import RowBytes
from luthier.sources.source import Source

_ROWS_WITHOUT = 1_000  # a source whose first rows have no id has no such column
_ROWS_LOOKED_AT = 8
_ID_AT_FRONT = re.compile(rb'\s*\{\s*"id"\s*:\s*("[^"\\]*"|-?[0-9]+)\s*[,}]')


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedIds:
    """``rows`` are those whose id an earlier row of the source has; ``first`` is the first such pair."""

    source: str
    rows: int
    id: str
    first: tuple[Address, Address]


def repeated_ids(source: Source) -> RepeatedIds | None:
    """The rows of a source whose ``id`` an earlier row has; None if there are none, or no such column.

    Reads all rows once, and decodes nothing but the id; takes 16 bytes a row. Ids are compared as they are written: 1
    and "1" are two. A source none of whose first 1,000 rows has one is read no further. Raises `SourceError`.
    """
    digests = np.fromiter((_digest(raw) for _, raw in _ids(source)), np.uint64)
    ascending = np.sort(digests)
    repeats = ascending[1:][ascending[1:] == ascending[:-1]]
    if not len(repeats):
        return None
    first, second = _first_pair(digests, repeats)
    found = list(islice(_ids(source), first, second + 1))
    (where, raw), (again, _) = found[0], found[-1]
    return RepeatedIds(
        source=source.name, rows=len(repeats), id=raw.decode("utf-8", "backslashreplace"), first=(where, again)
    )


def _first_pair(digests: NDArray[np.uint64], repeats: NDArray[np.uint64]) -> tuple[int, int]:
    """Where the first digest that comes twice stands for the second time, and where before."""
    seen: dict[int, int] = {}
    for place in np.flatnonzero(np.isin(digests, repeats)).tolist():
        before = seen.setdefault(int(digests[place]), place)
        if before != place:
            return before, place
    raise AssertionError("no digest comes twice")


def id_digests(rows: Sequence[RowBytes | RowError]) -> NDArray[np.uint64]:
    """uint64[n]: a digest of each row's ``id`` as it is written, 0 where it has none; empty if no first row has one.

    Ids are equal where digests are, but for one pair in 2**64.
    """
    if not any(isinstance(row, RowBytes) and b'"id"' in row.raw for row in rows[:_ROWS_LOOKED_AT]):
        return np.zeros(0, np.uint64)
    raw = (_id_of(row) if isinstance(row, RowBytes) else b"null" for row in rows)
    return np.array([0 if each == b"null" else _digest(each) for each in raw], dtype=np.uint64)


def _digest(raw: bytes) -> int:
    return xxhash.xxh3_64_intdigest(raw)


class _OnlyId(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_OnlyId)


def _ids(source: Source) -> Iterator[tuple[Address, bytes]]:
    """The ids as they are written, with the addresses of their rows; rows that cannot be read have none."""
    has_ids = False
    for number, row in enumerate(source.row_bytes()):
        if not has_ids and number == _ROWS_WITHOUT:
            return
        if isinstance(row, RowBytes) and (raw := _id_of(row)) != b"null":
            has_ids = True
            yield row.address, raw


def _id_of(row: RowBytes) -> bytes:
    at_front = _ID_AT_FRONT.match(row.raw)  # where it nearly always is; the whole row is looked through only else
    if at_front is not None:
        return at_front[1]
    try:
        return bytes(_DECODER.decode(row.raw).id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b"null"
