"""A server with a model: what it answers is what the engine answers."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import luthier
from luthier.config.loading import load_config
from luthier.config.schema import GenerateConfig
from luthier.encoding.encoder import Encoder
from luthier.engines import Completion, Finish, NewTokens, Request
from luthier.engines.local import LocalEngine
from luthier.presets import model_folder, tokenizer_folder
from luthier.serve.asking import TextReader
from luthier.serve.bodies import Teller
from tests.serve.conftest import ASK, TOKEN, Running, Scripted, running


@pytest.fixture(scope="module")
def engine(encoder: Encoder) -> LocalEngine:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder("tiny-qwen3"), hidden_size=32, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return LocalEngine(model, encoder.tokenizer, batch_size=16)


@pytest.fixture(scope="module")
def server(encoder: Encoder, engine: LocalEngine) -> Iterator[Running]:
    with running(encoder, engine.session(), score=engine.scored) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as found:
        yield found


def plain(engine: LocalEngine, ids: list[int]) -> torch.Tensor:
    """Log-probabilities by one forward pass, [T, V]."""
    with torch.no_grad():
        return engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_an_answer_and_its_logprobs_are_those_of_the_model(client: openai.OpenAI, engine: LocalEngine) -> None:
    tokenizer = engine.tokenizer
    prompt = luthier.encode_prompt(ASK, tokenizer).input_ids
    (expected,) = engine.generate([Request(prompt=prompt, settings=GenerateConfig(max_new_tokens=12), key=0)])
    assert isinstance(expected, Completion)
    told = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        temperature=0,  # type: ignore[arg-type]
    ).choices[0]
    assert told.message.content == expected.text(tokenizer)
    assert told.logprobs is not None and told.logprobs.content is not None
    scores_TV = plain(engine, [*prompt.tolist(), *expected.ids.tolist()])[len(prompt) - 1 :]
    for number, token in enumerate(told.logprobs.content):
        top = scores_TV[number].topk(3)
        assert token.logprob == pytest.approx(scores_TV[number, expected.ids[number]].item(), abs=1e-4)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [one.token for one in token.top_logprobs] == [tokenizer.decode([i]) for i in top.indices.tolist()]


def test_the_same_seed_gives_the_same_answers_alone_and_beside_others(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny",
            messages=ASK,
            max_tokens=8,
            n=3,
            temperature=1.5,
            seed=seed,  # type: ignore[arg-type]
        )
        return [choice.message.content for choice in answer.choices]

    alone = [ask(seed) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [1, 2] * 4))
    assert together == alone * 4
    assert len({text for texts in alone for text in texts}) == 6


def test_the_prompt_is_told_with_its_logprobs_as_evaluation_harnesses_ask(
    client: openai.OpenAI, server: Running, engine: LocalEngine
) -> None:
    ids = engine.tokenizer.encode_whole("The sun is far away.").tolist()
    other = engine.tokenizer.encode_whole("Two.").tolist()
    scores_TV = plain(engine, ids)
    body: dict[str, Any] = {"prompt": [ids, other], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    choices = server.http.post("/v1/completions", json=body).json()["choices"]
    told = choices[0]["logprobs"]
    expected = scores_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected.tolist(), abs=1e-4)
    best = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
    assert best == pytest.approx(scores_TV[:-1].max(-1).values.tolist(), abs=1e-4)
    assert [choice["index"] for choice in choices] == [0, 1]
    assert len(choices[1]["logprobs"]["tokens"]) == len(other) + 1
    one = client.completions.create(model="tiny", prompt=ids[:1], max_tokens=0, echo=True, logprobs=1).choices[0]
    assert one.logprobs is not None
    assert (one.logprobs.tokens, one.logprobs.token_logprobs, one.logprobs.top_logprobs) == ([one.text], [None], [None])
    alone = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert alone.choices[0].text == "The sun is far away."
    assert alone.choices[0].logprobs is not None and len(alone.choices[0].logprobs.tokens or ()) == len(ids)


def test_a_token_that_ends_the_answer_has_its_place_among_the_logprobs(server: Running, engine: LocalEngine) -> None:
    """Or harnesses, which leave the last place out, would lose one of the prompt's."""
    ids = engine.tokenizer.encode_whole("The sun is far away.").tolist()
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    body["return_token_ids"] = True
    for stops in ([], server.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]):
        (choice,) = server.http.post("/v1/completions", json={**body, "stop_token_ids": stops}).json()["choices"]
        assert choice["finish_reason"] == ("stop" if stops else "length")
        assert {len(values) for values in choice["logprobs"].values()} == {len(ids) + 1}


def test_completions_of_texts_are_whole_as_in_pieces(client: openai.OpenAI) -> None:
    prompts = ["One two", "Drei vier"]
    whole = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, n=2, temperature=1, seed=4)
    pieces = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=8, n=2, temperature=1, seed=4, stream=True
    )
    texts = dict.fromkeys(range(4), "")
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert len(set(texts.values())) == 4


def test_a_text_to_be_completed_reaches_no_control_token(server: Running, encoder: Encoder) -> None:
    tokenizer = encoder.tokenizer
    text = "".join(sorted(tokenizer.control.tokens))
    control = {tokenizer.control_id(token) for token in tokenizer.control.tokens}
    opening = [tokenizer.control_id(token) for token in tokenizer.control.opening]
    told = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert not control & set(told[len(opening) :])
    assert control & set(tokenizer.encode_whole(text).tolist()), "control: the plain tokenizer makes some"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""], "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2, "temperature": 1}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ],
)
def test_completions_that_cannot_be_given_are_refused(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 1e-5, "top_p": 1e-300, "tempered": True},
    {"temperature": 100, "top_k": 10**9, "min_p": 1},
    {"temperature": 1e-5, "repetition_penalty": 0.01},
    {"temperature": 1e-5, "repetition_penalty": 100, "logprobs": 20},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_at_their_bounds_end_no_answer_beside_them(server: Running, settings: dict[str, Any]) -> None:
    body = {"prompt": "One two", "max_tokens": 40, "temperature": 0}
    alone = server.http.post("/v1/completions", json=body).json()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        beside = pool.submit(server.http.post, "/v1/completions", json=body)
        odd = server.http.post("/v1/completions", json={**body, "max_tokens": 8, **settings})
        assert beside.result().json()["choices"] == alone["choices"]
    assert odd.status_code == 200
    if settings["temperature"] < 1e-5:
        assert alone["choices"][0]["text"].startswith(odd.json()["choices"][0]["text"])


def test_an_engine_that_asks_it_gets_the_ids_and_logprobs_of_the_model(server: Running, engine: LocalEngine) -> None:
    prompt = luthier.encode_prompt(ASK, engine.tokenizer).input_ids
    there = luthier.HttpEngine(server.url, engine.tokenizer, token=TOKEN)
    stops: list[int] = []
    for _ in range(2):  # to its length, and to a token that ends it
        settings = GenerateConfig(max_new_tokens=8, stop_token_ids=stops)
        asked = Request(prompt=prompt, settings=settings, key=0)
        (expected,), (found,) = engine.generate([asked]), there.generate([asked])
        assert isinstance(expected, Completion) and isinstance(found, Completion)
        assert found.ids.tolist() == expected.ids.tolist() and found.finish is expected.finish
        assert np.allclose(found.logprobs, expected.logprobs, atol=1e-4)
        stops = [int(expected.ids[4])]
    assert np.allclose(there.score(prompt, 3), engine.score(prompt, 3), atol=1e-4)


def test_whoever_draws_an_answer_draws_the_same(server: Running, engine: LocalEngine) -> None:
    prompt = luthier.encode_prompt(ASK, engine.tokenizer).input_ids
    there = luthier.HttpEngine(server.url, engine.tokenizer, token=TOKEN)
    how = GenerateConfig(do_sample=True, temperature=0.8, max_new_tokens=6, seed=5)
    asked = [
        Request(prompt=prompt[number:], settings=how, key=number, num_samples=10, draw=2**63 + number, tempered=True)
        for number in range(2)
    ]
    found, expected = (
        {(one.key, one.sample): one for one in drawn.generate(asked) if isinstance(one, Completion)}
        for drawn in (there, engine)
    )
    assert found.keys() == expected.keys() and len(found) == 20
    assert {key: one.ids.tolist() for key, one in found.items()} == {k: one.ids.tolist() for k, one in expected.items()}
    assert len({tuple(one.ids.tolist()) for one in found.values()}) > 15
    for key, one in found.items():
        assert np.allclose(one.logprobs, expected[key].logprobs, atol=1e-4)


class Spelled:
    """A tokenizer whose decoder drops the space that a text begins with, as SentencePiece's does."""

    words = ("▁One", "▁two", "▁a", "b", "\ufffd", "\ufffd")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[number] for number in ids).replace("▁", " ").removeprefix(" ")

    def encode_whole(self, text: str) -> np.ndarray[Any, Any]:
        return np.array([self.words.index(f"▁{text}")])


def new_tokens(ids: Sequence[int], tops: Sequence[Sequence[int]] = (), finish: Finish | None = None) -> NewTokens:
    numbers = np.array(tops or [[]] * len(ids), dtype=np.int32).reshape(len(ids), -1)
    return NewTokens(
        key=0,
        sample=0,
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        top_ids=numbers,
        top_logprobs=-np.arange(numbers.size, dtype=np.float32).reshape(numbers.shape),
        finish=finish,
    )


def test_the_text_that_follows_a_prompt_keeps_the_space_that_it_begins_with() -> None:
    tokenizer: Any = Spelled()
    for pieces in ([[1, 2, 3]], [[1], [2], [3]]):
        reader = TextReader(tokenizer, (), behind=[0])
        told = [reader.feed(new_tokens(ids, finish=Finish.LENGTH if 3 in ids else None)).content for ids in pieces]
        assert "".join(told) == " two ab"


def test_a_character_that_begins_in_the_prompt_is_not_lost(encoder: Encoder) -> None:
    *first, last = encoder.tokenizer.encode_whole("Gr\u00fc").tolist()
    reader = TextReader(encoder.tokenizer, (), behind=first)
    assert reader.feed(new_tokens([last], finish=Finish.LENGTH)).content == "\u00fc"


def test_logprobs_name_tokens_with_their_spaces_and_of_two_with_one_name_the_likelier() -> None:
    told: Any = Teller(None, Spelled())._text_logprobs(None, new_tokens([1, 3], [[1, 4, 5], [4, 5, 3]]))  # type: ignore[arg-type]
    assert told["tokens"] == [" two", "b"]
    assert told["top_logprobs"] == [{" two": 0, "\ufffd": -1}, {"\ufffd": -3, "b": -5}]


def test_a_prompt_is_told_as_it_was_sent_without_the_begin_token_that_it_was_given(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_folder("tiny"), tmp_path / "begins"))
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    begin: dict[str, Any] = {"id": "<|endoftext|>", "type_id": 0}
    number = next(token["id"] for token in said["added_tokens"] if token["content"] == begin["id"])
    single = [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {begin["id"]: {"id": begin["id"], "ids": [number], "tokens": [begin["id"]]}}
    said["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    model = {"name_or_path": "preset:tiny-qwen3", "tokenizer_name_or_path": str(folder)}
    opening = Encoder.from_config(load_config({"model": model, "data": {}, "train": {"enabled": False}}))
    (ids,) = opening.tokenizer.encode_runs(["One two"])
    with running(opening, session := Scripted(lambda request: ids.tolist())) as server:
        for prompt in ("One two", ["One two"], [number, *ids.tolist()]):
            asked = {"prompt": prompt, "echo": True}
            told = server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            assert session.asked[-1].prompt.tolist() == [number, *ids.tolist()]
            assert told == ("" if isinstance(prompt[0], str) else begin["id"]) + "One twoOne two"


def test_a_search_with_beams_tells_the_likeliest_tokens_too(client: openai.OpenAI, engine: LocalEngine) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**asked, extra_body={"num_beams": 2}).choices[0].logprobs
    assert content is not None and content.content
    assert all(len(token.top_logprobs) == 3 for token in content.content)
    prompt = luthier.encode_prompt(ASK, engine.tokenizer).input_ids.tolist()
    expected = plain(engine, prompt)[-1].topk(3).values
    np.testing.assert_allclose([one.logprob for one in content.content[0].top_logprobs], expected, atol=1e-4)
