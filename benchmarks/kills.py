"""Kills and failing disks: what is lost, what comes twice, what differs afterwards. `tests/faults` has the kinds.

Half of the points are kills of processes that load, a third of processes that prepare, the rest of whole training
runs; what is done at each operation of the disk is done at all of them, whatever the number. Exits with status 1 if
anything was lost or differs, or if a control was not found out.

python -m benchmarks.kills [--points 500] [--seed N]
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from tests.faults.killing import Findings
from tests.faults.points import run_points

SHARES = {
    "preparing": 0.16,
    "preparing-shared": 0.16,
    "stream": 0.22,
    "fed": 0.12,
    "loader": 0.12,
    "loader-padded": 0.08,
    "stream-workers": 0.03,
    "training": 0.07,
    "drawing": 0.04,
}  # of the points: SIGKILL at random times
ALL = ("preparing-operations", "checkpoints", "store-failures", "checkpoint-failures")  # each operation in turn
LARGE_FILES = 12
CONTROLS = ("loses-its-window", "loses-a-step", "draws-by-process")
CONTROL_POINTS = 20


def main() -> int:
    """Try everything and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--points", type=int, default=500, help="kills at random times")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    columns = ("kind of point", "points", "lost rows", "doubled rows", "differing", "seconds", "what was met")
    table = Table(*columns, title=f"kills and failures, seed {options.seed}")
    total = Findings(kind="all but the controls")
    wanted = {kind: max(1, round(share * options.points)) for kind, share in SHARES.items()}
    wanted |= dict.fromkeys(ALL, 1) | {"training-large-files": LARGE_FILES}
    is_clean = True
    for kind, points in wanted.items():
        for found in run_points({kind: points}, seed=options.seed):
            table.add_row(*_cells(found))
            is_clean &= found.is_clean
            _add(total, found)
    table.add_section()
    table.add_row(*_cells(total), style="bold")
    table.add_section()
    for found in run_points(dict.fromkeys(CONTROLS, CONTROL_POINTS), seed=options.seed):
        table.add_row(*_cells(found), style="dim")
        is_clean &= not found.is_clean
    Console(width=150).print(table)
    return 0 if is_clean else 1


def _add(total: Findings, found: Findings) -> None:
    for name in ("points", "lost", "doubled", "differing", "seconds"):
        setattr(total, name, getattr(total, name) + getattr(found, name))


def _cells(found: Findings) -> list[str]:
    counts = (found.points, found.lost, found.doubled, found.differing)
    facts = ", ".join(f"{name}: {count:,}" for name, count in found.facts.items())
    return [found.kind, *(f"{count:,}" for count in counts), f"{found.seconds:.1f}", facts]


if __name__ == "__main__":
    sys.exit(main())
