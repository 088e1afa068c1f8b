"""Which rows of several data sets an epoch sees, and in which order: integers of an order, before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy, MixtureStop
from luthier.errors import UserError
from luthier.packing.planned import bounds_of

# Rows of an epoch: more is a slip in the weights, and would not fit the memory; each takes some forty bytes of a plan.
MAX_ROWS, MAX_TIMES_ALL = 2**26, 8  # the larger of a number, and of so many times the rows that there are
RESOLUTION = 2**32  # shares are whole multiples of this part, so that all machines agree on the order

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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


def row_order(
    num_rows: Sequence[int],
    mixture: MixtureSettings,
    *,
    seed: int,
    epoch: int,
    tokens_per_row: Sequence[float] | Floats | None = None,
) -> Ints:
    """int64[n]: the rows of one epoch in the order in which they are seen, numbered through all sources.

    Row ``i`` of source ``s`` has the number ``sum(num_rows[:s]) + i``. By ``epochs`` it is one full shuffle. By shares
    every beginning of the order has them, to a few rows; each source comes in a full shuffle of its own, which later
    epochs go on with, and in a new one when it is exhausted.
    ``tokens_per_row`` are the sources' means; needed by ``tokens``.

    Raises `UserError` where a source without rows should have a share.
    """
    sizes = np.asarray(num_rows, dtype=np.int64)
    assert len(sizes) == len(mixture.weights), f"{len(sizes)} sources, {len(mixture.weights)} weights"
    match mixture.by:
        case MixtureBy.EPOCHS:
            return _by_epochs(sizes, mixture.weights, seed, epoch)
        case MixtureBy.ROWS:
            shares = _shares(sizes, mixture, np.ones(len(sizes)))
        case MixtureBy.TOKENS:
            assert tokens_per_row is not None, "shares of tokens need the sources' mean tokens per row"
            shares = _shares(sizes, mixture, np.asarray(tokens_per_row, dtype=np.float64))
        case _:
            raise AssertionError(f"unknown mixture {mixture.by!r}")
    return _interleaved(sizes, shares, mixture.stop, seed, epoch)


def check_mixture(num_rows: Sequence[int], mixture: MixtureSettings, *, seed: int, most_tokens: int = 1) -> None:
    """Raise the `UserError` with which `row_order` would end, or for an epoch without a row, before an order is made.

    How many tokens a row has is not known yet: from 1 to ``most_tokens``. By ``tokens`` an epoch is refused only where
    it would be too long for every such number.
    """
    sizes = np.asarray(num_rows, dtype=np.int64)
    match mixture.by:
        case MixtureBy.EPOCHS:
            pairs = zip(num_rows, mixture.weights, strict=True)
            parts = [int(weight) * size + round(weight % 1 * size) for size, weight in pairs]
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
            _check_length(_end(sizes, shares, mixture.stop, seed), sizes, shares)
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
            f"an epoch would have {num_rows:,} rows, and there are {all_rows:,}: {why}",
            hint=f"at most {most:,} rows are planned at once: change the weights of data.train[], or let "
            "train.num_train_epochs say how often all are seen",
            key="data.train",
        )


def repeat_counts(num_rows: int, weight: float, rng: np.random.Generator) -> Ints:
    """int64[num_rows]: how often each row is seen. 2.5: twice, and a random half once more."""
    times = np.full(num_rows, int(weight), dtype=np.int64)
    times[rng.permutation(num_rows)[: round((weight - int(weight)) * num_rows)]] += 1
    return times


def _by_epochs(sizes: Ints, weights: Sequence[float], seed: int, epoch: int) -> Ints:
    rng = _rng(seed, epoch, 1)
    rows = np.arange(int(sizes.sum()), dtype=np.int64)
    if any(weight != 1 for weight in weights):
        times = np.concatenate(
            [repeat_counts(size, weight, rng) for size, weight in zip(sizes.tolist(), weights, strict=True)]
        )
        check_epoch(int(times.sum()), len(rows), why="the weights say how often each row is seen")
        rows = np.repeat(rows, times)
    shuffled: Ints = rng.permutation(rows)
    return shuffled


def _shares(sizes: Ints, mixture: MixtureSettings, tokens_per_row: Floats) -> Ints:
    """int64[N]: how many rows come from each source, of `RESOLUTION` in all; at least one."""
    weights = np.asarray(mixture.weights, dtype=np.float64)
    for source in np.flatnonzero((sizes == 0) | ~(tokens_per_row > 0)).tolist():
        raise UserError(
            f"source {source} has {sizes[source]} rows of {tokens_per_row[source]:g} tokens: "
            f"it cannot have a share of {weights[source]:g}",
            hint="remove it, or set data.mixture.by: epochs",
            key=f"data.train[{source}]",
        )
    if mixture.temperature is not None:
        weights = weights * (sizes * tokens_per_row) ** (1 / mixture.temperature)
    per_row = weights / tokens_per_row
    parts: Ints = np.maximum(1, np.rint(per_row / per_row.sum() * RESOLUTION)).astype(np.int64)
    return parts


def _interleaved(sizes: Ints, shares: Ints, stop: MixtureStop, seed: int, epoch: int) -> Ints:
    # source s gives its k-th row at the time (k + phase) / share: within a row of its share at all times
    phases = _phases(len(sizes), seed)
    end = _end(sizes, shares, stop, seed)
    _check_length(end, sizes, shares)
    counts = [_rows_until(end, int(share), phase) for share, phase in zip(shares, phases, strict=True)]
    times = [(np.arange(n) + phase) / share for n, phase, share in zip(counts, phases, shares, strict=True)]
    firsts = bounds_of(sizes)
    rows = [firsts[s] + _passes(int(sizes[s]), count, (seed, epoch, s)) for s, count in enumerate(counts)]
    if not rows:
        return firsts[:0]
    order: Ints = np.concatenate(rows)[np.argsort(np.concatenate(times), kind="stable")]
    return order


def _phases(num_sources: int, seed: int) -> Floats:
    return _rng(seed, 0, 2).random(num_sources)  # the same in all epochs, and so are the counts


def _end(sizes: Ints, shares: Ints, stop: MixtureStop, seed: int) -> float:
    """The time at which an epoch ends, in rows of a source over its share."""
    exhausted = (sizes - 1 + _phases(len(sizes), seed)) / shares
    match stop:
        case MixtureStop.FIRST:
            return float(exhausted.min())
        case MixtureStop.ALL:
            return float(exhausted.max())
        case _:
            raise AssertionError(f"unknown stop {stop!r}")


def _check_length(end: float, sizes: Ints, shares: Ints) -> None:
    if not len(sizes):
        return
    slowest = int(np.argmax(sizes / shares))
    share = shares[slowest] / shares.sum()
    why = f"only then source {slowest} ({sizes[slowest]} rows, {share:.2g} of all rows) was seen whole"
    check_epoch(int(end * shares.sum()), int(sizes.sum()), why=f"{why}; data.mixture.stop: first ends sooner")


def _rows_until(end: float, share: int, phase: float) -> int:
    """How many ``k`` have ``(k + phase) / share <= end``, as floats see it."""
    count = max(0, int(end * share - phase))
    while (count + phase) / share <= end:
        count += 1
    return count


def _passes(size: int, count: int, key: tuple[int, int, int]) -> Ints:
    """``count`` rows of a source: whole shuffles, and then a part of one, with which the next epoch goes on."""
    seed, epoch, source = key
    whole, part = divmod(count, size)
    found = [_rng(seed, epoch, 3, source, number).permutation(size) for number in range(whole)]
    begin, end = epoch * part, (epoch + 1) * part
    for number in range(begin // size, -(-end // size)):
        shuffled = _rng(seed, number, 4, source).permutation(size)
        found.append(shuffled[max(0, begin - number * size) : end - number * size])
    return np.concatenate([*found, np.zeros(0, dtype=np.int64)]).astype(np.int64)


def _rng(*key: int) -> np.random.Generator:
    # numpy takes missing numbers for zeros; a window's key has its number, from 1 on, where this one has the 0
    seed, epoch, purpose, *more = key
    return np.random.Generator(np.random.PCG64([seed, epoch, 0, purpose, *more]))
