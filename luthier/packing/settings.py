"""What a plan is made from: a table of segments, and the settings that fix the order of everything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Packing

DEFAULT_WINDOW = 4096
LINEAR_COST = 24_576  # 6 x 4096: a token's matrix products over its attention to one other, at a width of 4096

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentTable:
    """What a plan needs to know of N segments.

    lengths, num_targets  int64[N]
    row_ids               int64[N], the row each came from: a row's segments are in an epoch together or not at all
    source_ids            int64[N], index into ``source_weights``, which say how often a row is seen per epoch
    extra_costs           int64[N], what a segment costs besides its tokens (images), in the unit of `segment_costs`
    """

    lengths: Ints
    num_targets: Ints
    row_ids: Ints
    source_ids: Ints
    source_weights: tuple[float, ...] = (1.0,)
    extra_costs: Ints | None = None

    @classmethod
    def of_lengths(cls, lengths: NDArray[np.integer] | list[int]) -> SegmentTable:
        """Segments that are rows of their own, from one source; every token but the first is taken for a target."""
        sizes = np.asarray(lengths, dtype=np.int64)
        rows = np.arange(len(sizes), dtype=np.int64)
        return cls(lengths=sizes, num_targets=sizes - 1, row_ids=rows, source_ids=np.zeros_like(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """``capacity`` is tokens per pack; ``micro_batches_per_step`` counts those of all ranks together.

    tokens_per_step  a step goes on, in whole groups of ``micro_batches_per_step``, until it has so many tokens
    window           under ``Packing.WINDOW`` and ``Packing.SPLIT``, segments that are packed together, at least: a
                     window also has tokens enough for the micro-batches that are balanced together
    linear_cost      a segment of l tokens costs ``linear_cost * l + l * l``

    Nothing of a plan but the number of dummies at its end depends on ``num_ranks``.
    """

    packing: Packing
    capacity: int
    rows_per_micro_batch: int = 1
    micro_batches_per_step: int = 1
    num_ranks: int = 1
    seed: int = 0
    tokens_per_step: int | None = None
    window: int = DEFAULT_WINDOW
    linear_cost: int = LINEAR_COST

    def __post_init__(self) -> None:
        assert self.capacity >= 1 and self.rows_per_micro_batch >= 1 and self.num_ranks >= 1
        assert self.window >= 1 and self.linear_cost >= 0 and (self.tokens_per_step or 1) >= 1
        assert self.micro_batches_per_step % self.num_ranks == 0 and self.micro_batches_per_step > 0, (
            f"{self.micro_batches_per_step} micro-batches a step cannot be shared by {self.num_ranks} ranks"
        )


def segment_costs(lengths: Ints, settings: PlanSettings, extra_costs: Ints | None = None) -> Ints:
    """int64[N]: the work that segments are, in units of one token attending to one other.

    Attention grows with the square of a segment's length (packed segments do not see each other), all else with the
    length itself.
    """
    costs = settings.linear_cost * lengths + lengths * lengths
    return costs if extra_costs is None else costs + extra_costs
