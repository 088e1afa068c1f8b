"""Best-fit packing of many lengths: CPU seconds, fill, and the fewest packs that any algorithm could reach.

python benchmarks/packing.py [CAPACITY]
"""

from __future__ import annotations

import sys
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from luthier.packing import plan_packs

SIZES = (10_000, 100_000, 1_000_000)
ROUNDS = 3


def main() -> None:
    capacity = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    table = Table(
        "lengths", "CPU seconds", "packs", "lower bound", "fill", title=f"capacity {capacity:,}, best of {ROUNDS}"
    )
    plan_packs(np.full(SIZES[-1], capacity), capacity)  # compile
    for size in SIZES:
        # long-tailed, like conversations: median about 600 tokens
        drawn = np.random.default_rng(0).lognormal(6.4, 0.9, size)
        lengths = np.clip(drawn, 8, capacity).astype(np.int64)
        seconds = []
        for _ in range(ROUNDS):
            start = time.process_time()
            packs = plan_packs(lengths, capacity)
            seconds.append(time.process_time() - start)
        bound = -(-int(lengths.sum()) // capacity)
        fill = int(lengths.sum()) / (len(packs) * capacity)
        table.add_row(f"{size:,}", f"{min(seconds):.3f}", f"{len(packs):,}", f"{bound:,}", f"{fill:.5f}")
    Console().print(table)


if __name__ == "__main__":
    main()
