"""A reference that is named: other tokenizers are refused, an adapter goes on the run's model, faults name the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_rows import epoch_steps, run_data

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError
from luthier.training.fit import fit_data
from luthier.training.report import RunResult

LORA = {"adapter__type": "lora", "adapter__r": 4, "train__learning_rate": 2e-2}
KEY = "objective.reference.name_or_path"
Run = Callable[..., RunResult]


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Run:
    """``run(folder, objective, **changes)``: three steps on eight rows."""

    def train(folder: str, objective: dict[str, Any], **changes: Any) -> RunResult:
        changes = {"train__per_device_train_batch_size": 8, **changes}
        config = epoch_steps(tmp_path / folder, objective, rows=8, **changes)
        return fit_data(config, tokenizer, run_data(tmp_path / "store", config, rows=range(8)))

    return train


def dpo(folder: Path, source: str = "model") -> dict[str, Any]:
    return {"name": "dpo", "reference": {"source": source, "name_or_path": str(folder)}}


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Path:
    """A model of other weights, saved with its tokenizer."""
    run("other", {"name": "sft"}, runtime__seed=2)
    return tmp_path / "other" / "model"


def swap_tokens(folder: Path, first: int, second: int) -> None:
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    one, two = (next(token for token, number in vocabulary.items() if number == wanted) for wanted in (first, second))
    vocabulary[one], vocabulary[two] = second, first
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize("source", ["model", "precomputed"])
def test_a_reference_with_another_tokenizer_is_refused_with_the_first_id_that_differs(
    run: Run, other: Path, source: str
) -> None:
    run("alike", dpo(other, source))  # control: the same tokenizer
    swap_tokens(other, 300, 301)
    with pytest.raises(ModelError, match=rf"{KEY} .* has another tokenizer: 2 of .* first of all 300: "):
        run("odd", dpo(other, source))


def test_added_tokens_of_the_reference_may_differ_and_a_folder_without_a_tokenizer_is_taken(
    run: Run, other: Path
) -> None:
    spec = json.loads((other / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 4000, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(spec))
    first = run("more", dpo(other)).steps[0].loss
    (other / "tokenizer.json").unlink()
    assert run("none", dpo(other)).steps[0].loss == first


def test_a_fault_of_the_reference_names_its_own_key(run: Run, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 8, "pad_token_id": 9}))
    with pytest.raises(ModelError, match=rf"^{KEY} .*pad_token_id 9, and its embedding has 8 rows"):
        run("padding", dpo(other))
    (other / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"^{KEY} ") as caught:
        run("empty", dpo(other))
    assert "model.name_or_path" not in caught.value.message.replace(KEY, "")


@pytest.mark.parametrize("source", ["model", "precomputed"])
def test_a_folder_with_an_adapter_is_the_runs_own_model_under_it(run: Run, tmp_path: Path, source: str) -> None:
    run("tuned", {"name": "sft"}, **LORA)
    adapter = tmp_path / "tuned" / "model"
    assert not (adapter / "config.json").exists()
    # the policy goes on from the same adapter, so it is its own reference: DPO begins at log 2
    going_on = {**LORA, "adapter__name_or_path": str(adapter)}
    assert run("same", dpo(adapter, source), **going_on).steps[0].loss == pytest.approx(0.693147, abs=1e-5)
    assert abs(run("base", dpo(adapter, source)).steps[0].loss - 0.693147) > 1e-4, "another one than without it"


def test_an_adapter_of_another_kind_is_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prefix"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "PREFIX_TUNING"}))
    with pytest.raises(ModelError, match=rf"{KEY} .*'prefix_tuning'"):
        run("prefix_run", dpo(folder))
