"""Runs that learn from answers of their own: whole weights, some layers, adapters on whole and quantized bases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_rollouts import ROLLOUT, evenness, losses, rollouts
from tiny_runs import TINY, make_data, make_segments

from luthier.engines.answering import Answering
from luthier.metrics.table import METRICS, Metric
from luthier.training.report.result import RunResult

Train = Callable[..., RunResult]
LORA: dict[str, Any] = {"type": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "freeze": {"adapter": {"type": "freeze", "freeze_trainable_layers": 1}},
    "lora": {"adapter": LORA},
    "dora": {"adapter": {**LORA, "use_dora": True}},
    "nf4": {"adapter": LORA, "quantization": "nf4"},
    "int8": {"adapter": LORA, "quantization": "int8"},
}
# each way with one objective, each objective with one way or two: all of them would take minutes
TRIED = [
    *(("rl", way) for way in WAYS if way != "full"),
    *(("ppo", way) for way in ("freeze", "int8")),
    ("opd", "lora"),
    ("gkd", "nf4"),
    ("best_of_n", "lora"),
    ("online_dpo", "dora"),
]
FOLLOWS_TEACHER = ("opd", "gkd")
STOP = 2034
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # PEFT's
)


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


def objectives(teacher: Path) -> dict[str, dict[str, Any]]:
    named = {"reference": {"name_or_path": str(teacher)}}
    return {
        "rl": {"objective": {"name": "rl", "loss": "dapo"}},
        "ppo": {"objective": {"name": "rl", "loss": "ppo", "kl_weight": 0.01}},
        "opd": {"objective": {"name": "distill", "loss": "opd", **named}},
        "gkd": {"objective": {"name": "distill", "loss": "gkd", **named}},
        "best_of_n": {"objective": "best_of_n"},
        "online_dpo": {"objective": "online_dpo"},
    }


def odd_share(run: RunResult) -> list[float]:
    """Of the drawn tokens of each step; `knows_half` gives none."""
    steps = [[number for one in step for number in one["ids"] if number != STOP] for step in rollouts(run.path)]
    return [float(np.mean([number % 2 for number in step])) for step in steps]


@pytest.mark.parametrize(("objective", "way"), TRIED)
def test_what_is_trained_in_any_way_learns_from_its_own_answers(
    objective: str, way: str, knows_few: Path, knows_half: Path, train: Train
) -> None:
    changes = dict(WAYS[way])
    run = train(
        make_data(make_segments(12)),
        model={"name_or_path": str(knows_few), "quantization": changes.pop("quantization", None)},
        rollout={**ROLLOUT, "answers": 16, "max_new_tokens": 2},
        data__max_length=64,
        train__max_steps=8,
        train__learning_rate=2e-2,
        **objectives(knows_half)[objective],
        **changes,
    )
    follows = objective in FOLLOWS_TEACHER
    told = [-share for share in odd_share(run)] if follows else [step.measures["reward"] for step in run.steps]
    assert np.mean(told[-3:]) > np.mean(told[:2]) + 0.08, told
    gaps = [step.measures["gap"] for step in run.steps if "gap" in step.measures]
    assert all(gap < (2e-2 if way == "int8" else 1e-5) for gap in gaps)  # its layers round what they read
    assert bool(gaps) == (objective in ("rl", "ppo", "opd"))


def test_answers_are_drawn_and_learned_without_dropout(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_training: list[bool] = []
    real = Answering.step

    def step(self: Answering) -> None:
        in_training.append(self.answerer.model.training)
        real(self)

    monkeypatch.setattr(Answering, "step", step)
    model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": {**TINY, "attention_dropout": 0.5}}
    told: list[str] = []
    run = train(
        make_data(make_segments(12)),
        model=model,
        objective="rl",
        rollout=ROLLOUT,
        data__max_length=64,
        on_event=lambda event: told.append(getattr(event, "text", "")),
    )
    assert max(step.measures["gap"] for step in run.steps) < 1e-5
    assert in_training and not any(in_training)
    assert sum("no dropout (attention_dropout 0.5)" in text for text in told) == 1
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["attention_dropout"] == 0.5, "it is the model's own, for other runs"


def test_control_other_objectives_train_with_the_dropout_of_the_model(train: Train) -> None:
    found = []
    for share in (0.0, 0.5):
        model = {"name_or_path": "preset:tiny-qwen3", "config_overrides": {**TINY, "attention_dropout": share}}
        found.append(losses(train(make_data(make_segments(4)), folder=str(share), model=model, train__max_steps=1)))
    assert found[0] != found[1]
