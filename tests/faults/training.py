"""Whole training runs that are killed at random times, or may write no file beyond a size.

Those that are killed are forked from a process that has imported everything and never trains.
"""

from __future__ import annotations

import hashlib
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import CheckpointError
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, StepDone
from tests.faults.killing import Findings, Kills, computes_nothing, has_done, tell_progress
from tests.training.tiny_runs import make_config, make_data, make_segments

CHANGES: dict[str, Any] = {
    "train__max_steps": 12,
    "output__save_strategy": "steps",
    "output__save_steps": 2,
    "output__save_total_limit": 2,
    "eval__strategy": "steps",
    "eval__steps": 5,
}
KILLS_IN_A_ROW = 10
MOST_STEPS = 5  # between two kills; a checkpoint is saved every two, so some kills cost all of them
SECONDS_MORE = 0.1  # to be in the middle of something: saving, evaluating
DATA = make_data(make_segments(13), make_segments(5, seed=8))


@dataclass(frozen=True)
class Trained:
    """What a run says and leaves: loss and norm of each step, loss of each evaluation, the final weights."""

    steps: tuple[tuple[int, float, float | None], ...]
    evals: tuple[tuple[int, float], ...]
    weights: str

    @classmethod
    def of(cls, result: RunResult) -> Trained:
        """Everything that may not depend on interruptions."""
        weights = (result.path / "model" / "model.safetensors").read_bytes()
        return cls(
            tuple((step.step, step.loss, step.grad_norm) for step in result.steps),
            tuple((each.step, each.loss) for each in result.evals),
            hashlib.sha256(weights).hexdigest(),
        )


def train(folder: Path) -> RunResult:
    """A tiny run, or what is left of it. ``FOLDER.progress`` says how many steps it has done."""
    torch.set_num_threads(1)
    num_steps = 0

    def count(event: Event) -> None:
        nonlocal num_steps
        if isinstance(event, StepDone):
            num_steps += 1
            tell_progress(_progress(folder), num_steps)

    config = make_config(folder, **CHANGES)
    return fit_data(config, load_tokenizer("preset:tiny-qwen3"), DATA, on_event=count)


def _progress(folder: Path) -> Path:
    return folder.with_suffix(".progress")


def kill_at_random(root: Path, points: int, seed: int) -> Findings:
    """Kill a run at random times, `KILLS_IN_A_ROW` at most, then let it end: the same losses, the same weights."""
    findings, errors = Findings(kind="training"), root / "errors"
    with computes_nothing(), Kills(seed) as kills:

        def start(folder: Path) -> int:
            return kills.start(lambda: train(folder), errors)

        assert kills.wait(start(root / "whole")) == 0
        expected = Trained.of(RunResult.load(root / "whole"))
        while findings.points < points:
            findings.facts["runs"] += 1
            assert findings.facts["runs"] <= 3 + points, "runs end before they can be killed"
            folder = root / f"run-{findings.facts['runs']}"
            for _ in range(min(KILLS_IN_A_ROW, points - findings.points)):
                pid = start(folder)
                once = has_done(_progress(folder), pid, num_steps=1 + kills.rng.randrange(MOST_STEPS))
                if not kills.kill_after(pid, kills.rng.random() * SECONDS_MORE, once=once):
                    break
                findings.points += 1
                findings.facts["with a checkpoint"] += any(folder.glob("checkpoint-*"))
                findings.facts["while saving"] += any(folder.glob(".saving-*"))
            else:
                assert kills.wait(start(folder)) == 0
            compare(findings, Trained.of(RunResult.load(folder)), expected)
            findings.differing += sorted(path.name for path in folder.iterdir()) != sorted(
                path.name for path in (root / "whole").iterdir()
            )
    return findings


def compare(findings: Findings, found: Trained, expected: Trained) -> None:
    """Count steps that are missing, that came twice, and all that differs."""
    findings.compare_rows([step for step, *_ in found.steps], [step for step, *_ in expected.steps])
    findings.differing += len(set(found.steps) ^ set(expected.steps))
    findings.differing += len(set(found.evals) ^ set(expected.evals))
    findings.differing += found.weights != expected.weights


def write_at_most(root: Path, points: int, seed: int) -> Findings:
    """No file may be larger than so many bytes, for real: one error that names a path of the run; then it goes on."""
    del seed
    findings = Findings(kind="training, files too large")
    expected = Trained.of(train(root / "whole"))
    sizes = {path.stat().st_size for path in (root / "whole").rglob("*") if path.is_file()}
    for size in sorted(sizes)[:: max(1, len(sizes) // points)][:points]:
        folder, said = root / f"run-{size}", ""
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))
        try:
            train(folder)
        except CheckpointError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        findings.points += 1
        findings.facts["told"] += bool(said)
        if said:
            assert str(folder) in said and "hint: " in said, said
            findings.differing += any(folder.glob(".saving-*"))
        compare(findings, Trained.of(train(folder)), expected)
    return findings
