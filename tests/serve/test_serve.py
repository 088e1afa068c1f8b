"""The server speaks OpenAI's interface, and lets in nothing else."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest

import luthier
from luthier.config.schema import GenerateConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Request, WeightsName
from luthier.engines.local import WeightsTaker
from luthier.serve import running as running_module
from luthier.serve.histories import Histories
from tests.conftest import HANG_SECONDS
from tests.serve.conftest import ASK, TOKEN, Running, Scripted, running

TEXT = "Zwölf Zitronen 🍋🍋 — sieben. 十二个柠檬。"


@pytest.fixture(scope="module")
def server(encoder: Encoder) -> Iterator[Running]:
    """Asker every question with `TEXT`, one token at a time."""
    tokenizer = encoder.tokenizer
    stop = tokenizer.stop_token_ids[0]
    (ids,) = tokenizer.encode_runs([TEXT])
    with running(encoder, Scripted(lambda request: [*ids.tolist(), stop], stop=stop)) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as found:
        yield found


def test_an_answer_names_the_weights_that_drew_it_whole_and_in_pieces(encoder: Encoder) -> None:
    taken = WeightsName(version=3, digest="0" * 32)
    taker = cast("WeightsTaker", SimpleNamespace(taken=taken))
    with running(encoder, Scripted(lambda request: [5, 6]), taker=taker) as found:
        whole = found.chat().json()["weights"]
        lines = found.chat(stream=True).text.splitlines()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert whole == {"version": 3, "digest": "0" * 32} and len(pieces) > 2
    assert all(piece["weights"] == whole for piece in pieces)


def test_the_openai_client_gets_an_answer_whole_and_the_same_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny",
        messages=ASK,  # type: ignore[arg-type]
        safety_identifier="a user",
        prompt_cache_key="a conversation",
    )
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    pieces = list(stream)
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == TEXT
    assert len([text for text in texts if text]) > 5, "it comes in pieces"
    assert not any("\ufffd" in text for text in texts), "no half of a character is told"
    assert pieces[-1].usage == whole.usage
    assert pieces[-2].choices[0].finish_reason == "stop"


def test_what_is_asked_is_the_prompt_of_training(server: Running, encoder: Encoder) -> None:
    import luthier

    server.chat()
    tokenizer = luthier.load_tokenizer("preset:tiny-qwen3")
    expected = luthier.encode_prompt(ASK, tokenizer).input_ids.tolist()
    assert server.session.asked[-1].prompt.tolist() == expected
    told = server.http.post("/tokenize", json={"messages": ASK}).json()
    assert (told["tokens"], told["count"]) == (expected, len(expected))


def test_models_are_listed_and_another_name_is_refused(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=ASK)  # type: ignore[arg-type]


def test_settings_of_a_request_win_over_those_of_the_run(server: Running) -> None:
    server.chat(max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop="x", repetition_penalty=1.2)
    settings = server.session.asked[-1].settings
    told = (settings.max_new_tokens, settings.do_sample, settings.temperature, settings.top_p, settings.top_k)
    assert told == (7, True, 0.5, 0.9, 5)
    assert (settings.min_p, settings.seed, settings.stop_strings, settings.repetition_penalty) == (0.1, 3, ["x"], 1.2)
    server.chat(temperature=0)
    settings = server.session.asked[-1].settings
    assert (settings.do_sample, settings.max_new_tokens) == (False, 256)


WARM = {
    "do_sample": True, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "num_beams": 4,
    "length_penalty": 2.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "stop_strings": ["own"],
    "stop_token_ids": [9], "max_new_tokens": 3, "max_length": 1000,
}  # fmt: skip
SWITCHED_OFF: list[tuple[dict[str, Any], str, Any]] = [
    ({"temperature": 0}, "do_sample", False),
    ({"temperature": 1}, "temperature", 1),
    ({"top_p": 1}, "top_p", None),
    ({"top_k": -1}, "top_k", None),
    ({"top_k": 0}, "top_k", None),
    ({"min_p": 0}, "min_p", None),
    ({"num_beams": 1}, "num_beams", 1),
    ({"length_penalty": 0}, "length_penalty", 0),
    ({"repetition_penalty": 1}, "repetition_penalty", None),
    ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size", None),
    ({"stop": []}, "stop_strings", []),
    ({"stop": "mine"}, "stop_strings", ["mine"]),
    ({"max_tokens": 7}, "max_new_tokens", 7),
]


def test_a_field_that_is_sent_takes_the_place_of_the_sections_and_others_leave_it(encoder: Encoder) -> None:
    """Of stop tokens those of the model stay, as answers would not end without them."""
    stops = {*encoder.tokenizer.stop_token_ids}
    assert {*WARM, "seed"} == GenerateConfig.model_fields.keys(), "each key is looked at here"
    session = Scripted(lambda request: [5])
    with running(encoder, session, generate=WARM) as server:
        for body, name, value in SWITCHED_OFF:
            server.chat(**{"stop": None, "top_p": None, "top_k": None, **body})  # null is as good as nothing
            found = session.asked[-1].settings.model_dump()
            assert found[name] == value, name
            rest = {key: one for key, one in WARM.items() if key not in (name, "max_length", "stop_token_ids")}
            assert {key: found[key] for key in rest} == rest, name
        server.chat(stop_token_ids=[])
        assert {*session.asked[-1].settings.stop_token_ids} == stops
        server.chat(stop_token_ids=[7])
        assert {*session.asked[-1].settings.stop_token_ids} == {7, *stops}


def test_an_engine_takes_nothing_from_the_section_of_the_server(encoder: Encoder) -> None:
    session = Scripted(lambda request: [5])
    with running(encoder, session, generate=WARM) as server:
        engine = luthier.HttpEngine(server.url, encoder.tokenizer, token=TOKEN)
        for how in ({}, {"do_sample": True, "temperature": 1.0}, {"do_sample": True, "temperature": 2.0, "top_k": 3}):
            asked = GenerateConfig(max_new_tokens=4, seed=3, stop_token_ids=[7], **how)
            list(engine.generate([Request(prompt=np.array([5, 6]), settings=asked, key=0)]))
            found = session.asked[-1].settings
            assert {*found.stop_token_ids} == {7, *encoder.tokenizer.stop_token_ids}
            assert found.model_copy(update={"stop_token_ids": [7]}) == asked


def test_what_asks_for_nothing_draws_nothing(server: Running) -> None:
    for neutral in ({"top_p": 1}, {"min_p": 0}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1, "repetition_penalty": 1}):
        server.chat(**neutral)
        assert not server.session.asked[-1].settings.do_sample, neutral
    for narrow in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 40}, {"temperature": 1}):
        server.chat(**narrow)
        assert server.session.asked[-1].settings.do_sample, narrow
        server.chat(**{**narrow, "temperature": 0})
        assert not server.session.asked[-1].settings.do_sample, narrow


def test_the_longest_prompt_and_answer_of_the_section_bounds_what_asks_for_no_length(encoder: Encoder) -> None:
    session = Scripted(lambda request: [5])
    with running(encoder, session, generate={"max_length": 30}) as server:
        server.chat()
        assert len(session.asked[-1].prompt) + session.asked[-1].settings.max_new_tokens == 30
        long = [{"role": "user", "content": "seven " * 40}]
        assert server.chat(messages=long).json()["error"]["code"] == "context_length_exceeded"
        assert server.chat(messages=long, max_tokens=4).status_code == 200


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"frequency_penalty": 1}, 400, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
    ({"verbosity": "low"}, 400, "verbosity"),
    ({"nonsense": 1}, 400, "nonsense"),
    ({"n": 0}, 400, "n"),
    ({"n": 99}, 400, "n"),
    ({"n": 2, "temperature": 0}, 400, "n"),
    ({"max_tokens": 1_000_000}, 400, "max_tokens"),
    ({"max_completion_tokens": 4097}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 4}, 400, "max_tokens"),
    ({"length_penalty": 2}, 400, "length_penalty"),
    ({"max_tokens": 2048}, 400, "messages"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "warm"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"num_beams": 17}, 400, "num_beams"),
    ({"num_beams": 2, "n": 2, "temperature": 1}, 400, "stream"),
    ({"repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, 400, "repetition_penalty"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"stop_token_ids": [1_000_000]}, 400, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"seed": -1}, 400, "seed"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"chat_template_kwargs": {"nonsense": 1}}, 400, "chat_template_kwargs.nonsense"),
    ({"chat_template_kwargs": {"text": "zzz"}}, 400, "chat_template_kwargs.text"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": "<|im_end|>"}}, 400, "chat_template_kwargs.enable_thinking"),
    ({"tools": [{"name": 1}]}, 400, "tools"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "weight": 2}]}, 400, "messages[0].weight"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/passwd"}]}]}, 400, ""),
    ({"model": "gpt"}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_done_is_refused_by_its_name(
    server: Running, body: dict[str, Any], status: int, param: str
) -> None:
    begun = time.perf_counter()
    answer = server.chat(**body)
    assert time.perf_counter() - begun < 2
    error = answer.json()["error"]
    assert (answer.status_code, bool(error["message"]), bool(error["code"])) == (status, True, True)
    if param:
        assert error["param"] == param
    assert server.chat().status_code == 200, "the next request is answered"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": ASK, "add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_what_says_nothing_of_what_is_tokenized_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    assert server.http.post("/tokenize", json=body).json()["error"]["param"] == param


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"messages": NaN}', b"[" * 5000, b'{"a": 1} x'], ids=repr
)
def test_a_body_that_is_no_request_is_refused(server: Running, raw: bytes) -> None:
    assert server.http.post("/v1/chat/completions", content=raw).status_code == 400


JUNK: list[Any] = [
    None, True, -1, 0, 1e308, 1e-300, "", "x", "\x00", "<|im_end|>", 10**30, [], {}, [[]], [None], [1] * 50, {"a": {}},
    {"role": "user"}, [{"role": "user", "content": "x", "tool_calls": [{"function": 1}]}],
]  # fmt: skip
FIELDS = (
    "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logprobs",
    "tools", "top_logprobs", "tool_choice", "chat_template_kwargs", "stream_options", "repetition_penalty",
    "stop_token_ids",
)  # fmt: skip


def test_odd_bodies_are_answered_or_refused_with_a_reason_and_none_breaks_the_server(server: Running) -> None:
    """Any value in any field, bodies that are cut off, and bodies with bits that were turned round."""
    rng, refused = random.Random(0), 0
    for number in range(400):
        body = {"messages": ASK, "max_tokens": 2}
        body |= {rng.choice(FIELDS): rng.choice(JUNK) for _ in range(rng.choice((1, 1, 2, 3)))}
        raw = bytearray(json.dumps(body).encode())
        if number % 5 == 0:
            del raw[rng.randrange(len(raw)) :]
        if number % 7 == 0 and raw:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        answer = server.http.post("/v1/chat/completions", content=bytes(raw))
        assert answer.status_code < 500, (raw, answer.text)
        if answer.status_code >= 400:
            refused += 1
            assert answer.json()["error"]["message"] and answer.json()["error"]["code"]
    assert 200 < refused < 400 and server.chat().status_code == 200


def test_a_refusal_does_not_wait_in_the_network(server: Running) -> None:
    """Nagle's algorithm and delayed acknowledgements take 40 ms together."""
    seconds = []
    for _ in range(30):
        begun = time.perf_counter()
        assert server.http.post("/v1/chat/completions", content=b"{").status_code == 400
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.03


def test_half_of_a_surrogate_pair_is_refused(server: Running) -> None:
    raw = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert server.http.post("/v1/chat/completions", content=raw).status_code == 400


@pytest.mark.parametrize("route", ["/", "/docs", "/openapi.json", "/v1", "/v1/chat/completions/", "/reset", "/../etc"])
def test_there_are_no_other_routes(server: Running, route: str) -> None:
    answer = server.http.get(route)
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["code"] == "no_such_route"


def test_the_name_of_the_scheme_may_be_written_in_any_case(server: Running) -> None:
    for scheme in ("bearer", "BEARER", "Bearer "):
        answer = server.http.get("/v1/models", headers={"Authorization": f"{scheme} {TOKEN}"})
        assert answer.status_code == 200, scheme


def test_who_has_no_token_gets_nothing(server: Running) -> None:
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/health").json() == {"status": "ok"}
        for header in (
            {},
            {"Authorization": "Bearer x"},
            {"Authorization": TOKEN},
            {"Authorization": f"bearer {TOKEN}x"},
            {"Authorization": f"bearer{TOKEN}"},
            {"Authorization": f"basic {TOKEN}"},
        ):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nothing")):
                answer = stranger.request(method, path, headers=header)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("localhost:1", 200), ("127.0.0.1", 200), ("", 403)]
)
def test_a_name_that_is_not_the_servers_is_refused(server: Running, host: str, status: int) -> None:
    answer = server.http.get("/v1/models", headers={"Host": host})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_what_was_done_is_counted_without_names_that_clients_choose(server: Running) -> None:
    server.chat(max_tokens=0)
    server.http.get("/secret/place")
    told = server.http.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    assert 'luthier_requests_total{path="/v1/chat/completions",status="400"}' in told.text
    assert 'path="other",status="404"' in told.text and "secret" not in told.text
    assert "luthier_requests_active 0" in told.text


def test_stop_strings_end_a_stream_where_they_end_the_whole(server: Running) -> None:
    body = {"stop": ["sieben", "🍋 —"]}
    whole = server.chat(**body).json()["choices"][0]["message"]["content"]
    assert whole == "Zwölf Zitronen 🍋"
    with server.http.stream("POST", "/v1/chat/completions", json={"messages": ASK, "stream": True, **body}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(pieces) == whole


def endless(request: Request) -> Iterator[int]:
    return cycle([100, 101, 102])


def test_a_client_that_goes_away_ends_its_answer(encoder: Encoder) -> None:
    session = Scripted(endless, pause=0.001)
    with running(encoder, session) as server:
        for number in range(200):
            streams = number % 2 == 0
            gone = http.client.HTTPConnection("127.0.0.1", httpx.URL(server.url).port, timeout=HANG_SECONDS)
            body = json.dumps({"messages": ASK, "stream": streams})
            gone.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {TOKEN}"})
            _until(lambda asked=number + 1: len(session.asked) == asked)
            if streams:
                assert gone.getresponse().read(1)
            gone.close()
        _until(lambda: not session.working and not server.gate.counts.active)


def test_limits_of_time_body_context_and_queue_are_told_with_their_number(encoder: Encoder) -> None:
    session = Scripted(endless, pause=0.01)
    with running(encoder, session, timeout=2, max_body=2000, max_requests=1, max_context=64) as server:
        slow = server.chat()
        assert (slow.status_code, slow.json()["error"]["type"]) == (504, "timeout_error")
        with server.http.stream("POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            busy = server.chat()
            assert (busy.status_code, busy.headers.get("retry-after")) == (429, "1")
            assert '"code":"timeout"' in "".join(lines)
        large = server.chat(messages=[{"role": "user", "content": "x" * 3000}])
        assert (large.status_code, "2,000" in large.json()["error"]["message"]) == (413, True)
        chunks = server.http.post("/v1/chat/completions", content=iter([b" " * 1500, b" " * 1500]))
        assert chunks.status_code == 413
        _until(lambda: not session.working and not server.gate.counts.active)


def test_half_heads_keep_nobody_out_and_are_closed_after_a_while(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs a token to open connections, of which there are at most 68 here."""
    monkeypatch.setattr(running_module, "KEPT_OPEN", 4)
    with running(encoder, Scripted(lambda request: [70]), max_requests=1) as server, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(server.url).port or 0)
        halves = [stack.enter_context(socket.create_connection(address, HANG_SECONDS)) for _ in range(150)]
        for half in halves:
            half.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as another:
                assert another.get("/health").status_code == 200
        drip = halves[-1]
        with suppress(OSError):  # a byte now and then does not keep it open
            for _ in range(100):
                drip.sendall(b"a")
                time.sleep(0.1)
        for half in halves:
            with suppress(ConnectionError):
                assert half.recv(100) == b""
        assert server.chat().status_code == 200


def test_the_time_of_a_request_counts_its_wait_for_a_prompt_and_who_is_gone_waits_no_more(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    free = threading.Event()
    make = Histories.of_messages

    def of_messages(self: Histories, messages: Any, *more: Any) -> Any:
        made.append(messages[0].content)
        assert free.wait(HANG_SECONDS)
        return make(self, messages, *more)

    monkeypatch.setattr(Histories, "of_messages", of_messages)
    with running(encoder, Scripted(lambda request: [70]), timeout=1) as server:
        for path, more in ((CHAT, {}), (CHAT, {"stream": True}), ("/tokenize", {})):
            since = time.monotonic()
            late = server.http.post(path, json={"messages": [{"role": "user", "content": "A"}], **more})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
            assert time.monotonic() - since < HANG_SECONDS / 4
        gone = http.client.HTTPConnection("127.0.0.1", httpx.URL(server.url).port, timeout=HANG_SECONDS)
        body = json.dumps({"messages": [{"role": "user", "content": "B"}]})
        gone.request("POST", CHAT, body, {"Authorization": f"Bearer {TOKEN}"})
        _until(lambda: server.gate.counts.active == 1)
        gone.close()
        _until(lambda: not server.gate.counts.active)
        free.set()
        assert server.chat(messages=[{"role": "user", "content": "C"}]).status_code == 200
        assert made == ["A", "C"], "only the first had begun to be made"


CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "word " * 5000
    turn = {"role": "user", "content": words}
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": words}
    longest: list[int] = []
    encode = Tokenizer.encode_flat

    def encode_flat(self: Tokenizer, texts: Sequence[str], bare: Any = None) -> Any:
        longest.append(max(map(len, texts), default=0))
        return encode(self, texts, bare)

    monkeypatch.setattr(Tokenizer, "encode_flat", encode_flat)
    with running(encoder, Scripted(lambda request: [70]), context=2000) as server:
        for path, body in (
            (CHAT, {"messages": [turn]}),
            (CHAT, {"messages": [*ASK, thought, turn]}),
            (CHAT, {"messages": [{"role": "system", "content": words}, *ASK], "max_tokens": 1}),
            (TEXTS, {"prompt": words}),
            (TEXTS, {"prompt": ["short", words]}),
            (TEXTS, {"prompt": [70] * 2000}),
            (TEXTS, {"prompt": [[70], [70] * 1991], "max_tokens": 10}),
        ):
            found = server.http.post(path, json=body)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded"), body
            assert max(longest, default=0) < 1000, "it was encoded"
        counted = server.http.post("/tokenize", json={"messages": [turn]}).json()["count"]
        assert counted > 5000 and max(longest) >= len(words), "whoever counts tokens has no limit"
        most = 2000 - 1 - server.http.post("/tokenize", json={"messages": ASK}).json()["count"]
        fits = [{**ASK[0], "content": ASK[0]["content"] + " and" * (most // 4)}]
        assert server.http.post(CHAT, json={"messages": fits, "max_tokens": 1}).status_code == 200
        assert server.http.post(TEXTS, json={"prompt": [70] * 1990, "max_tokens": 10}).status_code == 200
        # a thought that the template leaves out of its history takes no room
        assert server.http.post(CHAT, json={"messages": [*ASK, thought, *ASK]}).status_code == 200


def _until(condition: Any, seconds: float = HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_line_of_a_stream_is_a_whole_event_for_clients_that_end_lines_elsewhere_too(encoder: Encoder) -> None:
    """As `httpx.Response.iter_lines` does, at three characters that end no line of an event stream."""
    text = "one\u2028two\u2029three\x85four"
    (ids,) = encoder.tokenizer.encode_runs([text])
    with running(encoder, Scripted(lambda request: ids.tolist())) as server:
        body = {"messages": ASK, "stream": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_an_answer_that_a_stopping_server_cuts_off_is_told_so(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "GRACE", 0.2)
    session = Scripted(lambda request: [70] * 40_000, pause=0.01)
    found: list[httpx.Response] = []
    with running(encoder, session) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        ask = lambda: found.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=headers))  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        _until(lambda: bool(session.asked))
    thread.join(HANG_SECONDS)
    (cut,) = found
    assert (cut.status_code, cut.json()["error"]["code"], "Retry-After" in cut.headers) == (503, "stopping", True)


def test_who_reads_nothing_of_an_answer_is_left_alone_after_a_while(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "KEPT_OPEN", 1)
    session = Scripted(lambda request: [70] * 40_000, step=500)
    body = json.dumps({"prompt": "a", "stream": True, "logprobs": 20}).encode()
    with running(encoder, session) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(HANG_SECONDS)
        client.connect(("127.0.0.1", httpx.URL(server.url).port or 0))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        _until(lambda: bool(session.asked))
        _until(lambda: not session.working and not server.gate.counts.active)
        last = b"-"
        with suppress(ConnectionError):
            while more := client.recv(1 << 20):
                last = (last + more)[-5:]
        assert last != b"0\r\n\r\n", "it has not been sent to its end"
