"""A structured array that grows at its end, in amortised constant time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 4096


class GrowingTable:
    """Records of one dtype. ``table.records`` is a view of what is there; do not keep it over an `append`."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._memory = np.zeros(_FIRST_CAPACITY, dtype=dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> NDArray[Any]:
        """All records so far."""
        return self._memory[: self._length]

    def append(self, records: NDArray[Any]) -> None:
        """Add records at the end."""
        needed = self._length + len(records)
        if needed > len(self._memory):
            grown = np.zeros(max(needed, 2 * len(self._memory)), dtype=self._memory.dtype)
            grown[: self._length] = self.records
            self._memory = grown
        self._memory[self._length : needed] = records
        self._length = needed
