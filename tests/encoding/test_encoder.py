"""Rows become the ids that inference would see."""

from __future__ import annotations

import gc
import pickle
from importlib.metadata import version
from typing import Any

import pytest

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import LIBRARIES, Encoder
from luthier.errors import RowError, TemplateError
from luthier.records import Address, Conversation, Document, Image, Message, Text, Thinking
from tests.conftest import refused


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig())


def chat(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation(
        messages=tuple(Message(role=roles[i % 2], parts=(Text(text=text),)) for i, text in enumerate(texts)),
        address=Address(file="rows.jsonl", row=7),
    )


def test_targets_decode_to_the_answers_and_their_stops(encoder: Encoder) -> None:
    sample = encoder.encode(chat("hi", "hello there", "and?", "bye"))
    assert encoder.tokenizer.decode(sample.input_ids[sample.target]) == "hello there<|im_end|>bye<|im_end|>"


def test_each_turn_is_prompt_ids_followed_by_completion_ids(encoder: Encoder) -> None:
    row = chat("hi", "hello", "more", "bye")
    template = encoder.tokenizer.template
    assert template is not None
    [(ids, target)] = encoder.encode(row).unroll()
    prompt = template.render(row.messages[:3], generation_prompt=True)
    last = target.nonzero()[0][-len(encoder.tokenizer.encode_runs(["bye"])[0]) - 1]
    assert encoder.tokenizer.decode(ids[:last]) == prompt


def test_thinking_of_earlier_turns_becomes_a_branch(encoder: Encoder) -> None:
    def turn(thought: str, answer: str) -> Message:
        return Message(role="assistant", parts=(Thinking(text=thought), Text(text=answer)))

    users = [Message(role="user", parts=(Text(text=text),)) for text in ("one", "two")]
    row = Conversation(messages=(users[0], turn("hm", "a"), users[1], turn("so", "b")))
    sample = encoder.encode(row)
    assert len(sample.branches) == 3
    first, second = (encoder.tokenizer.decode(ids) for ids, _ in sample.unroll())
    assert "hm" in first and "hm" not in second and "so" in second


def test_weights_inside_one_run_of_text_fall_on_the_right_tokens(encoder: Encoder) -> None:
    row = Conversation(
        messages=(
            Message(role="user", parts=(Text(text="go"),)),
            Message(role="assistant", parts=(Text(text="the dog ", train=False), Text(text="runs fast", weight=0.5))),
        )
    )
    sample = encoder.encode(row)
    assert encoder.tokenizer.decode(sample.input_ids[sample.target]).strip() == "runs fast<|im_end|>"
    assert sample.weight is not None and sample.weight[sample.target].tolist()[-2:] == [0.5, 1.0]


def test_nothing_is_kept_of_rows_that_are_too_long_to_serve_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luthier.rendering.render.MOST_KEPT", 4)
    own = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig())
    rows = [chat("hi", *["so", "yes"] * number, "bye") for number in range(6)]
    for row in (*rows, *rows):
        own.encode(row)
    gc.collect()
    assert len(own.assembler._assemblies) == 2, "those of the rows of two and of four messages"


def test_errors_carry_the_address_of_their_row(encoder: Encoder) -> None:
    media = Conversation(
        messages=(
            Message(role="user", parts=(Image(source="a.png"),)),
            Message(role="assistant", parts=(Text(text="x"),)),
        ),
        address=Address(file="rows.jsonl", row=7),
    )
    with refused(RowError, "rows.jsonl:7"):
        encoder.encode(media)
    with refused(RowError, "rows.jsonl:7", "no_target"):
        encoder.encode(chat("only a question"))


def test_documents_end_with_the_end_token(encoder: Encoder) -> None:
    sample = encoder.encode(Document(parts=(Text(text="plain words"),)))
    assert encoder.tokenizer.decode(sample.input_ids) == "plain words<|im_end|>"
    assert sample.target.all()


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ({"add_special_tokens": ["<x>"]}, {}),
        ({}, {"train_on": "last_assistant"}),
        ({}, {"train_stop": False}),
        ({}, {"default_system": "be kind"}),
        ({}, {"kwargs": {"enable_thinking": False}}),
        ({}, {"chat_template": "{{ messages[0].content }}"}),
    ],
)
def test_whatever_changes_a_sample_changes_the_fingerprint(
    model: dict[str, Any], template: dict[str, Any], encoder: Encoder
) -> None:
    other = Encoder(
        ModelConfig.model_validate({"name_or_path": "preset:tiny-qwen3", **model}),
        TemplateConfig.model_validate(template),
    )
    again = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig())
    assert other.fingerprint != encoder.fingerprint == again.fingerprint


@pytest.mark.parametrize("name", LIBRARIES)
def test_samples_of_another_version_of_a_library_are_not_taken(
    name: str, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = version(name)
    known = encoder.fingerprint
    monkeypatch.setattr("luthier.encoding.encoder.version", lambda of: installed + ".1" if of == name else version(of))
    assert Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig()).fingerprint != known


def test_an_encoder_survives_the_way_to_a_worker(encoder: Encoder) -> None:
    copy = pickle.loads(pickle.dumps(encoder))  # noqa: S301  how multiprocessing sends it
    assert copy.fingerprint == encoder.fingerprint
    assert copy.encode(chat("a", "b")).input_ids.tolist() == encoder.encode(chat("a", "b")).input_ids.tolist()


@pytest.mark.parametrize("value", ["false", "True"])
def test_a_template_variable_with_the_text_of_a_boolean_is_an_error(value: str) -> None:
    kwargs = {"enable_thinking": value}
    with pytest.raises(TemplateError, match="take as true") as caught:
        _ = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(kwargs=kwargs)).renderer
    assert caught.value.hint == f"write enable_thinking: {value.lower()} without quotes"
    assert Encoder(
        ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(kwargs={"enable_thinking": False})
    ).renderer


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_template_variable_that_rows_fill_in_is_an_error(name: str) -> None:
    with pytest.raises(TemplateError, match="filled in for each row"):
        _ = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(kwargs={name: []})).renderer


def test_a_template_variable_that_nothing_reads_is_an_error() -> None:
    with pytest.raises(TemplateError, match="reads no variable 'enable_thinkin'"):
        _ = Encoder(
            ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(kwargs={"enable_thinkin": True})
        ).renderer
