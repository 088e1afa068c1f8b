"""The folders of the preset models, and how they are found by name."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import luthier
from luthier.errors import ModelError
from luthier.presets import ROWS_FOLDER, dataset_names, dataset_rows, model_folder, model_names, tokenizer_folder
from tests.presets.rows_script import SCRIPT

transformers: Any = pytest.importorskip("transformers")

TEXT = ("tiny-llama", "tiny-qwen3")
SEEING_OR_HEARING = ("tiny-qwen2-audio", "tiny-qwen3-vl")
NUM_PARAMETERS = {"tiny-llama": 1_278_912, "tiny-qwen3": 1_279_040}
CLASSES = {"tiny-llama": "LlamaForCausalLM", "tiny-qwen3": "Qwen3ForCausalLM"}


def test_names_are_listed() -> None:
    assert model_names() == ("tiny-llama", "tiny-qwen2-audio", "tiny-qwen3", "tiny-qwen3-vl")
    assert dataset_names() == (
        "feedback", "lookups", "lookups_sft", "pictures", "preferences", "preferences_sft", "skills", "sounds"
    )  # fmt: skip


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
    for name in TEXT:
        assert sorted(path.name for path in model_folder(name).iterdir()) == ["config.json", "generation_config.json"]
    for name in SEEING_OR_HEARING:
        assert sorted(path.name for path in model_folder(name).iterdir()) == [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "processor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    assert sorted(path.name for path in tokenizer_folder("tiny").iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert isinstance(json.loads((model_folder("tiny-qwen3") / "config.json").read_text()), dict)


def test_every_model_of_text_shares_the_tiny_tokenizer() -> None:
    assert {tokenizer_folder(name) for name in ("tiny", *TEXT)} == {tokenizer_folder("tiny")}


@pytest.mark.parametrize("name", SEEING_OR_HEARING)
def test_a_model_that_sees_or_hears_has_all_in_its_folder(name: str) -> None:
    assert tokenizer_folder(name) == model_folder(name)
    processor = transformers.AutoProcessor.from_pretrained(model_folder(name))
    config = transformers.AutoConfig.from_pretrained(model_folder(name))
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    assert type(model).__name__ == config.architectures[0]
    assert model.get_input_embeddings().num_embeddings >= len(processor.tokenizer)


def test_ids_in_configs_of_models_that_see_or_hear_are_those_of_their_tokenizers() -> None:
    for name in SEEING_OR_HEARING:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(name))
        config = transformers.AutoConfig.from_pretrained(model_folder(name))
        text = config.get_text_config()
        assert text.vocab_size == len(tokenizer), name
        assert (text.eos_token_id, text.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id), name
        slots = {
            "tiny-qwen3-vl": {"<|image_pad|>": "image_token_id", "<|video_pad|>": "video_token_id"},
            "tiny-qwen2-audio": {"<|audio_pad|>": "audio_token_index"},
        }[name]
        for token, key in slots.items():
            assert config.to_dict()[key] == tokenizer.convert_tokens_to_ids(token), (name, token)


@pytest.mark.parametrize(
    ("dataset", "model", "kind"), [("pictures", "tiny-qwen3-vl", "image"), ("sounds", "tiny-qwen2-audio", "audio")]
)
def test_generated_media_are_encoded_for_the_model_that_takes_them(dataset: str, model: str, kind: str) -> None:
    processor = transformers.AutoProcessor.from_pretrained(model_folder(model))
    tokenizer = luthier.load_tokenizer(f"preset:{model}")
    rows = list(itertools.islice(dataset_rows(dataset, "train"), 40))
    assert rows == list(itertools.islice(dataset_rows(dataset, "train"), 40))
    assert not {repr(row) for row in rows} & {repr(row) for row in dataset_rows(dataset, "test")}
    for row in rows:
        sample = luthier.encode({"messages": row["messages"]}, tokenizer, processor=processor)
        assert sample.media and sample.target.any()
        assert {type(item.media).__name__.lower() for item in sample.media} == {kind}


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

    package = Path(luthier.__file__).parent / "presets"
    assert all(package in folder.parents for folder in (model_folder("tiny-qwen3"), tokenizer_folder("tiny")))


@pytest.mark.parametrize(
    "folder", [tokenizer_folder("tiny"), *map(model_folder, SEEING_OR_HEARING)], ids=lambda path: path.name
)
def test_a_template_prints_a_text_and_a_list_of_one_text_alike(folder: Path) -> None:
    """vLLM makes lists of all contents for a template that walks through parts."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    def rendered(said: str, *, listed: bool) -> str:
        messages = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": said, "tool_calls": [call, call]},
            {"role": "tool", "content": "2"},
        ]
        if listed:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for said in ("", "Let me see."):
        assert rendered(said, listed=True) == rendered(said, listed=False)


def test_the_script_writes_the_rows_of_texts_again(tmp_path: Path) -> None:
    SCRIPT.write_rows(tmp_path)
    written = {path.name: gzip.decompress(path.read_bytes()) for path in tmp_path.iterdir()}
    assert written == {path.name: gzip.decompress(path.read_bytes()) for path in ROWS_FOLDER.iterdir()}
