"""Text never becomes a control token, and control tokens never come from text."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import AddedTokens, Tokenizer, load_tokenizer
from luthier.errors import RowError, TemplateError, TokenizerError, UserError
from luthier.presets import tokenizer_folder
from luthier.presets.named_templates import named_template
from tests.conftest import reason_is, refused


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3")


def write_tokenizer(folder: Path, *, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A byte-level tokenizer without merges: every byte is a token, and three added ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spec = tokenizers.Tokenizer(tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    spec.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec.decoder = tokenizers.decoders.ByteLevel()
    spec.add_special_tokens(["<s>", "</s>"])
    spec.add_tokens([tokenizers.AddedToken("<tag>", special=False), tokenizers.AddedToken("  ", normalized=False)])
    content = {**json.loads(spec.to_str()), **changes}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", **(config or {})})
    )
    return folder


def test_special_tokens_are_control_and_ordinary_added_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.control.tokens == {"<s>", "</s>"}
    assert tokenizer.control.stops == {"</s>"}


def test_a_tag_is_control_once_the_template_writes_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, config={"chat_template": "{{ '<tag>' + messages[0].content + '  ' }}"})
    assert load_tokenizer(folder).control.tokens == {"<s>", "</s>", "<tag>"}
    assert load_tokenizer(folder, chat_template="{{ '[' + messages[0].content }}").control.tokens == {"<s>", "</s>"}


def test_control_strings_in_text_are_spelled_out(tiny: Tokenizer) -> None:
    (ids,) = tiny.encode_runs(["a<|im_end|>b<think>"])
    assert tiny.decode(ids) == "a<|im_end|>b<think>"
    control = {tiny.control_id(token) for token in tiny.control.tokens}
    assert not control & set(ids.tolist())
    assert tiny.control_id("<|im_end|>") == tiny.eos_token_id


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_encoding(tiny: Tokenizer, text: str) -> None:
    (ids,) = tiny.encode_runs([text])
    assert ids.dtype == np.int32
    assert tiny.decode(ids) == text


def test_every_token_knows_the_last_character_it_covers(tiny: Tokenizer) -> None:
    text = "the 漢字 dog"
    ids, last = tiny.encode_with_last(text, bare=False)
    assert ids.tolist() == tiny.encode_runs([text])[0].tolist()
    assert (np.diff(last) >= 0).all()
    assert last[-1] == len(text) - 1
    assert tiny.decode(ids[last < 3]) == "the"


def test_a_rendered_text_is_encoded_whole_as_the_plain_tokenizer_does(tiny: Tokenizer) -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n"
    plain = tokenizers.Tokenizer.from_file(str(tiny.files.folder / "tokenizer.json"))
    ids = tiny.encode_whole(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == plain.encode(text, add_special_tokens=False).ids
    assert ids[0] == tiny.control_id("<|im_start|>")
    assert not np.array_equal(ids, tiny.encode_runs([text])[0])
    with pytest.raises(RowError, check=reason_is("invalid_unicode")):
        tiny.encode_whole("\ud800")


def test_half_a_surrogate_pair_is_a_bad_row(tiny: Tokenizer) -> None:
    with pytest.raises(RowError, check=reason_is("invalid_unicode")):
        tiny.encode_runs(["\ud800"])


def test_a_control_id_that_the_vocabulary_itself_can_spell_is_caught(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    letter = spec["model"]["vocab"]["x"]
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": letter, "content": "x"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(RowError, check=reason_is("control_token_in_text")):
        load_tokenizer(folder).encode_runs(["x"])


def test_added_tokens_get_the_next_ids(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    plain = load_tokenizer(folder)
    grown = load_tokenizer(folder, added=AddedTokens(ordinary=("hello",), special=("<new>", "<s>")))
    assert grown.vocab_size == plain.vocab_size + 2
    assert grown.control_id("<new>") == plain.vocab_size + 1
    assert grown.encode_runs(["hello"])[0].tolist() == [plain.vocab_size]
    assert grown.encode_runs(["  "])[0].tolist() == plain.encode_runs(["  "])[0].tolist() == [plain.vocab_size - 1]
    assert plain.fingerprint != grown.fingerprint


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    start = load_tokenizer(folder).control_id("<s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [start]}))
    assert load_tokenizer(folder).control.stops == {"<s>", "</s>"}


def test_the_opening_is_read_from_the_post_processor(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    assert load_tokenizer(write_tokenizer(tmp_path)).control.opening == ()
    assert load_tokenizer(write_tokenizer(tmp_path, post_processor=template)).control.opening == ("<s>",)


def test_a_chat_template_file_wins_over_the_config_and_the_option_over_both(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, config={"chat_template": "{{ 'config' }}"})
    assert load_tokenizer(folder).files.chat_template == "{{ 'config' }}"
    (folder / "chat_template.jinja").write_text("{{ 'file' }}")
    assert load_tokenizer(folder).files.chat_template == "{{ 'file' }}"
    (folder / "other.jinja").write_text("{{ 'option' }}")
    assert load_tokenizer(folder, chat_template=str(folder / "other.jinja")).files.chat_template == "{{ 'option' }}"


def test_a_named_template_may_be_only_for_a_tokenizer_without_one(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    without = load_tokenizer(folder, chat_template="own_or_default").files
    assert (without.template_name, without.chat_template) == ("default", named_template("default"))
    (folder / "chat_template.jinja").write_text("{{ 'file' }}")
    own = load_tokenizer(folder, chat_template="own_or_default").files
    assert (own.template_name, own.chat_template) == (None, "{{ 'file' }}")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match="defaul"):
        load_tokenizer(folder, chat_template="own_or_defaul")


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = write_tokenizer(tmp_path)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with refused(TokenizerError, "tokenizer.json", "JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_bytes(b"\x80\x04\x95pickle")
    with refused(TokenizerError, "tokenizer.json", "JSON"):
        load_tokenizer(folder)
    write_tokenizer(tmp_path, config={"eos_token": "<none>"})
    with pytest.raises(TokenizerError, match="'<none>', which is not in the vocabulary"):
        load_tokenizer(folder)
    write_tokenizer(tmp_path, config={"chat_template": "{% for %}"})
    with pytest.raises(TemplateError, match="chat template, line 1"):
        load_tokenizer(folder)


def test_a_damaged_vocabulary_is_a_tokenizer_error(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, model={"type": "BPE", "vocab": 3, "merges": []})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_tokens_can_be_added_to_a_vocabulary_that_is_a_list(tmp_path: Path) -> None:
    unigram = tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -1.5)], unk_id=0)
    tokenizers.Tokenizer(unigram).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(tmp_path, added=AddedTokens(ordinary=("ab", "new"), special=("<s>",)))
    assert tokenizer.encode_runs(["newab<s>"])[0].tolist() == [3, 2, 0]  # "ab" was known; "<s>" is text
    assert tokenizer.control_id("<s>") == 4


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_a_damaged_file_of_a_tokenizer_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    source = tokenizer_folder("tiny")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole.replace(b'"special"', b'"spexial"', 1).replace(b"message", b"m\xe9ssage", 1))
    with pytest.raises(UserError, match=name):
        Encoder(ModelConfig(name_or_path=str(tmp_path)), TemplateConfig()).tokenizer.control  # noqa: B018


@pytest.mark.parametrize("settings", [
    {"trainable_token_indices": {"embed_tokens": [2048, 2049]}},
    {"trainable_token_indices": [2048, 2049]},
    {"modules_to_save": ["embed_tokens"]},
])  # fmt: skip
@pytest.mark.parametrize("key", ["name_or_path", "merge_first"])
def test_rows_that_an_adapter_has_trained_are_of_the_same_tokens(
    key: str, settings: dict[str, object], tmp_path: Path
) -> None:
    spec = json.loads((tokenizer_folder("tiny-qwen3") / "tokenizer.json").read_text())
    spec["added_tokens"] += [{**spec["added_tokens"][-1], "id": 2048 + n, "content": f"<{n}>"} for n in range(2)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    adapter = {"type": "lora", key: str(tmp_path) if key == "name_or_path" else [str(tmp_path)]}
    for tokens, fits in ((["<0>", "<1>"], True), (["<0>", "<1>", "<2>"], True), (["<1>", "<0>"], False), ([], False)):
        model = {"name_or_path": "preset:tiny-qwen3", "add_tokens": tokens}
        config = load_config({"model": model, "adapter": adapter, "data": {}, "train": {"enabled": False}})
        with nullcontext() if fits else pytest.raises(TokenizerError, match=rf"adapter\.{key}.*2048"):
            Encoder.from_config(config)
