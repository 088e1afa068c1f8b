"""Signs that a run of drawn answers goes wrong: each is told once, and none of a sound run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tiny_runs import make_data, make_segments

from luthier.metrics import METRICS, Metric
from luthier.rewards.judging import DrawnAnswer, Judged
from luthier.training.report import RunResult
from luthier.training.rollouts.early_warnings import DEAD_STEPS, WINDOW, EarlyWarnings, StepAnswers

Reward = Callable[[DrawnAnswer], float]


def judging(reward: Reward) -> Callable[[Sequence[DrawnAnswer]], Judged]:
    def judge(answers: Sequence[DrawnAnswer]) -> Judged:
        totals_N = np.array([reward(answer) for answer in answers], dtype=np.float64)
        return Judged(total_N=totals_N, values_NF=totals_N[:, None], missing=Counter())

    return judge


def told_of(
    reward: Reward | Callable[[Sequence[DrawnAnswer]], Judged],
    *,
    steps: int = 1,
    answers: Callable[[int, int], str] = lambda step, number: "yes" if number % 2 else "no",
    finished: bool = True,
    length: Callable[[int], int] = lambda step: 10,
    entropy: Callable[[int], float] = lambda step: 1.0,
    judge: Any = None,
) -> list[str]:
    told: list[str] = []
    judge = judge or judging(reward)  # type: ignore[arg-type]
    warnings = EarlyWarnings(judge=judge, tell=told.append, num_tokens=len)
    for step in range(steps):
        texts = [
            DrawnAnswer(prompt="?", expected="yes", generated=answers(step, number), finished=finished)
            for number in range(32)
        ]
        warnings.step(
            StepAnswers(
                texts=texts,
                groups_N=np.arange(32) // 4,
                lengths_N=np.full(32, length(step)),
                logps_N=np.full(32, -entropy(step) * length(step)),
                judged=judge(texts),
            )
        )
    return told


def exact(answer: DrawnAnswer) -> float:
    return float(answer.generated == answer.expected)


def in_order(answers: Sequence[DrawnAnswer]) -> Judged:
    """Each answer gets the reward of the one before."""
    found = judging(exact)(answers)
    return Judged(total_N=np.roll(found.total_N, 1), values_NF=found.values_NF, missing=found.missing)


WRONG: dict[str, dict[str, Any]] = {
    "no answer of this step is finished": {"reward": exact, "finished": False, "steps": 3},
    "all of the first 32 answers": {"reward": lambda answer: 0.5 * bool(answer.generated)},
    "an empty answer is rewarded": {"reward": lambda answer: max(exact(answer), float(not answer.generated))},
    "thoughts without an answer behind them are rewarded": {
        "answers": lambda step, number: "<think>it is</think>yes" if number % 2 else "<think>it is</think>no",
        "reward": lambda answer: float(answer.generated[-3:] == "yes") + 2 * answer.generated.endswith("</think>"),
    },
    "own answers are not rewarded": {"reward": lambda answer: float(answer.generated == "no")},
    "rewards depend on the order": {
        "reward": exact,
        "judge": in_order,
        "answers": lambda step, number: "yes" if number % 3 else "no",
    },
    "had answers of one reward": {
        "reward": exact,
        "steps": DEAD_STEPS + 3,
        "answers": lambda step, number: "yes" if number // 4 % 2 else "no",
    },
    "entropy": {"reward": exact, "steps": 3 * WINDOW, "entropy": lambda step: 0.01 if step > WINDOW else 1.0},
    "have grown": {
        "reward": exact,
        "steps": 3 * WINDOW,
        "length": lambda step: 10 + 5 * step,
        "answers": lambda step, number: "yes" if number % 4 < 1 + step // WINDOW else "no",
    },
}


@pytest.mark.parametrize("words", WRONG)
def test_each_sign_is_told_once(words: str) -> None:
    found = told_of(**WRONG[words])
    assert [words in text for text in found] == [True], found


@pytest.mark.parametrize("length", [lambda step: 10 + step // 8, lambda step: 40 - step])
def test_nothing_is_told_of_a_run_that_learns(length: Callable[[int], int]) -> None:
    found = told_of(
        exact,
        steps=4 * WINDOW,
        answers=lambda step, number: "yes" if number % 4 < 1 + step // 20 else "no",
        length=length,
        entropy=lambda step: 1.0 - step / 60,
    )
    assert found == []


def test_rewards_that_are_never_the_same_twice_are_no_mistake_of_order() -> None:
    rng = np.random.default_rng(0)
    assert told_of(lambda answer: exact(answer) + rng.normal() * 1e-3) == []


def test_a_run_tells_what_it_sees(train: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "same", Metric(of_row=lambda *_: 0.5))
    told: list[str] = []
    train(
        make_data(make_segments(12)),
        on_event=lambda event: told.append(getattr(event, "text", "")),
        objective="rl",
        rollout={"prompts_per_step": 4, "answers": 8, "max_new_tokens": 4, "min_finished": 0, "rewards": ["same"]},
        data__max_length=64,
    )
    assert sum("have the reward 0.5" in text for text in told) == 1
