"""A served reward model gives the rewards that it has after training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import luthier
from luthier.engines.local import RewardEngine
from luthier.errors import UserError
from luthier.prediction import open_run
from luthier.presets import dataset_rows
from tests.serve.conftest import running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = luthier.train(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": [{"path": "preset:preferences", "first_rows": 20}]},
            "objective": "rm",
            "train": {"max_steps": 3, "learning_rate": 0.01, "precision": "fp32"},
            "output": {"dir": str(tmp_path_factory.mktemp("rm") / "run"), "save_strategy": "no"},
            "tracking": {"progress": False},
        }
    )
    return result.path


def test_the_rewards_are_those_of_the_trained_model_at_the_last_token_of_training(folder: Path) -> None:
    opened = open_run(folder, rewards=True)
    found = opened.load()
    engine = RewardEngine(found.model, opened.encoder.tokenizer, media=found.media)
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = [row for row, _ in zip(dataset_rows("preferences", "train"), range(4), strict=False)]
    conversations = [[*row["prompt"], *row[side]] for row in rows for side in ("chosen", "rejected")]
    with running(opened.encoder, engine) as server:
        told = server.http.post("/v1/score", json={"conversations": conversations}).json()
        one = server.http.post("/v1/score", json={"messages": conversations[3]}).json()
        assert server.chat().json()["error"]["hint"] == "ask /v1/score"
        wrong = server.http.post("/v1/score", json={"messages": conversations[3][:-1]})
        assert wrong.status_code == 400
    scores = [entry["score"] for entry in told["data"]]
    expected = []
    for row in rows:
        for segment in luthier.encode(row, opened.encoder.tokenizer, objective="rm").segments():
            ids = torch.from_numpy(segment.input_ids.astype("int64"))[None]
            with torch.no_grad():
                expected.append(plain.score(plain.model(ids).last_hidden_state)[0, -1, 0].item())
    assert scores == pytest.approx(expected, abs=1e-5)
    assert one["data"][0]["score"] == pytest.approx(scores[3], abs=1e-6)
    assert len({round(score, 4) for score in scores}) > 4, "they depend on what is judged"


def test_what_asks_for_answers_opens_no_reward_model(folder: Path) -> None:
    with pytest.raises(UserError, match="reward model"):
        open_run(folder)
