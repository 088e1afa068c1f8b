"""Resolved portions become a set: columns of numbers, 28 bytes a row, for there may be many millions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.portions import Ints, ResolvedPortion
from luthier.encoding.prepared import PreparedSet, SourceInfo
from luthier.encoding.quarantine import Quarantine
from luthier.encoding.store import SampleStore
from luthier.errors import BudgetError, UserError
from luthier.ledger import Ledger
from luthier.sources import Source

Number = TypeVar("Number", np.int32, np.int64)


@dataclass(kw_only=True, slots=True, eq=False)
class Collection:
    """The rows of one split that stay, and the account of those that do not."""

    split: str
    sources: Sequence[Source]
    ledger: Ledger = field(default_factory=Ledger)
    files: list[str] = field(default_factory=list)
    _rows: list[Ints] = field(default_factory=list)
    _sample_ids: list[Ints] = field(default_factory=list)
    _source_ids: list[NDArray[np.int32]] = field(default_factory=list)
    _file_ids: list[NDArray[np.int32]] = field(default_factory=list)
    _row_numbers: list[Ints] = field(default_factory=list)
    _ids: dict[int, list[NDArray[np.uint64]]] = field(default_factory=dict)  # by source: ids of two may be alike

    def add_all(self, portions: Iterable[ResolvedPortion], quarantine: Quarantine) -> None:
        """Take in portions, in their order; lost rows go into quarantine."""
        for portion in portions:
            self.ledger.add(portion.ledger)
            self.files.extend(portion.new_files)
            for row in portion.lost:
                quarantine.add(row.error, split=self.split, raw=row.raw)
            if len(portion.id_digests):
                self._ids.setdefault(int(portion.source_ids[0]), []).append(portion.id_digests)
            stays = portion.sample_ids >= 0
            self._rows.append(portion.rows[stays])
            self._sample_ids.append(portion.sample_ids[stays])
            self._source_ids.append(portion.source_ids[stays].astype(np.int32))
            self._file_ids.append(portion.file_ids[stays].astype(np.int32))
            self._row_numbers.append(portion.row_numbers[stays])

    def finish(self, store: SampleStore, *, max_drop: float, lost: Path | None) -> tuple[PreparedSet, Ints]:
        """The set of the rows that are kept, and their global numbers. Raises `BudgetError` or `UserError`."""
        self._check(max_drop, lost)
        sample_ids = _joined(self._sample_ids, np.int64)
        is_used = np.zeros(len(store), dtype=np.bool_)
        is_used[sample_ids] = True
        repeated = len(sample_ids) - int(is_used.sum())
        if repeated:
            self.ledger.note("repeated", repeated)
        if repeated_ids := sum(map(_num_repeated, self._ids.values())):
            self.ledger.note("repeated_id", repeated_ids)  # `luthier stats` says which
        whole = PreparedSet(
            store=store,
            sample_ids=sample_ids,
            source_ids=_joined(self._source_ids, np.int32),
            file_ids=_joined(self._file_ids, np.int32),
            row_numbers=_joined(self._row_numbers, np.int64),
            files=tuple(self.files),
            sources=tuple(
                SourceInfo(name=source.name, weight=source.config.weight, remarks=source.remarks)
                for source in self.sources
            ),
            ledger=self.ledger,
        )
        return whole, _joined(self._rows, np.int64)

    def _check(self, max_drop: float, lost: Path | None) -> None:
        try:
            self.ledger.check(max_drop=max_drop)
        except BudgetError as error:
            raise BudgetError(f"{error.message}\n  all of them: {lost}", hint=error.hint) from None
        if not self.ledger.prepared and (self.sources or self.split == "train"):
            why = f": {self.ledger.reasons()}" if self.ledger.lost else ""
            raise UserError(
                f"no row is left for {self.split}: {self.ledger.read} were read, {self.ledger.lost} are lost{why}",
                hint=f"name data with data.{self.split}" if lost is None else f"see {lost}",
                key=f"data.{self.split}",
            )


def _num_repeated(parts: list[NDArray[np.uint64]]) -> int:
    """How many ids an earlier row of the source has."""
    digests = np.concatenate(parts)
    digests = digests[digests > 0]
    return len(digests) - len(np.unique(digests))


def _joined(parts: list[NDArray[Number]], kind: type[Number]) -> NDArray[Number]:
    """The parts as one array; the list is emptied, so that the memory is needed once."""
    joined = np.concatenate([np.zeros(0, kind), *parts])
    parts.clear()
    return joined
