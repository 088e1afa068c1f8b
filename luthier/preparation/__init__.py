"""Rows to stored samples: read, looked up, encoded where they are new, and counted; by one process or by many.

Here is what comes of it: which samples of the store a run sees, in which order, and where each row came from.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowDropped, RowError, UserError
from luthier.ledger import HELD_OUT, SAME_AS_HELD_OUT, Ledger, way_out
from luthier.packing.order import hold_out_part
from luthier.records import Address, Ints, Sample
from luthier.store import SampleStore
from luthier.writing import counted, whole_file

if TYPE_CHECKING:
    from luthier.config.schema import RunConfig
    from luthier.sources.source import Source

MOST_NAMES = 12  # of what is not read


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """A source by name, how often each of its rows is seen per epoch, and in sentences: how its files were read where
    that was found out or left to a default, and which of its columns and keys are not."""

    name: str
    weight: float
    remarks: tuple[str, ...] = ()


def info_of(source: Source, config: RunConfig) -> SourceInfo:
    """What is not read is told but for runs that draw their answers, whose rewards may read anything."""
    unread = () if config.objective.kind.on_policy else source.unread
    names = ", ".join(unread[:MOST_NAMES]) + (f" and {len(unread) - MOST_NAMES} more" * (len(unread) > MOST_NAMES))
    told = (f"columns or keys that are not read: {names}",) if unread else ()
    return SourceInfo(name=source.name, weight=source.config.weight, remarks=(*source.remarks, *told))


def remarks_on(sources: Iterable[SourceInfo]) -> list[str]:
    """What there is to say of the sources, each with the name of its own, once."""
    return list(dict.fromkeys(f"{source.name}: {remark}" for source in sources for remark in source.remarks))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Numbering:
    """The numbers that n rows were read under: global ones, source by source, lost rows among them.

    rows      int64[n], ascending
    counts    how many rows each source has
    held_out  int64, ascending: rows that were looked at for evaluation, and so are in no epoch
    """

    rows: Ints
    counts: tuple[int, ...]
    held_out: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedSet:
    """n rows that can be trained on, in the order in which they were read.

    sample_ids   int64[n], the row's sample in ``store``; rows with the same content share one
    source_ids   int32[n], index into ``sources``
    file_ids     int32[n], index into ``files``
    row_numbers  int64[n], counted from 1 in each file
    ledger       what became of all rows that were read for this set
    numbering    what the order of an epoch counts; None: these rows, source by source, and no other
    """

    store: SampleStore
    sample_ids: Ints
    source_ids: NDArray[np.int32]
    file_ids: NDArray[np.int32]
    row_numbers: Ints
    files: tuple[str, ...]
    sources: tuple[SourceInfo, ...]
    ledger: Ledger
    numbering: Numbering | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, row: int) -> Sample:
        """The row's sample, with its address."""
        return self.store.read(int(self.sample_ids[row]), self.address(row))

    def address(self, row: int) -> Address:
        return Address(file=self.files[int(self.file_ids[row])], row=int(self.row_numbers[row]))

    def take(self, rows: Ints, *, ledger: Ledger) -> PreparedSet:
        """The set of these rows, in this order, numbered anew."""
        return replace(
            self,
            sample_ids=self.sample_ids[rows],
            source_ids=self.source_ids[rows],
            file_ids=self.file_ids[rows],
            row_numbers=self.row_numbers[rows],
            ledger=ledger,
            numbering=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A run's data. ``quarantine`` is the file of rows that were lost, None if there are none."""

    train: PreparedSet
    eval: PreparedSet | None
    num_encoded: int
    num_reused: int
    quarantine: Path | None


def same_as_held_out(address: Address) -> RowDropped:
    """Why a training row is left out whose content is evaluated on."""
    return RowDropped("same_as_held_out", "the same row is among the held-out rows", address=address)


def hold_out(
    whole: PreparedSet, size: float | int, *, seed: int, quarantine: Quarantine
) -> tuple[PreparedSet, PreparedSet]:
    """``(train, eval)``: a seeded choice of rows, a share of all that were read below 1, else a number.

    The choice depends on the number of rows and the seed alone: the first so many of `hold_out_part` that are not
    lost. Rows with the same content as one of them are left out of training, so nothing that is evaluated was
    trained on; the ledger notes them as ``same_as_held_out``, and ``quarantine`` lists them.

    Raises `UserError` if a side would be empty.
    """
    numbering = whole.numbering
    assert numbering is not None, "rows that were read have numbers"
    num_read = sum(numbering.counts)
    wanted = num_held_out(size, num_read)
    place_of_row = np.full(num_read, -1, dtype=np.int64)
    place_of_row[numbering.rows] = np.arange(len(whole))
    order = hold_out_part(num_read, 0, num_read, seed=seed)
    kept = np.flatnonzero(place_of_row[order] >= 0)[:wanted]
    tried = order[: int(kept[-1]) + 1 if len(kept) else 0]
    held = np.sort(place_of_row[order[kept]])
    same = np.isin(whole.sample_ids, whole.sample_ids[held])
    if wanted < 1 or same.all():
        raise empty_side(size, wanted, len(whole))
    train_ledger = Ledger.from_json(whole.ledger.to_json())
    train_ledger.read -= int(same.sum())
    train_ledger.prepared -= int(same.sum())
    train_ledger.note(HELD_OUT, len(held))
    if same.sum() > len(held):
        train_ledger.note(SAME_AS_HELD_OUT, int(same.sum()) - len(held))
    rows = np.flatnonzero(~same)
    same[held] = False
    quarantine.add_all((same_as_held_out(whole.address(row)) for row in np.flatnonzero(same).tolist()), split="train")
    train = replace(
        whole.take(rows, ledger=train_ledger),
        numbering=replace(numbering, rows=numbering.rows[rows], held_out=np.sort(tried)),
    )
    return train, whole.take(held, ledger=Ledger(read=len(held), prepared=len(held)))


def empty_side(size: float | int, wanted: int, num_rows: int) -> UserError:
    """What to raise where holding out rows leaves nothing on a side."""
    what = "nothing to evaluate on" if wanted < 1 else "nothing is left to train on"
    if 0 < wanted < num_rows:
        what += f", as {counted(num_rows - wanted, 'other row is', 'other rows are')} the same as what is held out"
    return UserError(
        f"data.eval_split={size:g} holds out {wanted} of {counted(num_rows, 'row')}: {what}",
        hint="choose another data.eval_split, or name evaluation data with data.eval",
    )


def num_held_out(size: float | int, num_rows: int) -> int:
    """How many of so many rows ``data.eval_split`` holds out: of a share, at least one."""
    return max(round(size * num_rows), 1 if size else 0) if size < 1 else int(size)


# ------------------------------------------------------------------------------------------------ the file of lost rows


class Quarantine:
    """Writes ``address, split, fate, reason, field, detail, hint, raw`` for each lost row; no row is kept in memory.

    Appears under its name when it is closed, so several processes of one run may write it: each writes the same. A
    file of an earlier preparation goes away when nothing is lost in this one.
    """

    def __init__(self, path: Path, *, temporary: Path | None = None) -> None:
        """Nothing is written before the first row. ``temporary``: the name until then, for the only process that
        writes it: what a killed run left under that name is overwritten. None: one of its own."""
        self.path = path
        self._temporary = temporary or path.with_name(f".{path.name}-{uuid.uuid4().hex}.tmp")
        self.num_rows = 0
        self._file: IO[bytes] | None = None
        self._finish = ExitStack()  # gives the file its name
        self._is_closed = False
        self._lock = threading.Lock()  # it may be closed while the thread that reads ahead loses another row

    @property
    def written(self) -> Path | None:
        """The file; None if no row is lost so far."""
        return self.path if self.num_rows else None

    def add(self, error: RowError, *, split: str, raw: bytes | None = None) -> None:
        """Write one row. ``raw`` is None where it could not be read, or was encoded before it was lost. Raises
        `UserError` if that fails."""
        line = {
            "address": str(error.address),
            "split": split,
            "fate": "dropped" if isinstance(error, RowDropped) else "quarantined",
            "reason": error.reason,
            "field": error.field,
            "detail": error.detail,
            "hint": way_out(error.reason),
            "raw": None if raw is None else raw.decode("utf-8", "backslashreplace"),
        }
        with self._lock:
            if not self._is_closed:
                self._write(line)
        self.num_rows += 1

    def add_all(self, errors: Iterable[RowError], *, split: str) -> None:
        """Write rows that were encoded before they were lost."""
        for error in errors:
            self.add(error, split=split)

    def _write(self, line: dict[str, str | None]) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._finish.enter_context(whole_file(self.path, temporary=self._temporary, durable=False))
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error_:
            raise self._unwritable(error_) from error_

    def close(self) -> None:
        """Give the file its name; nothing is written afterwards. Raises `UserError` if that fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._file is None:
                    self.path.unlink(missing_ok=True)
                self._finish.close()
            except OSError as error:
                raise self._unwritable(error) from error

    def discard(self) -> None:
        """Leave what is there under its name; nothing is written afterwards."""
        with self._lock:
            if self._file is not None and not self._is_closed:
                self._file.close()
                self._temporary.unlink(missing_ok=True)
            self._is_closed = True

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: the lost rows cannot be written: {error.strerror or error}",
            hint="free space or change the permissions there, or choose another output.dir",
            key="output.dir",
        )
