"""A source: the rows of one data set, and how each of them becomes a record.

Reading and converting are apart so that they can be in different processes: the parent iterates `Source.row_bytes`,
which decodes nothing, and sends the rows with `Source.reader` (a few hundred bytes) to workers, which decode and
convert. `Source.rows` and `Source.convert` do the same in one process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from luthier.config.choices import rows_of_slice
from luthier.config.draft import known_format, unread_by_rows
from luthier.config.inputs import SourceConfig
from luthier.errors import RowError, SourceError
from luthier.records import (
    Address,
    Conversation,
    Document,
    Feedback,
    Message,
    Part,
    Preference,
    Row,
    Text,
    Thinking,
    Tokenized,
    ToolCall,
)
from luthier.sources import RawRow, RowBytes, decode_row, json_kind
from luthier.sources.detect import NUM_ROWS_SEEN, detect_layout, unread_names
from luthier.sources.files import FileKind, passed_over
from luthier.sources.formats import Layout
from luthier.sources.formats.media import parted_slots, written_slots
from luthier.sources.formats.reading import Reading
from luthier.sources.formats.table import FORMATS, declared_by
from luthier.sources.origins import HUB, MODELSCOPE, PRESET, LocalFiles, Origin, open_origin
from luthier.sources.row_index import RowIndex, index_origin
from luthier.sources.text_files import cell_separator
from luthier.writing import counted

MOST_TOLD = 3  # of the files that are not read
SHORTEST_ROW = 2  # bytes of text: an empty object, or a character and the end of its line
_COUNT_SUFFIX = re.compile(r"^(?P<path>.+)#(?P<count>[1-9][0-9]*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Decodes and converts the rows of a source without its files. Picklable."""

    layout: Layout

    def read(self, row: RowBytes) -> RawRow:
        return decode_row(row)

    def convert(self, row: RawRow) -> Row:
        """The record that a row says; raises `RowError` with address and field, never anything else."""
        if type(row.data) is not dict:
            detail = f"a row is a JSON object, this is a JSON {json_kind(row.data)}"
            raise RowError("not_an_object", detail, address=row.address)
        limit = self.layout.text_limit
        try:
            record = self._record(row)
            if limit is not None and len(row.raw) >= limit:  # no character takes less than a byte
                check_texts(record, limit)
            return record
        except RowError as error:
            raise error.at(row.address) from None

    def _record(self, row: RawRow) -> Row:
        """Where no place was found for the media of a row, its text may hold what a processor writes for them."""
        rule = FORMATS[self.layout.format]
        reading = Reading(row, self.layout, declares=declared_by(rule))
        try:
            return rule.convert(reading)
        except RowError as error:
            if error.reason != "media_count" or not reading.media.may_be_written:
                raise
            for slots in (written_slots, parted_slots):
                with suppress(RowError):
                    return rule.convert(Reading(row, self.layout, slots, declares=declared_by(rule)))
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The rows of one data set. Immutable and picklable; every iteration starts anew and gives the same rows."""

    config: SourceConfig
    origin: Origin
    reader: RowReader
    seed: int
    unread: tuple[str, ...] = ()  # see `unread_names`

    @property
    def name(self) -> str:
        """What the config calls it."""
        return self.config.path

    @property
    def format(self) -> str:
        """The format of its rows: the config's, or the one that was detected."""
        return self.reader.layout.format

    @property
    def remarks(self) -> tuple[str, ...]:
        """How the files are read, in sentences, where the config leaves it to a default, to their header, their names
        or their rows."""
        config, told = self.config, list[str]()
        if known_format(config) is None:  # else the check before the run has told it
            unread = unread_by_rows(self.format)
            usual = SourceConfig(path=config.path, same_role=config.same_role)  # which may be that of all data sets
            told += [f"{key} is not read: {why}" for key, why in unread if getattr(config, key) != getattr(usual, key)]
        if not isinstance(self.origin, LocalFiles):
            return tuple(told)
        file = self.origin.files[0]
        if file.kind is FileKind.TXT:
            hint = "" if config.documents else " (a default: documents chooses line, paragraph or file)"
            told.append(f"each {file.documents} is a document with an end token of its own{hint}")
        if file.kind is FileKind.CSV and config.separator is None and (found := cell_separator(file)) != ",":
            told.append(f"its cells are separated by {found!r}, as the header shows")
        if others := [Path(name).name for name in passed_over(config, self.origin.files)]:
            names = ", ".join(others[:MOST_TOLD]) + (" …" if len(others) > MOST_TOLD else "")
            which = (
                f"{counted(len(others), 'file is', 'files are')} not read, as their names say another split, or none"
            )
            told.append(f"{which}: {names} (files that are named one by one are always read)")
        return tuple(told)

    def row_bytes(self) -> Iterator[RowBytes | RowError]:
        """The rows as bytes, in the order of the files. Raises `SourceError` if a file as a whole cannot be read.

        With ``max_rows`` a sample without replacement, which is a function of the seed and the number of rows alone;
        of a stream, whose length nobody knows, the first ``max_rows``. ``first_rows`` ends either early.
        """
        return islice(self._chosen_rows(), self.config.first_rows)

    def _chosen_rows(self) -> Iterator[RowBytes | RowError]:
        rows, limit = self.origin.rows(), self.config.max_rows
        if limit is None and self.config.slice is None:
            return rows
        count = self.origin.count()
        if self.config.slice is not None:
            part = self._slice(count)
            rows, count = islice(rows, part.start, part.stop), len(part)
        if limit is None:
            return rows
        if count is None:
            return islice(rows, limit)
        return _sample(rows, count, limit, self.seed) if limit < count else rows

    def _slice(self, count: int | None) -> range:
        """The numbers of the rows that ``slice`` takes of ``count``; raises `SourceError` if there are none."""
        if count is None:
            raise SourceError(f"{self.name}: no slice is taken of a stream", hint="set streaming: false, or first_rows")
        part = rows_of_slice(self.config.slice or ":", count)
        if self.config.slice and not part:
            raise SourceError(f"{self.name}: slice {self.config.slice} of {counted(count, 'row')} takes none")
        return part

    def count_at_most(self, counted_bytes: int) -> tuple[int, bool]:
        """A number of rows that this source does not exceed, and whether it is their exact number.

        Text files are read for it up to so many bytes; of larger ones only the sizes are known. Raises `SourceError`.
        """
        origin, limit = self.origin, min(filter(None, (self.config.max_rows, self.config.first_rows)), default=None)
        if isinstance(origin, LocalFiles) and not origin.files[0].is_columnar:
            num_bytes = sum(file.size for file in origin.files)
            packed = any(file.compression for file in origin.files)
            if packed or num_bytes > counted_bytes:
                most = sys.maxsize if packed else num_bytes // SHORTEST_ROW + len(origin.files)
                return (most if limit is None else min(limit, most)), False
        count = origin.count()
        if count is None:
            return (sys.maxsize if limit is None else limit), False
        count = len(self._slice(count))
        return (count if limit is None else min(limit, count)), True

    def index(self, *, spool: Path | None = None) -> RowIndex | None:
        """The rows of `row_bytes` by number, in any order; None for a stream, whose length nobody knows.

        Files that can only be read from their beginning (json arrays, csv, tsv, gzip, and columnar ones that are large
        once decoded) are written once into the folder ``spool``, or into files that are gone with this process. Raises
        `SourceError` if a file as a whole cannot be read.
        """
        parts, limit = index_origin(self.origin, spool), self.config.max_rows
        if parts is None:
            return None
        whole, first = sum(len(part) for part in parts), self.config.first_rows
        part = self._slice(whole)
        count = len(part)
        chosen = None if limit is None or limit >= count else _choose(count, limit, self.seed)
        if first is not None and first < count:
            chosen = np.arange(first, dtype=np.uint32) if chosen is None else chosen[:first]
        if count < whole:
            numbers = np.arange(count, dtype=np.int64) if chosen is None else chosen.astype(np.int64)
            chosen = numbers + part.start
        return RowIndex(parts, chosen=chosen)

    def check_unchanged(self) -> None:
        """Raises `SourceError` if a file of this source vanished or was written to since the source was opened."""
        if isinstance(self.origin, LocalFiles):
            for file in self.origin.files:
                file.check_unchanged()

    def rows(self) -> Iterator[RawRow | RowError]:
        """The rows, decoded. One that cannot be read comes as the `RowError` that says why, in its place."""
        read = self.reader.read
        for row in self.row_bytes():
            if isinstance(row, RowError):
                yield row
                continue
            try:
                yield read(row)
            except RowError as error:
                yield error

    def convert(self, row: RawRow) -> Row:
        """The record that a row says; raises `RowError`."""
        return self.reader.convert(row)


def open_sources(sources: Sequence[SourceConfig], *, seed: int) -> list[Source]:
    """Open data sets: find their files, read their first rows, and settle format and columns.

    Raises `SourceError` for what is missing, empty, or of a format that cannot be recognised.
    """
    opened = []
    for config in sources:
        try:
            opened.append(_open_source(config, seed))
        except SourceError as error:
            error.path = config.path  # by which its entry in the run description is found again
            raise
    return opened


def _open_source(config: SourceConfig, seed: int) -> Source:
    config = _take_count(config)
    origin = open_origin(config)
    rows = _first_rows(origin, config)
    layout = detect_layout(config, rows)
    if layout.media_root is None and config.path.startswith((HUB, MODELSCOPE, PRESET)):
        layout = replace(layout, media_root="")  # there is no folder that paths could be relative to
    reader, address = RowReader(layout=layout), Address(file=config.path, row=1)
    unread = unread_names(lambda row: reader.convert(RawRow(raw=b"", data=row, address=address)), rows)
    return Source(config=config, origin=origin, reader=reader, seed=seed, unread=unread)


def _take_count(config: SourceConfig) -> SourceConfig:
    """``train.jsonl#1000`` -> ``train.jsonl`` with ``max_rows`` 1000, unless a file has that very name."""
    match = _COUNT_SUFFIX.match(config.path)
    if match is None or Path(os.path.expanduser(config.path)).exists():
        return config
    if config.max_rows is not None:
        hint = "say it once"
        raise SourceError(f"{config.path}: the number of rows is given in the path and as max_rows", hint=hint)
    return config.model_copy(update={"path": match["path"], "max_rows": int(match["count"])})


def _first_rows(origin: Origin, config: SourceConfig) -> list[dict[str, object]]:
    """The first rows that can be read; raises `SourceError` if there is no row, or none of the first can be read."""
    rows: list[dict[str, object]] = []
    errors: list[RowError] = []
    for row in islice(origin.rows(), NUM_ROWS_SEEN):
        try:
            if isinstance(row, RowError):
                raise row
            rows.append(decode_row(row).data)
        except RowError as error:
            errors.append(error)
    if not rows and not errors:
        raise SourceError(f"{config.path}: there is no row in it")
    if not rows:
        first = f"none of its first {counted(len(errors), 'row')} can be read; the first: "
        raise SourceError(f"{config.path}: {first if len(errors) > 1 else 'its only row cannot be read: '}{errors[0]}")
    return rows


def _sample(rows: Iterator[RowBytes | RowError], count: int, size: int, seed: int) -> Iterator[RowBytes | RowError]:
    chosen = set(_choose(count, size, seed).tolist())
    return (row for index, row in enumerate(rows) if index in chosen)


def _choose(count: int, size: int, seed: int) -> NDArray[np.integer]:
    """The numbers of ``size`` rows of ``count``, rising."""
    chosen = np.sort(np.random.default_rng(seed).choice(count, size=size, replace=False, shuffle=False))
    return chosen.astype(np.uint32) if count < 1 << 32 else chosen


# --------------------------------------------------------------------------------------------------------------------
# The longest text that a row may have: what no program should be asked to tokenize.


def check_texts(row: Row, limit: int) -> None:
    """Raises `RowError` (``text_too_long``) if a text of the row has ``limit`` characters or more."""
    for place, length in _lengths(row):
        if length >= limit:
            detail = f"{counted(length, 'character')}, texts have fewer than {limit:,} (data.text_limit)"
            raise RowError("text_too_long", detail, field=place)


def _lengths(row: Row) -> Iterator[tuple[str, int]]:
    match row:
        case Document():
            yield "text", _length(row.parts, Text)
        case Tokenized():
            yield "input_ids", len(row.input_ids)
        case Conversation():
            yield from _of_messages("messages", row.messages)
        case Preference():
            for name, messages in (("prompt", row.prompt), ("chosen", row.chosen), ("rejected", row.rejected)):
                yield from _of_messages(name, messages)
        case Feedback():
            for name, messages in (("prompt", row.prompt), ("completion", row.completion)):
                yield from _of_messages(name, messages)
        case _:
            raise AssertionError(f"unknown kind of row {row!r}")


def _of_messages(name: str, messages: Iterable[Message]) -> Iterator[tuple[str, int]]:
    for index, message in enumerate(messages):
        path = f"{name}[{index}]"
        yield f"{path}.content", _length(message.parts, Text)
        yield f"{path}.reasoning_content", _length(message.parts, Thinking)
        yield (
            f"{path}.tool_calls",
            sum(_leaves(part.arguments) for part in message.parts if isinstance(part, ToolCall)),
        )


def _length(parts: Iterable[Part], kind: type[Text] | type[Thinking]) -> int:
    """A text that is cut into parts, because they count differently, is still one."""
    return sum(len(part.text) for part in parts if isinstance(part, kind))


def _leaves(value: object) -> int:
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(_leaves, value.values()))
        case list() | tuple():
            return sum(map(_leaves, value))
        case _:
            return 0


# ------------------------------------------------------------------------------------------------ rows that share an id


_ROWS_WITHOUT = 1_000  # a source whose first rows have no id has no such column
_ROWS_LOOKED_AT = 8
_ID_AT_FRONT = re.compile(rb'\s*\{\s*"id"\s*:\s*("[^"\\]*"|-?[0-9]+)\s*[,}]')


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedIds:
    """``rows`` are those whose id an earlier row of the source has; ``first`` is the first such pair."""

    source: str
    rows: int
    id: str
    first: tuple[Address, Address]


def repeated_ids(source: Source) -> RepeatedIds | None:
    """The rows of a source whose ``id`` an earlier row has; None if there are none, or no such column.

    Reads all rows once, and decodes nothing but the id; takes 16 bytes a row. Ids are compared as they are written: 1
    and "1" are two. A source none of whose first 1,000 rows has one is read no further. Raises `SourceError`.
    """
    digests = np.fromiter((xxhash.xxh3_64_intdigest(raw) for _, raw in _ids(source)), np.uint64)
    ascending = np.sort(digests)
    repeats = ascending[1:][ascending[1:] == ascending[:-1]]
    if not len(repeats):
        return None
    first, second = _first_pair(digests, repeats)
    found = list(islice(_ids(source), first, second + 1))
    (where, raw), (again, _) = found[0], found[-1]
    return RepeatedIds(
        source=source.name, rows=len(repeats), id=raw.decode("utf-8", "backslashreplace"), first=(where, again)
    )


def _first_pair(digests: NDArray[np.uint64], repeats: NDArray[np.uint64]) -> tuple[int, int]:
    """Where the first digest that comes twice stands for the second time, and where before."""
    seen: dict[int, int] = {}
    for place in np.flatnonzero(np.isin(digests, repeats)).tolist():
        before = seen.setdefault(int(digests[place]), place)
        if before != place:
            return before, place
    raise AssertionError("no digest comes twice")


def id_digests(rows: Sequence[RowBytes | RowError]) -> NDArray[np.uint64]:
    """uint64[n]: a digest of each row's ``id`` as it is written, 0 where it has none; empty if no first row has one.

    Ids are equal where digests are, but for one pair in 2**64.
    """
    if not any(isinstance(row, RowBytes) and b'"id"' in row.raw for row in rows[:_ROWS_LOOKED_AT]):
        return np.zeros(0, np.uint64)
    raw = (_id_of(row) if isinstance(row, RowBytes) else b"null" for row in rows)
    return np.array([0 if each == b"null" else xxhash.xxh3_64_intdigest(each) for each in raw], dtype=np.uint64)


class _OnlyId(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(_OnlyId)


def _ids(source: Source) -> Iterator[tuple[Address, bytes]]:
    """The ids as they are written, with the addresses of their rows; rows that cannot be read have none."""
    has_ids = False
    for number, row in enumerate(source.row_bytes()):
        if not has_ids and number == _ROWS_WITHOUT:
            return
        if isinstance(row, RowBytes) and (raw := _id_of(row)) != b"null":
            has_ids = True
            yield row.address, raw


def _id_of(row: RowBytes) -> bytes:
    at_front = _ID_AT_FRONT.match(row.raw)  # where it nearly always is; the whole row is looked through only else
    if at_front is not None:
        return at_front[1]
    try:
        return bytes(_DECODER.decode(row.raw).id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b"null"


# ------------------------------------------------------------------------------------------------ rows by their address


@dataclass(kw_only=True, slots=True, eq=False)
class RowsByAddress:
    """Where each row is, is found at the first question: all files are read once. Takes some 200 bytes a row."""

    sources: list[Source]
    _places: dict[Address | None, tuple[int, int]] | None = None
    _indexes: dict[int, RowIndex] = field(default_factory=dict)

    def read(self, address: Address) -> RawRow:
        """The row as its file has it. Raises `RowError`, and `SourceError` where there is no such row any more."""
        if self._places is None:
            self._places = {}
            for which, source in enumerate(self.sources):
                for number, row in enumerate(source.row_bytes()):
                    first, _ = self._places.setdefault(row.address, (which, number))
                    if self.sources[first].reader != source.reader and row.address is not None:
                        what = f"{row.address}: two data sets read this row, each in a way of its own"
                        raise SourceError(what, hint="give each a file: here rows are found by file and number")
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
            if (index := self.sources[which].index()) is None:
                name = self.sources[which].name
                raise SourceError(f"{name}: rows of a stream cannot be read again", hint="load it without streaming")
            self._indexes[which] = index
        return self._indexes[which]
