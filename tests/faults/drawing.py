"""Runs that draw their answers, killed while they sample, judge, update, write what was drawn, and save.

Children are forked from a process that has imported everything and never trains.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from luthier.encoding.tokenizer import load_tokenizer
from luthier.engines.answering import Answering
from luthier.metrics.table import METRICS, Metric
from luthier.rewards.judging import RewardJudge
from luthier.training.fit import fit_data
from luthier.training.folder.staging import RunFiles
from luthier.training.report.result import RunResult
from luthier.training.rollouts import drawing
from luthier.training.trainer import Trainer
from tests.faults.killing import Findings, Kills, computes_nothing
from tests.faults.training import Trained, compare
from tests.training.tiny_rollouts import evenness, rollouts
from tests.training.tiny_runs import make_config, make_data, make_segments

CHANGES: dict[str, Any] = {
    "objective": {"name": "rl", "loss": "ppo", "kl_weight": 0.1},  # with a value head and a weight, both remembered
    "rollout": {
        "prompts_per_step": 2, "answers": 2, "max_new_tokens": 3, "min_finished": 0.0, "rewards": ["evenness"],
        "updates": 2,
    },
    "data__max_length": 64,
    "train__max_steps": 6,
    "output__save_strategy": "steps",
    "output__save_steps": 1,  # every second checkpoint holds answers that wait
    "output__save_total_limit": 2,
}  # fmt: skip
DATA = make_data(make_segments(5))
# What a child may be killed before: calls that work in memory, and each operation on the run's folder.
CALLS: dict[str, tuple[type, str]] = {
    "sampling": (Answering, "step"),
    "judging": (RewardJudge, "judge"),
    "updating": (Trainer, "update"),
}
KINDS = (*CALLS, "writing answers", "files")
KILLS_IN_A_ROW = 5

OnKind = Callable[[str], None]
_DRAW_NUMBER = drawing.draw_number


def kill_everywhere(root: Path, points: int, seed: int, *, by_process: bool = False) -> Findings:
    """Kill runs before an operation of each kind in turn, `KILLS_IN_A_ROW` at most, then let them end: the same
    answers, rewards, losses and weights. ``by_process``, a control: what is drawn depends on the process."""
    findings, errors = Findings(kind="drawing answers"), root / "errors"
    drawing.draw_number = _of_this_process if by_process else _DRAW_NUMBER
    with computes_nothing(), Kills(seed) as kills:
        counts = root / "counts.json"
        assert kills.wait(kills.start(partial(_count, root / "whole", counts), errors)) == 0
        most: dict[str, int] = json.loads(counts.read_text())
        assert most.keys() == set(KINDS), most
        expected = _Drawn(root / "whole")
        while findings.points < points:
            findings.facts["runs"] += 1
            assert findings.facts["runs"] <= 3 + points, "runs end before they can be killed"
            folder = root / f"run-{findings.facts['runs']}"
            for _ in range(min(KILLS_IN_A_ROW, points - findings.points)):
                kind = KINDS[findings.points % len(KINDS)]
                place = kills.rng.randrange(max(1, most[kind] // 2))
                if kills.wait(kills.start(partial(_die, folder, kind, place), errors)) == 0:
                    break
                findings.points += 1
                findings.facts[kind] += 1
                findings.facts["while answers waited"] += any(folder.glob("checkpoint-*/rollouts_*.json"))
            else:
                assert kills.wait(kills.start(partial(train, folder), errors)) == 0
            found = _Drawn(folder)
            compare(findings, found.trained, expected.trained)
            findings.differing += found.answers != expected.answers
    return findings


def _of_this_process(*named: Any) -> int:
    return _DRAW_NUMBER(*named, os.getpid())


class _Drawn:
    """What a run says and leaves, with all that it drew and how that was judged."""

    def __init__(self, folder: Path) -> None:
        self.trained, self.answers = Trained.of(RunResult.load(folder)), rollouts(folder)
        assert len(self.answers) == len(self.trained.steps), "a file of answers for each step"


def train(folder: Path) -> None:
    """A tiny run, or what is left of it."""
    torch.set_num_threads(1)
    METRICS._rows["evenness"] = Metric(of_row=evenness)
    fit_data(make_config(folder, **CHANGES), load_tokenizer("preset:tiny-qwen3"), DATA)


def _count(folder: Path, counts: Path) -> None:
    found = Counter[str]()
    with _told_before(lambda kind: found.update([kind])):
        train(folder)
    counts.write_text(json.dumps(found))


def _die(folder: Path, kind: str, place: int) -> None:
    left = place

    def look(found: str) -> None:
        nonlocal left
        if found == kind:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with _told_before(look):
        train(folder)


@contextmanager
def _told_before(look: OnKind) -> Iterator[None]:
    """``look`` is called before each operation, in a child that ends afterwards."""
    for kind, (owner, name) in CALLS.items():
        setattr(owner, name, _watched(getattr(owner, name), kind, look))
    drawing.write_answers = _watched(drawing.write_answers, "writing answers", look)
    RunFiles.before = lambda _, operation, path: look("files")  # type: ignore[method-assign]
    yield


def _watched(real: Callable[..., Any], kind: str, look: OnKind) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        look(kind)
        return real(*arguments, **named)

    return call
