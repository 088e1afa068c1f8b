"""What preparation hands on: which samples of the store a run sees, in which order, and where each row came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.errors import UserError
from luthier.ledger import Ledger
from luthier.records import Address, Sample
from luthier.store.store import SampleStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """A source by name, how often each of its rows is seen per epoch, and how its files were read where that was found
    out or left to a default."""

    name: str
    weight: float
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedSet:
    """n rows that can be trained on, in the order in which they were read.

    sample_ids   int64[n], the row's sample in ``store``; rows with the same content share one
    source_ids   int32[n], index into ``sources``
    file_ids     int32[n], index into ``files``
    row_numbers  int64[n], counted from 1 in each file
    ledger       what became of all rows that were read for this set
    """

    store: SampleStore
    sample_ids: Ints
    source_ids: NDArray[np.int32]
    file_ids: NDArray[np.int32]
    row_numbers: Ints
    files: tuple[str, ...]
    sources: tuple[SourceInfo, ...]
    ledger: Ledger

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, row: int) -> Sample:
        """The row's sample, with its address."""
        return self.store.read(int(self.sample_ids[row]), self.address(row))

    def address(self, row: int) -> Address:
        """Where the row was read."""
        return Address(file=self.files[int(self.file_ids[row])], row=int(self.row_numbers[row]))

    def take(self, rows: Ints, *, ledger: Ledger) -> PreparedSet:
        """The set of these rows, in this order."""
        return replace(
            self,
            sample_ids=self.sample_ids[rows],
            source_ids=self.source_ids[rows],
            file_ids=self.file_ids[rows],
            row_numbers=self.row_numbers[rows],
            ledger=ledger,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A run's data. ``quarantine`` is the file of rows that were lost, None if there are none."""

    train: PreparedSet
    eval: PreparedSet | None
    num_encoded: int
    num_reused: int
    quarantine: Path | None


def hold_out(whole: PreparedSet, rows: Ints, size: float | int, *, seed: int) -> tuple[PreparedSet, PreparedSet]:
    """``(train, eval)``: a seeded choice of rows, a share of all that were read below 1, else a number.

    ``rows`` int64[n] are the rows' global numbers. The choice depends on the number of rows and the seed alone: the
    first so many of `hold_out_order` that are not lost. Rows with the same content as one of them are left out of
    training, so nothing that is evaluated was trained on; the ledger notes them as ``same_as_held_out``.

    Raises `UserError` if a side would be empty.
    """
    num_read = whole.ledger.read
    wanted = num_held_out(size, num_read)
    place_of_row = np.full(num_read, -1, dtype=np.int64)
    place_of_row[rows] = np.arange(len(whole))
    tried = place_of_row[hold_out_order(num_read, seed=seed)]
    held = np.sort(tried[tried >= 0][:wanted])
    same = np.isin(whole.sample_ids, whole.sample_ids[held])
    if wanted < 1 or same.all():
        raise UserError(
            f"data.eval_split={size:g} holds out {wanted} of {len(whole)} rows: "
            + ("nothing to evaluate on" if wanted < 1 else "nothing is left to train on"),
            hint="choose another data.eval_split, or name evaluation data with data.eval",
        )
    train_ledger = Ledger.from_json(whole.ledger.to_json())
    train_ledger.read -= int(same.sum())
    train_ledger.prepared -= int(same.sum())
    train_ledger.note("held_out", len(held))
    if same.sum() > len(held):
        train_ledger.note("same_as_held_out", int(same.sum()) - len(held))
    train = whole.take(np.flatnonzero(~same), ledger=train_ledger)
    return train, whole.take(held, ledger=Ledger(read=len(held), prepared=len(held)))


def num_held_out(size: float | int, num_rows: int) -> int:
    """How many of so many rows ``data.eval_split`` holds out."""
    return round(size * num_rows) if size < 1 else int(size)


def hold_out_order(num_rows: int, *, seed: int) -> Ints:
    """int64[num_rows]: global row numbers, in the order in which rows are held out."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(num_rows)
