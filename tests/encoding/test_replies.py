"""Replies of a model are read back as the messages that they were written from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import luthier
from luthier.encoding.encoder import Encoder
from luthier.presets import tokenizer_folder
from luthier.records import Conversation, Message, Text, Thinking, ToolCall
from luthier.rendering.replies.form import joined
from luthier.rendering.replies.learning import declared, is_same
from tests.oracles.catalogue import catalogue
from tests.oracles.vocabulary import encoder_of

WEATHER = ToolCall(name="get_weather", arguments={"city": "Köln 🙂", "days": 3}, id="Ab3dE5gH7")
SEND = ToolCall(
    name="send", arguments={"text": 'He said "no",\nthen {left} </tool_call>', "to": ["a", "b"]}, id="Zb3dE5gH7"
)
TOOLS = [declared(WEATHER), declared(SEND)]
QUESTION = Message(role="user", parts=(Text(text="So?"),))


def assistant(*parts: Text | Thinking | ToolCall) -> Message:
    return Message(role="assistant", parts=parts)


def trained(encoder: Encoder, row: Conversation) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each answer of a row that training learns, by its message, with the prompt before it."""
    sample = encoder.encode(row)
    stops = encoder.tokenizer.stop_token_ids
    numbers = [n for n, message in enumerate(row.messages) if message.role == "assistant"]
    found = []
    for segment in sample.segments():
        ids, target = np.asarray(segment.input_ids), np.asarray(segment.target)
        for start in np.flatnonzero(target).tolist():
            if start == 0 or not target[start - 1] or ids[start - 1] in stops:
                end = next((n + 1 for n in range(start, len(ids)) if not target[n] or ids[n] in stops), len(ids))
                found.append((ids[:start], ids[start:end]))
    found.sort(key=lambda pair: len(pair[0]))
    assert len(found) == len(numbers)
    for number, (prompt, reply) in zip(numbers, found, strict=True):
        yield number, prompt, reply


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


@pytest.mark.parametrize("name", ["named/qwen3", "named/llama3_1", "named/mistral", "named/deepseekr1", "named/glm4"])
def test_a_trained_answer_is_read_back(tmp_path: Path, name: str) -> None:
    encoder = encoder_for(name, tmp_path)
    read = 0
    for answer, has_tools in ANSWERS:
        row = Conversation(messages=(QUESTION, answer), tools=tuple(TOOLS) if has_tools else ())
        try:
            ((_, prompt, reply),) = trained(encoder, row)
        except luthier.RowError:
            continue
        for ids in (reply, reply[:-1]):  # with its stop token, and without it
            found = luthier.parse_reply(ids, encoder.tokenizer, tools=TOOLS if has_tools else None, prompt=prompt)
            assert is_same(found, answer), (found, answer)
        read += 1
    assert read >= 3


def test_deltas_joined_are_the_whole_reply_however_it_is_divided(tmp_path: Path) -> None:
    encoder = encoder_for("named/qwen3", tmp_path)
    answer = assistant(Thinking(text="Hm 🙂 東京"), Text(text="I look 🙂🙂."), WEATHER, SEND)
    ((_, prompt, reply),) = trained(encoder, Conversation(messages=(QUESTION, answer), tools=tuple(TOOLS)))
    whole = luthier.parse_reply(reply, encoder.tokenizer, prompt=prompt)
    assert is_same(whole, answer)
    for size in (1, 2, 3, 7):
        reader = luthier.ReplyReader(encoder.tokenizer, prompt=prompt)
        deltas = [reader.feed(reply[start : start + size]) for start in range(0, len(reply), size)]
        assert joined([*deltas, reader.close()]).message == whole


def test_a_call_that_is_cut_off_stays_in_the_text(tmp_path: Path) -> None:
    encoder = encoder_for("named/qwen3", tmp_path)
    row = Conversation(messages=(QUESTION, assistant(Text(text="I look."), WEATHER)), tools=tuple(TOOLS))
    ((_, prompt, reply),) = trained(encoder, row)
    text = encoder.tokenizer.decode(reply[:-1]).partition("</think>\n\n")[2]
    reader = luthier.ReplyReader(encoder.tokenizer, prompt=prompt)
    read = joined([reader.feed(reply[:-8]), reader.close()])
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
