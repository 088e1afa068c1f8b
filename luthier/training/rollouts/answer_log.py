"""The answers of a run in its folder: what was asked, what the model drew, and how it was judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.tokenizer import Tokenizer
from luthier.rewards.judging import Judged
from luthier.sources.formats.turns import message_row
from luthier.training.generate import Question, shown
from luthier.training.rollouts.trajectories import Trajectory
from luthier.writing import write_text

FOLDER = "rollouts"  # in the run's folder: a file of answers for each step


def answers_file(folder: Path, step: int, rank: int) -> Path:
    """Of a step, counted from 0, on one rank."""
    return folder / FOLDER / f"{step + 1:06d}{f'.rank{rank}' if rank else ''}.jsonl"


def write_answers(
    path: Path,
    questions: Sequence[Question],
    answers: Sequence[Trajectory],
    judged: Judged,
    names: Sequence[str],
    advantages_N: NDArray[np.float64],
    tokenizer: Tokenizer,
) -> None:
    """A line of JSON for each answer, with its rewards by name and its advantage by them alone; None: it is not learned
    from."""
    lines = [
        {
            "row": str(question.address),
            "sample": answer.sample,
            "prompt": shown(question, tokenizer),
            "expected": question.expected(tokenizer),
            "generated": answer.text(tokenizer),
            "ids": answer.ids.tolist(),
            "finish": answer.ended or str(answer.finish),
            "logprob": float(answer.logprobs.astype(np.float64).sum()),
            **({"messages": [message_row(m) for m in answer.messages]} if answer.messages else {}),
            "reward": None if np.isnan(total) else float(total),
            "advantage": None if np.isnan(advantage) else float(advantage),
            "rewards": {n: None if np.isnan(v) else float(v) for n, v in zip(names, values, strict=True)},
        }
        for question, answer, total, values, advantage in zip(
            questions, answers, judged.total_N, judged.values_NF, advantages_N, strict=True
        )
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
