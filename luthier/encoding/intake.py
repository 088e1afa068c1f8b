"""One pass over rows: read, convert, encode what is new, and account for every one."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from luthier import sources as sources_room
from luthier.encoding.prepared import PreparedSet, SourceInfo
from luthier.encoding.quarantine import Quarantine
from luthier.encoding.shard import KEY_BYTES
from luthier.encoding.store import SampleStore, StoreWriter, row_key
from luthier.encoding.workers import Chunk, Outcome, RowEncoder, encode_chunks
from luthier.errors import BudgetError, RowDropped, RowError, UserError
from luthier.ledger import Ledger
from luthier.records import Address
from luthier.sources import RowBytes, Source

CHUNK_BYTES = 256_000  # raw bytes of rows that are encoded together: a worker's message is then cheap beside its work
CHUNK_ROWS = 2_000  # rows between two reports of progress, where nothing needs encoding


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far preparation is, in rows of one split. ``encoded + reused + lost == read``."""

    split: str
    source: str
    read: int
    encoded: int
    reused: int
    lost: int


@dataclass(kw_only=True, slots=True, eq=False)
class Intake:
    """One pass over the rows of one split."""

    split: str
    sources: Sequence[Source]
    quarantine: Quarantine
    ledger: Ledger = field(default_factory=Ledger)
    num_encoded: int = 0
    num_reused: int = 0
    kept: _Kept = field(default_factory=lambda: _Kept())
    failed: dict[bytes, RowError] = field(default_factory=dict)  # why rows with this content are lost

    def read_all(
        self,
        encoder: RowEncoder,
        folder: Path,
        *,
        workers: int | Literal["auto"],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        """Book every row; afterwards the store has a sample for each one that is kept."""
        writer = StoreWriter(folder, fingerprint=encoder.fingerprint)
        store = SampleStore.open(folder, fingerprint=encoder.fingerprint)
        chunks = self._chunks(store, encoder.fingerprint)
        with closing(encode_chunks(chunks, encoder, workers=workers)) as encoded:
            for slots, outcomes in encoded:
                self._book(slots, outcomes, store, writer)
                if on_progress is not None:
                    on_progress(self._progress(self.sources[slots[-1].source].name))
        writer.commit()

    def finish(self, store: SampleStore, *, max_drop: float, lost: Path | None) -> PreparedSet:
        """The set of the rows that are kept. Raises `BudgetError` or `UserError`."""
        try:
            self.ledger.check(max_drop=max_drop)
        except BudgetError as error:
            raise BudgetError(f"{error.message}\n  all of them: {lost}", hint=error.hint) from None
        if not len(self.kept) and (self.sources or self.split == "train"):
            raise UserError(
                f"no row is left for {self.split}: {self.ledger.read} were read, {self.ledger.lost} are lost",
                hint=f"name data with data.{self.split}" if lost is None else f"see {lost}",
            )
        sample_ids = np.array([store.index_of(key) for key in self.kept.each_key()], dtype=np.int64)
        repeated = len(sample_ids) - len(np.unique(sample_ids))
        if repeated:
            self.ledger.note("repeated", repeated)
        return PreparedSet(
            store=store,
            sample_ids=sample_ids,
            source_ids=np.array(self.kept.source_ids, dtype=np.int64),
            file_ids=np.array(self.kept.file_ids, dtype=np.int64),
            row_numbers=np.array(self.kept.row_numbers, dtype=np.int64),
            files=tuple(self.kept.files),
            sources=tuple(SourceInfo(name=source.name, weight=source.config.weight) for source in self.sources),
            ledger=self.ledger,
        )

    def _chunks(self, store: SampleStore, fingerprint: str) -> Iterator[Chunk[list[_Slot]]]:
        under_way: set[bytes] = set()
        for number, source in enumerate(self.sources):
            slots: list[_Slot] = []
            num_bytes = 0
            for slot in _slots(source, number, fingerprint):
                slot.fresh = slot.row is not None and slot.key not in store and slot.key not in under_way
                if slot.fresh and slot.row is not None:
                    under_way.add(slot.key)
                    num_bytes += len(slot.row.raw)
                slots.append(slot)
                if num_bytes >= CHUNK_BYTES or len(slots) >= CHUNK_ROWS:
                    yield _chunk(slots, source, num_bytes)
                    slots, num_bytes = [], 0
            if slots:
                yield _chunk(slots, source, num_bytes)

    def _book(
        self, slots: Sequence[_Slot], outcomes: Sequence[Outcome], store: SampleStore, writer: StoreWriter
    ) -> None:
        remaining = iter(outcomes)
        for slot in slots:
            error = slot.error
            found: tuple[tuple[str, int], ...] = ()
            if slot.fresh:
                outcome = next(remaining)
                if isinstance(outcome, RowError):
                    error = outcome
                else:
                    writer.add(slot.key, outcome)
                    self.num_encoded += 1
                    found = outcome.counts
                    error = None if sum(outcome.leaf_targets) else _no_target()
            elif error is None:
                known = store.index_of(slot.key)
                error = _no_target() if known is not None and not store.num_targets[known] else None
                found = () if known is None else store.notes(known)
            self._settle(slot, error, found)

    def _settle(self, slot: _Slot, error: RowError | None, found: Sequence[tuple[str, int]]) -> None:
        if error is None:
            error = self.failed.get(slot.key)
        elif slot.key:
            self.failed[slot.key] = error
        if error is None:
            self.ledger.keep()
            self.num_reused += not slot.fresh
            self.kept.add(slot)
            for what, count in found:
                self.ledger.note(what, count)
            return
        placed = error.at(slot.address)
        self.ledger.lose(placed)
        self.quarantine.add(placed, split=self.split, raw=None if slot.row is None else slot.row.raw)

    def _progress(self, source: str) -> Progress:
        return Progress(
            split=self.split,
            source=source,
            read=self.ledger.read,
            encoded=self.ledger.trained - self.num_reused,
            reused=self.num_reused,
            lost=self.ledger.lost,
        )


@dataclass(kw_only=True, slots=True)
class _Slot:
    """A row on its way. ``row`` None: it could not be read, for the reason ``error``. ``fresh``: it is encoded now."""

    source: int
    address: Address
    row: RowBytes | None = None
    key: bytes = b""
    error: RowError | None = None
    fresh: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    """The rows that stay, as columns: 56 bytes a row, for there may be many millions."""

    keys: bytearray = field(default_factory=bytearray)
    source_ids: array[int] = field(default_factory=lambda: array("q"))
    file_ids: array[int] = field(default_factory=lambda: array("q"))
    row_numbers: array[int] = field(default_factory=lambda: array("q"))
    files: dict[str, int] = field(default_factory=dict)

    def add(self, slot: _Slot) -> None:
        self.keys += slot.key
        self.source_ids.append(slot.source)
        self.file_ids.append(self.files.setdefault(slot.address.file, len(self.files)))
        self.row_numbers.append(slot.address.row)

    def each_key(self) -> Iterator[bytes]:
        return (bytes(self.keys[place : place + KEY_BYTES]) for place in range(0, len(self.keys), KEY_BYTES))

    def __len__(self) -> int:
        return len(self.row_numbers)


def _slots(source: Source, number: int, fingerprint: str) -> Iterator[_Slot]:
    conversion = _conversion(source)
    for row in source.row_bytes():
        if isinstance(row, RowError):
            assert row.address is not None, f"{source.name}: a row's error has no address: {row}"
            yield _Slot(source=number, address=row.address, error=row)
        else:
            key = row_key(row.raw, fingerprint=fingerprint, conversion=conversion)
            yield _Slot(source=number, address=row.address, row=row, key=key)


def _chunk(slots: list[_Slot], source: Source, num_bytes: int) -> Chunk[list[_Slot]]:
    rows = [slot.row for slot in slots if slot.fresh and slot.row is not None]
    return Chunk(tag=slots, reader=source.reader, rows=rows, num_bytes=num_bytes)


def _no_target() -> RowDropped:
    return RowDropped("no_target", "no token of it is to be learned")


def _conversion(source: Source) -> str:
    """All that decides what a row's bytes mean: the settled layout, and the code that reads them.

    TODO(media): where rows may hold relative paths, the folder of the row's file decides too.
    """
    return json.dumps([asdict(source.reader.layout), _sources_version()], sort_keys=True)


@cache
def _sources_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(sources_room.__path__[0]).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
