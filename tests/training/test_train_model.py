"""Loading models: what is decided, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, make_config, make_data, make_segments
from transformers import AutoModelForCausalLM, AutoTokenizer, OpenAIGPTConfig

from luthier.config.inputs import ModelConfig
from luthier.encoding.tokenizer import AddedTokens, load_tokenizer
from luthier.errors import ModelError
from luthier.models.model import load_model, use_liger
from luthier.models.vocabulary import Vocabulary
from luthier.training.fit import fit_data
from tests.conftest import refused

VOCABULARY = Vocabulary(size=2048, eos_token_id=2034, pad_token_id=2032)


def _load(tmp_path: Path, vocabulary: Vocabulary = VOCABULARY, **keys: Any) -> Any:
    return load_model(make_config(tmp_path, **keys), vocabulary)


def _save(tmp_path: Path, **keys: Any) -> Path:
    folder = tmp_path / "saved"
    _load(tmp_path, **keys).model.save_pretrained(folder)
    return folder


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    first = _load(tmp_path).model.state_dict()
    torch.rand(7)
    again, other = _load(tmp_path).model.state_dict(), _load(tmp_path, runtime__seed=2).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_local_folder_gives_its_weights_and_random_init_does_not(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    stored = _load(tmp_path).model.state_dict()
    loaded = _load(tmp_path, model={"name_or_path": str(folder)})
    assert all(torch.equal(stored[name], value) for name, value in loaded.model.state_dict().items())
    assert not loaded.first_values
    drawn = _load(tmp_path, model={"name_or_path": str(folder), "random_init": True}, runtime__seed=5)
    assert drawn.first_values[0].startswith("random weights")
    assert not torch.equal(drawn.model.get_input_embeddings().weight, stored["model.embed_tokens.weight"])


def test_a_model_whose_config_says_nothing_of_caches_is_trained(tmp_path: Path) -> None:
    """As Inkling's and GPT's."""
    folder = tmp_path / "gpt"
    OpenAIGPTConfig(vocab_size=2048, n_positions=64, n_embd=16, n_layer=1, n_head=2).save_pretrained(folder)
    config = make_config(tmp_path / "run", model={"name_or_path": str(folder), "random_init": True})
    result = fit_data(config, load_tokenizer("preset:tiny-qwen3"), make_data(make_segments(8)))
    assert len(result.steps) == 4


def test_config_overrides_act_as_if_the_file_had_said_so(tmp_path: Path) -> None:
    model = _load(tmp_path, model__config_overrides={**TINY, "num_hidden_layers": 3}).model
    assert len(model.model.layers) == 3 and len(model.config.layer_types) == 3


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    with refused(ModelError, "Qwen3ForCausalLM", "missing_keys"):
        more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
        _load(tmp_path, model={"name_or_path": str(folder), "config_overrides": more})


def test_weights_whose_header_is_damaged_are_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtypf"', 1))
    with pytest.raises(ModelError, match=r"model\.name_or_path"):
        _load(tmp_path, model={"name_or_path": str(folder)})


def test_overrides_that_contradict_the_rest_of_the_config_are_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    with refused(ModelError, "num_hidden_layers", "3", "layer_types", "2"):
        _load(tmp_path, model={"name_or_path": str(folder), "config_overrides": {"num_hidden_layers": 3}})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model__config_overrides": {"hidden_sise": 3}}, "Qwen3Config has no hidden_sise"),
        ({"model": {"name_or_path": "/no/such/folder"}}, "/no/such/folder"),
        ({"model": {"name_or_path": "preset:giant"}}, "no preset model is named 'giant'"),
        ({"model__attn_implementation": "flash_attention_2"}, "trains on a GPU only"),
        ({"model__attn_implementation": "flex_attention"}, "trains on a GPU only"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is refused without a GPU")
def test_models_that_cannot_be_had_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        _load(tmp_path, **keys)


def test_a_folder_with_a_config_and_no_weights_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 2048, **TINY}))
    with pytest.raises(ModelError, match=r"model.random_init: true"):
        _load(tmp_path, model={"name_or_path": str(tmp_path / "bare")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_liger_is_for_gpus_only() -> None:
    assert use_liger(ModelConfig(name_or_path="m")) is False
    with pytest.raises(ModelError, match="use_liger_kernel is true, but"):
        use_liger(ModelConfig(name_or_path="m", use_liger_kernel=True))


@pytest.mark.parametrize(("dtype", "adapter", "expected"), [
    ("auto", "full", torch.float32), ("auto", "lora", torch.bfloat16), ("bfloat16", "full", torch.bfloat16),
])  # fmt: skip
def test_weights_are_float32_for_full_training_else_as_stored(
    tmp_path: Path, dtype: str, adapter: str, expected: torch.dtype
) -> None:
    folder = tmp_path / "saved"
    _load(tmp_path).model.to(torch.bfloat16).save_pretrained(folder)
    loaded = _load(tmp_path, model={"name_or_path": str(folder), "dtype": dtype}, adapter__type=adapter)
    assert loaded.model.dtype is expected


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    with pytest.raises(ModelError, match=r"has 2,049 ids, the embedding of .*saved has 2,048 rows"):
        _load(
            tmp_path, Vocabulary(size=2049, eos_token_id=2034, pad_token_id=2032), model={"name_or_path": str(folder)}
        )


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_get_the_mean_embedding(tmp_path: Path, tied: bool) -> None:
    folder = _save(tmp_path, model__config_overrides={**TINY, "tie_word_embeddings": tied})
    loaded = _load(
        tmp_path, Vocabulary(size=2050, eos_token_id=2034, pad_token_id=2032),
        model={"name_or_path": str(folder), "add_tokens": ["<new>"]},
    )  # fmt: skip
    for table in (loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight):
        assert table.shape[0] == 2050
        torch.testing.assert_close(table[2048:], table[:2048].mean(dim=0).expand(2, -1))
    assert loaded.model.config.vocab_size == 2050
    assert any("resized from 2,048 to 2,050" in note for note in loaded.notes)


def test_added_tokens_have_the_same_ids_in_the_saved_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("preset:tiny-qwen3", added=AddedTokens(ordinary=("zorkmid",), special=("<|act|>",)))
    config = make_config(
        tmp_path, model__add_tokens=["zorkmid"], model__add_special_tokens=["<|act|>"], train__max_steps=1
    )
    fit_data(config, tokenizer, make_data(make_segments(4)))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs("zorkmid").input_ids == tokenizer.encode_runs(["zorkmid"])[0].tolist()
    assert theirs.convert_tokens_to_ids("<|act|>") == tokenizer.control_id("<|act|>")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.get_input_embeddings().weight.shape[0] >= len(theirs)


def test_generation_settings_stop_at_the_tokenizers_eos_and_can_be_saved(tmp_path: Path) -> None:
    folder = _save(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 7}))
    loaded = _load(tmp_path, model={"name_or_path": str(folder)})
    assert loaded.model.generation_config.eos_token_id == [7, 2034]
    assert loaded.model.generation_config.pad_token_id == 2032
    loaded.model.save_pretrained(tmp_path / "again")


def test_random_weights_take_the_vocabulary_of_whichever_tokenizer_is_named(tmp_path: Path) -> None:
    other = Vocabulary(size=5001, eos_token_id=4000, pad_token_id=4001)
    loaded = _load(tmp_path, other)
    assert loaded.model.get_input_embeddings().weight.shape[0] == 5056
    assert loaded.model.generation_config.eos_token_id == 4000
    assert any("5,001 ids" in note for note in loaded.notes)
