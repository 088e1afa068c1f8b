"""Which rows of several data sets an epoch sees, and in which order: integers of an order, before anything is read.

The order of an epoch is a function from places to rows, not a list: any stretch of it is computed when it is asked for,
from a *keyed permutation* of so many numbers. So an order costs the same memory for a thousand rows and for a billion,
and nothing is read to know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy, MixtureStop
from luthier.errors import UserError
from luthier.packing import bounds_of
from luthier.records import Ints
from luthier.writing import counted

# Rows of an epoch: more is a slip in the weights; each takes some forty bytes of a plan.
MAX_ROWS, MAX_TIMES_ALL = 2**26, 8  # the larger of a number, and of so many times the rows that there are
RESOLUTION = 2**32  # shares are whole multiples of this part, so that all machines agree on the order
LISTED = 2**16  # so many numbers are permuted by a list, which is as good as a shuffle can be
ROUNDS = 6  # of the mixing of larger ones
BLOCK = 2**15  # numbers that are mixed at once: they stay in the processor's cache

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]


class KeyedPermutation:
    """A permutation of ``0 … size - 1`` that a key chooses. Its memory does not grow with its size.

    Above `LISTED` numbers the bits of a number are mixed by rounds of steps that can each be undone (a product with an
    odd number, a shift), and mixed again until the result is below ``size`` ("cycle walking").
    """

    def __init__(self, size: int, *key: int) -> None:
        """``key``: numbers from 0 on; another key is another permutation."""
        rng = np.random.Generator(np.random.PCG64([*key, len(key), size]))
        self.size = size
        self._listed: Ints | None = rng.permutation(size).astype(np.int64) if size <= LISTED else None
        bits = max(1, (size - 1).bit_length())
        self._mask, self._shift = np.uint64(2**bits - 1), np.uint64(bits - bits // 2)
        self._factors = rng.integers(0, 2**63, ROUNDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._added = rng.integers(0, 2**63, ROUNDS, dtype=np.uint64)

    def __getitem__(self, numbers: Ints) -> Ints:
        """Where the permutation sends these numbers, int64[n]."""
        if self._listed is not None:
            return self._listed[numbers]
        found = np.empty(len(numbers), dtype=np.int64)
        for start in range(0, len(numbers), BLOCK):
            mixed = self._mixed(numbers[start : start + BLOCK].astype(np.uint64))
            outside = np.flatnonzero(mixed >= self.size)
            while len(outside):
                mixed[outside] = again = self._mixed(mixed[outside])
                outside = outside[again >= self.size]
            found[start : start + BLOCK] = mixed
        return found

    def _mixed(self, words: Words) -> Words:
        for factor, added in zip(self._factors, self._added, strict=True):
            words = (words * factor + added) & self._mask
            words ^= words >> self._shift
        return words


@lru_cache(maxsize=16)
def _permutation(size: int, *key: int) -> KeyedPermutation:
    return KeyedPermutation(size, *key)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSettings:
    """How N sources share an epoch.

    weights      float[N]: by ``epochs`` how often each row is seen, 2.5 being twice, and a seeded half once more;
                 by ``rows`` or ``tokens`` the sources' shares, in any unit
    temperature  by ``rows`` or ``tokens``: a share is also proportional to size^(1/temperature); without it, to the
                 weight alone
    stop         by ``rows`` or ``tokens``: the epoch ends when the ``first`` source was seen whole, or ``all`` were
    """

    weights: tuple[float, ...]
    by: MixtureBy = MixtureBy.EPOCHS
    temperature: float | None = None
    stop: MixtureStop = MixtureStop.ALL


class EpochOrder(Protocol):
    """The rows of one epoch in the order in which they are seen."""

    def __len__(self) -> int:
        """How many, each counted as often as it is seen."""

    def rows(self, start: int, stop: int) -> Ints:
        """int64: those at the places ``start:stop``; ``stop`` may lie behind the end."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedOrder:
    """An order that somebody has written down."""

    listed: Ints

    def __len__(self) -> int:
        return len(self.listed)

    def rows(self, start: int, stop: int) -> Ints:
        return self.listed[start:stop]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowOrder:
    """The order of every epoch, by global number: rows of the first source, then of the second, and so on.

    counts          how many rows each source has, those that will turn out to be lost among them
    held_out        int64, ascending: rows that are evaluated on, and so in no epoch
    tokens_per_row  the sources' means; needed where shares are of ``tokens``

    By ``epochs`` an epoch is one full shuffle. By shares every beginning of it has them, to a few rows; each source
    comes in a full shuffle of its own, which later epochs go on with, and in a new one when it is exhausted.
    """

    counts: tuple[int, ...]
    mixture: MixtureSettings
    seed: int
    held_out: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tokens_per_row: tuple[float, ...] | None = None

    @property
    def num_rows(self) -> int:
        """All rows there are, those that are held out and those that no epoch takes among them."""
        return sum(self.counts)

    def epoch(self, number: int) -> EpochOrder:
        """The order of an epoch. Raises `UserError` where a source without rows should have a share, and where the
        weights make an epoch of far more rows than there are."""
        assert len(self.counts) == len(self.mixture.weights), f"{self.counts} rows, {self.mixture.weights} weights"
        sizes = rows_trained(self.counts, self.held_out)
        match self.mixture.by:
            case MixtureBy.EPOCHS:
                drawn: EpochOrder = _Shuffled(sizes, self.mixture.weights, self.seed, number)
            case MixtureBy.ROWS:
                drawn = _Interleaved(sizes, np.ones(len(sizes)), self.mixture, self.seed, number)
            case MixtureBy.TOKENS:
                assert self.tokens_per_row is not None, "shares of tokens need the sources' mean tokens per row"
                means = np.asarray(self.tokens_per_row, dtype=np.float64)
                drawn = _Interleaved(sizes, means, self.mixture, self.seed, number)
            case _:
                raise AssertionError(f"unknown mixture {self.mixture.by!r}")
        return drawn if not len(self.held_out) else _PassingOver(drawn, self.held_out)


@dataclass(frozen=True, slots=True, eq=False)
class _PassingOver:
    """An order of rows that are counted without those held out."""

    order: EpochOrder
    held_out: Ints

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, start: int, stop: int) -> Ints:
        rows = self.order.rows(start, stop)
        before = np.searchsorted(self.held_out - np.arange(len(self.held_out)), rows, side="right")
        return rows + before.astype(np.int64)


def rows_trained(counts: Sequence[int], held_out: Ints) -> Ints:
    """int64: how many rows of each source are not among ``held_out``, which ascend."""
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return np.diff(ends - np.searchsorted(held_out, ends), prepend=0)


def hold_out_part(num_rows: int, start: int, stop: int, *, seed: int) -> Ints:
    """Global row numbers, in the order in which rows are held out: the places ``start:stop`` of it."""
    return _permutation(num_rows, seed, 0, 0, 5)[np.arange(start, min(stop, num_rows), dtype=np.int64)]


def check_mixture(num_rows: Sequence[int], mixture: MixtureSettings, *, seed: int, most_tokens: int) -> None:
    """Raise the `UserError` with which `RowOrder.epoch` would end, or for an epoch without a row, before it is made.

    How many tokens a row has is not known yet: from 1 to ``most_tokens``. By ``tokens`` an epoch is refused only where
    it would be too long for every such number.
    """
    sizes = np.asarray(num_rows, dtype=np.int64)
    match mixture.by:
        case MixtureBy.EPOCHS:
            parts = _times_seen(sizes, mixture.weights)
            if sizes.sum() and not sum(parts):
                raise UserError(
                    f"an epoch takes no row: of {', '.join(f'{size:,}' for size in num_rows)} rows it sees a share of "
                    f"{', '.join(f'{weight:g}' for weight in mixture.weights)}",
                    hint="raise the weight of data.train[], which says how often each row is seen in an epoch",
                    key="data.train",
                )
            check_epoch(sum(parts), int(sizes.sum()), why="the weights say how often each row is seen")
        case MixtureBy.ROWS:
            shares = _shares(sizes, mixture, np.ones(len(sizes)))
            _check_length(_end(sizes, shares, _phases(len(sizes), seed), mixture.stop), sizes, shares)
        case MixtureBy.TOKENS if mixture.temperature is None:
            ends = []  # if each source in turn has the shortest rows, and all others the longest
            for source in range(len(sizes)):
                tokens = np.where(np.arange(len(sizes)) == source, 1.0, float(most_tokens))
                shares = _shares(sizes, mixture, tokens)
                ends.append(sizes[source] / shares[source] * shares.sum())
            end = max(ends) if mixture.stop is MixtureStop.ALL else 0
            check_epoch(int(end), int(sizes.sum()), why="only then the source with the smallest share was seen whole")
        case _:
            pass  # a temperature, which draws the sizes together


def check_epoch(num_rows: int, all_rows: int, *, why: str) -> None:
    """Raise `UserError` where the weights of sources make an epoch of far more rows than there are."""
    most = max(MAX_ROWS, MAX_TIMES_ALL * all_rows)
    if num_rows > most:
        raise UserError(
            f"an epoch would have {counted(num_rows, 'row')}, and there are {all_rows:,}: {why}",
            hint=f"at most {counted(most, 'row is', 'rows are')} planned at once: change the weights "
            "of data.train[], or let train.num_train_epochs say how often all are seen",
            key="data.train",
        )


def _times_seen(sizes: Ints, weights: Sequence[float]) -> list[int]:
    """How many rows an epoch takes of each source, whose rows are all seen ``weight`` times: 2.5 of 10 rows is 25."""
    pairs = zip(sizes.tolist(), weights, strict=True)
    return [int(weight) * size + round((weight - int(weight)) * size) for size, weight in pairs]


class _Shuffled:
    """Every row as often as its source's weight says, in one full shuffle. ``ends``: of the sources, in places before
    the shuffle; each has its rows over and over."""

    def __init__(self, sizes: Ints, weights: Sequence[float], *key: int) -> None:
        counts = _times_seen(sizes, weights)
        check_epoch(sum(counts), int(sizes.sum()), why="the weights say how often each row is seen")
        self.sizes, self.firsts, self.key = sizes, bounds_of(sizes), key
        self.whole = np.array([int(weight) for weight in weights], dtype=np.int64)  # times seen, without the fraction
        self.ends = np.cumsum(np.array(counts, dtype=np.int64))

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def rows(self, start: int, stop: int) -> Ints:
        places = np.arange(start, min(stop, len(self)), dtype=np.int64)
        if not len(places):
            return places
        places = _permutation(len(self), *self.key, 1)[places]
        if len(self.sizes) == 1 and len(self) == self.sizes[0]:
            return places
        sources = np.searchsorted(self.ends, places, side="right")
        within = places - np.append(np.int64(0), self.ends)[sources]
        found = within % np.maximum(1, self.sizes[sources])
        again = np.flatnonzero(within >= self.whole[sources] * self.sizes[sources])  # the fraction: a choice of rows
        for source in np.unique(sources[again]).tolist():
            mine = again[sources[again] == source]
            found[mine] = _permutation(int(self.sizes[source]), *self.key, 2, source)[found[mine]]
        return self.firsts[sources] + found


class _Interleaved:
    """Source s gives its k-th row at the time ``(k + phase) / share``: within a row of its share at all times."""

    def __init__(self, sizes: Ints, means: Floats, mixture: MixtureSettings, seed: int, epoch: int) -> None:
        self.sizes, self.firsts, self.key = sizes, bounds_of(sizes), (seed, epoch)
        self.shares = _shares(sizes, mixture, means)
        self.phases = _phases(len(sizes), seed)
        self.end = _end(sizes, self.shares, self.phases, mixture.stop)
        _check_length(self.end, sizes, self.shares)
        self.counts = _rows_until(self.end, self.shares, self.phases)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def rows(self, start: int, stop: int) -> Ints:
        stop = min(stop, len(self))
        if start >= stop:
            return self.firsts[:0]
        (low, _), (_, high) = self._counts_around(start), self._counts_around(stop)
        ranks = [np.arange(first, last, dtype=np.int64) for first, last in zip(low, high, strict=True)]
        times = [(k + phase) / share for k, phase, share in zip(ranks, self.phases, self.shares, strict=True)]
        rows = [self.firsts[source] + self._rows_of(source, mine) for source, mine in enumerate(ranks)]
        skip = start - int(low.sum())
        taken = np.argsort(np.concatenate(times), kind="stable")[skip : skip + stop - start]
        found: Ints = np.concatenate(rows)[taken]
        return found

    def _counts_around(self, place: int) -> tuple[Ints, Ints]:
        """How many rows each source gives until two moments, of which the first has at most ``place`` of all, the
        other at least, and between which there is no other."""
        before, after = -1.0, self.end
        while (middle := (before + after) / 2) not in (before, after):
            if int(self._until(middle).sum()) <= place:
                before = middle
            else:
                after = middle
        low = self._until(before)
        return low, low if int(low.sum()) == place else self._until(after)

    def _until(self, moment: float) -> Ints:
        return np.minimum(self.counts, _rows_until(moment, self.shares, self.phases))

    def _rows_of(self, source: int, ranks: Ints) -> Ints:
        """The source's rows: whole shuffles, and then a part of one, with which the next epoch goes on."""
        seed, epoch = self.key
        size = int(self.sizes[source])
        whole, part = divmod(int(self.counts[source]), size)
        goes_on = ranks >= whole * size
        places = np.where(goes_on, ranks - whole * size + epoch * part, ranks)
        shuffles = places // size
        found = places % size
        for kind in (False, True):
            for number in np.unique(shuffles[goes_on == kind]).tolist():
                mine = np.flatnonzero((goes_on == kind) & (shuffles == number))
                key = (seed, number, 4, source) if kind else (seed, epoch, 3, source, number)
                found[mine] = _permutation(size, *key)[found[mine]]
        return found


def _phases(num_sources: int, seed: int) -> Floats:
    """The same in all epochs, and so are the counts."""
    return np.random.Generator(np.random.PCG64([seed, 0, 0, 2])).random(num_sources)


def _end(sizes: Ints, shares: Ints, phases: Floats, stop: MixtureStop) -> float:
    """The time at which an epoch ends, in rows of a source over its share."""
    exhausted = (sizes - 1 + phases) / shares
    match stop:
        case MixtureStop.FIRST:
            return float(exhausted.min())
        case MixtureStop.ALL:
            return float(exhausted.max())
        case _:
            raise AssertionError(f"unknown stop {stop!r}")


def _shares(sizes: Ints, mixture: MixtureSettings, tokens_per_row: Floats) -> Ints:
    """int64[N]: how many rows come from each source, of `RESOLUTION` in all; at least one."""
    weights = np.asarray(mixture.weights, dtype=np.float64)
    for source in np.flatnonzero((sizes == 0) | ~(tokens_per_row > 0)).tolist():
        raise UserError(
            f"source {source} has {counted(sizes[source], 'row')} of {tokens_per_row[source]:g} tokens: "
            f"it cannot have a share of {weights[source]:g}",
            hint="remove it, or set data.mixture.by: epochs",
            key=f"data.train[{source}]",
        )
    if mixture.temperature is not None:
        weights = weights * (sizes * tokens_per_row) ** (1 / mixture.temperature)
    per_row = weights / tokens_per_row
    parts: Ints = np.maximum(1, np.rint(per_row / per_row.sum() * RESOLUTION)).astype(np.int64)
    return parts


def _check_length(end: float, sizes: Ints, shares: Ints) -> None:
    if not len(sizes):
        return
    slowest = int(np.argmax(sizes / shares))
    share = shares[slowest] / shares.sum()
    why = f"only then source {slowest} ({counted(sizes[slowest], 'row')}, {share:.2g} of all rows) was seen whole"
    check_epoch(int(end * shares.sum()), int(sizes.sum()), why=f"{why}; data.mixture.stop: first ends sooner")


def _rows_until(moment: float, shares: Ints, phases: Floats) -> Ints:
    """int64[N]: how many ``k`` have ``(k + phase) / share <= moment``, as floats see it."""
    counts = np.maximum(0, np.floor(moment * shares - phases)).astype(np.int64)
    while len(more := np.flatnonzero((counts + phases) / shares <= moment)):
        counts[more] += 1
    while len(fewer := np.flatnonzero((counts > 0) & ((counts - 1 + phases) / shares > moment))):
        counts[fewer] -= 1
    return counts
