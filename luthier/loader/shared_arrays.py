"""Large arrays on their way from a worker to the trainer: in memory that both have open. A socket would copy them five
times, which takes longer than decoding a picture.

The trainer makes a few anonymous files for a worker before it starts it, and the worker fills them by turns. Nobody
says when a slot is free again, since the protocol does: a worker is given work only if fewer than ``ahead``
micro-batches are on their way, and a batch is made of a slot before the next answer is taken. So of ``ahead + 1`` slots
the one whose turn it is has been read.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 1 << 14  # smaller arrays go with the message
ALIGNMENT = 64  # bytes
ROOM_TO_GROW = 1.25


class SharedArrays:
    """Memory by number, of one worker. Each side has one of these over the same files."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._views: list[mmap.mmap | None] = [None] * len(descriptors)

    @classmethod
    def create(cls, number: int) -> SharedArrays:
        """So many empty ones; none on systems without anonymous files, where everything goes with the messages."""
        if sys.platform != "linux":
            return cls([])
        return cls([os.memfd_create(f"luthier-slot-{slot}", os.MFD_CLOEXEC) for slot in range(number)])

    def write(self, slot: int, arrays: Sequence[NDArray[np.generic]]) -> list[int]:
        """Put the large ones into a slot, in place of what it held. Where each begins; -1: it was left out."""
        offsets, end = [], 0
        for array in arrays:
            fits = array.nbytes >= LEAST_BYTES and bool(self.descriptors)
            offsets.append(end if fits else -1)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT if fits else 0
        if end and end > os.fstat(self.descriptors[slot]).st_size:
            os.ftruncate(self.descriptors[slot], int(end * ROOM_TO_GROW))
        for array, offset in zip(arrays, offsets, strict=True):
            if offset >= 0:
                self._array(slot, offset, array.dtype, array.shape)[...] = array
        return offsets

    def read(self, slot: int, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        """A copy of an array that the other side has written."""
        return self._array(slot, offset, dtype, shape).copy()

    def close(self) -> None:
        """Let go of the memory; twice does no harm."""
        for view in self._views:
            if view is not None:
                view.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors, self._views = (), []

    def _array(
        self, slot: int, offset: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]
    ) -> NDArray[np.generic]:
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        view = self._views[slot]
        if view is None or len(view) < end:
            if view is not None:
                view.close()
            view = self._views[slot] = mmap.mmap(self.descriptors[slot], 0)  # all of the file, as large as it is now
        return np.frombuffer(memoryview(view)[offset:end], dtype=dtype).reshape(shape)
