"""Held-out rows of a run that learns from its own answers: judged by its rewards, before, between and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_runs import make_data, make_segments

from luthier.metrics import METRICS, Metric, pass_at
from luthier.objectives.loss_sums import FeedbackBaselines, FeedbackScores, FeedbackSettings
from luthier.training.losses.verdicts import FeedbackLosses
from luthier.training.report import ACCURACIES, GenerationRound, RunResult
from luthier.training.report.report import Report, write_report


def test_rounds_have_the_rewards_of_greedy_and_of_drawn_answers(
    train: Callable[..., RunResult], knows_few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def even(expected: str, generated: str) -> float:
        asked.append(generated)
        return float(len(generated) % 2 == 0)

    monkeypatch.setitem(METRICS._rows, "even", Metric(of_row=even))
    run = train(
        make_data(make_segments(12), make_segments(6, seed=3)),
        model={"name_or_path": str(knows_few)},
        objective="rl",
        rollout={"prompts_per_step": 4, "answers": 4, "max_new_tokens": 8, "min_finished": 0, "rewards": ["even"]},
        data__max_length=64,
        eval={"strategy": "steps", "steps": 2, "generate_rows": 5, "max_new_tokens": 8},
        train__max_steps=4,
        train__learning_rate=1e-12,
    )
    assert [one.step for one in run.generations] == [0, 2, 4]
    first, between, last = run.generations
    assert first.metrics == between.metrics == last.metrics, "the weights are the same, and so are the random numbers"
    greedy = [even("", record.generated) for record in first.records]
    assert first.metrics["greedy/reward"]["mean"] == pytest.approx(sum(greedy) / 5)
    drawn = asked[5 : 5 + 20]
    right = [sum(even("", text) for text in drawn[4 * row : 4 * row + 4]) for row in range(5)]
    sampled = first.metrics["sampled/reward"]
    assert sampled["mean"] == pytest.approx(sum(right) / 20)
    for k in (1, 2, 4):
        assert sampled[f"pass@{k}"] == pytest.approx(sum(pass_at(k, 4, int(one)) for one in right) / 5)
    assert first.scores["sampled/reward pass@4"] == sampled["pass@4"]
    page = write_report(Report(result=run))[0].read_text()
    assert "greedy/reward" in page and "sampled/reward pass@4" in page


def test_greedy_answers_are_as_long_as_they_were_drawn(train: Callable[..., RunResult], knows_few: Path) -> None:
    run = train(
        make_data(make_segments(12), make_segments(6, seed=3)),
        model={"name_or_path": str(knows_few)},
        objective="rl",
        rollout={"answers": 2, "max_new_tokens": 8, "min_finished": 0, "rewards": ["length"], "temperature": 1e-3},
        data__max_length=64,
        eval={"generate_rows": 5, "max_new_tokens": 8},
        train__max_steps=1,
    )
    found = run.generations[0].metrics  # as cold as that, the same answer is drawn each time
    assert found["greedy/reward"]["mean"] == pytest.approx(found["sampled/reward"]["mean"])


def test_other_runs_are_answered_as_before(train: Callable[..., RunResult]) -> None:
    run = train(
        make_data(make_segments(12), make_segments(6, seed=3)),
        eval={"strategy": "steps", "steps": 2, "generate_rows": 2, "max_new_tokens": 4},
    )
    found: list[GenerationRound] = list(run.generations)
    assert [one.step for one in found] == [0, 4] and not any(one.metrics for one in found)


def test_a_tie_judges_no_answer_right_whatever_its_verdict() -> None:
    zeros_R = torch.zeros(4)
    scores = FeedbackScores(
        logps_R=zeros_R, ref_logps_R=torch.tensor([0.0, 0.0, -1.0, 1.0]), lengths_R=torch.ones(4),
        desirable_R=torch.tensor([True, False, True, False]),
    )  # fmt: skip
    losses = SimpleNamespace(name="bco", settings=FeedbackSettings(), _baselines=FeedbackBaselines())
    told = FeedbackLosses._judged(cast(Any, losses), scores)
    assert float(told[ACCURACIES].total) == 2 and float(told[ACCURACIES].count) == 4


@pytest.mark.parametrize(("name", "known"), [("bco", {"delta": 0.05}), ("kto", {"kl": 0.5})])
def test_an_answer_is_judged_by_what_its_loss_compares_it_with(name: str, known: dict[str, float]) -> None:
    scores = FeedbackScores(  # rewards of 0.04, twice, and 0.06
        logps_R=torch.tensor([0.4, 0.4, 0.6]), ref_logps_R=torch.zeros(3), lengths_R=torch.ones(3),
        desirable_R=torch.tensor([False, False, True]),
    )  # fmt: skip
    settings = FeedbackSettings(beta=0.1)
    losses = SimpleNamespace(name=name, settings=settings, _baselines=FeedbackBaselines(**known))
    assert float(FeedbackLosses._judged(cast(Any, losses), scores)[ACCURACIES].total) == 3
