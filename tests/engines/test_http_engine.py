"""The engine that asks servers, against a real llama.cpp server and against stand-ins for vLLM and SGLang.

The stand-ins answer in the form of those servers with what a `LocalEngine` says, and refuse what they do not know.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_local_engine import NEW, SAMPLED, TOKENIZER, answers, ids_of, requests

import luthier
from luthier.config.schema import GenerateConfig
from luthier.engines import Completion, Finish, Refusal, Request, SamplerPool, WeightsName
from luthier.engines.http import HttpEngine, HttpSampler
from luthier.engines.json_client import JsonClient, ServerRefused, ServerUnreachable, ServerWrong, in_threads, patiently
from luthier.engines.local import LocalEngine
from luthier.errors import SamplerLost, UserError
from tests.check.llama_cpp import llama_cpp_server, write_gguf
from tests.conftest import HANG_SECONDS, refused, served_json

Json = dict[str, Any]


class StandIn:
    """A server of a model. ``seen`` are the bodies of what it was asked."""

    def __init__(self, model: Any, owner: str) -> None:
        self.engine, self.owner, self.seen = LocalEngine(model, TOKENIZER), owner, list[Json]()
        self.names = ["tiny"]
        self.trouble: list[tuple[int, object]] = []  # what the next questions are answered with

    def __call__(self, path: str, body: Json | None) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "owned_by": self.owner} for name in self.names]}
        assert body is not None
        self.seen.append(body)
        if self.trouble:
            return self.trouble.pop(0)
        if (self.owner, path) == ("vllm", "/v1/completions"):
            return 200, self.vllm(body)
        if (self.owner, path) == ("sglang", "/generate"):
            return 200, self.sglang(body)
        return 404, {"error": "no such route"}

    def completion(self, prompt: list[int], body: Json, longest: int) -> Completion:
        settings = GenerateConfig(
            max_new_tokens=longest, stop_token_ids=body.get("stop_token_ids", []), stop_strings=body.get("stop", [])
        )
        request = Request(prompt=np.array(prompt, np.int32), settings=settings, key=0)
        (found,) = self.engine.generate([request])
        assert isinstance(found, Completion)
        return found

    def vllm(self, body: Json) -> Json:
        known = {
            "model", "prompt", "max_tokens", "logprobs", "return_token_ids", "stop_token_ids", "temperature", "top_p",
            "top_k", "min_p", "repetition_penalty", "stop", "seed", "echo",
        }  # fmt: skip
        assert set(body) <= known and body["model"] in self.names
        found = self.completion(body["prompt"], body, body["max_tokens"])
        logprobs = found.logprobs.tolist()
        if body.get("echo"):
            prompt = np.array(body["prompt"], np.int32)
            logprobs = [None, *self.engine.score(prompt, 1).tolist(), *logprobs]
        choice: Json = {"index": 0, "text": "", "logprobs": {"token_logprobs": logprobs}}
        choice["finish_reason"] = "length" if found.finish is Finish.LENGTH else "stop"
        if body.get("return_token_ids"):
            choice["token_ids"] = found.ids.tolist()
        return {"choices": [choice]}

    def sglang(self, body: Json) -> Json:
        sampling = body["sampling_params"]
        found = self.completion(body["input_ids"], sampling, sampling["max_new_tokens"])
        told = [
            [logprob, token, None] for token, logprob in zip(found.ids.tolist(), found.logprobs.tolist(), strict=True)
        ]
        reason = {"type": "length" if found.finish is Finish.LENGTH else "stop"}
        about: Json = {"output_token_logprobs": told, "finish_reason": reason}
        if body.get("logprob_start_len") == 0:
            prompt = np.array(body["input_ids"], np.int32)
            scored = [None, *self.engine.score(prompt, 1).tolist()]
            about["input_token_logprobs"] = [
                [one, token, None] for one, token in zip(scored, prompt.tolist(), strict=True)
            ]
        return {"text": "", "output_ids": found.ids.tolist(), "meta_info": about}


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_answers_and_scores_are_those_of_the_model_that_is_served_json(model: Any, owner: str) -> None:
    asked = requests(6)
    expected = answers(model, asked)
    stop = int(expected[2, 0].ids[4])
    asked[3] = replace(asked[3], settings=GenerateConfig(max_new_tokens=NEW, stop_token_ids=[stop]))
    expected = answers(model, asked)
    with served_json(StandIn(model, owner)) as url:
        engine = HttpEngine(url, TOKENIZER)
        found = {(one.key, one.sample): one for one in engine.generate(asked) if isinstance(one, Completion)}
        scored = engine.score(asked[0].prompt, 1)
    assert ids_of(found) == ids_of(expected)
    assert {key: one.finish for key, one in found.items()} == {key: one.finish for key, one in expected.items()}
    assert all(np.allclose(found[key].logprobs, one.logprobs, atol=1e-5) for key, one in expected.items())
    assert np.allclose(scored, LocalEngine(model, TOKENIZER).score(asked[0].prompt, 1), atol=1e-5)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_each_sample_has_a_seed_of_its_own_which_the_request_fixes(model: Any, owner: str) -> None:
    def seeds(**settings: Any) -> list[int]:
        stand_in = StandIn(model, owner)
        with served_json(stand_in) as url:
            list(
                HttpEngine(url, TOKENIZER, batch_size=1).generate(
                    requests(2, num_samples=3, max_new_tokens=1, **settings)
                )
            )
        return [body["seed"] if owner == "vllm" else body["sampling_params"]["sampling_seed"] for body in stand_in.seen]

    first = seeds(**SAMPLED)
    assert seeds(**SAMPLED) == first and len(set(first)) == 6
    assert not set(seeds(**{**SAMPLED, "seed": 8})) & set(first)


def test_a_server_that_is_busy_is_asked_again_and_a_wrong_question_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.engines.http.PAUSES", (0.01, 0.01))
    stand_in = StandIn(model, "vllm")
    with served_json(stand_in) as url:
        engine = HttpEngine(url, TOKENIZER, batch_size=1)
        stand_in.trouble = [(503, {}), (429, {})]
        assert [type(one) for one in engine.generate(requests(1))] == [Completion]
        stand_in.trouble = [(400, {"error": "the prompt is too long"})] * 2
        found = list(engine.generate(requests(2, num_samples=2)))
        refused = [one for one in found if isinstance(one, Refusal)]
        assert [(one.key, one.reason) for one in refused] == [(0, "server_refused")] and "too long" in refused[0].detail
        assert [one.key for one in found if isinstance(one, Completion)] == [1, 1]
        lost = [(200, {"choices": [{"text": "a"}]})]
        for trouble, tries in (([(503, {})], 3), ([(401, {})], 1), ([(200, {"choices": []})], 3), (lost, 3)):
            stand_in.trouble = trouble * tries
            with pytest.raises(SamplerLost) as caught:
                list(engine.generate(requests(1)))
            assert ("3 times" in caught.value.message) == (tries == 3) and not stand_in.trouble


@pytest.mark.parametrize(
    ("said", "least", "most"),
    [
        (None, 0.01, 0.01),
        ("3", 3, 3),
        ("0.5", 0.5, 0.5),
        ("in 30 s", 28, 30),
        ("86400", 60, 60),
        ("0", 0.01, 0.01),
        ("-5", 0.01, 0.01),
        ("nan", 0.01, 0.01),
        ("soon", 0.01, 0.01),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.01, 0.01),
    ],
)
def test_a_busy_server_is_asked_again_when_it_says_but_within_a_minute(
    monkeypatch: pytest.MonkeyPatch, said: str | None, least: float, most: float
) -> None:
    monkeypatch.setattr("luthier.engines.json_client.PAUSES", (0.01, 0.01))
    pauses: list[float] = []
    sleepless = SimpleNamespace(sleep=pauses.append, time=time.time)
    for module in ("luthier.engines", "luthier.engines.json_client"):
        monkeypatch.setattr(f"{module}.time", sleepless)
    headers = (
        {} if said is None else {"Retry-After": said.replace("in 30 s", formatdate(time.time() + 30, usegmt=True))}
    )
    with served_json(lambda *_: (429, {}), headers=headers) as url:
        client = JsonClient(url, timeout=HANG_SECONDS, option="url", token_option="token")
        sampler: Any = SimpleNamespace(name="one", score=lambda *_: client.post("/v1/completions", {}))
        with pytest.raises(ServerRefused):
            patiently(lambda: client.post("/v1/completions", {}))
        with pytest.raises(SamplerLost):
            SamplerPool([sampler], at_once=1, pauses=(0.01, 0.01)).score(TOKENIZER.encode_runs(["a"])[0], 0)
        assert len(pauses) == 4 and all(least <= pause <= most for pause in pauses)
        with pytest.raises(SamplerLost):
            SamplerPool([sampler, sampler], at_once=1, pauses=(0.01,)).score(TOKENIZER.encode_runs(["a"])[0], 0)
        assert pauses[-1] == 0.01, "another server is asked at once"


def test_a_server_of_several_models_is_asked_by_the_name_of_one(model: Any) -> None:
    stand_in = StandIn(model, "vllm")
    stand_in.names = ["base", "tuned"]
    with served_json(stand_in) as url:
        for name in (None, "another"):
            with pytest.raises(UserError, match="base, tuned"):
                list(HttpEngine(url, TOKENIZER, model=name).generate(requests(1)))
        assert not stand_in.seen
        list(HttpEngine(url, TOKENIZER, model="tuned").generate(requests(1)))
    assert [body["model"] for body in stand_in.seen] == ["tuned"]


@pytest.mark.parametrize(("owner", "key"), [("vllm", "prompt"), ("luthier", "prompt"), ("llamacpp", "content")])
def test_a_server_of_another_tokenizer_is_refused_before_it_is_asked(owner: str, key: str) -> None:
    seen: list[str] = []
    other = False

    def server(path: str, body: Json | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": "tiny", "owned_by": owner}]}
        seen.append(path)
        if path != "/tokenize":
            return 404, {}
        (ids,) = TOKENIZER.encode_runs([body[key]])
        return 200, {"tokens": [TOKENIZER.eos_token_id, *(ids + int(other)).tolist()]}

    with served_json(server, tokenizes=True) as url:
        assert HttpEngine(url, TOKENIZER).sampler.route
        other = True
        with refused(UserError, "tokenizer"):
            list(HttpEngine(url, TOKENIZER).generate(requests(1)))
    assert seen == ["/tokenize"] * 2


def test_a_session_over_a_server_tells_whole_answers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luthier.engines.http.PAUSES", ())
    told, asked = SimpleQueue[Any](), requests(2)
    stand_in = StandIn(model, "vllm")
    with served_json(stand_in) as url:
        session = HttpEngine(url, TOKENIZER).session()
        session.submit(asked[0], told.put)
        found = told.get(timeout=HANG_SECONDS)
        assert found.ids.tolist() == answers(model, asked)[0, 0].ids.tolist() and found.finish is not None
        stand_in.trouble = [(503, {})]
        session.submit(asked[0], told.put)  # its key is free again
        assert told.get(timeout=HANG_SECONDS).reason == "engine_failed"
        begun, go_on = Event(), Event()

        def slow(body: Json) -> Json:
            begun.set()
            go_on.wait(HANG_SECONDS)
            return {}

        monkeypatch.setattr(stand_in, "vllm", slow)
        session.submit(asked[1], told.put)
        with pytest.raises(ValueError, match="being answered"):
            session.submit(asked[1], told.put)
        assert begun.wait(HANG_SECONDS)
        session.close()
        go_on.set()
    assert told.empty()


def test_what_a_server_is_not_asked_for_is_refused(model: Any) -> None:
    with served_json(StandIn(model, "vllm")) as url:
        engine = HttpEngine(url, TOKENIZER)
        for settings in ({"num_beams": 2}, {"no_repeat_ngram_size": 2}):
            with pytest.raises(UserError, match=next(iter(settings))):
                list(engine.generate(requests(1, **settings)))
    for url, token in (("localhost:1", None), ("http://example.org", "secret")):
        with pytest.raises(UserError):
            HttpEngine(url, TOKENIZER, token=token)


@pytest.mark.shared
def test_a_real_llama_cpp_server_answers_by_ids(tmp_path: Path, shared: Path) -> None:
    folder = shared / "tokenizers" / "qwen3"
    tokenizer = luthier.load_tokenizer(str(folder))
    write_gguf(tmp_path / "model.gguf", folder, add_bos=True)  # ids are taken as they are: no begin token is added

    def asked(key: int = 0, prompt: Sequence[int] = (1000, 2000, 3000), **settings: Any) -> Request:
        how = GenerateConfig(**{"max_new_tokens": 6, **settings})
        return Request(prompt=np.array(prompt, np.int32), settings=how, key=key)

    with llama_cpp_server(tmp_path / "model.gguf", "{{ messages }}") as url:
        engine = HttpEngine(url, tokenizer)

        def answer(request: Request) -> Completion:
            (found,) = engine.generate([request])
            assert isinstance(found, Completion)
            return found

        whole = answer(asked())
        ids = whole.ids.tolist()
        assert whole.finish is Finish.LENGTH and len(ids) == len(whole.logprobs) == 6 and (whole.logprobs < 0).all()
        rest = answer(asked(prompt=[1000, 2000, 3000, *ids[:2]], max_new_tokens=4))
        assert rest.ids.tolist() == ids[2:] and np.allclose(rest.logprobs, whole.logprobs[2:], atol=1e-4)
        stopped = answer(asked(stop_token_ids=[ids[2]]))
        assert stopped.finish is Finish.STOP and stopped.ids.tolist() == ids[: ids.index(ids[2]) + 1]
        text = tokenizer.decode(ids[:3])
        ended = answer(asked(stop_strings=[text]))
        assert ended.finish is Finish.STRING and ended.ids.tolist() == ids[:3] and len(ended.logprobs) == 3
        sampled = [answer(asked(key, do_sample=True, seed=3, repetition_penalty=1.2)) for key in (1, 1, 2)]
        first, again, other = (one.ids.tolist() for one in sampled)
        assert first == again != other
        (refusal,) = engine.generate([asked(prompt=[5] * 3000)])
        assert isinstance(refusal, Refusal) and refusal.reason == "server_refused"
        with pytest.raises(UserError):
            engine.score(np.array([5, 6, 7], np.int32), 1)


# ------------------------------------------------------------------------------------------- servers that are at fault


def choice_of(**changes: Any) -> list[Json]:
    ids = [5, 6, 7]
    choice: Json = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * 3}, "finish_reason": "length"}
    return [{**choice, **changes}]


LIES: dict[str, object] = {
    "another prompt": {"choices": choice_of(prompt_token_ids=[1, 2])},
    "3 tokens and 2 log-probabilities": {"choices": choice_of(logprobs={"token_logprobs": [-0.5] * 2})},
    "log-probability nan": {"choices": choice_of(logprobs={"token_logprobs": [-0.5, float("nan"), -0.5]})},
    "the token 99999": {"choices": choice_of(token_ids=[5, 6, 99999])},
    "the token -1": {"choices": choice_of(token_ids=[-1, 6, 7])},
    "the token 'a'": {"choices": choice_of(token_ids=["a", 6, 7])},
    "given up (abort)": {"choices": choice_of(finish_reason="abort")},
    "something else than token ids": {"choices": choice_of() * 2},
    "not an object": [1],
    "busy doing nothing": (500, {"error": {"message": "busy doing nothing"}}),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_model_can_have_said_is_refused_with_what_was_said(
    lie: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.engines.http.PAUSES", (0.01,))
    told, stand_in = LIES[lie], StandIn(model, "vllm")
    with served_json(stand_in) as url:
        client = JsonClient(url, timeout=HANG_SECONDS, option="url", token_option="token_env")
        pool = SamplerPool([HttpSampler(client, TOKENIZER, vocabulary=2048)], at_once=2, pauses=(0.01,))
        stand_in.trouble = [told if isinstance(told, tuple) else (200, told)] * 2
        with pytest.raises(SamplerLost) as caught:
            list(pool.generate(requests(1)))
        assert lie in caught.value.message and "asked 2 times" in caught.value.message
        stand_in.trouble = [told if isinstance(told, tuple) else (200, told)]
        assert [type(one) for one in pool.generate(requests(1))] == [Completion], "it was asked again"


def test_another_server_answers_where_one_is_gone(model: Any) -> None:
    asked = requests(6)
    with served_json(StandIn(model, "vllm")) as url:
        clients = [
            JsonClient(one, timeout=HANG_SECONDS, option="url", token_option="t") for one in ("http://127.0.0.1:9", url)
        ]
        pool = SamplerPool([HttpSampler(one, TOKENIZER) for one in clients], at_once=2, pauses=(0.01, 0.01, 0.01))
        found = {(one.key, one.sample): one for one in pool.generate(asked) if isinstance(one, Completion)}
    assert ids_of(found) == ids_of(answers(model, asked))


@pytest.mark.parametrize("sends", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"])
def test_a_server_that_stalls_or_trickles_is_cut_off(sends: bytes) -> None:
    """It takes the question, begins an answer, and then sends a byte now and then."""
    over = threading.Event()

    def trickle(listening: socket.socket) -> None:
        taken, _ = listening.accept()
        with taken, suppress(OSError):
            taken.sendall(sends)
            while sends and not over.wait(0.05):
                taken.sendall(b" ")
            over.wait(HANG_SECONDS)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ServerUnreachable):
            JsonClient(url, timeout=0.4, option="url", token_option="token_env").get("/v1/models")
        over.set()
        thread.join(HANG_SECONDS)


def test_nobody_waits_for_a_server_once_its_answers_are_not_wanted() -> None:
    over, begun = Event(), SimpleQueue[int]()

    def ask(number: int) -> None:
        begun.put(number)
        over.wait(HANG_SECONDS)

    with pytest.raises(KeyboardInterrupt), in_threads(ask, range(5), 2):
        assert {begun.get(timeout=HANG_SECONDS) for _ in range(2)} == {0, 1}
        raise KeyboardInterrupt
    asking = [thread for thread in threading.enumerate() if thread.name == "luthier-asking"]
    assert len(asking) == 2 and all(thread.daemon for thread in asking), "the process may end before they do"
    over.set()
    for thread in asking:
        thread.join(HANG_SECONDS)
    assert begun.empty(), "what has not begun never does"


@pytest.mark.parametrize(("head", "error"), [(b"", ServerWrong), (b"Content-Length: 900\r\n", ServerUnreachable)])
def test_half_an_answer_is_none(head: bytes, error: type[UserError]) -> None:
    """Where its length was told, the connection is known to have broken, and the question is asked again."""

    def half(listening: socket.socket) -> None:
        taken, _ = listening.accept()
        with taken:
            taken.recv(10_000)
            taken.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + head + b'\r\n{"choices": [{"tok')

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=half, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(error) as caught:
            JsonClient(url, timeout=HANG_SECONDS, option="url", token_option="token_env").get("/v1/models")
    assert ('{"choices": [{"tok' if error is ServerWrong else "18 bytes") in str(caught.value.message)


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(("owner", "adapter"), [("vllm", True), ("vllm", False), ("sglang", True), ("sglang", False)])
def test_other_servers_are_given_weights_by_their_own_routes(owner: str, adapter: bool, tmp_path: Path) -> None:
    if adapter:
        (tmp_path / "adapter_config.json").write_text("{}")
    seen: list[tuple[str, Json]] = []
    named: list[object] = [None]  # by what the server says it answers

    def server(path: str, body: Json | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": "tiny", "owned_by": owner}]}
        seen.append((path, body))
        if path == "/v1/completions":
            return 200, {"choices": choice_of(), "model": named[0] or body["model"]}
        about = {"output_token_logprobs": [[-0.5, 5]], "finish_reason": {"type": "length"}}
        return 200, {"meta_info": {**about, "weight_version": named[0]}}

    first, second = (WeightsName(version=version, digest=f"{version}" * 32) for version in (1, 2))
    with served_json(server) as url:
        client = JsonClient(url, timeout=HANG_SECONDS, option="url", token_option="token_env")
        pool = SamplerPool([HttpSampler(client, TOKENIZER)], at_once=1, pauses=())
        for weights in (first, second):
            pool.deliver(weights, tmp_path)
        given = [path for path, _ in seen]
        (answer,) = pool.generate(requests(1, max_new_tokens=3))
        assert isinstance(answer, Completion) and answer.weights == second
        named[0] = "luthier-of-yesterday"
        if adapter is (owner == "vllm"):
            with pytest.raises(SamplerLost) as caught:
                list(pool.generate(requests(1, max_new_tokens=3)))
            assert "luthier-of-yesterday" in caught.value.message and "after 2 steps" in caught.value.message
    routes = {
        ("vllm", True): ["/v1/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        ("vllm", False): ["/collective_rpc", "/reset_prefix_cache"] * 2,
        ("sglang", True): ["/load_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"],
        ("sglang", False): ["/update_weights_from_disk"] * 2,
    }
    assert given == routes[owner, adapter]
    asked = next(body for path, body in seen[len(given) :])
    name = f"luthier-{second}"
    assert (asked.get("model") == name or asked.get("lora_path") == name) is adapter
