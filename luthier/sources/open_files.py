"""What an index keeps open between reads, and where rows are in files, in few bytes."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from luthier.errors import SourceError
from luthier.writing import counted

_MAX_DESCRIPTORS = 64
CACHE_BYTES = 32 << 20  # of decoded columns; what does not fit in here is spooled (see `columnar`)
_BLOCK_BYTES = 1 << 20  # rows that stand one behind the other are read together, up to this

Value = TypeVar("Value")


class OpenFiles:
    """Descriptors and decoded groups, the least recently used ones given up first. For one thread at a time."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], tuple[object, int]] = OrderedDict()
        self._kept_bytes = 0

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Bytes of a file, fewer only at its end; raises `SourceError`."""
        descriptor = self._descriptor(path)
        try:
            return os.pread(descriptor, num_bytes, offset)
        except OSError as error:
            where = f"{counted(num_bytes, 'byte')} at {offset:,}"
            raise SourceError(f"{path}: cannot be read ({where}): {error.strerror}") from error

    def read_spans(self, path: str, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[bytes]:
        """The bytes of each span ``begins[i]:ends[i]``, both in rising order; spans may touch or overlap."""
        blocks = _blocks(zip(begins.tolist(), ends.tolist(), strict=True))
        self._announce(path, blocks)
        for spans in blocks:
            start = spans[0][0]
            block = self.read(path, start, spans[-1][1] - start)
            for begin, end in spans:
                yield block[begin - start : end - start]

    def kept(self, path: str, number: int, load: Callable[[], tuple[Value, int]]) -> Value:
        """Something made of a file; ``load`` gives it, and the bytes it holds, where it is not kept any more."""
        key = (path, number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return cast(Value, self._kept[key][0])
        value, num_bytes = load()
        if num_bytes <= CACHE_BYTES:
            self._kept[key] = (value, num_bytes)
            self._kept_bytes += num_bytes
        while self._kept_bytes > CACHE_BYTES:
            _, (_, freed) = self._kept.popitem(last=False)
            self._kept_bytes -= freed
        return value

    def close(self) -> None:
        """Close all; files open again when they are asked for."""
        self._kept.clear()
        self._kept_bytes = 0
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _announce(self, path: str, blocks: list[list[tuple[int, int]]]) -> None:
        """Tell the system what will be read, so that the disk works on all of it at once (4 times faster when cold)."""
        if sys.platform == "linux" and len(blocks) > 1:
            descriptor = self._descriptor(path)
            for spans in blocks:
                start = spans[0][0]
                os.posix_fadvise(descriptor, start, spans[-1][1] - start, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, path: str) -> int:
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
            return self._descriptors[path]
        while len(self._descriptors) >= _MAX_DESCRIPTORS:
            os.close(self._descriptors.popitem(last=False)[1])
        try:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error
        return self._descriptors[path]


def _blocks(spans: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans that touch each other, up to `_BLOCK_BYTES` together."""
    blocks: list[list[tuple[int, int]]] = []
    for begin, end in spans:
        if blocks and begin <= blocks[-1][-1][1] and end - blocks[-1][0][0] <= _BLOCK_BYTES:
            blocks[-1].append((begin, end))
        else:
            blocks.append([(begin, end)])
    return blocks


# --------------------------------------------------------------------------------------------------------------------
# Where rows are, in few bytes: byte offsets at 4 bytes a row, and the numbers of lines among which some are blank.


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
        none = [np.empty(0, np.int64)]
        rows, counts = np.concatenate(self._rows or none), np.concatenate(self._counts or none)
        if len(rows) * _BYTES_PER_BREAK <= 4 * self._num_rows:
            return LineNumbers(rows=rows, counts=counts)
        dense = AscendingBuilder()
        dense.add(np.repeat(np.concatenate(([0], counts)), np.diff(np.concatenate(([0], rows, [self._num_rows])))))
        return LineNumbers(rows=none[0], counts=none[0], dense=dense.finish())
