"""Cold preparation of rows with a photograph each, against LLaMA-Factory's preparation of the same rows.

Both make the ids that training sees, with as many image tokens as Qwen2.5-VL's processor writes; the ids are compared
row by row. Luthier reads the pictures' headers, LLaMA-Factory runs the image processor on their pixels (and again when
it makes batches). Luthier's seconds are those of the whole process, start-up included; LLaMA-Factory's are those of the
work alone, with its start-up in a column of its own. It may get fewer rows: what is compared is the time of a row.

python -m benchmarks.media_prepare [--rows N] [--peer-rows N] [--rounds N] [--peers VENV …]

LLaMA-Factory is looked for in the virtual environments that --peers or LUTHIER_PEERS name: python -m venv peers;
peers/bin/pip install llamafactory==0.9.5
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.pictures import vision_model, write_photographs, write_picture_rows
from benchmarks.harness.processes import Cost, FailedError, load, median_cost, run
from benchmarks.harness.runs import description, forget, peer_environments, prepare, python_with, qwen3_tokenizer
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare as prepared_rows

CUTOFF = 4096
PEER = "llamafactory"
SCRIPT = Path(__file__).parent / "harness" / "peers" / "llamafactory_media.py"
QUIET = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1"}
FEW = 10  # rows of the run that is nearly all start-up


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of one tool: ``work`` is what is compared, ``startup`` in CPU-seconds, within ``work`` or not."""

    version: str
    work: Cost
    startup: float
    startup_included: bool
    num_rows: int
    num_tokens: int

    @property
    def milliseconds(self) -> float:
        """CPU time of a row."""
        return self.work.cpu / self.num_rows * 1e3


def main() -> int:
    """Print the table; 1 if ids differ."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if tokenizer is None:
        print("nothing to do: this needs the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        pictures = write_photographs(folder / "pictures", options.rows)
        write_picture_rows(folder / "rows.jsonl", pictures)
        model = vision_model(folder / "model", tokenizer)
        measured = {}
        measured["luthier prepare"], our_ids = luthier(folder, model, options.rounds)
        outcomes = Counter[str]()
        python = python_with(PEER, options.peers)
        if python is not None and (theirs := llamafactory(folder, model, python, options.peer_rows)) is not None:
            measured["LLaMA-Factory, get_dataset"], their_ids = theirs
            outcomes = Counter(map(_verdict, our_ids, their_ids))
    Console(width=150).print(_table(measured))
    if python is None:
        print(f"left out: {PEER}, which is not installed")
    if outcomes:
        print("ids of both, row by row: " + ", ".join(f"{count:,} {told}" for told, count in outcomes.most_common()))
    return 1 if outcomes["DIFFERENT"] else 0


# ------------------------------------------------------------------------------------------------------ measuring


def luthier(folder: Path, model: Path, rounds: int) -> tuple[Measured, list[list[int]]]:
    """Cold stores, new processes; and the ids of each row, in the order of the rows."""
    few = folder / "few.jsonl"
    with (folder / "rows.jsonl").open(encoding="utf-8") as lines:
        few.write_text("".join(itertools.islice(lines, FEW)), encoding="utf-8")
    costs = {"few.jsonl": [], "rows.jsonl": []}
    for _ in range(rounds):
        for name, measured in costs.items():
            forget(folder / "store")
            measured.append(prepare(_description(folder, folder / name, model)).finished.cost)
    config = load_config(_description(folder, folder / "rows.jsonl", model))
    stored = prepared_rows(config, Encoder.from_config(config)).train  # all from the store
    by_row = {stored.address(index).row: stored[index].input_ids.tolist() for index in range(len(stored))}
    ids = [by_row[row] for row in sorted(by_row)]
    told = Measured(
        version=version("luthier"),
        work=median_cost(costs["rows.jsonl"]),
        startup=median_cost(costs["few.jsonl"]).cpu,
        startup_included=True,
        num_rows=len(ids),
        num_tokens=sum(map(len, ids)),
    )
    return told, ids


def llamafactory(folder: Path, model: Path, python: Path, num_rows: int) -> tuple[Measured, list[list[int]]] | None:
    """The first rows, without what it kept before; None, with its last words, if it fails."""
    rows = folder / "peer_rows.jsonl"
    with (folder / "rows.jsonl").open(encoding="utf-8") as lines:
        rows.write_text("".join(itertools.islice(lines, num_rows)), encoding="utf-8")
    own = folder / PEER
    own.mkdir()
    cold = {"HF_DATASETS_CACHE": str(own / "datasets"), "HF_HOME": str(own / "home")}
    try:
        finished = run([python, SCRIPT, model, rows, str(CUTOFF), own], env={**QUIET, **cold})
    except FailedError as error:
        print(error, file=sys.stderr)
        return None
    told = json.loads(finished.last_line)
    measured = Measured(
        version=told["version"],
        work=Cost(cpu=told["cpu"], wall=told["wall"], peak=finished.cost.peak),
        startup=finished.cost.cpu - told["cpu"],
        startup_included=False,
        num_rows=told["rows"],
        num_tokens=told["tokens"],
    )
    return measured, list(_lines(own / "ids.jsonl"))


def _verdict(ours: list[int], theirs: list[int]) -> str:
    if ours == theirs:
        return "the same"
    # LLaMA-Factory learns the line break behind the stop token, which nobody has to emit
    return "the same but for a line break at the end" if ours == theirs[:-1] else "DIFFERENT"


def _lines(file: Path) -> Iterator[list[int]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


# ------------------------------------------------------------------------------------------------------------ table


def _table(measured: dict[str, Measured]) -> Table:
    ours = measured["luthier prepare"]
    title = f"rows of one photograph each, {ours.num_tokens / ours.num_rows:,.0f} tokens a row, {load()}"
    columns = (
        "",
        "version",
        "rows",
        "CPU s",
        "wall s",
        "start-up CPU s",
        "peak MB",
        "CPU ms a row",
        "luthier is",
        "start-up left out",
        "luthier is",
    )
    table = Table(*columns, title=title, box=None)
    for name, each in measured.items():
        own = _work_milliseconds(each)
        table.add_row(
            name,
            each.version,
            f"{each.num_rows:,}",
            f"{each.work.cpu:.1f}",
            f"{each.work.wall:.1f}",
            f"{each.startup:.1f}" + (" (in it)" if each.startup_included else ""),
            f"{each.work.peak / 1e6:,.0f}",
            f"{each.milliseconds:.2f}",
            f"{each.milliseconds / ours.milliseconds:.1f}x",
            f"{own:.2f}",
            f"{own / max(_work_milliseconds(ours), 1e-3):.0f}x",
        )
    return table


def _work_milliseconds(each: Measured) -> float:
    """CPU time of a row, without start-up."""
    if not each.startup_included:
        return each.milliseconds
    return max(0.0, each.work.cpu - each.startup) / max(1, each.num_rows - FEW) * 1e3


# ------------------------------------------------------------------------------------------------------------ start


def _description(folder: Path, rows: Path, model: Path) -> Path:
    sections = {
        "model": {"name_or_path": str(model), "config_overrides": {}},
        "data": {"max_length": CUTOFF},
        "media": {"roots": [str(folder)]},
    }
    return description(folder, rows, model, **sections)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--peer-rows", type=int, default=500, help="of LLaMA-Factory, which takes long")
    parser.add_argument("--rounds", type=int, default=3, help="of luthier")
    parser.add_argument("--peers", type=Path, nargs="+", default=peer_environments(), metavar="VENV")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
