"""What came of a unit: enough to know its rows' samples, or why they are lost, without reading a row of it again.

Results travel between processes (`work_list`), and stay beside the store under the digest of the unit's bytes:

    <store>/units/<digest>    a unit that comes again is not even cut into rows; safe to delete at any time
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.encoding.disk import Disk
from luthier.encoding.naming import UNITS
from luthier.encoding.portions import Ints, LostRow, ResolvedPortion
from luthier.encoding.shard import KEY_BYTES
from luthier.encoding.store import SampleStore
from luthier.encoding.units import CutUnit, LineUnit
from luthier.errors import RowDropped, RowError, StoreError
from luthier.ledger import Ledger
from luthier.records import Address

DIGEST_BYTES = 32
BLANK_LINE = "blank_line"  # a note: lines between rows, which are no rows


class LostEntry(msgspec.Struct, frozen=True, array_like=True):
    """A row that is lost, by its place in the unit."""

    place: int
    dropped: bool
    reason: str
    detail: str
    field: str | None
    raw: bytes | None

    @classmethod
    def of(cls, row: LostRow, place: int) -> LostEntry:
        """The entry of a row whose place in its unit is this."""
        error = row.error
        dropped = isinstance(error, RowDropped)
        return cls(place, dropped, error.reason, error.detail, error.field, row.raw)

    def at(self, address: Address) -> RowError:
        """The error, for the row that is now at this address."""
        kind = RowDropped if self.dropped else RowError
        return kind(self.reason, self.detail, address=address, field=self.field)


class UnitResult(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a unit. Arrays are bytes: ``row_numbers`` int64[n], less the lines before the unit; ``keys``
    uint8[n, 32]; ``file_ids`` int64[n], index into ``files``, both empty where all rows are of the unit's own file;
    ``id_digests`` uint64[n], or empty where no row has an id."""

    num_lines: int
    row_numbers: bytes
    keys: bytes
    file_ids: bytes
    files: tuple[str, ...]
    notes: dict[str, int]
    lost: tuple[LostEntry, ...]
    id_digests: bytes

    @classmethod
    def of(cls, unit: CutUnit, portions: Sequence[ResolvedPortion], files: Sequence[str]) -> UnitResult:
        """The result of a unit from all its portions; ``files`` by their numbers in these."""
        notes: Counter[str] = Counter()
        lost: list[LostEntry] = []
        place = 0
        for portion in portions:
            notes.update(portion.ledger.notes)
            lost.extend(LostEntry.of(row, place + row.place) for row in portion.lost)
            place += len(portion)
        own_file = isinstance(unit.unit, LineUnit)
        numbers, file_ids = np.unique(_joined([portion.file_ids for portion in portions]), return_inverse=True)
        return cls(
            num_lines=unit.num_lines,
            row_numbers=(_joined([portion.row_numbers for portion in portions]) - unit.first_line).tobytes(),
            keys=b"".join(portion.keys.tobytes() for portion in portions),
            file_ids=b"" if own_file else file_ids.astype(np.int64).tobytes(),
            files=() if own_file else tuple(files[number] for number in numbers.tolist()),
            notes=dict(notes),
            lost=tuple(lost),
            id_digests=_id_digests(portions).tobytes(),
        )

    def __len__(self) -> int:
        return len(self.row_numbers) // 8

    def sample_ids(self, store: SampleStore) -> Ints | None:
        """int64[n]: the samples of the rows, -1 for those that are lost; None if the store lacks one."""
        is_lost = np.zeros(len(self), dtype=np.bool_)
        is_lost[[row.place for row in self.lost]] = True
        found = store.lookup(self.key_array())
        found[is_lost] = -1
        return None if (found[~is_lost] < 0).any() else found

    def key_array(self) -> NDArray[np.uint8]:
        """uint8[n, KEY_BYTES]."""
        return np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES)


class Placing:
    """Turns the results of all units, in order, into portions with global numbers, addresses and files."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._num_rows = 0
        self._num_lines: Counter[str] = Counter()

    def place(self, unit: LineUnit | None, source: int, result: UnitResult, sample_ids: Ints) -> ResolvedPortion:
        """The next unit's rows; ``unit`` None if its row numbers need no shift."""
        num_known = len(self._files)
        row_numbers = np.frombuffer(result.row_numbers, np.int64)
        if unit is None:
            numbers = np.array([self._number(file) for file in result.files], dtype=np.int64)
            file_ids = numbers[np.frombuffer(result.file_ids, np.int64)]
        else:
            row_numbers = row_numbers + self._num_lines[unit.file.path]
            self._num_lines[unit.file.path] += result.num_lines
            file_ids = np.full(len(result), self._number(unit.file.path) if len(result) else 0, dtype=np.int64)
        names = list(self._files)
        ledger = Ledger(read=len(result) - len(result.lost), prepared=len(result) - len(result.lost))
        ledger.notes.update(result.notes)
        if unit is not None and (num_blank := result.num_lines - len(result)):
            ledger.note(BLANK_LINE, num_blank)
        lost = []
        for row in result.lost:
            address = Address(file=names[int(file_ids[row.place])], row=int(row_numbers[row.place]))
            lost.append(LostRow(place=row.place, error=row.at(address), raw=row.raw))
            ledger.lose(lost[-1].error)
        first, self._num_rows = self._num_rows, self._num_rows + len(result)
        return ResolvedPortion(
            rows=np.arange(first, self._num_rows, dtype=np.int64),
            sample_ids=sample_ids,
            keys=result.key_array(),
            source_ids=np.full(len(result), source, dtype=np.int64),
            file_ids=file_ids,
            row_numbers=row_numbers,
            new_files=tuple(names[num_known:]),
            ledger=ledger,
            lost=tuple(lost),
            id_digests=np.frombuffer(result.id_digests, np.uint64),
        )

    def _number(self, file: str) -> int:
        return self._files.setdefault(file, len(self._files))


class RememberedUnits:
    """Results of earlier preparations, by the digest of what was read."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self._folder = folder / UNITS
        self._disk = Disk() if disk is None else disk
        self._disk.make_folder(self._folder)

    def find(self, digest: str, store: SampleStore) -> bytes | None:
        """The encoded result of a unit with the same bytes, if there is a sound one and the store has all of it."""
        raw = self._disk.read(self._folder / digest)
        if raw is None or hashlib.sha256(raw[DIGEST_BYTES:]).digest() != raw[:DIGEST_BYTES]:
            return None
        encoded = raw[DIGEST_BYTES:]
        return None if decode_result(encoded).sample_ids(store) is None else encoded

    def keep(self, digest: str, encoded: bytes) -> None:
        """Keep the result of a unit with these bytes. Raises `StoreError`."""
        whole = [hashlib.sha256(encoded).digest() + encoded]
        self._disk.publish(self._folder / digest, whole, durable=False)


def encode_result(result: UnitResult) -> bytes:
    """A result as a message."""
    return msgspec.msgpack.encode(result)


def decode_result(encoded: bytes) -> UnitResult:
    """Read what `encode_result` wrote. Raises `StoreError` if it is of another version."""
    try:
        return msgspec.msgpack.decode(encoded, type=UnitResult)
    except msgspec.MsgspecError as error:
        hint = "give all processes of a run the same version of Luthier"
        raise StoreError(f"the result of a unit cannot be read: {error}", hint=hint) from error


def _id_digests(portions: Sequence[ResolvedPortion]) -> NDArray[np.uint64]:
    if not any(len(portion.id_digests) for portion in portions):
        return np.zeros(0, np.uint64)
    absent = (np.zeros(len(portion), np.uint64) for portion in portions)
    return np.concatenate(
        [
            portion.id_digests if len(portion.id_digests) else zeros
            for portion, zeros in zip(portions, absent, strict=True)
        ]
    )


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
