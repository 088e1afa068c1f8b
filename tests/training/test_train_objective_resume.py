"""Objectives with a memory: killed after a step and resumed, the rest is the same to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_rows import run_data
from tiny_runs import make_config

from luthier.encoding.tokenizer import Tokenizer
from luthier.training.fit import fit_data
from luthier.training.folder.checkpoint import OBJECTIVE_STATE
from luthier.training.losses.pairs import PairLosses
from luthier.training.losses.verdicts import FeedbackLosses
from luthier.training.report import RunResult
from luthier.training.report.events import Event, StepDone

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo"},
    "kto": {"name": "kto", "beta": 0.5, "undesirable_weight": 0.05},
    "bco_pair": {"name": "dpo", "loss": "bco_pair", "beta": 0.5},
    "bco": {"name": "kto", "loss": "bco", "beta": 0.5, "undesirable_weight": 0.05},
    "rm": {"name": "rm"},
}
CHANGES = {
    # the order of rows, another row's completions, and the epoch all have to be found again
    "train__max_steps": 6, "train__per_device_train_batch_size": 2, "train__gradient_accumulation_steps": 2,
    "output__save_strategy": "steps", "output__save_steps": 2,
}  # fmt: skip


class Killed(Exception):
    """What nobody catches."""


def _kill_in_step_5(event: Event) -> None:
    if isinstance(event, StepDone) and event.step == 5:
        raise Killed


def _train(folder: Path, tokenizer: Tokenizer, objective: str, *, killed: bool = False) -> RunResult:
    adapter = {"adapter__type": "lora", "adapter__lora_dropout": 0.3} if objective in ("dpo", "kto") else {}
    config = make_config(folder, objective=OBJECTIVES[objective], **CHANGES, **adapter)
    data = run_data(folder.parent / "store", config, rows=range(9))
    return fit_data(config, tokenizer, data, on_event=_kill_in_step_5 if killed else None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_killed_run_goes_on_to_the_same_losses_and_weights(
    tmp_path: Path, tokenizer: Tokenizer, objective: str
) -> None:
    whole = _train(tmp_path / "whole", tokenizer, objective)
    with pytest.raises(Killed):
        _train(tmp_path / "killed", tokenizer, objective, killed=True)
    resumed = _train(tmp_path / "killed", tokenizer, objective)
    assert resumed.resumed_from == "checkpoint-4" and len(resumed.steps) == 6
    for name in ("loss", "grad_norm", "measures"):
        assert [getattr(step, name) for step in resumed.steps] == [getattr(step, name) for step in whole.steps]
    (weights,) = (tmp_path / "whole" / "model").glob("*.safetensors")
    assert weights.read_bytes() == (tmp_path / "killed" / "model" / weights.name).read_bytes()
    state = tmp_path / "killed" / "checkpoint-4" / OBJECTIVE_STATE
    assert state.is_file() == objective.startswith("bco")


@pytest.mark.parametrize(("objective", "losses"), [("bco_pair", PairLosses), ("bco", FeedbackLosses)])
def test_a_mean_that_is_not_read_back_would_show(
    tmp_path: Path, tokenizer: Tokenizer, objective: str, losses: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _train(tmp_path / "whole", tokenizer, objective)
    kept = json.loads((tmp_path / "whole" / "checkpoint-4" / OBJECTIVE_STATE).read_text())["rewards"]
    assert kept["count"] > 0 and kept["total"] != 0
    with pytest.raises(Killed):
        _train(tmp_path / "killed", tokenizer, objective, killed=True)
    monkeypatch.setattr(losses, "load_state", lambda self, state: None)
    resumed = _train(tmp_path / "killed", tokenizer, objective)
    assert [step.loss for step in resumed.steps[:4]] == [step.loss for step in whole.steps[:4]]
    assert resumed.steps[4].loss != whole.steps[4].loss
