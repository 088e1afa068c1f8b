"""The order of the rows of a run, by global number: rows of the first source, then of the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import RunConfig
from luthier.errors import UserError
from luthier.packing.mixture import MixtureSettings, row_order
from luthier.preparation.prepared import hold_out_order, num_held_out

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunOrder:
    """``order(epoch)``: the rows of an epoch, shuffled as a whole.

    rows     int64, all rows to train on, ascending: those of the sources that are not held out
    counts   how many of them each source has
    """

    rows: Ints
    counts: tuple[int, ...]
    mixture: MixtureSettings
    seed: int

    @classmethod
    def of_sources(cls, num_rows: Sequence[int], mixture: MixtureSettings, *, seed: int, held_out: Ints) -> RunOrder:
        """The order of sources with so many rows, ``held_out`` (ascending) taken out."""
        rows = np.setdiff1d(np.arange(sum(num_rows), dtype=np.int64), held_out, assume_unique=True)
        ends = np.cumsum(np.asarray(num_rows, dtype=np.int64))
        below = np.searchsorted(rows, ends)
        return cls(rows=rows, counts=tuple(np.diff(below, prepend=0).tolist()), mixture=mixture, seed=seed)

    def __call__(self, epoch: int) -> Ints:
        return self.rows[row_order(self.counts, self.mixture, seed=self.seed, epoch=epoch)]


def mixture_of(config: RunConfig, weights: Sequence[float]) -> MixtureSettings:
    """How the run's sources share an epoch."""
    mixture = config.data.mixture
    return MixtureSettings(weights=tuple(weights), by=mixture.by, temperature=mixture.temperature, stop=mixture.stop)


def held_out_rows(num_rows: int, size: float | int | None, *, seed: int) -> Ints:
    """A seeded choice of rows, ascending: a share of all below 1, else a number; none where ``size`` is None or 0.

    Raises `UserError` if a side would be empty.
    """
    if not size:
        return np.zeros(0, dtype=np.int64)
    wanted = num_held_out(size, num_rows)
    if not 0 < wanted < num_rows:
        raise UserError(
            f"data.eval_split={size:g} holds out {wanted} of {num_rows} rows: "
            + ("nothing to evaluate on" if wanted < 1 else "nothing is left to train on"),
            hint="choose another data.eval_split, or name evaluation data with data.eval",
        )
    return np.sort(hold_out_order(num_rows, seed=seed)[:wanted])
