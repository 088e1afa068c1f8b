"""Units of preparation: stretches of the data that one process reads and resolves as a whole, whichever process it is.

Files with a row a line are cut by bytes, so a unit is read at the speed of the disk and known again by one digest of
its bytes. Of other sources a unit is a range of row numbers.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from luthier import __version__
from luthier.errors import PlainRowError, RowError, StoreError, plain_error, row_error
from luthier.ledger import Ledger
from luthier.preparation.resolver import LostRow, ResolvedPortion, conversion_of, key_array
from luthier.records import Address, Ints
from luthier.sources import RowBytes, text_files
from luthier.sources.files import DataFile
from luthier.sources.origins import LocalFiles
from luthier.sources.row_index import RowIndex
from luthier.sources.source import Source
from luthier.store import SampleStore
from luthier.store.disk import Disk
from luthier.store.format import UNITS, joined

UNIT_BYTES = 16_000_000  # a second of work: little to lose or to wait for, and much beside what sharing it costs
UNIT_ROWS = 1_000
SKIP_BYTES = 1 << 20
NEWLINE = ord("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class LineUnit:
    """The lines of a file that begin in ``start:stop``, in bytes."""

    source: int
    file: DataFile
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexUnit:
    """The rows ``start:stop`` of a source's index."""

    source: int
    start: int
    stop: int


WorkUnit = LineUnit | IndexUnit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitBytes:
    """The lines of a unit, ``start:stop`` of its file; good until the next unit is read.

    ``digest`` is of all that decides the rows. ``more``: bytes of a last line that is too long to be kept.
    ``is_first``: no row of the file comes before.
    """

    unit: LineUnit
    digest: str
    start: int
    stop: int
    is_first: bool
    parts: Sequence[memoryview]
    more: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutUnit:
    """A unit's rows. ``first_line`` is the number of lines before it in its file, ``num_lines`` how many it has; both
    are 0 for an `IndexUnit`."""

    unit: WorkUnit
    rows: Iterator[RowBytes | RowError]
    first_line: int = 0
    num_lines: int = 0


@dataclass(kw_only=True, eq=False)
class WorkUnits:
    """All units of some sources, in the order of their rows. The same for every process that sees the same data."""

    sources: Sequence[Source]
    units: list[WorkUnit] = field(default_factory=list)
    _indexes: dict[int, RowIndex] = field(default_factory=dict)
    _line_counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # so many lines before this byte
    _buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, sources: Sequence[Source], *, spool: Path | None = None) -> WorkUnits | None:
        """The units of these sources; None if one of them is a stream. ``spool``: see `Source.index`.

        Raises `SourceError`.
        """
        units = cls(sources=sources)
        for number, source in enumerate(sources):
            files = _files_of_lines(source)
            if files is not None:
                units.units += [
                    LineUnit(source=number, file=file, start=start, stop=min(start + UNIT_BYTES, file.size))
                    for file in files
                    for start in range(0, file.size, UNIT_BYTES)
                ]
                continue
            index = source.index(spool=spool)
            if index is None:
                return None
            units._indexes[number] = index
            for start in range(0, len(index), UNIT_ROWS):
                units.units.append(IndexUnit(source=number, start=start, stop=min(start + UNIT_ROWS, len(index))))
        return units

    @property
    def identity(self) -> str:
        """Hex digest of what the units are, so that only those share work who have the same."""
        parts = [conversion_of(source) for source in self.sources]
        parts += map(repr, self.units)
        parts += [index.identity for index in self._indexes.values()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def read(self, number: int) -> UnitBytes | CutUnit:
        """Read a unit, as bytes if they can tell that they are known, else as rows. Raises `SourceError`."""
        unit = self.units[number]
        if isinstance(unit, LineUnit):
            return self._read_bytes(unit)
        rows = self._indexes[unit.source].read(np.arange(unit.start, unit.stop, dtype=np.int64))
        return CutUnit(unit=unit, rows=iter(rows))

    def cut(self, read: UnitBytes) -> CutUnit:
        """The rows of what was read last."""
        raw = b"".join(read.parts)
        # a line that goes on behind the unit is its own, and so is one that the file ends in
        num_lines = raw.count(b"\n") + (read.more > 0 or (bool(raw) and not raw.endswith(b"\n")))
        first_line = self._lines_before(read.unit.file, read.start)
        self._line_counts[read.unit.file.path] = (read.stop, first_line + num_lines)
        lines, file = io.BytesIO(raw), read.unit.file
        rows = text_files.read_lines(lines, file, number=first_line, is_first=read.is_first, more=read.more)
        return CutUnit(unit=read.unit, rows=rows, first_line=first_line, num_lines=num_lines)

    def pass_over(self, read: UnitBytes, num_lines: int) -> None:
        """Say how many lines there were, where it is known already, so that nobody needs to count them."""
        at, lines = self._line_counts.get(read.unit.file.path, (0, 0))
        if at == read.start or read.is_first:
            self._line_counts[read.unit.file.path] = (read.stop, num_lines + (0 if read.is_first else lines))

    def _read_bytes(self, unit: LineUnit) -> UnitBytes:
        unit.file.check_unchanged()
        with text_files.open_text_file(unit.file) as stream:
            is_first = unit.start <= stream.tell()  # which is behind a byte order mark
            if not is_first:
                stream.seek(unit.start - 1)
                _skip_line(stream)  # it began in an earlier unit
            start = stream.tell()
            parts = [self._fill(stream, max(0, unit.stop - start))]
            more = 0
            if len(parts[0]) and parts[0][-1] != NEWLINE:
                parts.append(memoryview(stream.readline(text_files.MAX_LINE_BYTES + 1)))
                more = 0 if len(parts[1]) and parts[1][-1] == NEWLINE else _skip_line(stream)
            stop = stream.tell()
        unit.file.check_unchanged()
        conversion = conversion_of(self.sources[unit.source])
        about = "\0".join((conversion, unit.file.kind.value, str(is_first), str(more), ""))
        digest = _digest(about.encode(), parts)
        return UnitBytes(unit=unit, digest=digest, start=start, stop=stop, is_first=is_first, parts=parts, more=more)

    def _fill(self, stream: IO[bytes], num_bytes: int) -> memoryview:
        # one buffer for all units: fresh memory for each would cost as much as reading
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(max(num_bytes, min(UNIT_BYTES, 1 << 24)))
        whole = memoryview(self._buffer)[:num_bytes]
        filled = 0
        while filled < num_bytes and (got := stream.readinto(whole[filled:])):  # type: ignore[attr-defined]
            filled += got
        return whole[:filled]

    def _lines_before(self, file: DataFile, offset: int) -> int:
        at, lines = self._line_counts.get(file.path, (0, 0))
        if at > offset:
            at, lines = 0, 0
        with text_files.open_text_file(file) as stream:
            stream.seek(at)
            while at < offset:
                bite = stream.read(min(SKIP_BYTES, offset - at))
                lines += bite.count(b"\n")
                at += len(bite)
        return lines


def _files_of_lines(source: Source) -> Sequence[DataFile] | None:
    """The files of a source if all of them have a row a line and all their rows count."""
    config = source.config
    if (config.slice, config.max_rows, config.first_rows) != (None, None, None) or not isinstance(
        source.origin, LocalFiles
    ):
        return None
    files = source.origin.files
    return files if all(not file.compression and text_files.has_row_a_line(file) for file in files) else None


def _digest(about: bytes, parts: Sequence[memoryview]) -> str:
    """Hex digest of all bytes, at the speed of memory: 128 bits of XXH3. It tells accidents apart, not adversaries."""
    digest = xxhash.xxh3_128(about)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _skip_line(stream: IO[bytes]) -> int:
    """Go to the next line's beginning; how many bytes that was."""
    skipped = 0
    while bite := stream.readline(SKIP_BYTES):
        skipped += len(bite)
        if bite.endswith(b"\n"):
            break
    return skipped


# --------------------------------------------------------------------------------------------------------------------
# What came of a unit: enough to know its rows' samples, or why they are lost, without reading a row of it again.
#
# Processes share results (`preparation.sharing`), which also stay beside the store under the digest of the unit's
# bytes:
#
#     <store>/units/<digest>    a unit that comes again is not even cut into rows; safe to delete at any time


BLANK_LINE = "blank_line"  # a note: lines between rows, which are no rows


class LostEntry(msgspec.Struct, frozen=True, array_like=True):
    """A row that is lost, by its place in the unit."""

    place: int
    error: PlainRowError
    raw: bytes | None


class UnitResult(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a unit. Arrays are bytes: ``row_numbers`` int64[n], less the lines before the unit; ``keys``
    uint8[n, 32]; ``file_ids`` int64[n], index into ``files``, both empty where all rows are of the unit's own file;
    ``id_digests`` uint64[n], or empty where no row has an id. ``worded_by``: the version of Luthier that told why
    rows are lost."""

    num_lines: int
    row_numbers: bytes
    keys: bytes
    file_ids: bytes
    files: tuple[str, ...]
    notes: dict[str, int]
    lost: tuple[LostEntry, ...]
    id_digests: bytes
    worded_by: str = ""

    @classmethod
    def of(cls, unit: CutUnit, portions: Sequence[ResolvedPortion], files: Sequence[str]) -> UnitResult:
        """The result of a unit from all its portions; ``files`` by their numbers in these."""
        notes: Counter[str] = Counter()
        lost: list[LostEntry] = []
        place = 0
        for portion in portions:
            notes.update(portion.ledger.notes)
            lost.extend(LostEntry(place + row.place, plain_error(row.error), row.raw) for row in portion.lost)
            place += len(portion)
        own_file = isinstance(unit.unit, LineUnit)
        numbers, file_ids = np.unique(joined([portion.file_ids for portion in portions]), return_inverse=True)
        return cls(
            num_lines=unit.num_lines,
            row_numbers=(joined([portion.row_numbers for portion in portions]) - unit.first_line).tobytes(),
            keys=b"".join(portion.keys.tobytes() for portion in portions),
            file_ids=b"" if own_file else file_ids.astype(np.int64).tobytes(),
            files=() if own_file else tuple(files[number] for number in numbers.tolist()),
            notes=dict(notes),
            lost=tuple(lost),
            id_digests=_id_digests(portions).tobytes(),
            worded_by=__version__ if lost else "",
        )

    def __len__(self) -> int:
        return len(self.row_numbers) // 8

    def sample_ids(self, store: SampleStore) -> Ints | None:
        """int64[n]: the samples of the rows, -1 for those that are lost; None if the store lacks one."""
        is_lost = np.zeros(len(self), dtype=np.bool_)
        is_lost[[row.place for row in self.lost]] = True
        found = store.lookup(key_array([self.keys]))
        found[is_lost] = -1
        return None if (found[~is_lost] < 0).any() else found


class Placing:
    """Turns the results of all units, in order, into portions with global numbers, addresses and files."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._num_rows = 0
        self._num_lines: Counter[tuple[int, str]] = Counter()  # of a source's file, as two sources may read one

    def place(self, unit: LineUnit | None, source: int, result: UnitResult, sample_ids: Ints) -> ResolvedPortion:
        """The next unit's rows; ``unit`` None if its row numbers need no shift."""
        num_known = len(self._files)
        row_numbers = np.frombuffer(result.row_numbers, np.int64)
        if unit is None:
            numbers = np.array([self._number(file) for file in result.files], dtype=np.int64)
            file_ids = numbers[np.frombuffer(result.file_ids, np.int64)]
        else:
            row_numbers = row_numbers + self._num_lines[source, unit.file.path]
            self._num_lines[source, unit.file.path] += result.num_lines
            file_ids = np.full(len(result), self._number(unit.file.path) if len(result) else 0, dtype=np.int64)
        names = list(self._files)
        ledger = Ledger(read=len(result) - len(result.lost), prepared=len(result) - len(result.lost))
        ledger.notes.update(result.notes)
        if unit is not None and (num_blank := result.num_lines - len(result)):
            ledger.note(BLANK_LINE, num_blank)
        lost = []
        for row in result.lost:
            address = Address(file=names[int(file_ids[row.place])], row=int(row_numbers[row.place]))
            lost.append(LostRow(place=row.place, error=row_error(row.error, address), raw=row.raw))
            ledger.lose(lost[-1].error)
        first, self._num_rows = self._num_rows, self._num_rows + len(result)
        return ResolvedPortion(
            rows=np.arange(first, self._num_rows, dtype=np.int64),
            sample_ids=sample_ids,
            keys=key_array([result.keys]),
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

    def __init__(self, folder: Path) -> None:
        self._folder = folder / UNITS
        self._disk = Disk()
        self._disk.make_folder(self._folder)

    def find(self, digest: str, store: SampleStore) -> bytes | None:
        """The encoded result of a unit with the same bytes, if there is a sound one and the store has all of it.

        Its lost rows are encoded again where another version told why: reasons and words are of the Luthier that runs.
        """
        encoded = self._disk.read_sealed(self._folder / digest)
        if encoded is None:
            return None
        try:
            result = decode_result(encoded)
        except StoreError:  # what another version of Luthier wrote is encoded again
            return None
        is_old = bool(result.lost) and result.worded_by != __version__
        return None if is_old or result.sample_ids(store) is None else encoded

    def keep(self, digest: str, encoded: bytes) -> None:
        """Keep the result of a unit with these bytes. Raises `StoreError`."""
        self._disk.publish_sealed(self._folder / digest, encoded)


def decode_result(encoded: bytes) -> UnitResult:
    """A result from its message. Raises `StoreError` if it is of another version."""
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
