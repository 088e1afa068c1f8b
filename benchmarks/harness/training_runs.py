"""One run of a trainer, Luthier or a peer, on rows that all of them get alike: the job it is told, what came of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import FailedError, run
from benchmarks.harness.training_material import Material

SCRIPTS = Path(__file__).parent / "peers"
QUIET = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A trainer in one of its settings."""

    name: str
    package: str
    script: str
    packed: bool = False
    objectives: tuple[str, ...] = ("sft", "dpo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """What is trained: ``rows`` in number, micro-batches of about ``batch_tokens``; ``checked`` rows are compared.

    long_prompts  of pairs: made of real texts; else those of a preset
    text_tokens   of conversations: only those whose texts take so many tokens (from, to), so that rows are of like
                  length and padding costs the others little
    """

    name: str
    objective: str
    vocab_size: int
    num_rows: int
    checked: int
    max_length: int
    batch_tokens: int
    long_prompts: bool = False
    text_tokens: tuple[int, int] | None = None


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
            "accumulation": material.num_units if one_step else 1,
            "max_length": contest.max_length,
            "packed": tool.packed,
            "learning_rate": 1e-4,
            "optim": "adamw_torch_fused",
            "threads": threads,
            "seed": 1,
            "output": output,
        }
        job["description"] = str(description(contest, material.rows, material.model, job))
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


def description(contest: Contest, rows: Path, model: Path, job: dict[str, Any] | None = None) -> Path:
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
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
