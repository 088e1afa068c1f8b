"""Replies of a model are read back as the messages that they were written from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

import luthier
from luthier.config.inputs import ModelConfig, SourceConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.replies import reply_form
from luthier.presets import tokenizer_folder
from luthier.records import Conversation, Message, Text, Thinking, ToolCall
from luthier.rendering.replies import joined_deltas, joined_pieces
from luthier.rendering.replies.learning import declared, is_same
from luthier.sources.source import open_sources
from tests.conftest import examples, refused
from tests.oracles.catalogue import catalogue
from tests.oracles.vocabulary import encoder_of

Ids = NDArray[np.int32]
WEATHER = ToolCall(name="get_weather", arguments={"city": "Köln 🙂", "days": 3}, id="Ab3dE5gH7")
SEND = ToolCall(
    name="send", arguments={"text": 'He said "no",\nthen {left} </tool_call>', "to": ["a", "b"]}, id="Zb3dE5gH7"
)
TOOLS = [declared(WEATHER), declared(SEND)]
QUESTION = Message(role="user", parts=(Text(text="So?"),))


def assistant(*parts: Text | Thinking | ToolCall) -> Message:
    return Message(role="assistant", parts=parts)


def trained(encoder: Encoder, row: Conversation) -> Iterator[tuple[Message, Ids, Ids]]:
    """Each answer of a row as training learns it behind its history: the message, the prompt and the reply."""
    for number, message in enumerate(row.messages, 1):
        if message.role == "assistant":
            (segment,) = encoder.encode(
                replace(row, messages=row.messages[:number], train_on="last_assistant")
            ).segments()
            start = int(np.flatnonzero(segment.target)[0])
            yield message, segment.input_ids[:start], segment.input_ids[start:]


def asked(encoder: Encoder, answer: Message) -> tuple[Ids, Ids]:
    """The prompt of a question, and an answer to it."""
    tools = TOOLS if any(isinstance(part, ToolCall) for part in answer.parts) else []
    ((_, prompt, reply),) = trained(encoder, Conversation(messages=(QUESTION, answer), tools=tuple(tools)))
    return prompt, reply


def is_read_back(encoder: Encoder, answer: Message, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an answer is read as what it was written from; where calls are said, also as another of the same ids.

    Raises `RowError` for an answer that training refuses.
    """
    prompt, reply = asked(encoder, answer)
    read = luthier.parse_reply(reply, encoder.tokenizer, tools=tools, prompt=prompt)
    assert in_pieces(encoder, prompt, reply, tools)[0] == [
        (part.name, part.id, part.arguments) for part in read.parts if isinstance(part, ToolCall)
    ]
    if is_same(read, answer):
        return True
    has_calls = any(isinstance(part, ToolCall) for part in (*read.parts, *answer.parts))
    return has_calls and asked(encoder, read)[1].tolist() == reply.tolist()


def in_pieces(
    encoder: Encoder, prompt: Ids, reply: Ids, tools: Sequence[Mapping[str, Any]] | None, size: int = 1
) -> tuple[list[tuple[str | None, str | None, Any]], list[int]]:
    """The calls of a reply as their pieces say them, and of each call the number of pieces."""
    reader = luthier.ReplyReader(encoder.tokenizer, tools=tools, prompt=prompt, calls_in_pieces=True)
    deltas = [reader.feed(reply[start : start + size]) for start in range(0, len(reply), size)]
    pieces = [piece for delta in (*deltas, reader.close()) for piece in delta.call_pieces]
    calls = joined_pieces(pieces)
    assert [call.number for call in calls] == list(range(len(calls)))
    found = [(call.name, call.id, json.loads(call.arguments)) for call in calls]
    return found, [sum(piece.number == call.number for piece in pieces) for call in calls]


ANSWERS: Sequence[tuple[Message, bool]] = (
    (assistant(Text(text="Yes.")), False),
    (assistant(Text(text='"<tool_call>" and </think> and <|im_end|> are tags. 是的 🙂')), False),
    (assistant(Text(text='{"name": "get_weather", "arguments": {}}')), False),
    (assistant(Thinking(text="Hm <think> 🙂"), Text(text="Yes.")), False),
    (assistant(WEATHER), True),
    (assistant(Thinking(text="Hm."), SEND), True),
    (assistant(Text(text="I look."), WEATHER, SEND), True),
)


def encoder_for(name: str, folder: Path) -> Encoder:
    return encoder_of(tokenizer_folder("tiny"), folder, catalogue()[name])


FORMS = [
    "named/qwen3",
    "named/llama3_1",
    "named/mistral",
    "named/glm4",
    "trl/glm4moe",
    "trl/qwen3_5_think",
    "trl/gptoss",
]


@pytest.mark.parametrize("name", [*FORMS, "named/deepseekr1", "named/vicuna"])
def test_a_trained_answer_is_read_back(tmp_path: Path, name: str) -> None:
    encoder = encoder_for(name, tmp_path)
    read = 0
    for answer, has_tools in ANSWERS:
        try:
            prompt, reply = asked(encoder, answer)
        except luthier.RowError:
            continue
        for ids in (reply, reply[:-1]):  # with its stop token, and without it
            found = luthier.parse_reply(ids, encoder.tokenizer, tools=TOOLS if has_tools else None, prompt=prompt)
            assert is_same(found, answer), (found, answer)
        read += 1
    assert read >= 3


WORDS = (
    "<think>", "</think>", "<tool_call>", "\n", " ", '"', "'", "\\", "{", "}", ", ", "<|im_end|>", "[TOOL_CALLS]", "3",
    "get_weather", '{"name": "send", "arguments": {}}', "\nsend\n", "🙂", "東京", "</arg_value>", "</parameter>\n",
)  # fmt: skip
TEXTS = st.text() | st.lists(st.sampled_from(WORDS)).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**12) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.sampled_from(["t", "ht", "c", "tc", "htc", "tcc"])  # of a text, a thought and a call


@pytest.mark.parametrize("name", FORMS)
@hypothesis.settings(max_examples=examples(30))
@hypothesis.given(text=TEXTS, thought=TEXTS, city=TEXTS, value=VALUES, parts=PARTS)
def test_whatever_is_said_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str, thought: str, city: str, value: object, parts: str
) -> None:
    encoder = _encoders.get(name) or _encoders.setdefault(name, encoder_for(name, tmp_path_factory.mktemp("encoder")))
    call = replace(WEATHER, arguments={"city": city, "days": value})
    kinds = {"t": Text(text=text), "h": Thinking(text=thought), "c": call}
    with suppress(luthier.RowError):  # training refuses it, too
        assert is_read_back(encoder, assistant(*(kinds[part] for part in parts)), TOOLS)


_encoders: dict[str, Encoder] = {}


@pytest.mark.parametrize("name", ["named/qwen3", "named/llama3_1", "trl/glm4moe"])
@hypothesis.settings(max_examples=examples(60))
@hypothesis.given(data=st.data())
def test_any_ids_are_read_in_any_division_alike(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    encoder = _encoders.get(name) or _encoders.setdefault(name, encoder_for(name, tmp_path_factory.mktemp("encoder")))
    tokenizer = encoder.tokenizer
    written = [
        '\n<tool_call>\n{"name": "send", "arguments": {}}\n</tool_call>',
        "<think>\n",
        "\n</think>\n\n",
        "🙂",
        '{"name": "send", "parameters": {"a": 1}}',
        '<tool_call>\n{"arguments": {"a": "x',
        '<tool_call>\n{"name": "send", "arguments": {"text": "A\n{',
        '", "b": [1]}}\n</tool_call>',
        "<tool_call>send\n<arg_key>a</arg_key>\n<arg_value>",
    ]
    stretches = data.draw(st.lists(st.sampled_from(written) | TEXTS, max_size=6))
    ids = [number for text in stretches for number in tokenizer.encode_whole(text).tolist()]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    pieces = data.draw(st.booleans())
    whole = luthier.ReplyReader(tokenizer, tools=TOOLS, calls_in_pieces=pieces)
    expected = joined_deltas([whole.feed(ids), whole.close()])
    size = data.draw(st.integers(1, 5))
    reader = luthier.ReplyReader(tokenizer, tools=TOOLS, calls_in_pieces=pieces)
    deltas = [reader.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert joined_deltas([*deltas, reader.close()]) == expected
    assert bool(expected.call_pieces) == bool(pieces and (expected.calls or expected.call_pieces))


# Notations with a control token before the arguments, and with nothing behind them that is told first. Llama 3.1 and
# GLM 4 write letters alone, and Mistral the id of a call behind its arguments.
AS_DRAWN = ["named/qwen3", "trl/glm4moe", "trl/qwen3_5_think", "trl/gptoss"]


@pytest.mark.parametrize("name", FORMS)
def test_arguments_come_as_they_are_drawn(tmp_path: Path, name: str) -> None:
    encoder = encoder_for(name, tmp_path)
    for calls in ((SEND,), (WEATHER,), (WEATHER, SEND)):
        try:
            prompt, reply = asked(encoder, assistant(*calls))
        except luthier.RowError:  # of one call an answer
            continue
        for size in (1, 3):
            found, counts = in_pieces(encoder, prompt, reply, TOOLS, size)
            assert [(called, arguments) for called, _, arguments in found] == [(c.name, c.arguments) for c in calls]
            assert min(counts) > 9 // size if name in AS_DRAWN else set(counts) == {1}, counts


@pytest.mark.parametrize("name", AS_DRAWN)
def test_of_a_call_that_is_cut_off_comes_what_was_drawn(tmp_path: Path, name: str) -> None:
    """Wherever it is: either as far as its arguments were drawn, or in the text, and never in both."""
    encoder = encoder_for(name, tmp_path)
    prompt, reply = asked(encoder, assistant(SEND))
    (whole,) = read_in_pieces(encoder, prompt, reply).call_pieces
    told = []
    for end in range(len(reply)):
        delta = read_in_pieces(encoder, prompt, reply[:end])
        assert len(delta.call_pieces) <= 1
        for piece in delta.call_pieces:
            assert whole.arguments.startswith(piece.arguments) and piece.name == "send"
            assert "send" not in delta.content and (delta.num_malformed == 1) == (not delta.calls)
            told.append(piece.arguments)
    assert told == sorted(told, key=len) and len(set(told)) > 9


def read_in_pieces(encoder: Encoder, prompt: Ids, reply: Ids) -> luthier.ReplyDelta:
    reader = luthier.ReplyReader(encoder.tokenizer, tools=TOOLS, prompt=prompt, calls_in_pieces=True)
    return joined_deltas([reader.feed(reply), reader.close()])


def test_what_is_behind_a_broken_call_is_text(tmp_path: Path) -> None:
    encoder = encoder_for("named/qwen3", tmp_path)
    prompt, _ = asked(encoder, assistant(Text(text="Yes.")))
    broken = '<tool_call>\n{"name": "send", "arguments": {"text": yes}}\n</tool_call>'
    whole = '\n<tool_call>\n{"name": "send", "arguments": {"to": []}}\n</tool_call>'
    delta = read_in_pieces(encoder, prompt, encoder.tokenizer.encode_whole(f"{broken} So.{whole}"))
    assert [piece.arguments for piece in delta.call_pieces] == ['{"text": yes}', '{"to": []}']
    assert (delta.content.strip(), delta.num_malformed, len(delta.calls)) == ("So.", 1, 1)


@pytest.mark.parametrize("name", ["trl/gemma4_v5", "trl/lfm2_v2"])
def test_a_template_whose_calls_cannot_be_read_back_is_refused_for_tools(tmp_path: Path, name: str) -> None:
    encoder = encoder_for(name, tmp_path)
    answer = assistant(Text(text="Yes."))
    prompt, reply = asked(encoder, answer)
    assert luthier.parse_reply(reply, encoder.tokenizer, prompt=prompt) == answer
    prompt, called = asked(encoder, assistant(WEATHER))  # without tools a call is text, and not a guess
    read = luthier.parse_reply(called, encoder.tokenizer, prompt=prompt)
    assert "get_weather" in read.text and len(read.parts) == 1
    with refused(luthier.TemplateError, "tools"):
        luthier.parse_reply(reply, encoder.tokenizer, tools=TOOLS, prompt=prompt)


LOSING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}{{ v | string }}{% endfor %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_notation_that_says_too_little_is_found_out() -> None:
    """Negative control: names and values of arguments run into each other, so no reading of them can be right."""
    tokenizer = luthier.load_tokenizer(tokenizer_folder("tiny"), chat_template=LOSING)
    form = reply_form(tokenizer)
    assert "tools" in form.unreadable and "text" not in form.unreadable


def test_thoughts_that_run_into_the_answer_are_refused() -> None:
    source = LOSING.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    tokenizer = luthier.load_tokenizer(tokenizer_folder("tiny"), chat_template=source)
    with refused(luthier.TemplateError, "text"):
        luthier.parse_reply([], tokenizer)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_demo_rows_are_read_back_with_real_tokenizers(shared: Path, name: str) -> None:
    encoder = Encoder(ModelConfig(name_or_path=str(shared / "tokenizers" / name)), TemplateConfig())
    read: Counter[bool] = Counter()
    for file in ("glaive_toolcall_en_demo.json", "glaive_toolcall_zh_demo.json", "reason_tool_use_demo_50.jsonl"):
        (source,) = open_sources([SourceConfig(path=str(shared / "data" / "demo" / file))], seed=0)
        for raw in islice(source.rows(), 6):
            row = source.convert(raw) if not isinstance(raw, luthier.RowError) else None
            assert isinstance(row, Conversation)
            try:
                found = list(trained(encoder, row))
            except luthier.RowError:
                continue
            for message, prompt, reply in found:
                parsed = luthier.parse_reply(reply, encoder.tokenizer, tools=row.tools or None, prompt=prompt)
                read[is_same(parsed, message)] += 1
    assert not read[False] and read[True] >= 4, read


def test_deltas_joined_are_the_whole_reply_however_it_is_divided(tmp_path: Path) -> None:
    encoder = encoder_for("named/qwen3", tmp_path)
    answer = assistant(Thinking(text="Hm 🙂 東京"), Text(text="I look 🙂🙂."), WEATHER, SEND)
    prompt, reply = asked(encoder, answer)
    whole = luthier.parse_reply(reply, encoder.tokenizer, prompt=prompt)
    assert is_same(whole, answer)
    for size in (1, 2, 3, 7):
        reader = luthier.ReplyReader(encoder.tokenizer, prompt=prompt)
        deltas = [reader.feed(reply[start : start + size]) for start in range(0, len(reply), size)]
        assert joined_deltas([*deltas, reader.close()]).message == whole


def test_a_call_that_is_cut_off_stays_in_the_text(tmp_path: Path) -> None:
    encoder = encoder_for("named/qwen3", tmp_path)
    prompt, reply = asked(encoder, assistant(Text(text="I look."), WEATHER))
    text = encoder.tokenizer.decode(reply[:-1]).partition("</think>\n\n")[2]
    reader = luthier.ReplyReader(encoder.tokenizer, prompt=prompt)
    read = joined_deltas([reader.feed(reply[:-8]), reader.close()])
    assert not read.calls and read.num_malformed == 1
    assert text.startswith(read.content) and "get_weather" in read.content


def test_a_tag_of_letters_is_no_control_token(tmp_path: Path) -> None:
    """Negative control: the same characters by the tag's id are a call, and by letters they are text."""
    encoder = encoder_for("named/qwen3", tmp_path)
    tokenizer = encoder.tokenizer
    said = '<tool_call>\n{"name": "send", "arguments": {}}\n</tool_call>'
    (letters,) = tokenizer.encode_runs([said])
    assert luthier.parse_reply(letters, tokenizer, tools=TOOLS) == assistant(Text(text=said))
    control = luthier.parse_reply(tokenizer.encode_whole(said), tokenizer, tools=TOOLS)
    assert control == assistant(replace(SEND, arguments={}, id=None))


def test_a_reply_ends_at_the_first_stop_string_however_it_is_divided(tmp_path: Path) -> None:
    """Every cut through an answer with a thought, a text and a call: what is told is what was before it."""
    encoder = encoder_for("named/qwen3", tmp_path)
    answer = assistant(Thinking(text="Well, two."), Text(text="I ask."), ToolCall(name="f", arguments={"a": "b c"}))
    prompt, reply = asked(encoder, answer)
    whole = encoder.tokenizer.decode(reply[:-1])
    for start in range(len(whole) - 3):
        stop = whole[start : start + 4]
        if whole.find(stop) < start:
            continue
        cut = luthier.ReplyReader(encoder.tokenizer, tools=TOOLS, prompt=prompt, stop_strings=[stop, "never"])
        told = joined_deltas([*(cut.feed([number]) for number in reply), cut.close()])
        assert (
            luthier.parse_reply(reply, encoder.tokenizer, tools=TOOLS, prompt=prompt, stop_strings=[stop, "never"])
            == told.message
        )
        letters = "".join(whole[:start].split())
        said = "".join((told.reasoning + told.content).split())
        assert letters.replace("<think>", "").replace("</think>", "").startswith(said)
        assert ("I ask." in told.content) == (start >= whole.index("I ask.") + len("I ask."))
        assert len(told.calls) == (start >= whole.index("}}") + len("}}"))
