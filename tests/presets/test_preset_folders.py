"""The folders of the preset models, and how they are found by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luthier.errors import ModelError
from luthier.presets import model_folder, model_names, tokenizer_folder
from luthier.presets.datasets import dataset_names

transformers: Any = pytest.importorskip("transformers")

NUM_PARAMETERS = {"tiny-llama": 1_278_912, "tiny-qwen3": 1_279_040}
CLASSES = {"tiny-llama": "LlamaForCausalLM", "tiny-qwen3": "Qwen3ForCausalLM"}


def test_names_are_listed() -> None:
    assert model_names() == ("tiny-llama", "tiny-qwen3")
    assert dataset_names() == ("feedback", "preferences", "preferences_sft", "skills")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_a_model_is_built_from_its_folder(name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(model_folder(name))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == CLASSES[name] == config.architectures[0]
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_a_model_and_its_tokenizer_agree(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(name))
    config = transformers.AutoConfig.from_pretrained(model_folder(name))
    generation = transformers.GenerationConfig.from_pretrained(model_folder(name))
    assert config.vocab_size == len(tokenizer)
    assert config.max_position_embeddings == tokenizer.model_max_length
    for holder in (config, generation):
        assert (holder.eos_token_id, holder.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_folders_hold_plain_files_and_no_weights() -> None:
    for name in model_names():
        assert sorted(path.name for path in model_folder(name).iterdir()) == ["config.json", "generation_config.json"]
    assert sorted(path.name for path in tokenizer_folder("tiny").iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert isinstance(json.loads((model_folder("tiny-qwen3") / "config.json").read_text()), dict)


def test_every_model_shares_the_tiny_tokenizer() -> None:
    assert {tokenizer_folder(name) for name in ("tiny", *model_names())} == {tokenizer_folder("tiny")}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no preset model is named 'tiny-qwen'(.|\n)*did you mean tiny-qwen3"):
        model_folder("tiny-qwen")
    with pytest.raises(ModelError, match=r"no preset tokenizer is named 'zzz'(.|\n)*choose one of tiny, tiny-llama"):
        tokenizer_folder("zzz")


@pytest.mark.parametrize("name", ["", "..", "../presets", "tiny-qwen3/../tiny-llama"])
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(ModelError):
        model_folder(name)


def test_folders_lie_in_the_package() -> None:
    import luthier.presets

    package = Path(luthier.presets.__file__).parent
    assert all(package in folder.parents for folder in (model_folder("tiny-qwen3"), tokenizer_folder("tiny")))
