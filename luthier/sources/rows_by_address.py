"""The rows of a run's training data by their address, as a run reads them that asks what no sample holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from luthier.errors import RowError, SourceError
from luthier.records import Address, Row
from luthier.sources.row_index import RowIndex
from luthier.sources.rows import RawRow
from luthier.sources.source import Source


@dataclass(kw_only=True, slots=True, eq=False)
class RowsByAddress:
    """Where each row is, is found at the first question: all files are read once. Takes some 200 bytes a row."""

    sources: list[Source]
    _places: dict[Address, tuple[int, int]] | None = None
    _indexes: dict[int, RowIndex] = field(default_factory=dict)

    def read(self, address: Address) -> RawRow:
        """The row as its file has it. Raises `RowError`, and `SourceError` where there is no such row any more."""
        if self._places is None:
            self._places = {
                row.address: (which, number)
                for which, source in enumerate(self.sources)
                for number, row in enumerate(source.row_bytes())
                if row.address is not None
            }
        if address not in self._places:
            raise SourceError(f"{address}: there is no such row", hint="the data changed after it was prepared")
        which, number = self._places[address]
        (found,) = self._index(which).read(np.array([number]))
        if isinstance(found, RowError):
            raise found
        return self.sources[which].reader.read(found)

    def convert(self, row: RawRow) -> Row:
        """The record that a row says. Raises `RowError`."""
        assert self._places is not None, "a row that was read"
        return self.sources[self._places[row.address][0]].convert(row)

    def _index(self, which: int) -> RowIndex:
        if which not in self._indexes:
            index = self.sources[which].index()
            if index is None:
                name = self.sources[which].name
                raise SourceError(f"{name}: rows of a stream cannot be read again", hint="load it without streaming")
            self._indexes[which] = index
        return self._indexes[which]
