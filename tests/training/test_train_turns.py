"""SFT on rows whose history is rewritten: the tree is computed once, with the loss and gradients of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_rows import epoch_steps, run_data
from tiny_runs import make_config

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import CheckpointError
from luthier.models.isolation import ChosenIsolation
from luthier.models.isolation import Trial as IsolationTrial
from luthier.training.fit import fit_data
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note, StepDone

ROWS, TURNS = 6, 5
PLAIN = {"train__optim": "sgd", "train__learning_rate": 0.05}  # Adam would blow up the noise of tiny gradients
Run = Callable[..., tuple[RunResult, dict[str, torch.Tensor]]]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer, notes: list[str]) -> Run:
    """``run(shared, **changes)``: three steps on all rows, and the weights that they lead to."""

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    def train(shared: bool | str, *, weighted: bool = False, held_out: range = range(0), **changes: Any) -> Any:
        changes = {"train__packing": "best_fit", "micro_batches": 40, "data__max_length": 96, **PLAIN, **changes}
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        config = epoch_steps(folder, {"name": "sft"}, rows=ROWS, train__shared_prompts=shared, **changes)
        data = run_data(tmp_path / "store", config, rows=range(ROWS), held_out=held_out, weighted=weighted, turns=TURNS)
        result = fit_data(config, tokenizer, data, on_event=listen)
        assert result.model_dir is not None
        (weights,) = (result.path / result.model_dir).glob("*model.safetensors")
        return result, load_file(weights)

    return train


def curve(result: RunResult) -> list[float]:
    """The losses and gradient norms of all steps."""
    return [number for step in result.steps for number in (step.loss, step.grad_norm)]


VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True},
    "window": {"train__packing": "window"},
    "long enough for one sequence": {"data__max_length": 48},
    "cut": {"data__max_length": 30, "data__overflow": "truncate"},
    "dropped": {"data__max_length": 30, "data__overflow": "drop", "data__max_drop": 0.9},
    "split": {"data__max_length": 30, "data__overflow": "split"},
    "several rows": {"train__per_device_train_batch_size": 3, "micro_batches": 20},
    "lora": {"adapter": {"type": "lora", "r": 4}},
    "checkpointed": {"train__gradient_checkpointing": True},
    "masks": {"model__attn_implementation": "sdpa"},
    "workers": {"runtime__dataloader_num_workers": 1},
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_turns_that_share_their_beginnings_train_as_their_sequences_do(run: Run, variation: str) -> None:
    changes = VARIATIONS[variation]
    (shared, weights), (unrolled, others) = run(True, **changes), run(False, **changes)
    assert curve(shared) == pytest.approx(curve(unrolled), rel=1e-5)
    assert len(shared.steps) == 3
    if "data__max_length" not in changes:
        assert shared.steps[0].tokens < 0.8 * unrolled.steps[0].tokens, "or nothing was shared"
    assert shared.steps[0].target_tokens == unrolled.steps[0].target_tokens
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------------- streams, fallbacks

GOING_ON = {
    "train__gradient_accumulation_steps": 2, "train__packing": "window", "train__max_steps": 6,
    "output__save_strategy": "steps", "output__save_steps": 2, "data__max_length": 64,
}  # fmt: skip


class Killed(Exception):
    """What nobody catches."""


def going_on(folder: Path, tokenizer: Tokenizer, *, killed: bool = False, **changes: Any) -> RunResult:
    def listen(event: Event) -> None:
        if killed and isinstance(event, StepDone) and event.step == 5:
            raise Killed

    config = make_config(folder, objective={"name": "sft"}, **{**GOING_ON, **changes})
    data = run_data(folder.parent / "store", config, rows=range(9), turns=TURNS)
    return fit_data(config, tokenizer, data, on_event=listen)


def test_a_killed_run_of_trees_goes_on_to_the_same_bytes_and_not_with_another_layout(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    whole = going_on(tmp_path / "whole", tokenizer)
    with pytest.raises(Killed):
        going_on(tmp_path / "killed", tokenizer, killed=True)
    with pytest.raises(CheckpointError, match="shared_prompts"):
        going_on(tmp_path / "killed", tokenizer, train__shared_prompts=False)
    resumed = going_on(tmp_path / "killed", tokenizer)
    assert resumed.resumed_from == "checkpoint-4" and curve(resumed) == curve(whole)
    (weights,) = (tmp_path / "whole" / "model").glob("*.safetensors")
    assert weights.read_bytes() == (tmp_path / "killed" / "model" / weights.name).read_bytes()


def test_held_out_trees_have_the_loss_of_their_sequences(run: Run) -> None:
    evaluating = {"held_out": range(6, 10), "eval__strategy": "steps", "eval__steps": 3}
    (shared, _), (unrolled, _) = run(True, **evaluating), run(False, **evaluating)
    assert [each.loss for each in shared.evals] == pytest.approx([each.loss for each in unrolled.evals], rel=1e-5)
    assert len(shared.evals) > 1


def test_a_model_that_cannot_have_trees_gets_sequences_and_the_run_says_why(
    run: Run, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, weights = run(False)
    told = "the common beginning of a row's turns is computed once for each turn"
    assert not any(told in note for note in notes)
    problem = IsolationTrial.problem

    def no_trees(self: IsolationTrial, chosen: ChosenIsolation) -> str | None:
        return "no branches here" if self.shared else problem(self, chosen)

    monkeypatch.setattr(IsolationTrial, "problem", no_trees)
    found, others = run("auto")
    assert any(told in note and "no branches here" in note for note in notes)
    assert curve(found) == pytest.approx(curve(right), rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
