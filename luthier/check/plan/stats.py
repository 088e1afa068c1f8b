"""How long the data is and how much of it is learned, per source and before any cutting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from luthier.check.plan import LongRow, MediaCount, MediaItems, longest_rows
from luthier.config.choices import Overflow
from luthier.encoding.tokenizer import Tokenizer
from luthier.metrics.texts import words
from luthier.preparation import Prepared, PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import Ints, Sample, Segment
from luthier.writing import counted

PERCENTILES = (50, 90, 95, 99)
NO_LIMIT = 2**31 - 1  # no segment is longer: token numbers are int32
NUM_BINS = 16
WIDE_RANGE = 64  # largest over smallest


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Of whole numbers: extremes, mean, ``percentiles`` (nearest rank: a value that occurs), and a histogram.

    Bin ``i`` counts values in ``edges[i] <= value < edges[i + 1]``; the last edge is above the maximum.
    """

    minimum: int
    mean: float
    maximum: int
    percentiles: dict[int, int]
    edges: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStats:
    """One source, or all of them. A segment is what attends to itself: most rows have one."""

    name: str
    weight: float
    rows: int
    segments: int
    tokens: int
    targets: int
    lengths: Distribution
    targets_per_segment: Distribution
    over_max_length: int  # segments
    media: tuple[MediaCount, ...] = ()

    @property
    def share_trained(self) -> float:
        """Targets / tokens."""
        return self.targets / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """``fitting`` says which share of segments fits into so many tokens, to choose ``data.max_length`` by."""

    split: str
    max_length: int
    total: SourceStats
    sources: tuple[SourceStats, ...]
    fitting: dict[int, float]
    longest: tuple[LongRow, ...]


def stats(prepared: PreparedSet, *, split: str, max_length: int) -> Stats:
    """The numbers of one prepared set; a source none of whose rows is left is not listed."""
    index = SegmentIndex(prepared, max_length=NO_LIMIT, overflow=Overflow.ERROR)
    everything = np.ones(len(index), dtype=np.bool_)
    media = MediaItems.of_index(index)
    sources = []
    for number, source in enumerate(prepared.sources):
        mine = index.source_ids == number
        if mine.any():
            found = _source_stats(index, mine, name=source.name, weight=source.weight, max_length=max_length)
            sources.append(replace(found, media=media.counts(mine)))
    total = _source_stats(index, everything, name="all", weight=1.0, max_length=max_length)
    return Stats(
        split=split,
        max_length=max_length,
        total=replace(total, media=media.counts()),
        sources=tuple(sources),
        fitting=_fitting(index.lengths, max_length),
        longest=longest_rows(index),
    )


def distribution(values: Ints) -> Distribution:
    """Of at least one value."""
    assert len(values), "a distribution of nothing"
    edges = _edges(int(values.min()), int(values.max()))
    counts, _ = np.histogram(values, bins=np.array(edges))
    return Distribution(
        minimum=int(values.min()),
        mean=float(values.mean()),
        maximum=int(values.max()),
        percentiles={p: int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES},
        edges=edges,
        counts=tuple(counts.tolist()),
    )


def _source_stats(
    index: SegmentIndex, mine: NDArray[np.bool_], *, name: str, weight: float, max_length: int
) -> SourceStats:
    lengths, targets = index.lengths[mine], index.num_targets[mine]
    return SourceStats(
        name=name,
        weight=weight,
        rows=len(np.unique(index.row_ids[mine])),
        segments=len(lengths),
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        lengths=distribution(lengths),
        targets_per_segment=distribution(targets),
        over_max_length=int((lengths > max_length).sum()),
    )


def _edges(low: int, high: int) -> tuple[int, ...]:
    """Edges of bins. Of equal, round width: ``(3, 17) -> (3, 4, 5, … 18)``; over wide ranges they double instead."""
    if high > WIDE_RANGE * max(low, 1):  # one row of 10,000 tokens would put all others into the first bin
        start = 1 << max(0, low.bit_length() - 1) if low else 0
        return (
            *([0] if start == 0 else []),
            *(1 << n for n in range(max(start, 1).bit_length() - 1, high.bit_length() + 1)),
        )
    width = max(1, -(-(high - low + 1) // NUM_BINS))
    magnitude = 10 ** max(0, len(str(width)) - 1)
    width = -(-width // magnitude) * magnitude
    start = low // width * width
    return tuple(range(start, high + width + 1, width))


def _fitting(lengths: Ints, max_length: int) -> dict[int, float]:
    longest = int(lengths.max())
    powers = [2**n for n in range(7, 32)]
    useful = [limit for limit in powers if limit >= np.percentile(lengths, 25)]
    stop = next((number for number, limit in enumerate(useful) if limit >= longest), len(useful))
    limits = sorted({*useful[: stop + 1][-6:], max_length})
    return {limit: float((lengths <= limit).mean()) for limit in limits}


# ------ Held-out rows whose content stands in the training data, too: their scores say how well it was learned by heart


RUN, ALIKE, MOST_ROWS = 13, 0.8, 10
MOST_TOKENS = 20_000_000  # of training rows that are looked at, which takes about a minute
MOST_NAMED = 100

WordRun = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContaminatedRow:
    """A held-out row, the training row that holds its content, in which way, and how much of it."""

    row: str
    train_row: str
    kind: str  # exact, normalised, question, alike
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Contamination:
    """Of ``rows`` held-out rows, those whose content was found in ``train_rows`` training rows (of ``of_train_rows``),
    by kind; the first `MOST_NAMED` are named."""

    rows: int
    train_rows: int
    of_train_rows: int
    counts: dict[str, int]
    found: tuple[ContaminatedRow, ...]

    @property
    def sentence(self) -> str:
        """``of 90 held-out rows 3 are in the training data or like it (2 exact, 1 alike); the first: a:3, as b:7``"""
        looked = "" if self.train_rows == self.of_train_rows else f", of which the first {self.train_rows:,} were read"
        if not self.found:
            return (
                f"none of {counted(self.rows, 'held-out row')} was found in "
                f"{counted(self.of_train_rows, 'training row')}{looked}"
            )
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())
        first = f"the first: {self.found[0].row}, as {self.found[0].train_row}"
        they_are = counted(sum(self.counts.values()), "is", "are")
        of = f"of {counted(self.rows, 'held-out row')} {they_are} in the training data or like it"
        return f"{of} ({kinds}){looked}; {first}"


@dataclass(kw_only=True, slots=True)
class _HeldOut:
    """What is looked for of a held-out row, and where it was found."""

    row: str
    ids: bytes
    question: WordRun
    asked: WordRun  # the question that it ends with, with all that stands before it; or nothing
    text: WordRun
    runs: frozenset[WordRun]
    places: dict[str, tuple[str, float]] = field(default_factory=dict)


def contamination(held_out: Iterable[Sample | Segment], train: PreparedSet, tokenizer: Tokenizer) -> Contamination:
    """Look for the content of held-out rows in the training rows. The longest segment of a row with something that is
    learned stands for it, and the one without, if any, for the question that it ends with."""
    content = _RowWords(tokenizer)
    longest: dict[str, Sample | Segment] = {}
    asked: dict[str, Sample | Segment] = {}
    for each in held_out:
        row = str(each.address)
        if not each.target.any():
            asked[row] = each
        if row not in longest or _substance(longest[row]) < _substance(each):
            longest[row] = each
    wanted = [content.held_out(row, each, asked.get(row)) for row, each in longest.items()]
    num_read = _look(wanted, train, content)
    named = [found for one in wanted for found in _named(one)]
    counts = Counter(found.kind for found in named)
    kinds = {kind: counts[kind] for kind in ("exact", "normalised", "question", "alike") if counts[kind]}
    return Contamination(
        rows=len(wanted),
        train_rows=num_read,
        of_train_rows=len(train),
        counts=kinds,
        found=tuple(named[:MOST_NAMED]),
    )


def contaminated(prepared: Prepared, tokenizer: Tokenizer) -> Contamination:
    """`contamination` of a run's own held-out rows."""
    held_out = prepared.eval
    assert held_out is not None, "a run with held-out rows"
    return contamination((held_out[row] for row in range(len(held_out))), prepared.train, tokenizer)


def _substance(each: Sample | Segment) -> tuple[bool, int]:
    return bool(each.target.any()), len(each.input_ids)


class _RowWords:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.control = np.array(sorted(tokenizer.control_ids), np.int64)

    def of(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> WordRun:
        """Those of some ids."""
        return tuple(words(self.tokenizer.decode(ids[~np.isin(ids, self.control)])))

    def question(self, each: Sample | Segment) -> WordRun:
        """Those before the first target; all, where nothing is learned."""
        targets = np.flatnonzero(each.target)
        return self.of(each.input_ids[: int(targets[0])] if len(targets) else each.input_ids)

    def answers(self, each: Sample | Segment, asked: WordRun) -> bool:
        """Whether an answer that is learned stands right behind these words, which are its first ones."""
        starts = np.flatnonzero(each.target & ~np.append(False, each.target[:-1])).tolist()
        return any(self.of(each.input_ids[:start]) == asked for start in starts)

    def held_out(self, row: str, each: Sample | Segment, asked: Sample | Segment | None) -> _HeldOut:
        text = self.of(each.input_ids)
        return _HeldOut(
            row=row,
            ids=each.input_ids.tobytes(),
            question=self.question(each),
            asked=() if asked is None else self.of(asked.input_ids),
            text=text,
            runs=frozenset(_runs(text)),
        )


def _runs(text: WordRun) -> Iterator[WordRun]:
    return (text[start : start + RUN] for start in range(len(text) - RUN + 1))


def _look(wanted: list[_HeldOut], train: PreparedSet, content: _RowWords) -> int:
    """Note where each held-out row was found; give how many training rows were read."""
    by_ids, by_text, by_question = (defaultdict[object, list[_HeldOut]](list) for _ in range(3))
    by_asked = defaultdict[WordRun, list[_HeldOut]](list)
    holders: dict[WordRun, list[int]] = {}
    for one in wanted:
        by_ids[one.ids].append(one)
        by_text[one.text].append(one)
        by_question[one.question].append(one)
        by_asked[one.asked].append(one)
        holders |= {run: [] for run in one.runs}
    last_words = {(len(asked), asked[-1]) for asked in by_asked if asked}
    lengths = {length for length, _ in last_words}
    num_tokens = 0
    for number in range(len(train)):
        sample = train[number]
        num_tokens += len(sample.input_ids)
        if num_tokens > MOST_TOKENS:
            break
        found = [("question", one) for one in by_question.get(content.question(sample), ()) if one.question]
        runs: set[WordRun] = set()
        # a row whose history is rewritten holds several sequences, each of which a held-out segment may be
        for each in (sample, *(sample.segments() if len(sample.branches) > 1 else ())):
            text = content.of(each.input_ids)
            found += [("exact", one) for one in by_ids.get(each.input_ids.tobytes(), ())]
            found += [("normalised", one) for one in by_text.get(text, ()) if text]
            fits = (length for length in lengths if length <= len(text) and (length, text[length - 1]) in last_words)
            told = [asked for length in fits if (asked := text[:length]) in by_asked and content.answers(each, asked)]
            found += [("question", one) for asked in told for one in by_asked[asked]]
            runs.update(_runs(text))
        for kind, one in found:
            one.places.setdefault(kind, (str(sample.address), 1.0))
        for run in runs & holders.keys():
            if len(holders[run]) <= MOST_ROWS:  # one more than is counted tells that there are too many
                holders[run].append(number)
    else:
        number = len(train)
    for one in wanted:
        _alike(one, holders, train)
    return number


def _alike(one: _HeldOut, holders: dict[WordRun, list[int]], train: PreparedSet) -> None:
    counted = [holders[run] for run in one.runs if len(holders[run]) <= MOST_ROWS]
    rows = Counter(row for of_run in counted for row in of_run)
    share = sum(bool(of_run) for of_run in counted) / len(counted) if counted else 0.0
    if rows and share >= ALIKE:
        one.places["alike"] = (str(train.address(rows.most_common(1)[0][0])), share)


def _named(one: _HeldOut) -> Iterator[ContaminatedRow]:
    for kind in ("exact", "normalised", "question", "alike"):
        if kind in one.places:
            place, share = one.places[kind]
            yield ContaminatedRow(row=one.row, train_row=place, kind=kind, share=share)
            return
