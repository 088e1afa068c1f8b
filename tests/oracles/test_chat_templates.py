"""On real tokenizers and real rows our ids are Hugging Face's, and our targets are the answers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import transformers

from luthier.config.inputs import DataConfig, ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.records import Conversation, Sample, Text, Thinking, ToolCall
from luthier.rendering import plain_messages
from luthier.sources import RawRow
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources
from tests.oracles.chat_rows import hugging_face_tokenizer

pytestmark = pytest.mark.shared

TOKENIZERS = ("qwen3", "llama3_1", "gemma3")
TEXT_DATA = ("alpaca_en_demo", "alpaca_zh_demo", "identity", "glaive_toolcall_en_demo", "glaive_toolcall_zh_demo")
ROWS_PER_DATA_SET = 120


@cache
def conversations(folder: Path, name: str) -> list[Conversation]:
    registry = folder / "data" / "demo" / "dataset_info.json"
    sources, _ = resolve_sources(DataConfig(registry=registry, use=[f"{name}#{ROWS_PER_DATA_SET}"]))
    (source,) = open_sources(sources, seed=1)
    rows = [source.convert(row) for row in source.rows() if isinstance(row, RawRow)]
    return [row for row in rows if isinstance(row, Conversation)]


@cache
def reasoning(folder: Path) -> list[Conversation]:
    (source,) = open_sources(
        DataConfig(train=str(folder / "data" / "demo" / "reason_tool_use_demo_50.jsonl")).train, seed=1
    )
    rows = [source.convert(row) for row in source.rows() if isinstance(row, RawRow)]
    return [row for row in rows if isinstance(row, Conversation)]


@cache
def encoder(folder: Path, name: str) -> Encoder:
    return Encoder(ModelConfig(name_or_path=str(folder / "tokenizers" / name)), TemplateConfig())


def reference(folder: Path, name: str) -> transformers.PreTrainedTokenizerBase:
    return hugging_face_tokenizer(folder / "tokenizers" / name)


def apply_chat_template(hf: transformers.PreTrainedTokenizerBase, row: Conversation, **options: object) -> list[int]:
    encoded = hf.apply_chat_template(
        plain_messages(row.messages), tools=list(row.tools) or None, tokenize=True, return_dict=True, **options
    )
    return list(encoded["input_ids"])


def holds_control_string(encoder: Encoder, row: Conversation) -> bool:
    texts = [part.text for message in row.messages for part in message.parts if isinstance(part, Text | Thinking)]
    return any(token in text for text in texts for token in encoder.tokenizer.control.tokens)


@pytest.mark.parametrize("data", TEXT_DATA)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ids_equal_apply_chat_template(shared: Path, tokenizer: str, data: str) -> None:
    ours, hf = encoder(shared, tokenizer), reference(shared, tokenizer)
    refused = equal = 0
    for row in conversations(shared, data):
        try:
            sample = ours.encode(row)
        except RowError as error:
            assert error.reason in {"template", "dropped_by_template"}, error
            refused += 1
            continue
        assert not holds_control_string(ours, row)
        assert sample.unroll()[-1][0].tolist() == apply_chat_template(hf, row), str(row.address)
        equal += 1
    tools = data.startswith("glaive")
    assert equal > 0 or (tools and tokenizer != "qwen3"), "only templates without tools may refuse a whole data set"
    assert refused == 0 or tools, f"{refused} rows without tools are refused"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_targets_are_the_last_answer_and_its_stop(shared: Path, tokenizer: str) -> None:
    ours, hf = encoder(shared, tokenizer), reference(shared, tokenizer)
    for row in conversations(shared, "alpaca_en_demo"):
        [(ids, target)] = ours.encode(row).unroll()
        prompt = apply_chat_template(
            hf, Conversation(messages=row.messages[:-1], tools=row.tools), add_generation_prompt=True
        )
        assert ids[: len(prompt)].tolist() == prompt
        assert not target[: len(prompt)].any()
        trained = hf.decode(ids[target])
        stop = hf.decode([ours.tokenizer.eos_token_id])
        thought = "<think>\n\n</think>\n\n" if tokenizer == "qwen3" else ""
        assert trained == thought + plain_text(row) + stop


def plain_text(row: Conversation) -> str:
    text = row.messages[-1].text
    return text.strip() if text != text.strip() else text


def answers(sample: Sample) -> int:
    return sum(int(target.sum()) for _, target in sample.unroll())


def test_each_turn_of_a_reasoning_row_sees_its_own_inference_context(shared: Path) -> None:
    ours, hf = encoder(shared, "qwen3"), reference(shared, "qwen3")
    branched = 0
    for row in reasoning(shared):
        sample = ours.encode(row)
        paths = sample.unroll()
        branched += len(paths) > 1
        for index, message in enumerate(row.messages):
            if message.role != "assistant":
                continue
            history = Conversation(messages=row.messages[:index], tools=row.tools)
            prompt = apply_chat_template(hf, history, add_generation_prompt=True)
            homes = [target for ids, target in paths if ids[: len(prompt)].tolist() == prompt and target[len(prompt)]]
            assert homes, f"{row.address} message {index}: no path begins with its generation prompt"
            assert not any(target[len(prompt) - 1] for target in homes)
    assert branched > 0, "this data set is here because its history is rewritten"


def test_tool_calls_are_trained_as_qwen3_writes_them(shared: Path) -> None:
    ours = encoder(shared, "qwen3")
    row = next(
        row
        for row in conversations(shared, "glaive_toolcall_en_demo")
        if any(isinstance(part, ToolCall) for message in row.messages for part in message.parts)
    )
    call = next(part for message in row.messages for part in message.parts if isinstance(part, ToolCall))
    sample = ours.encode(row)
    trained = ours.tokenizer.decode(sample.input_ids[sample.target])
    assert f'<tool_call>\n{{"name": "{call.name}", "arguments": ' in trained
    assert "}\n</tool_call><|im_end|>" in trained
    assert answers(sample) == int(sample.target.sum())


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_no_added_token_written_in_text_becomes_control(shared: Path, tokenizer: str) -> None:
    ours, hf = encoder(shared, tokenizer), reference(shared, tokenizer)
    control = {ours.tokenizer.control_id(token) for token in ours.tokenizer.control.tokens}
    for token in sorted(ours.tokenizer.control.tokens):
        text = f"see {token}{token} here"
        (ids,) = ours.tokenizer.encode_runs([text])
        assert not control & set(ids.tolist())
        assert hf.decode(ids) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_ordinary_added_tokens_keep_their_ids(shared: Path, tokenizer: str) -> None:
    ours, hf = encoder(shared, tokenizer), reference(shared, tokenizer)
    ordinary = [token for token in hf.get_added_vocab() if token not in ours.tokenizer.control.tokens][:300]
    for token in ordinary:
        text = f"a{token}b"
        assert ours.tokenizer.encode_runs([text])[0].tolist() == hf.encode(text, add_special_tokens=False), token
