"""Answers judged by all rewards of a run. N answers, F rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from typing import Self

import numpy as np
from numpy.typing import NDArray

from luthier.config.rollout import RewardConfig
from luthier.errors import UserError
from luthier.metrics.table import chosen_metrics
from luthier.rewards.function_process import FunctionProcess, NoReward


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnAnswer:
    """An answer and what it is judged by: the prompt as text, and the answer that the row holds."""

    prompt: str
    expected: str
    generated: str
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """``total_N`` float64: the weighted sum, nan where no reward had an opinion. ``values_NF`` float64: each reward
    before its weight, nan where it had none. ``missing``: why there is none, and how often."""

    total_N: NDArray[np.float64]
    values_NF: NDArray[np.float64]
    missing: Counter[str]


class RewardJudge:
    """All rewards of a run. Functions' processes are started when they are first asked, and ended by `close`."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self.rewards = rewards
        self._exits = ExitStack()
        self._judges = [self._judge(reward) for reward in rewards]

    @property
    def labels(self) -> list[str]:
        """The rewards' names in logs."""
        return [reward.label for reward in self.rewards]

    def judge(self, answers: Sequence[DrawnAnswer]) -> Judged:
        """The rewards of some answers. What fails or takes too long is counted, and its answer has no such reward."""
        values_NF = np.full((len(answers), len(self.rewards)), nan)
        missing: Counter[str] = Counter()
        for number, (reward, judge) in enumerate(zip(self.rewards, self._judges, strict=True)):
            for place, answer in enumerate(answers):
                try:
                    found = judge(answer)
                except NoReward as error:
                    missing[f"{reward.label}: {error}"] += 1
                    continue
                values_NF[place, number] = nan if found is None else found
        weights_F = np.array([reward.weight for reward in self.rewards])
        silent_N = np.isnan(values_NF).all(axis=1)
        total_N = np.where(silent_N, nan, np.nansum(values_NF * weights_F, axis=1))
        return Judged(total_N=total_N, values_NF=values_NF, missing=missing)

    def close(self) -> None:
        """End the processes."""
        self._exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, reward: RewardConfig) -> Callable[[DrawnAnswer], float | None]:
        if reward.metric is not None:
            found, _ = chosen_metrics([reward.metric])
            of_row = found[reward.metric].of_row
            if of_row is None:
                raise UserError(
                    f"rollout.rewards: the metric {reward.metric} is one of all answers together, not of each",
                    hint="take rougeL, exact, contains or regex:PATTERN",
                    key="rollout.rewards",
                )
            return lambda answer: of_row(answer.expected, answer.generated)
        assert reward.file is not None, "a reward is a metric or a function"
        process = self._exits.enter_context(
            FunctionProcess(reward.file, reward.function_name, timeout=reward.timeout, max_memory=reward.max_memory)
        )
        return lambda answer: process.call(
            {
                "answer": answer.generated,
                "expected": answer.expected,
                "prompt": answer.prompt,
                "finished": answer.finished,
            }
        )
