"""What preparation hands on: which samples of the store a run sees, in which order, and where each row came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.store import SampleStore
from luthier.errors import UserError
from luthier.ledger import Ledger
from luthier.records import Address, Sample

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """A source by name, and how often each of its rows is seen per epoch."""

    name: str
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedSet:
    """n rows that can be trained on, in the order in which they were read.

    sample_ids   int64[n], the row's sample in ``store``; rows with the same content share one
    source_ids   int64[n], index into ``sources``
    file_ids     int64[n], index into ``files``
    row_numbers  int64[n], counted from 1 in each file
    ledger       what became of all rows that were read for this set
    """

    store: SampleStore
    sample_ids: Ints
    source_ids: Ints
    file_ids: Ints
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


def hold_out(whole: PreparedSet, size: float | int, *, seed: int) -> tuple[PreparedSet, PreparedSet]:
    """``(train, eval)``: a seeded choice of rows, a share of all below 1, else a number.

    Rows with the same content stay on the same side, so nothing that is evaluated was trained on; where rows repeat,
    the choice may come out a little larger than asked. It depends on the rows' order, not on what is in them.

    Raises `UserError` if a side would be empty.
    """
    wanted = round(size * len(whole)) if size < 1 else int(size)
    _, first, group = np.unique(whole.sample_ids, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # groups by first row: the store's numbering must not matter
    shuffled = order[np.random.Generator(np.random.PCG64(seed)).permutation(len(order))]
    rows_so_far = np.cumsum(np.bincount(group, minlength=len(first))[shuffled])
    num_groups = int(np.searchsorted(rows_so_far, wanted)) + 1
    held = np.isin(group, shuffled[:num_groups])
    num_held = int(held.sum())
    if wanted < 1 or num_held >= len(whole):
        raise UserError(
            f"data.eval_split={size:g} holds out {wanted} of {len(whole)} rows: "
            + ("nothing to evaluate on" if wanted < 1 else "nothing is left to train on"),
            hint="choose another data.eval_split, or name evaluation data with data.eval",
        )
    train_ledger = Ledger.from_json(whole.ledger.to_json())
    train_ledger.read -= num_held
    train_ledger.trained -= num_held
    train_ledger.note("held_out", num_held)
    train = whole.take(np.flatnonzero(~held), ledger=train_ledger)
    return train, whole.take(np.flatnonzero(held), ledger=Ledger(read=num_held, trained=num_held))
