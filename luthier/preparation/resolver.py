"""Resolving rows: find a row's sample in the store, or encode it and put it there; or name why it is lost."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowDropped, RowError, RowForbidden, plain_error, row_error
from luthier.ledger import Ledger
from luthier.preparation.workers import Chunk, Outcome, RowEncoder, encode_chunks
from luthier.records import SAMPLES_VERSION, Address, Ints
from luthier.sources import RowBytes
from luthier.sources.row_index import RowIndex
from luthier.sources.source import Source, id_digests
from luthier.store import SHARD_BYTES, SampleStore, StoreWriter
from luthier.store.format import KEY_BYTES, digest_of_folder, key_in_folder, read_counts, row_key
from luthier.writing import counted

_NO_TARGET = RowDropped("no_target", "no token of it is to be learned")
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
    id_digests   uint64[n] as `sources.source.id_digests`, or empty
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
            keys=key_array([message["keys"]]),
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


def read_by_number(indexes: Sequence[RowIndex], portions: Iterable[Ints]) -> Iterator[ReadPortion]:
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


BYTES_WORTH_HASTE = 24_000_000  # of rows to come: the encoder need not find out by itself that there is much text


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far preparation is, in rows of one split. ``encoded + reused + lost == read``.

    ``num_tokens``: of the rows that were encoded. ``share``: of the whole work, 1.0 at its end; None if nobody knows.
    """

    split: str
    source: str
    read: int
    encoded: int
    reused: int
    lost: int
    num_tokens: int = 0
    share: float | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class Resolver:
    """Resolves portions of rows of one split, once.

    ``eager``: each portion is committed by itself, so that it can be used at once; else portions wait until a shard
    is full, which makes fewer and larger shards.
    """

    sources: Sequence[Source]
    encoder: RowEncoder
    folder: Path
    split: str
    eager: bool
    on_progress: Callable[[Progress], None] | None = None
    num_encoded: int = 0
    num_reused: int = 0
    share: float | None = None  # of the whole work that is done, for reports
    bytes_left: float = math.inf  # of rows that are still to come, as far as anyone knows
    _encodes_here: bool = False
    _num_tokens: int = 0
    _num_lost: int = 0
    _files: dict[str, int] = field(default_factory=dict)
    _under_way: set[bytes] = field(default_factory=set)  # keys that are being encoded, or wait for a commit
    _failed: dict[bytes, RowError] = field(default_factory=dict)  # why rows with this content are lost
    _waiting: deque[_Booked] = field(default_factory=deque)
    store: SampleStore = field(init=False)
    _writer: StoreWriter = field(init=False)

    def __post_init__(self) -> None:
        self._writer = StoreWriter(self.folder, fingerprint=self.encoder.fingerprint, about=self.encoder.about)
        self.store = SampleStore.open(self.folder, fingerprint=self.encoder.fingerprint)

    def resolve(
        self, portions: Iterator[ReadPortion], *, workers: int | Literal["auto"]
    ) -> Generator[ResolvedPortion, None, None]:
        """The portions in their order, each when all that it names is in the store; several are encoded at a time where
        there are workers. Close the generator to stop these.

        Raises `SourceError`, `StoreError`, and `UserError` if a worker dies.
        """
        readers = [source.reader for source in self.sources]
        self._encodes_here = workers in (0, "auto")
        uncommitted = 0
        chunks = encode_chunks(
            self._chunks(portions), self.encoder, readers, workers=workers, bytes_left=lambda: self.bytes_left
        )
        with closing(chunks) as encoded:
            for pending, outcomes in encoded:
                uncommitted += self._book(pending, outcomes)
                if uncommitted and (self.eager or uncommitted >= SHARD_BYTES):
                    self._commit()
                    uncommitted = 0
                yield from self._resolved()
        self._commit()
        yield from self._resolved()
        assert not self._waiting, f"{counted(len(self._waiting), 'portion is', 'portions are')} left over"

    def count(self, *, encoded: int, reused: int, lost: int, source: int) -> None:
        """Count rows that were not resolved here: because all is known of them, or because others have done it."""
        self.num_encoded += encoded
        self.num_reused += reused
        self._num_lost += lost
        self._tell(source)

    def _chunks(self, portions: Iterator[ReadPortion]) -> Iterator[Chunk[_Pending]]:
        fingerprint = self.encoder.fingerprint
        conversions = [conversion_of(source) for source in self.sources]
        nothing = bytes(KEY_BYTES)
        for portion in portions:
            source_ids = portion.source_ids.tolist()
            keys = [
                nothing
                if isinstance(row, RowError)
                else row_key(row.raw, fingerprint=fingerprint, conversion=conversions[source])
                for row, source in zip(portion.read, source_ids, strict=True)
            ]
            pending = _Pending(portion=portion, keys=keys, sample_ids=self.store.lookup(key_array(keys)))
            if self.encoder.takes_media:
                self._look_into_folders(pending)
            self._look_at_media(pending)
            for place in np.flatnonzero(pending.sample_ids < 0).tolist():
                key = keys[place]
                if key not in self._under_way and key not in self._failed and key != nothing:
                    self._under_way.add(key)
                    pending.fresh.append(place)
            rows = [row for row in map(portion.read.__getitem__, pending.fresh) if isinstance(row, RowBytes)]
            if rows and self._encodes_here and BYTES_WORTH_HASTE <= self.bytes_left < math.inf:
                self.encoder.expect_many_rows()
                self._encodes_here = False  # once is enough
            yield Chunk(
                tag=pending,
                rows=rows,
                source_ids=[source_ids[place] for place in pending.fresh],
                num_bytes=sum(len(row.raw) for row in rows),
            )

    def _look_into_folders(self, pending: _Pending) -> None:
        """Look for rows by the keys of their folders, too. A row that is not known keeps that key until it is encoded:
        only then does anyone know whether it names files in its folder, and so is another row in another one."""
        folders: dict[str, bytes] = {}
        for place in np.flatnonzero(pending.sample_ids < 0).tolist():
            row = pending.portion.read[place]
            if isinstance(row, RowBytes):
                if (folder := folders.get(row.address.file)) is None:
                    folder = folders[row.address.file] = digest_of_folder(row.address.folder)
                pending.row_keys[place] = pending.keys[place]
                pending.keys[place] = key_in_folder(pending.keys[place], folder)
        places = list(pending.row_keys)
        pending.sample_ids[places] = self.store.lookup(key_array([pending.keys[place] for place in places]))

    def _look_at_media(self, pending: _Pending) -> None:
        """Give rows whose media have changed since they were encoded keys of their own: what is stored is of others."""
        known = np.flatnonzero(pending.sample_ids >= 0)
        for place in known[self.store.have_media(pending.sample_ids[known])].tolist():
            change = self.encoder.media_change(self.store[int(pending.sample_ids[place])].media)
            if change is not None:
                key = pending.keys[place] = hashlib.sha256(pending.keys[place] + change).digest()
                pending.sample_ids[place] = self.store.lookup(key_array([key]))[0]

    def _book(self, pending: _Pending, outcomes: Sequence[Outcome]) -> int:
        """Put the portion among those that wait for a commit; how many bytes it adds to the store."""
        ledger = Ledger()
        num_bytes = num_encoded = 0
        under_way = [pending.keys[place] for place in pending.fresh]
        for place, outcome in zip(pending.fresh, outcomes, strict=True):
            key = pending.keys[place]
            if isinstance(outcome, RowForbidden):
                raise outcome.stop() from outcome
            if isinstance(outcome, RowError) or not any(outcome.leaf_targets):
                self._under_way.discard(key)
                self._failed[key] = outcome if isinstance(outcome, RowError) else _NO_TARGET
                continue
            if not outcome.in_folder:
                key = pending.keys[place] = pending.row_keys.get(place, key)
            self._writer.add(key, outcome)
            num_bytes += len(outcome.payload)
            num_encoded += 1
            self._num_tokens += outcome.num_tokens
            for what, count in read_counts(outcome.notes):
                ledger.note(what, count)
        lost = tuple(self._lost_rows(pending))
        for row in lost:
            ledger.lose(row.error)
        num_kept = len(pending.keys) - len(lost)
        ledger.read += num_kept
        ledger.prepared += num_kept
        self.num_encoded += num_encoded
        self.num_reused += num_kept - num_encoded
        self._num_lost += len(lost)
        self._waiting.append(
            _Booked(
                portion=self._portion(pending, ledger, lost),
                fresh=pending.fresh,
                under_way=under_way,
                row_keys=pending.row_keys,
            )
        )
        if pending.keys:
            self._tell(int(pending.portion.source_ids[-1]))
        return num_bytes

    def _lost_rows(self, pending: _Pending) -> Iterator[LostRow]:
        for place in np.flatnonzero(pending.sample_ids < 0).tolist():
            row = pending.portion.read[place]
            if isinstance(row, RowError):
                yield LostRow(place=place, error=row, raw=None)
            elif (error := self._failed.get(pending.keys[place])) is not None:
                yield LostRow(place=place, error=error.at(row.address), raw=row.raw)

    def _portion(self, pending: _Pending, ledger: Ledger, lost: tuple[LostRow, ...]) -> ResolvedPortion:
        files = self._files
        num_files = len(files)
        addresses = [_address(row) for row in pending.portion.read]
        file_ids = [files.setdefault(address.file, len(files)) for address in addresses]
        return ResolvedPortion(
            rows=pending.portion.rows,
            sample_ids=pending.sample_ids,
            keys=key_array(pending.keys).copy(),
            source_ids=pending.portion.source_ids,
            file_ids=np.array(file_ids, dtype=np.int64),
            row_numbers=np.array([address.row for address in addresses], dtype=np.int64),
            new_files=tuple(files)[num_files:],
            ledger=ledger,
            lost=lost,
            id_digests=id_digests(pending.portion.read),
        )

    def _commit(self) -> None:
        self._writer.commit()
        self.store = self.store.refresh()

    def _resolved(self) -> Iterator[ResolvedPortion]:
        """The portions, from the first, whose samples all have a number in the store by now."""
        while self._waiting:
            booked = self._waiting[0]
            portion = booked.portion
            if not self._are_all_there(booked):
                return
            is_reused = portion.sample_ids >= 0
            is_reused[booked.fresh] = False
            for number in portion.sample_ids[is_reused].tolist():
                for what, count in self.store.notes(number):
                    portion.ledger.note(what, count)
            self._under_way.difference_update(booked.under_way)
            self._waiting.popleft()
            yield portion

    def _are_all_there(self, booked: _Booked) -> bool:
        """Look for the samples that have no number yet; whether none is missing any more."""
        portion = booked.portion
        missing = np.setdiff1d(np.flatnonzero(portion.sample_ids < 0), [row.place for row in portion.lost])
        portion.sample_ids[missing] = self.store.lookup(portion.keys[missing])
        missing = missing[portion.sample_ids[missing] < 0]
        # a row like one that was under way, which turned out to name no files of its folder
        keys = key_array([booked.row_keys.get(place, portion.keys[place].tobytes()) for place in missing.tolist()])
        found = portion.sample_ids[missing] = self.store.lookup(keys)
        portion.keys[missing[found >= 0]] = keys[found >= 0]
        return bool((found >= 0).all())

    def _tell(self, source: int) -> None:
        if self.on_progress is None:
            return
        progress = Progress(
            split=self.split,
            source=self.sources[source].name,
            read=self.num_encoded + self.num_reused + self._num_lost,
            encoded=self.num_encoded,
            reused=self.num_reused,
            lost=self._num_lost,
            num_tokens=self._num_tokens,
            share=self.share,
        )
        self.on_progress(progress)


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A portion that is being encoded. ``fresh``: places of the rows that are encoded for it. ``row_keys``: by place,
    keys that say nothing of a folder, of rows that were looked for in theirs."""

    portion: ReadPortion
    keys: list[bytes]
    sample_ids: Ints
    row_keys: dict[int, bytes] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class _Booked:
    """A portion of which some samples may still have no number. ``under_way``: keys that wait for its commit."""

    portion: ResolvedPortion
    fresh: list[int]
    under_way: list[bytes]
    row_keys: dict[int, bytes]


def _address(row: RowBytes | RowError) -> Address:
    assert row.address is not None, f"a row's error has no address: {row}"
    return row.address


# --------------------------------------------------------------------------------------------------------------------
# What of a row's key its source decides, and keys as arrays.


def key_array(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """uint8[n, KEY_BYTES] of n keys."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)


def conversion_of(source: Source) -> str:
    """All that decides what a row's bytes mean: the settled layout, where media are that it names from the folder of
    this process, and the version of the code that reads them."""
    layout = source.reader.layout
    root = Path(layout.media_root or "/").expanduser()
    where = [] if root.is_absolute() else [str(root.absolute())]
    return json.dumps([asdict(layout), SAMPLES_VERSION, *where], sort_keys=True)
