"""Answers that wait for the step that learns from them: drawn by one thread while the steps before are learned, and
kept in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.engines import Completion, Finish
from luthier.errors import CheckpointError, UserError
from luthier.training.folder import FILES
from luthier.training.folder.checkpoint import read_json, taking_over
from luthier.training.generate import Question
from luthier.training.rollouts.talks import ModelCall, Trajectory
from luthier.writing import JsonObject

DrawingNotes = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnStep:
    """What was drawn for a step, by the number of the question and of the answer, and by which weights.

    notes    what could not be done, and how often
    refused  why a question was not answered, by its number
    seconds  that drawing took, and bringing the weights before it
    """

    answers: dict[tuple[int, int], Trajectory]
    version: int
    notes: DrawingNotes = field(default_factory=list)
    refused: Mapping[int, str] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)


class DrawingAhead:
    """The steps that are being drawn, or wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="luthier-ahead")
        self._steps: dict[int, Future[DrawnStep]] = {}

    def begin(self, step: int, draw: Callable[[], DrawnStep]) -> None:
        """Draw the answers of a step behind those that wait."""
        self._steps[step] = self._thread.submit(draw)

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def take(self, step: int) -> DrawnStep:
        """What was drawn for a step; waits for it. Raises what drawing it has raised, and then draws nothing more."""
        try:
            return self._steps.pop(step).result()
        except BaseException:
            self._thread.shutdown(wait=False, cancel_futures=True)
            raise

    def finished(self) -> list[int]:
        """The steps whose answers are there, in their order: waits for all of them up to the first that has failed."""
        found = []
        for step, future in sorted(self._steps.items()):
            if isinstance(future.exception(), UserError):
                break
            found.append(step)
        return found


_FILE, _FILES = "rollouts_{rank}.json", "rollouts_*.json"  # one for each rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptAnswer:
    """An answer with its reward, and each reward before its weight; not a number: none has an opinion.

    scores  what was found of each of its ids when it was drawn, float32[N], by name
    """

    answer: Trajectory
    reward: float
    values_F: Sequence[float]
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)


Kept = dict[int, dict[str, list[KeptAnswer]]]
"""Answers by the step that learns from them, and by the name of their question."""


def write_kept(folder: Path, rank: int, kept: Kept, *, updates: int) -> None:
    """What one rank has drawn; ``updates`` is how many steps learn from answers that were drawn at once."""
    steps = {
        str(step): {name: [_to_json(one) for one in answers] for name, answers in by_name.items()}
        for step, by_name in kept.items()
    }
    FILES.write(folder / _FILE.format(rank=rank), json.dumps({"updates": updates, "steps": steps}).encode())


def read_kept(folder: Path, *, updates: int) -> Kept:
    """What all ranks had drawn; nothing, where other numbers of steps learned from it. Raises `CheckpointError`."""
    found: Kept = {}
    for path in sorted(folder.glob(_FILES)):
        with taking_over(folder, path.name):
            there: JsonObject = read_json(path)
            if there["updates"] != updates:
                return {}
            for step, by_name in there["steps"].items():
                of_step = found.setdefault(int(step), {})
                for name, answers in by_name.items():
                    of_step[name] = [_of_json(one) for one in answers]
    return found


def name_of(question: Question) -> str:
    """The row and its prompt: a row that was changed is another question."""
    return f"{question.address} {blake2b(question.prompt.tobytes(), digest_size=8).hexdigest()}"


def answers_to(question: Question, answers: Mapping[str, list[KeptAnswer]], step: int) -> list[KeptAnswer]:
    """Those of a step, counted from 0. Raises `CheckpointError` where it was drawn by a run that asked other
    questions."""
    found = answers.get(name_of(question))
    if found is None:
        raise CheckpointError(
            f"the checkpoint holds the answers of step {step + 1}, but none to {question.address}, which this run asks",
            hint="set the section rollout as it was, or begin anew without output.resume",
        )
    return found


def _to_json(one: KeptAnswer) -> JsonObject:
    # a float32 as JSON is the number to its last digit; messages are told in the log of answers, and not learned from
    calls = [
        {
            "prompt": call.prompt.tolist(),
            "ids": call.completion.ids.tolist(),
            "logprobs": call.completion.logprobs.tolist(),
            "finish": str(call.completion.finish),
            "version": call.version,
        }
        for call in one.answer.calls
    ]
    told = {"sample": one.answer.sample, "ended": one.answer.ended, "outcome": one.answer.outcome}
    scores = {name: score_N.tolist() for name, score_N in one.scores.items()}
    return {**told, "calls": calls, "reward": one.reward, "values": list(one.values_F), "scores": scores}


def _of_json(there: Mapping[str, Any]) -> KeptAnswer:
    calls = [
        ModelCall(
            prompt=np.array(call["prompt"], dtype=np.int32),
            completion=Completion(
                key=0,
                sample=there["sample"],
                ids=np.array(call["ids"], dtype=np.int32),
                logprobs=np.array(call["logprobs"], dtype=np.float32),
                finish=Finish(call["finish"]),
            ),
            version=call["version"],
        )
        for call in there["calls"]
    ]
    answer = Trajectory(calls=tuple(calls), ended=there["ended"], outcome=there["outcome"])
    scores = {name: np.array(score, dtype=np.float32) for name, score in there["scores"].items()}
    return KeptAnswer(answer=answer, reward=there["reward"], values_F=there["values"], scores=scores)
