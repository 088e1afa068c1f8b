"""What a run on compared answers saves, others load, and it judges as training said."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_rows import make_row, run_data
from tiny_runs import make_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from luthier.encoding.tokenizer import Tokenizer
from luthier.records import Segment
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

HELD_OUT = range(20, 25)
STEPS = {
    "train__max_steps": 3, "train__learning_rate": 1e-2, "train__per_device_train_batch_size": 4,
    "eval__strategy": "steps", "eval__steps": 3,
}  # fmt: skip
ADAPTER = {"adapter__type": "lora", "adapter__r": 4}


def _train(folder: Path, tokenizer: Tokenizer, objective: str, **changes: Any) -> RunResult:
    config = make_config(folder, objective=objective, **STEPS, **changes)
    return fit_data(config, tokenizer, run_data(folder / "store", config, held_out=HELD_OUT))


def _segments() -> list[list[Segment]]:
    """The chosen answers of the held-out rows, and the rejected ones, each after its prompt."""
    rows = [make_row(number, continuations=2).segments() for number in HELD_OUT]
    return [list(side) for side in zip(*rows, strict=True)]


def _rewards(model: Any, segments: list[Segment], padding: int) -> torch.Tensor:
    """As anybody would ask for them: one right-padded batch."""
    width = max(map(len, segments))
    ids = np.full((len(segments), width), padding)
    for row, segment in enumerate(segments):
        ids[row, : len(segment)] = segment.input_ids
    with torch.no_grad():
        inputs = torch.from_numpy(ids)
        return model(input_ids=inputs, attention_mask=(inputs != padding).long()).logits[:, 0]


def _full(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder / "model")


def _adapted(folder: Path) -> Any:
    return PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(folder / "base"), folder / "model"
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize(("changes", "load"), [({}, _full), (ADAPTER, _adapted)])
def test_a_reward_model_gives_others_the_rewards_of_training(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any], load: Callable[[Path], Any], packing: str
) -> None:
    result = _train(tmp_path, tokenizer, "rm", train__packing=packing, **changes)
    model = load(tmp_path).eval()
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    chosen, rejected = (_rewards(model, side, tokenizer.pad_token_id) for side in _segments())
    said = result.evals[-1].measures
    assert float(chosen.mean()) == pytest.approx(said["rewards/chosen"], rel=1e-4)
    assert float(rejected.mean()) == pytest.approx(said["rewards/rejected"], rel=1e-4)
    assert float((chosen > rejected).double().mean()) == pytest.approx(said["rewards/accuracies"])
    before = result.evals[0].measures["rewards/chosen"]
    assert abs(before - said["rewards/chosen"]) > 1e-2, "control: training moved them"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("changes", "load"), [({}, _full), (ADAPTER, _adapted)])
def test_the_end_of_an_answer_is_not_taken_for_padding(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any], load: Callable[[Path], Any]
) -> None:
    padless = copy(tokenizer)  # as Llama 3's
    padless.special_tokens = {name: token for name, token in tokenizer.special_tokens.items() if name != "pad_token"}
    assert padless.pad_token_id in padless.stop_token_ids
    result = _train(tmp_path, padless, "rm", train__packing="none", **changes)
    model = load(tmp_path).eval()
    with torch.no_grad():
        sides = [
            [float(model(torch.from_numpy(one.input_ids)[None].long()).logits) for one in side] for side in _segments()
        ]
    said = result.evals[-1].measures
    assert np.mean(sides[0]) == pytest.approx(said["rewards/chosen"], rel=1e-4)
    assert np.mean(sides[1]) == pytest.approx(said["rewards/rejected"], rel=1e-4)
    with pytest.raises(ValueError, match="batch sizes"):  # rather than other numbers
        model(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("changes", [{}, {"train__packing": "best_fit"}])
def test_a_model_trained_on_pairs_gives_others_the_log_probabilities_of_training(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    result = _train(tmp_path, tokenizer, "dpo", **changes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    for side, name in zip(_segments(), ("logps/chosen", "logps/rejected"), strict=True):
        found = [_logp(model, segment) for segment in side]
        assert np.mean(found) == pytest.approx(result.evals[-1].measures[name], rel=1e-5)
        assert abs(np.mean(found) - result.evals[0].measures[name]) > 1e-2, "control: training moved them"


def _logp(model: Any, segment: Segment) -> float:
    """Of the answer: the sum over its tokens."""
    ids = torch.from_numpy(segment.input_ids.astype(np.int64))
    with torch.no_grad():
        scores = model(ids[None]).logits[0].double().log_softmax(dim=-1)
    return sum(float(scores[at - 1, ids[at]]) for at in np.flatnonzero(segment.target))
