"""Held-out rows answered under the rewards of a run: by greedy search, and drawn several times each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from luthier.config.rollout import RolloutConfig
from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Engine, Finish
from luthier.metrics.table import told_of_values
from luthier.rewards.judging import DrawnAnswer, RewardJudge
from luthier.training.generate import Question
from luthier.training.report.result import GenerationRound

REWARD = "reward"


def with_rewards(
    found: GenerationRound,
    questions: Sequence[Question],
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    judge: RewardJudge,
    config: RolloutConfig,
    settings: GenerateConfig,
) -> GenerationRound:
    """The round with the mean of each reward of its answers, and of ``config.answers`` that are drawn to each question:
    ``greedy/NAME``, ``sampled/NAME``, and ``pass@K`` where all rewards are 0 or 1."""
    greedy = [
        DrawnAnswer(
            prompt=one.prompt,
            expected=questions[number].expected(tokenizer),
            generated=one.generated,
            finished=one.finished is not False,
            columns=questions[number].columns,
            num_tokens=len(tokenizer.encode_whole(one.generated)),
            group=number,
        )
        for number, one in enumerate(found.records)
    ]
    owners = list(range(len(greedy)))
    drawn, drawn_owners = _drawn(found, questions, engine, tokenizer, config, settings)
    rows = [one.address for one in found.records]
    told: dict[str, dict[str, object]] = {}
    for kind, answers, places in (("greedy", greedy, owners), ("sampled", drawn, drawn_owners)):
        judged = judge.judge(answers)
        columns = {REWARD: judged.total_N}
        if len(judge.labels) > 1:
            columns |= {label: judged.values_NF[:, number] for number, label in enumerate(judge.labels)}
        for name, values_N in columns.items():
            told |= _told(f"{kind}/{name}", values_N, places, rows)
    return replace(found, metrics={**found.metrics, **told})


def _drawn(
    found: GenerationRound,
    questions: Sequence[Question],
    engine: Engine,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    settings: GenerateConfig,
) -> tuple[list[DrawnAnswer], list[int]]:
    """Drawn as in training; with the same random numbers at every round, so that rounds differ by the weights alone."""
    drawing = GenerateConfig(
        do_sample=True,
        temperature=config.temperature,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )
    requests = [question.request(number, drawing, config.answers) for number, question in enumerate(questions)]
    answers = [answer for answer in engine.generate(requests) if isinstance(answer, Completion)]
    answers.sort(key=lambda answer: (answer.key, answer.sample))
    texts = [
        DrawnAnswer(
            prompt=found.records[answer.key].prompt,
            expected=questions[answer.key].expected(tokenizer),
            generated=answer.text(tokenizer),
            finished=answer.finish is Finish.STOP,
            columns=questions[answer.key].columns,
            num_tokens=len(answer.ids),
            group=answer.key,
        )
        for answer in answers
    ]
    return texts, [answer.key for answer in answers]


def _told(
    name: str, values_N: NDArray[np.float64], owners: Sequence[int], rows: Sequence[str]
) -> dict[str, dict[str, object]]:
    values: list[list[float]] = [[] for _ in rows]
    for owner, value in zip(owners, values_N.tolist(), strict=True):
        if not np.isnan(value):
            values[owner].append(value)
    found = told_of_values(values, rows)
    if not found:
        return {}
    most = max(map(len, values))
    likely = found.get(f"pass@{most}")
    return {name: found} | ({f"{name} pass@{most}": {"mean": likely}} if likely is not None else {})
