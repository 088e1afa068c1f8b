"""Answers come as messages: what was trained as thought, text and calls is told as such, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest

import luthier
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.engines import Finish
from luthier.serve.asking import HALF_CHARACTER
from tests.serve.conftest import TOKEN, Running, Scripted, running

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALLS = [
    {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": 'Köln "am" \\n 🌦', "days": 2}},
    },
    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {}}},
]
ASKED = [{"role": "user", "content": "How is the weather in <tool_call>Köln</tool_call>?"}]
ANSWERS: dict[str, dict[str, Any]] = {
    "text": {"content": 'Rain, <think>perhaps</think> 🌧 {"name": 1}.'},
    "thought": {"content": "Rain.", "reasoning_content": "It is Köln, so it rains. 🤔"},
    "calls": {"content": "", "tool_calls": CALLS},
    "all": {"content": "I ask.", "reasoning_content": "Hm.", "tool_calls": CALLS[:1]},
}


def emitted(answer: dict[str, Any], encoder: Encoder) -> list[int]:
    """The ids that training teaches for an answer, the stop token included."""
    row = {"messages": [*ASKED, {"role": "assistant", **answer}], "tools": TOOLS}
    sample = luthier.encode(row, encoder.tokenizer, train_on="last_assistant")
    ids, target = sample.unroll()[-1]
    return [int(number) for number in ids[np.flatnonzero(target)]]


def as_told(message: Any) -> dict[str, Any]:
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    told = {"content": message.content or "", "reasoning": getattr(message, "reasoning_content", None) or ""}
    return told | {"calls": calls}


def expected(answer: dict[str, Any]) -> dict[str, Any]:
    called = [one["function"] for one in answer.get("tool_calls", ())]
    calls = [(one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in called]
    return {"content": answer["content"], "reasoning": answer.get("reasoning_content", ""), "calls": calls}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_learned_of_an_answer_comes_back_whole_and_in_pieces(name: str, encoder: Encoder) -> None:
    answer = ANSWERS[name]
    ids = emitted(answer, encoder)
    for step in (1, 3):
        session = Scripted(lambda request: ids, step=step, stop=encoder.tokenizer.stop_token_ids[0])
        with running(encoder, session) as server:
            assert as_told(_whole(server)[0]) == expected(answer)
            assert _whole(server)[1] == ("tool_calls" if answer.get("tool_calls") else "stop")
            assert _in_pieces(server) == (expected(answer), _whole(server)[1])
            assert _accumulated(server) == (expected(answer), _whole(server)[1])


@pytest.mark.parametrize("place", ["reasoning", "content", "calls"])
def test_a_stop_string_ends_an_answer_wherever_it_stands(place: str, encoder: Encoder) -> None:
    """The answer is told up to it, and a call in whose arguments it stands was not made."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
    ids = emitted({"content": "I ask now.", "reasoning_content": "Hm, hm.", "tool_calls": [call]}, encoder)[:-1]
    word = {"reasoning": ", h", "content": "sk n", "calls": 'öln", "d'}[place]
    end = next(n for n in range(len(ids)) if word in encoder.tokenizer.decode(ids[:n]))
    before = {
        "reasoning": {"content": "", "reasoning": "Hm", "calls": []},
        "content": {"content": "I a", "reasoning": "Hm, hm.", "calls": []},
        "calls": {"content": "I ask now.", "reasoning": "Hm, hm.", "calls": [("weather", '{"city": "K')]},
    }[place]
    for step in (1, 3):
        with running(encoder, Scripted(lambda request: ids[:end], step=step, last=Finish.STRING)) as server:
            message, finish = _whole(server, stop=[word])
            assert (as_told(message), finish) == (before, "stop")
            assert _in_pieces(server, stop=[word]) == (before, "stop")


def test_a_stop_string_behind_a_call_leaves_the_call(encoder: Encoder) -> None:
    ids = emitted(ANSWERS["calls"], encoder)
    end = next(n for n in range(len(ids)) if "</tool_call>\n" in encoder.tokenizer.decode(ids[:n]))
    with running(encoder, Scripted(lambda request: ids[:end], last=Finish.STRING)) as server:
        told = {**expected(ANSWERS["calls"]), "calls": expected(ANSWERS["calls"])["calls"][:1]}
        assert _in_pieces(server, stop="</tool_call>\n") == (told, "tool_calls")
        assert as_told(_whole(server, stop="</tool_call>\n")[0]) == told


def _accumulated(server: Running) -> tuple[dict[str, Any], str]:
    """As the client itself puts a stream together. The arguments of a call come in pieces, behind its name."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
        with client.chat.completions.stream(**asked) as stream:
            events = list(stream)
            choice = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**asked).choices[0].message
    arguments = [call.function.arguments for call in choice.message.tool_calls or () if call.function.arguments != "{}"]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) >= 5 * len(arguments)
    assert as_told(choice.message)["calls"] == as_told(whole)["calls"]
    return as_told(choice.message), choice.finish_reason


def _whole(server: Running, **more: Any) -> tuple[Any, str]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        choice = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, **more).choices[0]  # type: ignore[call-overload]
        return choice.message, choice.finish_reason


def _in_pieces(server: Running, **more: Any) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        stream = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, stream=True, **more)  # type: ignore[call-overload]
        for piece in stream:
            (choice,) = piece.choices
            told = as_told(choice.delta)
            found["content"] += told["content"]
            found["reasoning"] += told["reasoning"]
            for call in choice.delta.tool_calls or ():
                assert (call.index in found["calls"]) == (call.id is None) == (call.function.name is None)
                name, arguments = found["calls"].get(call.index, (call.function.name, ""))
                found["calls"][call.index] = (name, arguments + call.function.arguments)
            finish = choice.finish_reason
    assert list(found["calls"]) == list(range(len(found["calls"])))
    return {**found, "calls": list(found["calls"].values())}, finish


def test_what_was_answered_may_be_sent_back_and_is_the_prompt_of_training(encoder: Encoder) -> None:
    answer = ANSWERS["all"]
    session = Scripted(lambda request: emitted(answer, encoder), stop=encoder.tokenizer.stop_token_ids[0])
    result = {"role": "tool", "content": "Rain.", "tool_call_id": "a"}
    with running(encoder, session) as server:
        message = server.chat(messages=ASKED, tools=TOOLS).json()["choices"][0]["message"]
        message["tool_calls"][0]["id"] = "a"
        server.chat(messages=[*ASKED, message, result], tools=TOOLS)
    history = [*ASKED, {"role": "assistant", **answer}, result]
    trained = luthier.encode_prompt(history, encoder.tokenizer, tools=TOOLS).input_ids
    assert session.asked[-1].prompt.tolist() == trained.tolist()


def test_tools_are_not_offered_where_none_are_to_be_called(encoder: Encoder) -> None:
    session = Scripted(lambda request: emitted(ANSWERS["text"], encoder), stop=encoder.tokenizer.stop_token_ids[0])
    with running(encoder, session) as server:
        server.chat(messages=ASKED, tools=TOOLS, tool_choice="none")
    assert session.asked[-1].prompt.tolist() == luthier.encode_prompt(ASKED, encoder.tokenizer).input_ids.tolist()


def test_a_call_that_is_cut_off_is_told_as_far_as_it_was_drawn(encoder: Encoder) -> None:
    """In its name it is text; in its arguments, some of which a stream has told by then, it is a call cut off."""
    ids = emitted(ANSWERS["calls"], encoder)
    (_, whole), *_ = expected(ANSWERS["calls"])["calls"]
    found = []
    for end in range(1, len(ids), 3):
        with running(encoder, Scripted(lambda request, end=end: ids[:end])) as server:
            message, finish = _whole(server)
            told = as_told(message)
            assert finish == "length" and _in_pieces(server) == (told, finish)
        first = told["calls"][0] if told["calls"] else None
        assert first is None or (first[0] == "weather" and whole.startswith(first[1].rstrip(HALF_CHARACTER)))
        assert "weather" not in told["content"] or first is None or len(told["calls"]) == 1
        found.append(None if first is None else first[1])
    assert found[0] is None and whole in found and len(set(found)) > 5


WITHOUT_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_tools_and_calls_that_the_template_leaves_out_are_refused_where_an_answer_is_asked_for() -> None:
    described = {"model": "preset:tiny-qwen3", "template": {"chat_template": WITHOUT_TOOLS}, "data": {}}
    plain = Encoder.from_config(load_config({**described, "train": {"enabled": False}}))
    calling = [
        *ASKED,
        {"role": "assistant", **ANSWERS["all"]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "a"},
    ]
    with running(plain, Scripted(lambda request: [70])) as server:
        told = [
            server.chat(messages=ASKED, tools=TOOLS).json()["error"]["param"],
            server.chat(messages=calling).json()["error"]["param"],
        ]
        assert told == ["tools", "messages[1].tool_calls"]
        assert server.chat(messages=ASKED, tools=TOOLS, tool_choice="none").status_code == 200
        asked = {"messages": ASKED, "tools": TOOLS}  # what the model would be shown is told whatever is left out of it
        assert server.http.post("/tokenize", json=asked).status_code == 200
