"""The answers of a run in its folder: what was asked, what the model drew, how it was judged, and what became of it.

rollouts/000001.jsonl          a line for each answer of the first step; of rank 1 in 000001.rank1.jsonl
rollouts/000001.counts.json    how many of them were asked for and learned from, and why the others were not

A step that is done again writes both again, so that what is added up over the finished steps counts each answer once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.rewards.judging import DrawnAnswer, Judged
from luthier.sources.formats.turns import message_row
from luthier.training.generate import Question
from luthier.training.rollouts.answer_groups import Fate
from luthier.training.rollouts.trajectories import Trajectory
from luthier.writing import JsonObject, write_text

FOLDER = "rollouts"  # in the run's folder: a file of answers for each step


def answers_file(folder: Path, step: int, rank: int) -> Path:
    """Of a step, counted from 0, on one rank."""
    return folder / FOLDER / f"{step + 1:06d}{f'.rank{rank}' if rank else ''}.jsonl"


def write_answers(
    path: Path,
    questions: Sequence[Question],
    answers: Sequence[Trajectory],
    texts: Sequence[DrawnAnswer],
    judged: Judged,
    names: Sequence[str],
    advantages_N: NDArray[np.float64],
    fates_N: Sequence[str],
) -> None:
    """A line of JSON for each answer, with its rewards by name and its advantage by them alone; None: it is not learned
    from. ``texts``: the answers as they were judged; ``fates_N``: see `answer_groups.fates`."""
    lines = [
        {
            "row": str(question.address),
            "sample": answer.sample,
            "prompt": text.prompt,
            "expected": text.expected,
            "generated": text.generated,
            "ids": answer.ids.tolist(),
            "finish": answer.ended or str(answer.finish),
            "logprob": float(answer.logprobs.astype(np.float64).sum()),
            **({"weights": str(weights)} if (weights := answer.calls[0].completion.weights) is not None else {}),
            **({"messages": [message_row(m) for m in answer.messages]} if answer.messages else {}),
            "reward": None if np.isnan(total) else float(total),
            "advantage": None if np.isnan(advantage) else float(advantage),
            "fate": str(fate),
            "rewards": {n: None if np.isnan(v) else float(v) for n, v in zip(names, values, strict=True)},
        }
        for question, answer, text, total, values, advantage, fate in zip(
            questions, answers, texts, judged.total_N, judged.values_NF, advantages_N, fates_N, strict=True
        )
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


COUNTS = ".counts.json"


def write_counts(path: Path, fates: Counter[str]) -> None:
    """Beside the answers in ``path``: how many were asked for, by what became of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.with_name(path.stem + COUNTS), json.dumps(dict(fates), ensure_ascii=False))


def remove_other_ranks(folder: Path, step: int, size: int) -> None:
    """Files of a step, counted from 0, that more ranks than the ``size`` of now have left before a kill."""
    for path in (folder / FOLDER).glob(f"{step + 1:06d}.rank*.json*"):
        rank = path.name.split(".")[1].removeprefix("rank")
        if rank.isdecimal() and int(rank) >= size:
            path.unlink(missing_ok=True)


def ledger_of_answers(folder: Path, num_steps: int) -> JsonObject:
    """What became of every answer that was asked for in the first steps of a run: ``sampled`` = ``trained`` +
    ``no_signal`` + ``dropped``, by reason. ``waiting`` are those that were drawn for steps which did not come, and
    ``steps_without_counts`` finished steps whose file is lost. Nothing, where no step has any."""
    fates: Counter[str] = Counter()
    counted, waiting = set(), 0
    for path in sorted((folder / FOLDER).glob(f"*{COUNTS}")):
        step, found = int(path.name.partition(".")[0]), json.loads(path.read_text())
        if step > num_steps:
            waiting += sum(found.values())
            continue
        counted.add(step)
        fates.update(found)
    if not counted and not waiting:
        return {}
    told: JsonObject = {"sampled": fates.total(), "trained": fates.pop(Fate.TRAINED, 0)}
    told |= {"no_signal": fates.pop(Fate.NO_SIGNAL, 0), "dropped": dict(fates.most_common())}
    told |= {"waiting": waiting, "steps_without_counts": num_steps - len(counted)}
    assert told["sampled"] == told["trained"] + told["no_signal"] + fates.total(), told
    return told
