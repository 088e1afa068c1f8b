"""Runs that draw their answers, killed while they sample, judge, update, deliver weights, write answers, and save.

Runs take turns: the model in the process draws, a sampler draws that is given the weights, or it draws ahead. The
sampler dies with the run. Children are forked from a process that has imported everything and never trains.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from luthier.encoding.tokenizer import load_tokenizer
from luthier.engines import Completion, Ids, Refusal, Request, SamplerPool, WeightsName
from luthier.engines.answering import Answering
from luthier.engines.local import LocalEngine, WeightsTaker
from luthier.metrics import METRICS, Metric
from luthier.rewards.judging import RewardJudge
from luthier.training import assemble
from luthier.training import rollouts as answer_groups
from luthier.training.fit import fit_data
from luthier.training.folder import RunFiles
from luthier.training.report import RunResult
from luthier.training.rollouts import drawing
from luthier.training.rollouts.delivery import Delivery
from luthier.training.trainer import Trainer
from tests.faults.killing import Findings, Kills, computes_nothing
from tests.faults.training import Trained, compare
from tests.training.tiny_rollouts import evenness, rollouts
from tests.training.tiny_runs import make_config, make_data, make_segments

ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 2, "answers": 2, "max_new_tokens": 3, "min_finished": 0.0, "rewards": ["evenness"],
}  # fmt: skip
CHANGES: dict[str, Any] = {
    "objective": {"name": "rl", "loss": "ppo", "kl_weight": 0.1},  # with a value head and a weight, both remembered
    "data__max_length": 64,
    "train__max_steps": 6,
    "output__save_strategy": "steps",
    "output__save_steps": 1,  # where steps share their answers, every second checkpoint holds some that wait
    "output__save_total_limit": 2,
}
_ELSEWHERE = {"engine": "http://localhost:1"}  # nobody listens there: see `_give_sampler`
WAYS: dict[str, dict[str, Any]] = {
    "here": {**ROLLOUT, "updates": 2},
    "elsewhere": {**ROLLOUT, **_ELSEWHERE, "updates": 2},
    "ahead": {**ROLLOUT, **_ELSEWHERE, "staleness": 1, "correction": "truncate"},
}
DATA = make_data(make_segments(5))
# What a child may be killed before: calls that work in memory, and each operation on the run's folder.
CALLS: dict[str, list[tuple[type, str]]] = {
    "sampling": [(Answering, "step")],
    "judging": [(RewardJudge, "judge")],
    "updating": [(Trainer, "update")],
    "delivering": [(Delivery, "snapshot"), (Delivery, "bring"), (WeightsTaker, "_put"), (Delivery, "_check")],
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
    assemble.delivery_of = partial(_give_sampler, assemble.delivery_of)  # type: ignore[attr-defined]
    with computes_nothing(), Kills(seed) as kills:
        most, expected = dict[str, dict[str, int]](), dict[str, _Drawn]()
        while findings.points < points:
            way = list(WAYS)[findings.facts["runs"] % len(WAYS)]
            if way not in expected:
                counts = root / f"counts-{way}.json"
                assert kills.wait(kills.start(partial(_count, root / way, way, counts), errors)) == 0
                most[way] = json.loads(counts.read_text())
                assert most[way].keys() == set(KINDS) - ({"delivering"} if way == "here" else set()), most
                expected[way] = _Drawn(root / way)
            findings.facts["runs"] += 1
            assert findings.facts["runs"] <= 3 + points, "runs end before they can be killed"
            folder = root / f"run-{findings.facts['runs']}"
            for _ in range(min(KILLS_IN_A_ROW, points - findings.points)):
                kind = min(most[way], key=lambda one: findings.facts[one])
                place = kills.rng.randrange(max(1, most[way][kind] // 2))
                if kills.wait(kills.start(partial(_die, folder, way, kind, place), errors)) == 0:
                    break
                findings.points += 1
                findings.facts[kind] += 1
                findings.facts["while answers waited"] += any(folder.glob("checkpoint-*/rollouts_*.json"))
            else:
                assert kills.wait(kills.start(partial(train, folder, way), errors)) == 0
            found = _Drawn(folder)
            compare(findings, found.trained, expected[way].trained)
            findings.differing += found.answers != expected[way].answers
    return findings


def _of_this_process(*named: Any) -> int:
    return _DRAW_NUMBER(*named, os.getpid())


class _Drawn:
    """What a run says and leaves, with all that it drew and how that was judged."""

    def __init__(self, folder: Path) -> None:
        self.trained, self.answers = Trained.of(RunResult.load(folder)), rollouts(folder)
        assert len(self.answers) == len(self.trained.steps), "a file of answers for each step"


def train(folder: Path, way: str) -> None:
    """A tiny run, or what is left of it."""
    torch.set_num_threads(1)
    METRICS._rows["evenness"] = Metric(of_row=evenness)
    config = make_config(folder, **CHANGES, rollout=WAYS[way])
    fit_data(config, load_tokenizer("preset:tiny-qwen3"), DATA)


def _count(folder: Path, way: str, counts: Path) -> None:
    found = Counter[str]()
    with _told_before(lambda kind: found.update([kind])):
        train(folder, way)
    counts.write_text(json.dumps(found))


def _die(folder: Path, way: str, kind: str, place: int) -> None:
    left = place

    def look(found: str) -> None:
        nonlocal left
        if found == kind:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    with _told_before(look):
        train(folder, way)


@contextmanager
def _told_before(look: OnKind) -> Iterator[None]:
    """``look`` is called before each operation, in a child that ends afterwards."""
    for kind, calls in CALLS.items():
        for owner, name in calls:
            setattr(owner, name, _watched(getattr(owner, name), kind, look))
    answer_groups.write_answers = _watched(answer_groups.write_answers, "writing answers", look)
    RunFiles.before = lambda _, operation, path: look("files")  # type: ignore[method-assign]
    yield


def _watched(real: Callable[..., Any], kind: str, look: OnKind) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        look(kind)
        return real(*arguments, **named)

    return call


class _GivenSampler:
    """A `Sampler` in the process of the run. Its model has no weights of its own: it answers by those that come."""

    name, samples_at_once = "the sampler", ROLLOUT["answers"]

    def __init__(self, trained: LocalEngine, root: Path) -> None:
        model = deepcopy(trained.model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        self.engine = LocalEngine(model, trained.tokenizer)
        self.taker = WeightsTaker(self.engine, root)
        self.expected: WeightsName | None = None

    def answer(self, request: Request) -> list[Completion] | Refusal:
        assert self.taker.taken == self.expected is not None
        found = list(self.engine.generate([request]))
        return [one for one in found if isinstance(one, Completion)]

    def score(self, ids: Ids, start: int) -> NDArray[np.float32]:
        return self.engine.score(ids, start)

    def expect(self, weights: WeightsName, folder: Path) -> None:
        self.expected = weights

    def take(self, weights: WeightsName, folder: Path) -> None:
        self.taker.take(weights)


def _give_sampler(
    real: Callable[..., Delivery], config: Any, trained: LocalEngine, *others: Any, **more: Any
) -> Delivery:
    found = real(config, trained, *others, **more)
    found.pool = SamplerPool([_GivenSampler(trained, found.root)], at_once=ROLLOUT["answers"], pauses=())
    return found
