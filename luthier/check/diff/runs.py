"""Two run descriptions compared row by row, in one pass, with nothing kept but counts and a few rows to show."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

import msgspec
import numpy as np

from luthier.check.diff import Change, Comparison, FirstDifference, Lesson
from luthier.config.choices import Overflow
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowDropped, RowError
from luthier.loader.settings import units_of
from luthier.preparation.segments import cut_sample
from luthier.records import Address, Row, Sample
from luthier.sources import RowBytes, decode_row
from luthier.sources.source import Source

BATCH_ROWS = 256  # rows that are encoded together: enough to be quick, few enough that memory stays flat


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChange:
    """A row that changes. Addresses are None on the side that has no such row, reasons where it is not refused."""

    change: Change
    address_a: str | None
    address_b: str | None
    reason_a: str | None
    reason_b: str | None
    tokens_a: int
    tokens_b: int
    targets_a: int
    targets_b: int
    same_answers: bool
    first: FirstDifference | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDiff:
    """What changes from A to B. ``counts`` has every `Change`; they sum to the rows compared.

    In ``num_same_answers`` of the rows whose tokens differ, what is learned is the same text (control tokens and white
    space apart): only what is read has changed. ``shown`` has the first rows of each kind of change, and counts in
    ``unit``: tokens, or characters where ids mean different texts on the two sides.
    """

    a: str
    b: str
    settings: tuple[Setting, ...]
    pairing: Pairing
    unit: str
    counts: Mapping[Change, int]
    num_same_answers: int
    reasons_a: Mapping[str, int]
    reasons_b: Mapping[str, int]
    tokens_a: int
    tokens_b: int
    targets_a: int
    targets_b: int
    shown: tuple[RowChange, ...]

    @property
    def num_rows(self) -> int:
        """Rows that were compared."""
        return sum(self.counts.values())

    @property
    def num_different(self) -> int:
        """Rows that are trained on differently, or on one side only."""
        return sum(count for change, count in self.counts.items() if change.is_difference)


@dataclass(frozen=True, kw_only=True)
class EncodedSide:
    """One side of a comparison, whose rows are rendered and encoded now. ``name`` is what a reader calls it."""

    name: str
    config: RunConfig
    encoder: Encoder
    sources: Sequence[Source]

    def lessons(self, rows: Sequence[tuple[AnyRow, Source]]) -> list[Lesson]:
        """What is trained on in each row, after cutting to ``data.max_length``."""
        converted = [_convert(row, source) for row, source in rows]
        encoded = iter(self.encoder.encode_many([row for row in converted if not isinstance(row, RowError)]))
        return [lesson_of(row if isinstance(row, RowError) else next(encoded), self.config) for row in converted]


def diff_runs(
    a: EncodedSide,
    b: EncodedSide,
    *,
    sample: int | None = None,
    num_shown: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunDiff:
    """Compare all rows of both sides, or about ``sample`` of them.

    ``num_shown`` rows of each kind of change are kept to be shown. ``on_progress`` is told how many rows were compared
    and how many of them differ. Raises what reading the sources raises.
    """
    of_a, of_b = a.encoder.tokenizer, b.encoder.tokenizer
    comparison = Comparison(
        vocabulary_a=of_a,
        vocabulary_b=of_b,
        control_a=of_a.control_ids,
        control_b=of_b.control_ids,
        by_characters=_vocabulary(of_a) != _vocabulary(of_b),
    )
    tally = _Tally(num_shown=num_shown)
    for batch in _batches(pairs(a.sources, b.sources, sample=sample)):
        tally.add(batch, _lessons(a, batch, lambda pair: pair.a), _lessons(b, batch, lambda pair: pair.b), comparison)
        if on_progress is not None:
            on_progress(tally.counts.total(), sum(n for change, n in tally.counts.items() if change.is_difference))
    return RunDiff(
        a=a.name,
        b=b.name,
        settings=tuple(changed_settings(a.config, b.config)),
        pairing=pairing_of(a.sources, b.sources),
        unit="character" if comparison.by_characters else "token",
        counts={change: tally.counts[change] for change in Change},
        num_same_answers=tally.num_same_answers,
        reasons_a=dict(tally.reasons_a.most_common()),
        reasons_b=dict(tally.reasons_b.most_common()),
        tokens_a=tally.tokens_a,
        tokens_b=tally.tokens_b,
        targets_a=tally.targets_a,
        targets_b=tally.targets_b,
        shown=tuple(row for change in Change for row in tally.shown.get(change, ())),
    )


def lesson_of(outcome: Sample | RowError, config: RunConfig) -> Lesson:
    """What is left of a sample once it is cut to ``data.max_length``.

    Under ``overflow: error`` a row that is too long ends the run; here it counts as refused.
    """
    if isinstance(outcome, RowError):
        return Lesson(refusal=outcome)
    overflow = Overflow.DROP if config.data.overflow is Overflow.ERROR else config.data.overflow
    limit, units = config.data.max_length, units_of(config)
    try:
        return Lesson(segments=cut_sample(outcome, max_length=limit, overflow=overflow, units=units))
    except RowDropped as error:
        return Lesson(refusal=error)


@dataclass(kw_only=True, slots=True)
class _Tally:
    num_shown: int
    counts: Counter[Change] = field(default_factory=Counter)
    num_same_answers: int = 0
    reasons_a: Counter[str] = field(default_factory=Counter)
    reasons_b: Counter[str] = field(default_factory=Counter)
    tokens_a: int = 0
    tokens_b: int = 0
    targets_a: int = 0
    targets_b: int = 0
    shown: dict[Change, list[RowChange]] = field(default_factory=dict)

    def add(
        self, batch: Sequence[Pair], of_a: Sequence[Lesson], of_b: Sequence[Lesson], comparison: Comparison
    ) -> None:
        for pair, a, b in zip(batch, of_a, of_b, strict=True):
            change = _change(pair, a, b, comparison)
            self.counts[change] += 1
            self.tokens_a, self.targets_a = self.tokens_a + a.num_tokens, self.targets_a + a.num_targets
            self.tokens_b, self.targets_b = self.tokens_b + b.num_tokens, self.targets_b + b.num_targets
            if a.refusal is not None:
                self.reasons_a[a.refusal.reason] += 1
            if b.refusal is not None:
                self.reasons_b[b.refusal.reason] += 1
            same_answers = change is Change.TOKENS and comparison.same_answers(a, b)
            self.num_same_answers += same_answers
            shown = self.shown.setdefault(change, [])
            if change.is_difference and len(shown) < self.num_shown:
                shown.append(_row_change(pair, (a, b), change, comparison, same_answers=same_answers))


def _batches(every: Iterator[Pair]) -> Iterator[list[Pair]]:
    while batch := list(islice(every, BATCH_ROWS)):
        yield batch


def _lessons(side: EncodedSide, batch: Sequence[Pair], place_of: Callable[[Pair], RowLocation | None]) -> list[Lesson]:
    rows = [
        (pair.row, place.source)
        for pair in batch
        if pair.a is not None and pair.b is not None and (place := place_of(pair)) is not None and pair.row is not None
    ]
    found = iter(side.lessons(rows))
    return [Lesson() if pair.a is None or pair.b is None else next(found) for pair in batch]


def _change(pair: Pair, a: Lesson, b: Lesson, comparison: Comparison) -> Change:
    if pair.a is None:
        return Change.MISSING_A
    if pair.b is None:
        return Change.MISSING_B
    return comparison.change(a, b)


def _row_change(
    pair: Pair, lessons: tuple[Lesson, Lesson], change: Change, comparison: Comparison, *, same_answers: bool
) -> RowChange:
    a, b = lessons
    parts = change in (Change.TOKENS, Change.TARGETS, Change.WEIGHTS)
    return RowChange(
        change=change,
        address_a=None if pair.a is None else str(pair.a.address),
        address_b=None if pair.b is None else str(pair.b.address),
        reason_a=_reason(a),
        reason_b=_reason(b),
        tokens_a=a.num_tokens,
        tokens_b=b.num_tokens,
        targets_a=a.num_targets,
        targets_b=b.num_targets,
        same_answers=same_answers,
        first=comparison.first_difference(a, b, change) if parts else None,
    )


def _reason(lesson: Lesson) -> str | None:
    error = lesson.refusal
    if error is None:
        return None
    return f"{error.reason}{': ' + error.detail if error.detail else ''}{f' ({error.field})' if error.field else ''}"


def _convert(row: AnyRow, source: Source) -> Row | RowError:
    try:
        return row if isinstance(row, RowError) else source.convert(source.reader.read(row))
    except RowError as error:
        return error


def _vocabulary(tokenizer: Tokenizer) -> tuple[object, ...]:
    spec = tokenizer.files.tokenizer
    added = [(token["id"], token["content"]) for token in spec["added_tokens"]]
    return spec["model"].get("vocab"), sorted(added), tokenizer.added


# --------------------------------------------------------------------------------------------------------------------
# Which row of one run description is which row of another.


ROW_BITS = 40  # of a packed place: rows of a file; the rest numbers the file

AnyRow = RowBytes | RowError


class Pairing(StrEnum):
    """How rows are matched."""

    ADDRESS = "by address: both sides read the same rows of the same files"
    CONTENT = "by content, in whatever order: the two sides read different files, or other rows of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLocation:
    """Where a row stands on one side, and the source that knows how to read it."""

    address: Address
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A row and its places; None on the side that has no such row. ``row`` is None where only ``b`` has it."""

    row: AnyRow | None
    a: RowLocation | None
    b: RowLocation | None


def pairing_of(a: Sequence[Source], b: Sequence[Source]) -> Pairing:
    """By address if both sides read the same rows of the same unchanged files, else by content."""
    same = [_reading(source) for source in a] == [_reading(source) for source in b]
    return Pairing.ADDRESS if same else Pairing.CONTENT


def pairs(a: Sequence[Source], b: Sequence[Source], *, sample: int | None = None) -> Iterator[Pair]:
    """All rows of both sides, matched: those of ``a`` in their order, then those that only ``b`` has.

    ``sample`` takes the rows with the smallest digests, about so many (rows that repeat come together): the same rows
    in every file that holds them. By address nothing is kept in memory; by content 16 bytes for each row of ``b``.
    Raises what reading the sources raises.
    """
    match pairing_of(a, b):
        case Pairing.ADDRESS:
            yield from _by_address(a, b, _limit(a, sample, _raw_digest))
        case Pairing.CONTENT:
            yield from _by_content(a, b, _limit(a, sample, _content_digest))
        case unknown:
            raise AssertionError(f"unknown pairing {unknown!r}")


def _reading(source: Source) -> tuple[object, ...]:
    # an origin holds its files with their sizes and times of change; the seed matters only where a sample is taken
    limit = source.config.max_rows
    return source.origin, source.config.slice, limit, source.config.first_rows, None if limit is None else source.seed


def _by_address(a: Sequence[Source], b: Sequence[Source], limit: int | None) -> Iterator[Pair]:
    for one, other in zip(a, b, strict=True):
        for row in one.row_bytes():
            if limit is None or _raw_digest(row) <= limit:
                address = _address(row)
                yield Pair(
                    row=row, a=RowLocation(address=address, source=one), b=RowLocation(address=address, source=other)
                )


def _by_content(a: Sequence[Source], b: Sequence[Source], limit: int | None) -> Iterator[Pair]:
    index = _ContentIndex(b, limit)
    for source in a:
        for row in source.row_bytes():
            digest = _content_digest(row)
            if limit is None or digest <= limit:
                yield Pair(row=row, a=RowLocation(address=_address(row), source=source), b=index.take(digest))
    for place in index.left():
        yield Pair(row=None, a=None, b=place)


class _ContentIndex:
    """The rows of one side by digest: where each stands, and which were taken."""

    def __init__(self, sources: Sequence[Source], limit: int | None) -> None:
        self._files: dict[tuple[int, str], int] = {}
        self._sources = sources
        digests, places = array("Q"), array("Q")
        for number, source in enumerate(sources):
            for row in source.row_bytes():
                digest = _content_digest(row)
                if limit is None or digest <= limit:
                    address = _address(row)
                    file = self._files.setdefault((number, address.file), len(self._files))
                    digests.append(digest)
                    places.append(file << ROW_BITS | address.row)
        found = np.array(digests, dtype=np.uint64)
        order = np.argsort(found, kind="stable")  # rows that repeat keep their order
        self._digests = found[order]
        self._places = np.array(places, dtype=np.uint64)[order]
        self._taken = np.zeros(len(found), dtype=np.bool_)
        self._repeats: Counter[int] = Counter()  # how often a digest was taken, for digests that come again
        self._keys = list(self._files)

    def take(self, digest: int) -> RowLocation | None:
        """The first row with this digest that was not taken yet."""
        start = int(np.searchsorted(self._digests, np.uint64(digest), side="left"))
        if start < len(self._taken) and self._taken[start]:
            self._repeats[digest] += 1
            start += self._repeats[digest]
        if start >= len(self._taken) or int(self._digests[start]) != digest:
            return None
        self._taken[start] = True
        return self._place(start)

    def left(self) -> Iterator[RowLocation]:
        """The rows that nobody took, in the order of their files."""
        remaining = np.flatnonzero(~self._taken)
        for number in remaining[np.argsort(self._places[remaining])].tolist():
            yield self._place(number)

    def _place(self, number: int) -> RowLocation:
        packed = int(self._places[number])
        source, file = self._keys[packed >> ROW_BITS]
        return RowLocation(address=Address(file=file, row=packed & (1 << ROW_BITS) - 1), source=self._sources[source])


def _limit(sources: Sequence[Source], sample: int | None, digest: Callable[[AnyRow], int]) -> int | None:
    """The largest digest of a sample; None takes all rows."""
    if sample is None:
        return None
    smallest = heapq.nsmallest(sample, (digest(row) for source in sources for row in source.row_bytes()))
    return smallest[-1] if len(smallest) == sample else None


def _raw_digest(row: AnyRow) -> int:
    return _hash(str(row.args).encode("utf-8", "backslashreplace") if isinstance(row, RowError) else row.raw)


def _content_digest(row: AnyRow) -> int:
    """What a row says, however its JSON is spaced and its keys are ordered."""
    if isinstance(row, RowError):
        return _raw_digest(row)
    try:
        return _hash(msgspec.json.encode(decode_row(row).data, order="deterministic"))
    except (RowError, OverflowError):
        return _hash(row.raw)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _address(row: AnyRow) -> Address:
    assert row.address is not None, "rows that are read have an address"
    return row.address


# --------------------------------------------------------------------------------------------------------------------
# What two run descriptions set differently, as far as it may decide tokens and targets.


SECTIONS = ("model", "data", "template", "media")
IGNORED = {"data.store", "data.workers"}  # where and how samples are made, not what is in them


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting that decides what is learned and differs: ``template.train_on``, ``assistant`` and ``all``."""

    key: str
    a: str
    b: str


def changed_settings(a: RunConfig, b: RunConfig) -> list[Setting]:
    """The settings of ``model``, ``data``, ``template``, ``media`` that differ: what may decide tokens and targets."""
    one, other = (_flat(config.model_dump(mode="json", include=set(SECTIONS))) for config in (a, b))
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key) and key not in IGNORED]
    return [Setting(key=key, a=str(one.get(key, "–")), b=str(other.get(key, "–"))) for key in keys]


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if isinstance(value, dict) and value:
        return {
            key: one for name, item in value.items() for key, one in _flat(item, f"{prefix}.{name}".lstrip(".")).items()
        }
    if isinstance(value, list) and value:
        return {key: one for n, item in enumerate(value) for key, one in _flat(item, f"{prefix}[{n}]").items()}
    return {prefix: value}
