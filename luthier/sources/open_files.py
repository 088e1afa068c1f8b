"""What an index keeps open between reads: descriptors of files, and what was decoded of columnar ones."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import SourceError

_MAX_DESCRIPTORS = 64
CACHE_BYTES = 32 << 20  # of decoded columns; what does not fit in here is spooled (see `column_groups`)
_BLOCK_BYTES = 1 << 20  # rows that stand one behind the other are read together, up to this


class OpenFiles:
    """Descriptors and decoded groups, the least recently used ones given up first. For one thread at a time."""

    def __init__(self, *, max_descriptors: int = _MAX_DESCRIPTORS, cache_bytes: int = CACHE_BYTES) -> None:
        self._max_descriptors = max_descriptors
        self._cache_bytes = cache_bytes
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()
        self._kept_bytes = 0

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Bytes of a file, fewer only at its end; raises `SourceError`."""
        descriptor = self._descriptor(path)
        try:
            return os.pread(descriptor, num_bytes, offset)
        except OSError as error:
            where = f"{num_bytes:,} bytes at {offset:,}"
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

    def kept(self, path: str, number: int, load: Callable[[], tuple[Any, int]]) -> Any:
        """Something made of a file; ``load`` gives it, and the bytes it holds, where it is not kept any more."""
        key = (path, number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        value, num_bytes = load()
        if num_bytes <= self._cache_bytes:
            self._kept[key] = (value, num_bytes)
            self._kept_bytes += num_bytes
        while self._kept_bytes > self._cache_bytes:
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
        while len(self._descriptors) >= self._max_descriptors:
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
