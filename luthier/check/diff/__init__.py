"""What changes in rows between two run descriptions: as data, in a terminal and as a page.

Here: one row of the two, its tokens, which of them are learned, what they count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, zip_longest

import numpy as np
from numpy.typing import NDArray

from luthier.check.show import TokenDecoder, token_texts
from luthier.errors import RowError
from luthier.records import Segment

BEFORE, AFTER, MOST = 24, 12, 160  # tokens of an excerpt: ahead of a change, behind it, of the change
CHARACTERS_PER_TOKEN = 4  # an excerpt of characters is so many times as long


class Change(StrEnum):
    """What became of a row. Each is a count; all together they are the rows that were compared."""

    SAME = "same"
    TOKENS = "tokens differ"
    TARGETS = "only targets differ"
    WEIGHTS = "only weights differ"
    REFUSED_A = "refused in A"
    REFUSED_B = "refused in B"
    REFUSED_BOTH = "refused in both"
    MISSING_A = "missing in A"
    MISSING_B = "missing in B"

    def words(self, *, unit: str) -> str:
        """``tokens differ``; ``characters differ`` where those are what is compared."""
        return f"{unit}s differ" if self is Change.TOKENS else self.value

    @property
    def is_difference(self) -> bool:
        """A row that neither side trains on changes nothing."""
        return self not in (Change.SAME, Change.REFUSED_BOTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExcerptToken:
    """A token of an excerpt, or a character where vocabularies differ (``id`` is then None).

    A character that is split over tokens stands at the first of them; the others have no text.
    """

    id: int | None
    text: str
    target: bool
    weight: float
    differs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    """One side of a row around its first difference.

    ``index`` is where ``units`` begin; ``at`` is the place of the difference in them, ``len(units)`` where the side
    has ended. ``num_units`` of the segment, ``is_cut``: more of what differs follows than is shown.
    """

    index: int
    at: int
    units: tuple[ExcerptToken, ...]
    num_units: int
    is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """Where two sides part: token (or character) ``index`` of segment ``segment`` of A (of B, where A has none).

    None is the excerpt of a side that has no such segment.
    """

    segment: int
    index: int
    a: Excerpt | None
    b: Excerpt | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What one side trains on in a row: its segments, or the reason why there are none."""

    segments: Sequence[Segment] = ()
    refusal: RowError | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_targets(self) -> int:
        return sum(int(segment.target.sum()) for segment in self.segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How two lessons are compared: by ids, or by characters where ids mean different texts on the two sides."""

    vocabulary_a: TokenDecoder
    vocabulary_b: TokenDecoder
    control_a: frozenset[int]
    control_b: frozenset[int]
    by_characters: bool

    def change(self, a: Lesson, b: Lesson) -> Change:
        """What changes from ``a`` to ``b``."""
        match a.refusal, b.refusal:
            case RowError(), RowError():
                return Change.REFUSED_BOTH
            case RowError(), None:
                return Change.REFUSED_A
            case None, RowError():
                return Change.REFUSED_B
        return _kind(*self._lines(a, b))

    def same_answers(self, a: Lesson, b: Lesson) -> bool:
        """Whether both learn the same text, control tokens apart: then only what is read before it has changed."""
        return _answers(a, self.vocabulary_a, self.control_a) == _answers(b, self.vocabulary_b, self.control_b)

    def first_difference(self, a: Lesson, b: Lesson, change: Change) -> FirstDifference | None:
        """Where the two part for the first time, in what ``change`` says; None if they do not.

        Segments that both sides have are set aside first: a run that only one side learns does not shift the others.
        """
        for (number, one), (other_number, other) in _unmatched(*self._lines(a, b)):
            if one is None or other is None:
                here = one or other
                assert here is not None, "a segment that is nobody's is no difference"
                start = int(here.target.argmax())  # what is learned says more than how the text begins
                return FirstDifference(
                    segment=other_number if one is None else number,
                    index=start,
                    a=None if one is None else _excerpt(one, start, len(one.symbols), self.vocabulary_a),
                    b=None if other is None else _excerpt(other, start, len(other.symbols), self.vocabulary_b),
                )
            start, behind = _extent(one, other, change)
            if start >= 0:
                return FirstDifference(
                    segment=number,
                    index=start,
                    a=_excerpt(one, start, len(one.symbols) - behind, self.vocabulary_a),
                    b=_excerpt(other, start, len(other.symbols) - behind, self.vocabulary_b),
                )
        return None

    def _lines(self, a: Lesson, b: Lesson) -> tuple[list[_SegmentColumns], list[_SegmentColumns]]:
        if self.by_characters:
            return (
                [_characters(segment, self.vocabulary_a) for segment in a.segments],
                [_characters(segment, self.vocabulary_b) for segment in b.segments],
            )
        return [_ids(segment) for segment in a.segments], [_ids(segment) for segment in b.segments]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SegmentColumns:
    """One segment as columns: ``symbols`` (ids, or code points), ``target``, and ``weight``, 0 where it is none."""

    symbols: NDArray[np.int64]
    target: NDArray[np.bool_]
    weight: NDArray[np.float32]
    are_ids: bool

    def equals(self, other: _SegmentColumns) -> bool:
        return (
            np.array_equal(self.symbols, other.symbols)
            and np.array_equal(self.target, other.target)
            and np.array_equal(self.weight, other.weight)
        )


def _ids(segment: Segment) -> _SegmentColumns:
    return _SegmentColumns(
        symbols=segment.input_ids.astype(np.int64), target=segment.target, weight=_weight(segment), are_ids=True
    )


def _characters(segment: Segment, vocabulary: TokenDecoder) -> _SegmentColumns:
    """Each character is a target if the token is that it begins in."""
    texts = token_texts(segment.input_ids.tolist(), vocabulary)
    sizes = [len(text.text) for text in texts]
    whole = "".join(text.text for text in texts)
    return _SegmentColumns(
        symbols=np.array([ord(character) for character in whole], dtype=np.int64),
        target=np.repeat(segment.target, sizes),
        weight=np.repeat(_weight(segment), sizes),
        are_ids=False,
    )


def _answers(lesson: Lesson, vocabulary: TokenDecoder, control: frozenset[int]) -> str:
    """All that is learned, as text: ids of one text may differ, as ``Yes`` and `` Yes`` do behind other seams."""
    ids = [i for segment in lesson.segments for i in segment.input_ids[segment.target].tolist() if i not in control]
    return "".join(vocabulary.decode(ids).split())


def _weight(segment: Segment) -> NDArray[np.float32]:
    weight = np.ones(len(segment), dtype=np.float32) if segment.weight is None else segment.weight
    return np.where(segment.target, weight, 0).astype(np.float32)


def _unmatched(
    a: Sequence[_SegmentColumns], b: Sequence[_SegmentColumns]
) -> list[tuple[tuple[int, _SegmentColumns | None], tuple[int, _SegmentColumns | None]]]:
    """Segments of ``a`` beside those of ``b``, with their numbers, without those that both sides have.

    [P Q R] and [R S] -> P beside S, Q beside nothing
    """
    left = dict(enumerate(a))
    right = dict(enumerate(b))
    for number, one in enumerate(a):
        twin = next((other for other, line in right.items() if one.equals(line)), None)
        if twin is not None:
            del left[number], right[twin]
    return list(zip_longest(left.items(), right.items(), fillvalue=(-1, None)))


def _kind(a: Sequence[_SegmentColumns], b: Sequence[_SegmentColumns]) -> Change:
    pairs = [(one, other) for (_, one), (_, other) in _unmatched(a, b)]
    if not pairs:
        return Change.SAME
    whole = [(one, other) for one, other in pairs if one is not None and other is not None]
    if len(whole) < len(pairs) or not all(np.array_equal(one.symbols, other.symbols) for one, other in whole):
        return Change.TOKENS
    if not all(np.array_equal(one.target, other.target) for one, other in whole):
        return Change.TARGETS
    return Change.WEIGHTS


def _extent(a: _SegmentColumns, b: _SegmentColumns, change: Change) -> tuple[int, int]:
    """``(start, behind)``: what differs begins at ``start``, -1 for nothing; ``behind`` units at the end are alike.

    [x a b y] and [x c y] -> (1, 1)
    """
    left, right = _column(a, change), _column(b, change)
    size = min(len(left), len(right))
    unequal = np.flatnonzero(left[:size] != right[:size])
    if not len(unequal) and len(left) == len(right):
        return -1, 0
    start = int(unequal[0]) if len(unequal) else size
    most = size - start
    unequal = np.flatnonzero(left[::-1][:most] != right[::-1][:most]) if most else np.zeros(0, np.int64)
    return start, int(unequal[0]) if len(unequal) else most


def _column(line: _SegmentColumns, change: Change) -> NDArray[np.int64] | NDArray[np.bool_] | NDArray[np.float32]:
    match change:
        case Change.TOKENS:
            return line.symbols
        case Change.TARGETS:
            return line.target
        case Change.WEIGHTS:
            return line.weight
        case _:
            raise AssertionError(f"there is no place at which rows are {change!r}")


def _excerpt(line: _SegmentColumns, start: int, stop: int, vocabulary: TokenDecoder) -> Excerpt:
    scale = 1 if line.are_ids else CHARACTERS_PER_TOKEN
    begin, shown_stop = max(0, start - scale * BEFORE), min(stop, start + scale * MOST)
    end = min(len(line.symbols), shown_stop + scale * AFTER) if shown_stop == stop else shown_stop
    units = []
    for place, text in zip(range(begin, end), _texts(line.symbols[begin:end].tolist(), line, vocabulary), strict=True):
        is_target = bool(line.target[place])
        units.append(
            ExcerptToken(
                id=int(line.symbols[place]) if line.are_ids else None,
                text=text,
                target=is_target,
                weight=float(line.weight[place]) if is_target else 1.0,
                differs=start <= place < stop,
            )
        )
    return Excerpt(
        index=begin, at=start - begin, units=tuple(units), num_units=len(line.symbols), is_cut=shown_stop < stop
    )


def _texts(symbols: Sequence[int], line: _SegmentColumns, vocabulary: TokenDecoder) -> list[str]:
    if not line.are_ids:
        return [chr(symbol) for symbol in symbols]
    return [text.text for text in token_texts(symbols, vocabulary)]


# --------------------------------------------------------------------------------------------------------------------
# Runs of one token in an excerpt, told once: the slots of a picture are many, and all alike.


FEWEST = 4  # fewer are written out


def repeats(units: Sequence[ExcerptToken], *, at: int = -1) -> Iterator[tuple[int, ExcerptToken, int]]:
    """``(place, unit, count)``: ``a b b b b c -> (0, a, 1), (1, b, 4), (5, c, 1)``.

    Learned tokens, characters (which have no id) and the unit at ``at`` stand alone.
    """

    def key(numbered: tuple[int, ExcerptToken]) -> tuple[ExcerptToken, bool]:
        place, unit = numbered
        return unit, place == at or unit.target or unit.id is None

    for (_, is_single), group in groupby(enumerate(units), key=key):
        same = list(group)
        if is_single or len(same) < FEWEST:
            yield from ((place, unit, 1) for place, unit in same)
        else:
            place, unit = same[0]
            yield place, unit, len(same)
