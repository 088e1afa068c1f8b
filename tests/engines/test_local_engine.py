"""The local engine gives the answers of a plain search, and no answer depends on the batch in which it is made."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import luthier
from luthier.config.schema import GenerateConfig
from luthier.engines.engine import Completion, Finish, Refusal, Request
from luthier.engines.local import LocalEngine
from luthier.engines.next_tokens import BatchRow, token_at
from luthier.presets import model_folder

TOKENIZER = luthier.load_tokenizer("preset:tiny-qwen3")
NEW = 10


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny model with random weights of a size that makes its probabilities differ."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        model_folder("tiny-qwen3"), hidden_size=32, num_hidden_layers=2, vocab_size=2048
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return made


def requests(count: int, *, num_samples: int = 1, **settings: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 2000, size=int(rng.integers(1, 30))).astype(np.int32) for _ in range(count)]
    how = GenerateConfig(**{"max_new_tokens": NEW, **settings})
    return [Request(prompt=ids, settings=how, key=n, num_samples=num_samples) for n, ids in enumerate(prompts)]


def answers(model: Any, asked: Iterable[Request], batch_size: int = 16) -> dict[tuple[int, int], Completion]:
    found = {}
    for one in LocalEngine(model, TOKENIZER, batch_size=batch_size).generate(asked):
        assert isinstance(one, Completion)
        found[one.key, one.sample] = one
    return found


def ids_of(found: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: one.ids.tolist() for key, one in found.items()}


def test_greedy_answers_are_those_of_generate_one_by_one(model: Any) -> None:
    asked = requests(40)
    found = answers(model, asked)
    for request in asked:
        ids = torch.from_numpy(request.prompt.astype(np.int64))[None]
        with torch.no_grad():
            out = model.generate(
                ids,
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=list(TOKENIZER.stop_token_ids),
                pad_token_id=TOKENIZER.pad_token_id,
            )
        assert found[request.key, 0].ids.tolist() == out[0, ids.shape[1] :].tolist()


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 7}


def test_200_sampled_answers_are_the_same_alone_and_in_any_batch(model: Any) -> None:
    asked = requests(200, max_new_tokens=6, **SAMPLED)
    together = ids_of(answers(model, asked, 64))
    shuffled = random.Random(1).sample(asked, len(asked))
    assert ids_of(answers(model, shuffled, 7)) == together
    alone = [answers(model, [request], 1) for request in asked[::8]]
    assert all(together[key] == one.ids.tolist() for found in alone for key, one in found.items())
    assert len({tuple(ids) for ids in together.values()}) > 190


def test_requests_of_one_draw_and_seed_get_the_same_numbers_whatever_their_keys(model: Any) -> None:
    (one,) = requests(1, **SAMPLED)
    asked = [replace(one, key=key, draw=draw) for key, draw in ((0, 5), (1, 5), (2, 6))]
    found = ids_of(answers(model, asked))
    assert found[0, 0] == found[1, 0] != found[2, 0]


def test_rows_of_a_batch_have_settings_of_their_own(model: Any) -> None:
    kinds: Sequence[dict[str, Any]] = (
        {},
        SAMPLED,
        {**SAMPLED, "top_k": 3, "seed": 8},
        {**SAMPLED, "min_p": 0.1, "max_new_tokens": 3},
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 6},
        {"stop_token_ids": [1500, 1501]},
        {"max_length": 33},
        {"num_beams": 3},
        {"num_beams": 2, **SAMPLED},
    )
    asked = [
        replace(request, settings=GenerateConfig(**{"max_new_tokens": NEW, **kinds[request.key % len(kinds)]}))
        for request in requests(30)
    ]
    assert ids_of(answers(model, asked, 30)) == {
        key: one.ids.tolist() for request in asked for key, one in answers(model, [request], 1).items()
    }


def test_samples_differ_from_each_other_and_are_fixed_by_seed_key_and_number(model: Any) -> None:
    four = ids_of(answers(model, requests(3, num_samples=4, **SAMPLED)))
    two = ids_of(answers(model, requests(3, num_samples=2, **SAMPLED)))
    assert set(four) == {(key, sample) for key in range(3) for sample in range(4)}
    assert two.items() <= four.items()
    assert all(len({tuple(four[key, sample]) for sample in range(4)}) > 1 for key in range(3))
    assert ids_of(answers(model, requests(3, num_samples=4, **{**SAMPLED, "seed": 8}))) != four
    renamed = [replace(request, key=request.key + 100) for request in requests(3, **SAMPLED)]
    assert list(ids_of(answers(model, renamed)).values()) != [two[key, 0] for key in range(3)]


def test_draws_have_the_probabilities_of_the_model() -> None:
    """10,000 draws from five tokens, within four standard deviations of each share; one has none."""
    shares = np.array([0.0, 0.5, 0.3, 0.15, 0.05])
    request = Request(prompt=np.array([1], np.int32), settings=GenerateConfig(do_sample=True), key=0)
    row = BatchRow(request=request, sample=0, features={})
    scores = torch.from_numpy(shares).log() + 3.0
    drawn = [int(token_at(scores, row.draw(position))) for position in range(10_000)]
    counts = np.bincount(drawn, minlength=5) / 10_000
    assert int(token_at(scores, 0.0)) == 1 and int(token_at(scores, math.nextafter(1.0, 0.0))) == 4
    assert (abs(counts - shares) <= 4 * np.sqrt(shares * (1 - shares) / 10_000)).all()


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"repetition_penalty": 3.0}, {"num_beams": 3}], ids=str)
def test_log_probabilities_are_those_of_a_plain_forward_pass(model: Any, settings: dict[str, Any]) -> None:
    asked = requests(12, **settings)
    found = answers(model, asked)
    engine = LocalEngine(model, TOKENIZER)
    for request in asked:
        one = found[request.key, 0]
        ids = np.concatenate([request.prompt, one.ids]).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        start = len(request.prompt)
        expected = [float(logits[place - 1, ids[place]]) for place in range(start, len(ids))]
        assert np.allclose(one.logprobs, expected, atol=1e-4)
        assert np.allclose(engine.score(ids, start), expected, atol=1e-4)


def test_an_answer_ends_at_a_stop_token_a_stop_string_or_its_length_and_says_so(model: Any) -> None:
    plain = answers(model, requests(6))
    assert {one.finish for one in plain.values()} == {Finish.LENGTH}
    assert all(len(one.ids) == len(one.logprobs) == NEW for one in plain.values())
    stop = int(plain[2, 0].ids[4])
    first = plain[2, 0].ids.tolist().index(stop)
    stopped = answers(model, requests(6, stop_token_ids=[stop]))[2, 0]
    assert stopped.finish is Finish.STOP and stopped.ids.tolist() == plain[2, 0].ids[: first + 1].tolist()
    assert stopped.text(TOKENIZER) == TOKENIZER.decode(plain[2, 0].ids[:first])
    text = plain[3, 0].text(TOKENIZER)
    word = text[len(text) // 2 :][:3]
    ended = answers(model, requests(6, stop_strings=[word]))[3, 0]
    assert ended.finish is Finish.STRING and ended.text(TOKENIZER, [word]) == text[: text.index(word)]


def test_what_leaves_no_room_is_refused_once_and_the_others_are_answered(model: Any) -> None:
    asked = requests(8, num_samples=3, max_length=15, **SAMPLED)
    found = list(LocalEngine(model, TOKENIZER, batch_size=2).generate(asked))
    long = {request.key for request in asked if len(request.prompt) >= 15}
    assert long and sorted(one.key for one in found if isinstance(one, Refusal)) == sorted(long)
    assert {one.reason for one in found if isinstance(one, Refusal)} == {"prompt_too_long"}
    assert len(found) == len(long) + 3 * (8 - len(long))


def test_the_model_and_other_random_numbers_are_left_as_they_were(model: Any) -> None:
    model.train()
    try:
        own, state = model.generation_config, torch.random.get_rng_state()
        answers(model, requests(2, num_beams=2, do_sample=True))
        answers(model, requests(2, **SAMPLED))
        assert model.training and model.generation_config is own
        assert torch.equal(state, torch.random.get_rng_state())
    finally:
        model.eval()
