"""The engine that asks servers, against a real llama.cpp server and against stand-ins for vLLM and SGLang.

The stand-ins answer in the form of those servers with what a `LocalEngine` says, and refuse what they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_local_engine import NEW, SAMPLED, TOKENIZER, answers, ids_of, requests

import luthier
from luthier.config.schema import GenerateConfig
from luthier.engines.engine import Completion, Finish, Refusal, Request
from luthier.engines.http import HttpEngine
from luthier.engines.local import LocalEngine
from luthier.errors import SamplerLost, UserError
from tests.check.llama_cpp import llama_cpp_server, write_gguf
from tests.conftest import served_json

Json = dict[str, Any]


class StandIn:
    """A server of a model. ``seen`` are the bodies of what it was asked."""

    def __init__(self, model: Any, owner: str) -> None:
        self.engine, self.owner, self.seen = LocalEngine(model, TOKENIZER), owner, list[Json]()
        self.trouble: list[tuple[int, object]] = []  # what the next questions are answered with

    def __call__(self, path: str, body: Json | None) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "owned_by": self.owner}]}
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
        assert set(body) <= known and body["model"] == "tiny"
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
    monkeypatch.setattr("luthier.engines.pool.PAUSES", (0.01, 0.01))
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
