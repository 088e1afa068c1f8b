"""Where rows are, in few bytes: byte offsets at 4 bytes a row, and the numbers of lines among which some are blank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_HIGH_BITS = np.int64(32)
_LOW_MASK = np.int64(0xFFFFFFFF)
_BYTES_PER_BREAK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Ascending:
    """Numbers that never fall, such as offsets into one file: their lower 32 bits, and where the upper ones step up.

    ``[5, 2**32 + 1, 2**33]`` -> lows ``[5, 1, 0]``, steps ``[1, 2]``.
    """

    lows: NDArray[np.uint32]
    steps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lows)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at some places."""
        return self.lows[places].astype(np.int64) + (np.searchsorted(self.steps, places, side="right") << _HIGH_BITS)

    @property
    def num_bytes(self) -> int:
        """What it costs in memory."""
        return self.lows.nbytes + self.steps.nbytes


class AscendingBuilder:
    """Collects the numbers of an `Ascending`, array by array, in little more memory than they will need."""

    def __init__(self) -> None:
        self._lows = bytearray()
        self._steps: list[NDArray[np.int64]] = []
        self._high = 0

    def __len__(self) -> int:
        return len(self._lows) // 4

    def add(self, numbers: NDArray[np.int64]) -> None:
        """Numbers that do not fall, and are not below those added before."""
        if not len(numbers):
            return
        if (last := int(numbers[-1]) >> 32) > self._high:
            risen = np.diff(numbers >> _HIGH_BITS, prepend=self._high)
            self._steps.append(np.repeat(np.arange(len(self), len(self) + len(numbers), dtype=np.int64), risen))
            self._high = last
        self._lows += (numbers & _LOW_MASK).astype("<u4").tobytes()

    def finish(self) -> Ascending:
        """All that was added."""
        steps = np.concatenate(self._steps) if self._steps else np.empty(0, np.int64)
        return Ascending(lows=np.frombuffer(self._lows, dtype="<u4"), steps=steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineNumbers:
    """Which line of a file each row is: row + 1, and the blank lines before it.

    Where few rows follow blank lines, only those are kept: ``rows[i]`` and all rows up to ``rows[i + 1]`` have
    ``counts[i]`` blank lines before them. Where many do, ``dense`` has the count of every row.
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    dense: Ascending | None = None

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lines of some rows, from 1."""
        if self.dense is not None:
            return rows + 1 + self.dense.at(rows)
        if not len(self.rows):
            return rows + 1
        place = np.searchsorted(self.rows, rows, side="right")
        blank = np.where(place > 0, self.counts[np.maximum(place - 1, 0)], 0)
        return rows + 1 + blank

    @property
    def num_bytes(self) -> int:
        """What it costs in memory: at most 4 bytes a row."""
        return self.rows.nbytes + self.counts.nbytes + (0 if self.dense is None else self.dense.num_bytes)


class LineNumbersBuilder:
    """Collects which lines are blank."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._num_blank = 0
        self._num_counted = 0  # blank lines before the last row
        self._rows: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []

    def add(self, is_blank: NDArray[np.bool_]) -> None:
        """The next lines of the file."""
        if self._num_blank == self._num_counted and not is_blank.any():
            self._num_rows += len(is_blank)
            return
        before = (np.cumsum(is_blank) + self._num_blank)[~is_blank]
        changed = np.flatnonzero(np.diff(before, prepend=self._num_counted))
        self._rows.append(changed + self._num_rows)
        self._counts.append(before[changed])
        self._num_rows += len(before)
        self._num_blank += int(is_blank.sum())
        if len(before):
            self._num_counted = int(before[-1])

    def finish(self) -> LineNumbers:
        """All lines that were added."""
        none = [np.empty(0, np.int64)]
        rows, counts = np.concatenate(self._rows or none), np.concatenate(self._counts or none)
        if len(rows) * _BYTES_PER_BREAK <= 4 * self._num_rows:
            return LineNumbers(rows=rows, counts=counts)
        dense = AscendingBuilder()
        dense.add(np.repeat(np.concatenate(([0], counts)), np.diff(np.concatenate(([0], rows, [self._num_rows])))))
        return LineNumbers(rows=none[0], counts=none[0], dense=dense.finish())
