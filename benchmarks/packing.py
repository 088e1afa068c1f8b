"""Packing many lengths: CPU seconds, fill, and how evenly the steps are shared among ranks. All lengths are drawn.

python benchmarks/packing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from luthier.config.choices import MixtureBy, MixtureStop, Packing
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import describe, plan_epoch, straggler_factor
from luthier.packing.order import MAX_ROWS, MixtureSettings, RowOrder
from luthier.packing.packer import plan_packs

SIZES = (10_000, 100_000, 1_000_000)
ROUNDS = 3
NUM_SEGMENTS = 200_000
MILLION = 1_000_000

Result = TypeVar("Result")


def main() -> None:
    plan_packs(np.full(MILLION, 4096), 4096)  # compile
    console = Console(width=120)
    console.print(best_fit_table(), window_table(), balance_table(), mixture_table())


def best_fit_table() -> Table:
    """Everything at once."""
    table = Table(
        "lengths", "CPU seconds", "packs", "lower bound", "fill", title=f"best fit, capacity 4,096, best of {ROUNDS}"
    )
    for size in SIZES:
        # long-tailed, like conversations: median about 600 tokens
        lengths = np.clip(np.random.default_rng(0).lognormal(6.4, 0.9, size), 8, 4096).astype(np.int64)
        seconds, packs = timed(lambda lengths=lengths: plan_packs(lengths, 4096))
        bound = -(-int(lengths.sum()) // 4096)
        fill = int(lengths.sum()) / (len(packs) * 4096)
        table.add_row(f"{size:,}", f"{seconds:.3f}", f"{len(packs):,}", f"{bound:,}", f"{fill:.5f}")
    return table


def window_table() -> Table:
    """4,096 segments at a time, against everything at once."""
    table = Table("lengths", "capacity", "best fit", "window", title=f"fill of {NUM_SEGMENTS:,} segments")
    for name, (lengths, capacity) in workloads().items():
        fills = [
            lengths.sum() / (len(plan_packs(lengths, capacity, window=window)) * capacity) for window in (None, 4096)
        ]
        table.add_row(name, f"{capacity:,}", *(f"{fill:.4f}" for fill in fills))
    return table


def balance_table() -> Table:
    """One micro-batch per rank and step, so that a step has none to average over."""
    names = [f"{packing.value}, {ranks} ranks" for packing in Packing for ranks in (8, 64)]
    table = Table("lengths", *names, title="max/mean cost of the ranks, mean over steps")
    for name in ("reasoning 32k", "mixed 32k", "chat 8k"):
        lengths, capacity = workloads()[name]
        segments = SegmentTable.of_lengths(lengths)
        cells = []
        for packing in Packing:
            for ranks in (8, 64):
                settings = PlanSettings(
                    packing=packing, capacity=capacity, micro_batches_per_step=ranks, num_ranks=ranks
                )
                plan = plan_epoch(segments, settings, epoch=0)
                assert describe(plan, segments).tokens == lengths.sum()
                cells.append(f"{straggler_factor(plan, segments, settings, ranks):.3f}")
        table.add_row(name, *cells)
    return table


def mixture_table() -> Table:
    """The order of a million rows."""
    table = Table("mixture by", "rows", "CPU seconds", title=f"row order, best of {ROUNDS}")
    for by in MixtureBy:
        mixture = MixtureSettings(weights=(1.0, 1.5, 0.5), by=by, stop=MixtureStop.FIRST)
        seconds, order = timed(
            lambda mixture=mixture: (
                RowOrder(counts=(400_000, 600_000, 200_000), mixture=mixture, seed=0, tokens_per_row=(1, 1, 1))
                .epoch(0)
                .rows(0, MAX_ROWS)
            )
        )
        table.add_row(by.value, f"{len(order):,}", f"{seconds:.3f}")
    return table


def workloads() -> dict[str, tuple[NDArray[np.int64], int]]:
    """Drawn lengths, and the capacity they are packed to."""
    rng = np.random.default_rng(0)
    size = NUM_SEGMENTS
    chat = rng.lognormal(np.log(1200), 0.9, size)
    reasoning = np.where(rng.random(size) < 0.3, rng.lognormal(7, 0.8, size), rng.lognormal(8.8, 0.7, size))
    kind = rng.random(size)
    long = np.where(kind < 0.9, rng.lognormal(8.3, 0.8, size), rng.lognormal(9.6, 0.6, size))
    mixed = np.where(kind < 0.6, rng.lognormal(6.2, 0.8, size), long)
    narrow = rng.lognormal(np.log(1200), 0.42, size)
    drawn = {
        "chat 4k": (chat, 4096),
        "chat 4k, narrow": (narrow, 4096),
        "chat 8k": (chat, 8192),
        "reasoning 16k": (reasoning, 16_384),
        "reasoning 32k": (reasoning, 32_768),
        "mixed 32k": (mixed, 32_768),
        "uniform": (rng.integers(1, 4097, size), 4096),
    }
    return {name: (np.clip(each, 8, capacity).astype(np.int64), capacity) for name, (each, capacity) in drawn.items()}


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """The fewest CPU seconds of several rounds, and what came out."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


if __name__ == "__main__":
    main()
