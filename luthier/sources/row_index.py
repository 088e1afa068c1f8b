"""Random access to the rows of a source by their numbers: what `Source.row_bytes` gives, in any order.

Each kind of file has its own way to a row (`line_rows`, `column_groups`, `record_spool`); the index knows which rows
are in which file. Nothing is decoded that is not asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Documents
from luthier.errors import RowError, SourceError
from luthier.sources.column_groups import index_columns
from luthier.sources.columnar import chosen_rows
from luthier.sources.files import DataFile, FileKind
from luthier.sources.line_rows import index_lines
from luthier.sources.open_files import OpenFiles
from luthier.sources.origins import HubRows, LocalFiles, Origin
from luthier.sources.record_spool import index_by_spool
from luthier.sources.rows import RowBytes
from luthier.sources.text_files import has_row_a_line, read_text_file

_WHOLE = 0  # the number under which a data set is kept that has no groups


class IndexPart(Protocol):
    """Rows that are together in one file or data set."""

    def __len__(self) -> int: ...

    def digested(self) -> Iterator[bytes | memoryview]:
        """What the rows depend on."""
        ...

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        """Some rows; ``rows`` rise, none comes twice. Raises `SourceError`."""
        ...


class RowIndex:
    """The rows of a source by number, from 0, as `Source.row_bytes` counts them.

    Costs at most 8 bytes a row. Can be sent to another process, where files open again as they are needed. Reads from
    one thread at a time.
    """

    def __init__(self, parts: Sequence[IndexPart], *, chosen: NDArray[np.integer[Any]] | None = None) -> None:
        """``chosen`` are the numbers, rising, of the rows that count, where not all do."""
        self._parts = tuple(parts)
        self._chosen = chosen
        self._starts = np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))
        self._opened = OpenFiles()

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._chosen is None else len(self._chosen)

    def __reduce__(self) -> tuple[Callable[..., RowIndex], tuple[Any, ...]]:
        return _restore, (self._parts, self._chosen)

    @cached_property
    def identity(self) -> str:
        """A digest of what it was built from: paths, sizes, times, places of rows, and which rows count."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts:
            digest.update(f"{type(part).__name__}\0{len(part)}\0".encode())
            for content in part.digested():
                digest.update(content)
        if self._chosen is not None:
            digest.update(b"chosen\0" + self._chosen.astype("<i8").tobytes())
        return digest.hexdigest()

    def read(self, numbers: NDArray[np.int64]) -> list[RowBytes | RowError]:
        """The rows of some numbers, in their order; one that cannot be read is the `RowError` that says why.

        Raises `SourceError` if a file vanished or is not what it was, ``IndexError`` for numbers that no row has.
        """
        distinct, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < len(self):
            raise IndexError(f"rows {distinct[0]} to {distinct[-1]} of an index of {len(self)}")
        rows = distinct if self._chosen is None else self._chosen[distinct].astype(np.int64)
        cuts = np.searchsorted(rows, self._starts)
        found: list[RowBytes | RowError] = []
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            here = rows[cuts[number] : cuts[number + 1]] - self._starts[number]
            found += self._parts[number].read(here, self._opened)
        return [found[place] for place in places.tolist()]

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self._opened.close()


def index_origin(origin: Origin, spool: Path | None) -> list[IndexPart] | None:
    """The parts of an origin's index; None for a stream. Raises `SourceError`.

    Files that can only be read from their beginning are written to ``spool`` (see `spools`).
    """
    match origin:
        case LocalFiles(files=files) if files[0].is_columnar:
            return list(index_columns(files, spool))
        case LocalFiles(files=files) if files[0].kind is FileKind.TXT and files[0].documents is Documents.FILE:
            return [_WholeFiles(files=files)]
        case LocalFiles(files=files):
            return [_index_text(file, spool) for file in files]
        case HubRows(streaming=True):
            return None
        case HubRows():
            data = origin.load()
            return [_DatasetRows(origin=origin, num_rows=int(data.num_rows), fingerprint=str(data._fingerprint))]
        case _:
            if origin.count() is None:
                return None
            rows = list(origin.rows())
            return [_ListedRows(origin=origin, num_rows=len(rows), digest=_digest(rows))]


def _restore(parts: Sequence[IndexPart], chosen: NDArray[np.integer[Any]] | None) -> RowIndex:
    return RowIndex(parts, chosen=chosen)


def _index_text(file: DataFile, spool: Path | None) -> IndexPart:
    if not file.compression and has_row_a_line(file):
        return index_lines(file)
    return index_by_spool(file, read_text_file(file), spool)


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeFiles:
    """Text files each of which is one row."""

    files: tuple[DataFile, ...]

    def __len__(self) -> int:
        return len(self.files)

    def digested(self) -> Iterator[bytes]:
        for file in self.files:
            yield repr(file).encode()

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        found: list[RowBytes | RowError] = []
        for file in (self.files[row] for row in rows.tolist()):
            file.check_unchanged()
            found += read_text_file(file)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _DatasetRows:
    """Rows of a split of the Hub, from the files that `datasets` keeps of it."""

    origin: HubRows
    num_rows: int
    fingerprint: str

    def __len__(self) -> int:
        return self.num_rows

    def digested(self) -> Iterator[bytes]:
        yield repr(self).encode()

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        data = opened.kept(self.origin.address, _WHOLE, lambda: (self._load(), 0))
        table = data[rows.tolist()]
        places = zip(range(len(rows)), (rows + 1).tolist(), strict=True)
        return list(chosen_rows(table, self.origin.address, places))

    def _load(self) -> Any:
        data = self.origin.load()
        if (found := str(data._fingerprint)) != self.fingerprint:
            what = f"{self.origin.address}: the data set changed since it was indexed"
            raise SourceError(f"{what}: {self.fingerprint} then, {found} now", hint="name a revision")
        return data.with_format("arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ListedRows:
    """Rows of an origin that makes them anew each time, as presets do: few enough to be kept."""

    origin: Origin
    num_rows: int
    digest: str

    def __len__(self) -> int:
        return self.num_rows

    def digested(self) -> Iterator[bytes]:
        yield self.digest.encode()

    def read(self, rows: NDArray[np.int64], opened: OpenFiles) -> list[RowBytes | RowError]:
        listed = opened.kept("", _WHOLE, lambda: (self._load(), 0))
        return [listed[row] for row in rows.tolist()]

    def _load(self) -> list[RowBytes | RowError]:
        rows = list(self.origin.rows())
        if _digest(rows) != self.digest:
            raise SourceError(f"{type(self.origin).__name__}: the rows are not those that were indexed")
        return rows


def _digest(rows: list[RowBytes | RowError]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        content = row.raw if isinstance(row, RowBytes) else str(row).encode("utf-8", "replace")
        digest.update(f"{row.address}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
