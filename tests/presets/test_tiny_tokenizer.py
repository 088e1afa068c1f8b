"""The tokenizer that comes with Luthier, and its chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from luthier.presets import dataset_rows, tokenizer_folder

FOLDER = tokenizer_folder("tiny")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_tiny_tokenizer.py"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_tokenizer", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hf() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def render(hf: Any, messages: list[dict[str, Any]], **variables: Any) -> str:
    return str(hf.apply_chat_template(messages, tokenize=False, **variables))


USER = {"role": "user", "content": "How long is oak?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
THOUGHT = {"role": "assistant", "content": "3", "reasoning_content": "o-a-k"}


def test_the_script_writes_the_same_bytes_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(tmp_path)])
    script.main()
    for preset in ("tiny", *script.MEDIA_ROWS):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / preset / name).read_bytes() == (tokenizer_folder(preset) / name).read_bytes(), name


def test_other_text_gives_another_tokenizer(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PROSE", script.PROSE.replace("valley", "harbour"))
    assert script.train_tokenizer(script.VOCAB_SIZE, script._texts()).to_str() != TOKENIZER.to_str()


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["  two  spaces \n\n\t tab", "naïve Ünïcödé", "日本語のテキスト", "👩‍🌾🎻", "a\r\nb\u0000c", "<|im_end|>x"]
)
def test_difficult_text_comes_back_in_transformers_too(hf: Any, text: str) -> None:
    assert hf.decode(hf.encode(text, add_special_tokens=False)) == text


def test_ids_of_added_tokens_follow_the_vocabulary(script: ModuleType, hf: Any) -> None:
    added = [*script.CONTROL_TOKENS, *script.MARKUP_TOKENS]
    assert TOKENIZER.get_vocab_size() == len(hf) == 2048
    assert [TOKENIZER.token_to_id(token) for token in added] == list(range(2048 - len(added), 2048))
    special = [token.content for token in TOKENIZER.get_added_tokens_decoder().values() if token.special]
    assert special == list(script.CONTROL_TOKENS)
    assert (hf.eos_token, hf.pad_token, hf.bos_token) == ("<|im_end|>", "<|endoftext|>", None)


def test_words_of_the_data_set_are_single_ids() -> None:
    for word in (" Larkfield", " violin", " Friday", " bigger", " village", "assistant", "Boris"):
        assert len(TOKENIZER.encode(word).ids) == 1, word


def test_every_role_is_rendered(hf: Any) -> None:
    system = {"role": "system", "content": "Be kind."}
    tool = {"role": "tool", "content": '{"b": 2}'}
    assert render(hf, [system, USER, CALL, tool, {"role": "assistant", "content": "Done."}]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHow long is oak?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        '<|im_start|>tool\n<tool_response>\n{"b": 2}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\nDone.<|im_end|>\n"
    )


def test_an_unknown_role_and_an_unknown_part_are_refused(hf: Any) -> None:
    with pytest.raises(TemplateError, match="unknown role: critic"):
        render(hf, [{"role": "critic", "content": "x"}])
    with pytest.raises(TemplateError, match="unknown type: smell"):
        render(hf, [{"role": "user", "content": [{"type": "smell"}]}])


def test_tools_are_declared_in_the_system_turn_as_json_lines(hf: Any) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
    declared = (
        "You have these tools:\n"
        '{"type": "function", "function": {"name": "f", "parameters": {}}}\n'
        '{"type": "function", "function": {"name": "g", "parameters": {}}}\n'
        'Call one by writing:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n'
    )
    user = "<|im_start|>user\nHow long is oak?<|im_end|>\n"
    assert render(hf, [USER], tools=tools) == "<|im_start|>system\n" + declared + user
    system = {"role": "system", "content": "Be kind."}
    assert render(hf, [system, USER], tools=tools) == "<|im_start|>system\nBe kind.\n\n" + declared + user


def test_arguments_render_alike_as_object_and_as_json_text(hf: Any) -> None:
    text = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert render(hf, [USER, text]) == render(hf, [USER, CALL])


def test_calls_stand_on_lines_of_their_own_after_text(hf: Any) -> None:
    both = CALL | {"content": "I look.", "tool_calls": CALL["tool_calls"] * 2}
    one = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert render(hf, [USER, both]).endswith(f"assistant\nI look.\n{one}\n{one}<|im_end|>\n")


def test_parts_become_text_and_placeholders(hf: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}, {"type": "audio"}]
    assert render(hf, [{"role": "user", "content": parts}]) == (
        "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
    )


def test_thinking_is_shown_for_the_newest_question_only(hf: Any) -> None:
    shown = "<think>\no-a-k\n</think>\n\n3<|im_end|>\n"
    assert render(hf, [USER, THOUGHT]).endswith("assistant\n" + shown)
    longer = render(hf, [USER, THOUGHT, USER, THOUGHT])
    assert longer.count("<think>") == 1 and longer.endswith(shown)
    assert "assistant\n3<|im_end|>" in longer


def test_thinking_survives_a_tool_result(hf: Any) -> None:
    tool = {"role": "tool", "content": "1"}
    assert render(hf, [USER, CALL | {"reasoning_content": "I look."}, tool, THOUGHT]).count("<think>") == 2


def test_switching_thinking_off_opens_answers_and_the_prompt_with_an_empty_block(hf: Any) -> None:
    off = render(hf, [USER, THOUGHT, USER], add_generation_prompt=True, enable_thinking=False)
    assert off.count("<think>\n\n</think>\n\n") == 2 and "o-a-k" not in off
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    on = render(hf, [USER], add_generation_prompt=True, enable_thinking=True)
    assert on == render(hf, [USER], add_generation_prompt=True)
    assert on.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_without_thinking_every_history_is_a_prefix_of_what_follows(hf: Any, variables: dict[str, Any]) -> None:
    rows = [row for row in dataset_rows("skills", "test") if not any("reasoning_content" in m for m in row["messages"])]
    assert {"recall", "tools", "style"} <= {row["skill"] for row in rows}
    for row in rows:
        messages, tools = row["messages"], row.get("tools")
        whole = render(hf, messages, tools=tools, **variables)
        for i, message in enumerate(messages):
            assert whole.startswith(render(hf, messages[: i + 1], tools=tools, **variables))
            if message["role"] == "assistant":
                assert whole.startswith(render(hf, messages[:i], tools=tools, add_generation_prompt=True, **variables))


def test_with_thinking_a_history_is_no_prefix(hf: Any) -> None:
    assert not render(hf, [USER, THOUGHT, USER]).startswith(render(hf, [USER, THOUGHT]))
