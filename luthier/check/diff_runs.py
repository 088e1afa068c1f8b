"""Two run descriptions compared row by row, in one pass, with nothing kept but counts and a few rows to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from luthier.check.diff import Change, Comparison, FirstDifference, Lesson
from luthier.check.diff_pairs import AnyRow, Pair, Pairing, Place, pairing_of, pairs
from luthier.check.diff_settings import Setting
from luthier.config.schema import DataConfig, Overflow, RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowDropped, RowError
from luthier.layout import cut_segment
from luthier.records import Row, Sample, Segment
from luthier.sources import Source

BATCH_ROWS = 256  # rows that are encoded together: enough to be quick, few enough that memory stays flat


class Side(Protocol):
    """One side of a comparison."""

    @property
    def name(self) -> str:
        """What a reader calls it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What its ids mean."""

    def lessons(self, rows: Sequence[tuple[AnyRow, Source]]) -> list[Lesson]:
        """What is trained on in each row, after cutting to ``data.max_length``."""


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
    """A side whose rows are rendered and encoded now."""

    name: str
    config: RunConfig
    encoder: Encoder

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self.encoder.tokenizer

    def lessons(self, rows: Sequence[tuple[AnyRow, Source]]) -> list[Lesson]:
        """See `Side`."""
        converted = [_convert(row, source) for row, source in rows]
        encoded = iter(self.encoder.encode_many([row for row in converted if not isinstance(row, RowError)]))
        return [lesson_of(row if isinstance(row, RowError) else next(encoded), self.config.data) for row in converted]


def diff_runs(
    a: Side,
    b: Side,
    sources: tuple[Sequence[Source], Sequence[Source]],
    *,
    settings: Sequence[Setting] = (),
    sample: int | None = None,
    num_shown: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunDiff:
    """Compare all rows of ``sources`` (or about ``sample`` of them), those of A and those of B.

    ``num_shown`` rows of each kind of change are kept to be shown. ``on_progress`` is told how many rows were compared
    and how many of them differ. Raises what reading the sources raises.
    """
    comparison = Comparison(
        vocabulary_a=a.tokenizer,
        vocabulary_b=b.tokenizer,
        control_a=_control(a.tokenizer),
        control_b=_control(b.tokenizer),
        by_characters=not same_vocabulary(a.tokenizer, b.tokenizer),
    )
    tally = _Tally(num_shown=num_shown)
    for batch in _batches(pairs(*sources, sample=sample)):
        tally.add(batch, _lessons(a, batch, lambda pair: pair.a), _lessons(b, batch, lambda pair: pair.b), comparison)
        if on_progress is not None:
            on_progress(tally.counts.total(), sum(n for change, n in tally.counts.items() if change.is_difference))
    return RunDiff(
        a=a.name,
        b=b.name,
        settings=tuple(settings),
        pairing=pairing_of(*sources),
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


def lesson_of(outcome: Sample | RowError, data: DataConfig) -> Lesson:
    """What is left of a sample once it is cut to ``data.max_length``.

    Under ``overflow: error`` a row that is too long ends the run; here it counts as refused.
    """
    if isinstance(outcome, RowError):
        return Lesson(refusal=outcome)
    overflow = Overflow.DROP if data.overflow is Overflow.ERROR else data.overflow
    kept: list[Segment] = []
    refusal: RowError | None = None
    for segment in outcome.segments():
        try:
            kept += cut_segment(segment, max_length=data.max_length, overflow=overflow)
        except RowDropped as error:
            refusal = refusal or error
    return Lesson(segments=kept) if kept else Lesson(refusal=refusal)


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether an id means the same text on both sides."""
    return _vocabulary(a) == _vocabulary(b)


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


def _lessons(side: Side, batch: Sequence[Pair], place_of: Callable[[Pair], Place | None]) -> list[Lesson]:
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


def _control(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.control_id(token) for token in tokenizer.control.tokens)


def _vocabulary(tokenizer: Tokenizer) -> tuple[object, ...]:
    spec = tokenizer.files.tokenizer
    added = [(token["id"], token["content"]) for token in spec["added_tokens"]]
    return spec["model"].get("vocab"), sorted(added), tokenizer.added
