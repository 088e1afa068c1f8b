"""Weights that are read back into the model that wrote them, whatever its file calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_vlms import VLMS
from torch import nn
from transformers import PreTrainedModel, Qwen3ForSequenceClassification

from luthier.errors import CheckpointError
from luthier.models.sharding import restore_weights
from tests.conftest import refused


def _judge() -> nn.Module:
    config = tiny_model("qwen3").config
    config.num_labels = 1
    return Qwen3ForSequenceClassification(config)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "text": lambda: tiny_model("qwen3"),
    "reward model": _judge,
    "experts": lambda: tiny_model("qwen3_moe"),
    "experts with biases": lambda: tiny_model("gpt_oss"),
    **{name: each.make for name, each in VLMS.items()},
}
RENAMED = ("experts", "qwen2_5_vl")  # models whose files say it otherwise


def _saved(name: str, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of which the folder has the weights, and one of its kind with others."""
    torch.manual_seed(1)
    first = MAKERS[name]()
    torch.manual_seed(2)
    other = MAKERS[name]()
    assert isinstance(first, PreTrainedModel) and isinstance(other, PreTrainedModel)
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_()
    first.save_pretrained(folder)
    return first, other


@pytest.mark.parametrize("name", MAKERS)
def test_every_weight_comes_back(name: str, tmp_path: Path) -> None:
    first, other = _saved(name, tmp_path)
    places = {name: weight.data_ptr() for name, weight in other.named_parameters()}
    random = torch.get_rng_state()
    restore_weights(other, tmp_path)
    expected = first.state_dict()
    assert all(torch.equal(weight, expected[key]) for key, weight in other.state_dict().items())
    assert places == {name: weight.data_ptr() for name, weight in other.named_parameters()}, "the optimizer has these"
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("name", RENAMED)
def test_by_the_names_in_the_file_some_would_not(name: str, tmp_path: Path) -> None:
    _, other = _saved(name, tmp_path)
    found = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert found.missing_keys and found.unexpected_keys


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    _saved("text", tmp_path)
    with refused(CheckpointError, "Qwen3MoeForCausalLM", "missing_keys"):
        restore_weights(MAKERS["experts"](), tmp_path)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_comes_back_whole_or_is_refused(tmp_path: Path) -> None:
    def adapted(rank: int) -> PeftModel:
        model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=rank, target_modules=["q_proj"]))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        return model

    first, other = adapted(2), adapted(2)
    first.save_pretrained(tmp_path)
    restore_weights(other, tmp_path)
    expected = get_peft_model_state_dict(first)
    assert all(torch.equal(weight, expected[name]) for name, weight in get_peft_model_state_dict(other).items())
    with pytest.raises(CheckpointError, match="not those of this adapter"):
        restore_weights(adapted(4), tmp_path)
