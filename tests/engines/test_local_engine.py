"""The local engine gives the answers of a plain search, and no answer depends on the batch in which it is made."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import luthier
from luthier.config.schema import GenerateConfig
from luthier.engines import Completion, Finish, NewTokens, Refusal, Request, answering, local, next_tokens
from luthier.engines.answering import Answerer, _WaitingRequest
from luthier.engines.joined import JoinedCache
from luthier.engines.local import LocalEngine
from luthier.engines.next_tokens import BatchRow, candidates, tokens_at
from luthier.errors import ModelError
from tests.conftest import HANG_SECONDS

TOKENIZER = luthier.load_tokenizer("preset:tiny-qwen3")
NEW = 10


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
    found = candidates(request.settings, (torch.from_numpy(shares).log() + 3.0)[None], rounding=0.0)

    def token_at(draw: float) -> int:
        return int(tokens_at(found, torch.tensor([draw], dtype=torch.float64))[0])

    drawn = [token_at(row.draw(position)) for position in range(10_000)]
    counts = np.bincount(drawn, minlength=5) / 10_000
    assert token_at(0.0) == 1 and token_at(math.nextafter(1.0, 0.0)) == 4
    assert (abs(counts - shares) <= 4 * np.sqrt(shares * (1 - shares) / 10_000)).all()


def test_a_draw_is_made_of_the_seed_the_request_the_sample_and_the_place() -> None:
    """Whichever places were drawn before, and now as ever: runs go on with numbers that others of them began with."""
    request = Request(prompt=np.array([1], np.int32), settings=GenerateConfig(seed=9), key=0, draw=2**63 + 5)
    row = BatchRow(request=request, sample=3, features={})
    for place in (4, 0, 4, 300, 7):
        key, counter = np.array([9, 2**63 + 5], np.uint64), np.array([0, 0, 3, place], np.uint64)
        assert row.draw(place) == np.random.Generator(np.random.Philox(key=key, counter=counter)).random()


RULES = list(product((None, 1, 9), (None, 0.2, 0.9), (None, 0.05), (None, 0.7)))


@pytest.mark.parametrize("ties", [False, True])
def test_what_may_be_drawn_is_what_passes_transformers_rules(monkeypatch: pytest.MonkeyPatch, *, ties: bool) -> None:
    """Whether the vocabulary had to be sorted or not; the same draws take the same tokens."""
    monkeypatch.setattr(next_tokens, "_FEW", (64,))
    torch.manual_seed(0)
    draws_G = torch.linspace(0, 1, 40, dtype=torch.float64)
    sorted_few = 0
    for scale, (top_k, top_p, min_p, temperature) in product((1.0, 6.0), RULES):
        told = GenerateConfig(do_sample=True, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
        scores_1V = (torch.randn(1, 500) * scale).round(decimals=0 if ties else 7) / (temperature or 1.0)
        expected_1V = scores_1V
        for make, value in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p), (MinPLogitsWarper, min_p)):
            expected_1V = expected_1V if value is None else make(value)(None, expected_1V)
        expected_1V = expected_1V.double().softmax(-1)
        found = candidates(told, scores_1V, rounding=0.0)
        sorted_few += found.ids is not None and found.ids.shape[1] == 64
        assert (
            torch.equal(found.least > 0, found.likely > 0) and torch.equal(found.most > 0, found.likely > 0)
        ) or ties
        shares = found.likely[found.likely > 0]
        assert torch.allclose((shares / shares.sum()).sort().values, expected_1V[expected_1V > 0].sort().values), told
        if not ties:
            ids, likely = (None if one is None else one.repeat(40, 1) for one in (found.ids, found.likely))
            taken_G, _ = tokens_at(replace(found, ids=ids, likely=likely), draws_G)
            whole = candidates(GenerateConfig(do_sample=True), expected_1V.log().expand(40, -1), rounding=0.0)
            assert taken_G.tolist() == tokens_at(whole, draws_G)[0].tolist()
    assert sorted_few >= 20


def test_of_too_many_close_draws_those_are_decided_alone_that_less_rounding_could_change() -> None:
    """At a rounding of 0.1 a draw among 50 tokens is nearly always close."""
    asked = [
        Request(prompt=np.arange(5, dtype=np.int32), settings=GenerateConfig(do_sample=True), key=n) for n in range(9)
    ]
    row = next(row for one in asked if 0.3 < (row := BatchRow(request=one, sample=0, features={})).draw(0) < 0.7)

    def scores(first: float) -> torch.Tensor:
        """Of 50 tokens, the first 25 of which have this probability together."""
        return torch.tensor([[first / 25] * 25 + [(1 - first) / 25] * 25], dtype=torch.float64).log()

    scores_1V, away_1V = scores(row.draw(0)), scores(row.draw(0) * 25 / 24.5)  # at the bounds of a token, in its middle
    assert next_tokens._choose([row], scores_1V, rounding=0.1)[1] == [0]
    assert next_tokens._choose([row], away_1V, rounding=0.1)[1] == []
    assert next_tokens._choose([row], scores_1V, rounding=2.0**-15)[1] == [0]


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_scores_that_differ_by_rounding_take_the_same_token_where_a_draw_is_not_close(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """Under every rule of sampling. Rounding is large here, so that other tokens are often taken at close draws."""
    monkeypatch.setattr(next_tokens, "_FEW", (64,))
    torch.manual_seed(0)
    rounding, others, close = 0.02, 0, 0
    scores_GV, draws_G = torch.randn(500, 200) * scale, torch.rand(500, dtype=torch.float64)
    for top_k, top_p, min_p, _ in RULES:
        told = GenerateConfig(do_sample=True, top_k=top_k, top_p=top_p, min_p=min_p)
        taken_G, close_G = tokens_at(candidates(told, scores_GV, rounding), draws_G)
        rounded_GV = scores_GV + rounding * (2 * torch.rand(500, 200) - 1)
        other_G, _ = tokens_at(candidates(told, rounded_GV, rounding), draws_G)
        assert not ((taken_G != other_G) & ~close_G).any(), told
        others, close = others + int((taken_G != other_G).sum()), close + int(close_G.sum())
    assert others > 20 and close < len(RULES) * 500 / 2


@pytest.mark.parametrize(
    ("settings", "joins"),
    [({}, True), ({}, False), ({"do_sample": True, "top_k": 1}, True), ({"repetition_penalty": 1.01}, True)],
    ids=str,
)
def test_two_tokens_that_are_nearly_tied_are_told_apart_alike_in_every_batch(
    model: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], *, joins: bool
) -> None:
    """Half of the head's rows are the other half with a millionth added, so that rounding decides between the two."""
    tied = deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        head = torch.nn.Linear(32, 2048, bias=False)
        head.weight[:1024] = model.get_output_embeddings().weight[:1024]
        head.weight[1024:] = head.weight[:1024] + 1e-6 * torch.randn(1024, 32)
    tied.set_output_embeddings(head)
    if not joins:
        monkeypatch.setattr(local, "rows_can_join", lambda *_: False)
    asked = requests(48, max_new_tokens=8, **settings)

    def in_batches() -> list[dict[tuple[int, int], list[int]]]:
        shuffled = random.Random(2).sample(asked, len(asked))
        alone = {key: ids for one in asked for key, ids in ids_of(answers(tied, [one], 1)).items()}
        return [alone, ids_of(answers(tied, asked, 48)), ids_of(answers(tied, shuffled, 7))]

    first, *others = in_batches()
    assert others == [first, first]
    monkeypatch.setattr(Answerer, "alone", None)
    first, *others = in_batches()
    assert others != [first, first]


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


def test_the_mode_is_changed_once_for_a_batch_of_answers_and_never_where_it_is_right(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting it costs milliseconds in a model of many layers, as much as a step of few rows."""
    changes, of_class = list[bool](), type(model).train

    def train(self: Any, mode: bool = True) -> Any:
        changes.append(mode)
        return of_class(self, mode)

    monkeypatch.setattr(type(model), "train", train)
    asked = requests(40, **SAMPLED)
    evaluated = ids_of(answers(model, asked, 8))
    LocalEngine(model, TOKENIZER).score(asked[0].prompt, 1)
    assert changes == []
    model.train()
    changes.clear()
    try:
        assert ids_of(answers(model, asked, 8)) == evaluated
    finally:
        model.eval()
    assert changes[::2] == [False] * (len(changes) // 2 + 1)
    assert 40 // 8 <= len(changes) // 2 <= 40 // 8 + 2, "as often as there are batches of answers, not answers"


class Followed:
    """What a session has told of a request; ``done`` is set when its last sample has ended or it is refused."""

    def __init__(self, num_samples: int = 1) -> None:
        self.left, self.told, self.begun, self.done = num_samples, list[NewTokens | Refusal](), Event(), Event()

    def __call__(self, told: NewTokens | Refusal) -> None:
        self.told.append(told)
        self.begun.set()
        self.left -= isinstance(told, NewTokens) and told.finish is not None
        if self.left == 0 or isinstance(told, Refusal):
            self.done.set()

    def ids(self, sample: int = 0) -> list[int]:
        assert self.done.wait(HANG_SECONDS)
        new = [told for told in self.told if isinstance(told, NewTokens) and told.sample == sample]
        assert [told.finish is None for told in new] == [True] * (len(new) - 1) + [False]
        return [token for told in new for token in told.ids.tolist()]


def test_a_session_tells_the_answers_of_generate_token_by_token(model: Any) -> None:
    asked = [
        *requests(12, num_samples=3, top_k=20, **SAMPLED),
        *(replace(one, key=100 + one.key) for one in requests(4, repetition_penalty=2.0)),
        *(replace(one, key=200 + one.key) for one in requests(2, num_beams=2)),
    ]
    expected = ids_of(answers(model, asked, 4))
    with closing(LocalEngine(model, TOKENIZER, batch_size=4).session()) as session:
        followed = {one.key: Followed(one.num_samples) for one in asked}
        for one in asked:
            session.submit(one, followed[one.key])
        assert {key: followed[key[0]].ids(key[1]) for key in expected} == expected


@pytest.mark.parametrize("place", ["choosing", "reading", "joining"])
def test_a_request_that_is_cancelled_in_the_middle_of_a_step_harms_no_other(
    model: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, behind any line: while it is chosen, while its prompt is read, while its row joins."""
    other, cancelled = requests(2, max_new_tokens=40)
    expected = ids_of(answers(model, [other]))[other.key, 0]
    following, session = Followed(), LocalEngine(model, TOKENIZER).session()
    reads, left, join, read = 0, _WaitingRequest.left.fget, JoinedCache.join, answering.read_prompts

    def counted_left(asked: Any) -> int:
        nonlocal reads
        reads += asked.request.key == cancelled.key
        found: int = left(asked)
        if reads == 2:
            session.cancel(cancelled.key)
        return found

    def joined(*args: Any) -> None:
        session.cancel(cancelled.key)
        join(*args)

    def read_and_cancelled(*args: Any) -> Any:
        session.cancel(cancelled.key)
        return read(*args)

    with closing(session):
        session.submit(other, following)
        assert following.begun.wait(HANG_SECONDS)
        match place:
            case "choosing":
                monkeypatch.setattr(_WaitingRequest, "left", property(counted_left))
            case "reading":
                monkeypatch.setattr(answering, "read_prompts", read_and_cancelled)
            case _:
                monkeypatch.setattr(JoinedCache, "join", joined)
        session.submit(cancelled, Followed())
        assert following.ids() == expected
        deadline = time.monotonic() + HANG_SECONDS
        while session.keys():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_a_request_joins_those_that_are_being_answered(model: Any) -> None:
    """A short answer that is asked for while a long one is drawn ends before it."""
    long = replace(requests(1, max_new_tokens=400)[0], key=1)
    short = replace(requests(1, max_new_tokens=3)[0], key=2)
    following, begun = Followed(), Event()
    told_before = []

    def follow_long(told: NewTokens | Refusal) -> None:
        begun.set()
        following(told)

    def follow_short(told: NewTokens | Refusal) -> None:
        told_before.append(following.done.is_set())

    with closing(LocalEngine(model, TOKENIZER).session()) as session:
        session.submit(long, follow_long)
        assert begun.wait(HANG_SECONDS)
        session.submit(short, follow_short)
        assert len(following.ids()) == 400
    assert told_before == [False] * 3


def test_the_likeliest_tokens_are_told_with_their_log_probabilities(model: Any) -> None:
    asked = [replace(one, top_logprobs=one.key) for one in requests(4)]
    with closing(LocalEngine(model, TOKENIZER).session()) as session:
        followed = [Followed() for _ in asked]
        for one, follow in zip(asked, followed, strict=True):
            session.submit(one, follow)
        found = [follow.ids() for follow in followed]
    for request, ids, follow in zip(asked, found, followed, strict=True):
        whole = torch.tensor([[*request.prompt.tolist(), *ids]])
        with torch.no_grad():
            expected = model(whole).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1).topk(request.top_logprobs)
        told = [one for one in follow.told if isinstance(one, NewTokens)]
        assert np.concatenate([one.top_ids for one in told]).tolist() == expected.indices.tolist()
        assert np.allclose(np.concatenate([one.top_logprobs for one in told]), expected.values, atol=1e-4)


def test_a_cancelled_request_is_told_nothing_more_and_leaves_nothing_behind(model: Any) -> None:
    threads = threading.active_count()
    session = LocalEngine(model, TOKENIZER).session()
    told, begun = Counter[int](), [Event() for _ in range(200)]

    def follow(one: NewTokens | Refusal) -> None:
        told[one.key] += 1
        begun[one.key].set()

    for request in requests(200, num_samples=2, max_new_tokens=10_000):
        session.submit(request, follow)
        assert begun[request.key].wait(HANG_SECONDS)
        session.cancel(request.key)
        before = told[request.key]
        if request.key % 20 == 0:
            time.sleep(0.02)
        assert told[request.key] == before
    last = Followed()
    session.submit(requests(1)[0], last)
    assert last.ids() == answers(model, requests(1))[0, 0].ids.tolist()
    assert session.keys() == () and not len(session._answering.joined.lengths)
    session.close()
    assert threading.active_count() == threads
    with pytest.raises(ValueError, match="closed"):
        session.submit(requests(1)[0], last)


def test_a_session_that_is_closed_ends_within_a_step(model: Any) -> None:
    session = LocalEngine(model, TOKENIZER, batch_size=2).session()
    followed = Followed()
    for request in requests(5, max_new_tokens=100_000):
        session.submit(request, followed)
    begun = time.monotonic()
    session.close()
    assert time.monotonic() - begun < 5 and not followed.done.is_set()


def test_a_step_that_fails_and_a_listener_that_fails_end_their_own_requests_only(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LocalEngine(model, TOKENIZER)
    good, bad = Followed(), Followed()
    forward = model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 29:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    def angry(told: NewTokens | Refusal) -> None:
        raise KeyError("gone")

    prompt = np.arange(10, 39, dtype=np.int32)
    expected = answers(model, requests(1))[0, 0].ids.tolist()
    with closing(engine.session()) as session:
        session.submit(replace(requests(1)[0], key=7), angry)
        while session.keys():  # it has not failed yet
            time.sleep(0.001)
        monkeypatch.setattr(model, "forward", failing)
        session.submit(replace(requests(1)[0], key=8, prompt=prompt), bad)
        assert bad.done.wait(HANG_SECONDS)
        session.submit(requests(1)[0], good)
        assert good.ids() == expected
    refusal = bad.told[-1]
    assert isinstance(refusal, Refusal) and refusal.reason == "engine_failed" and "out of memory" in refusal.detail


def test_what_cannot_be_answered_is_refused_in_a_session_and_a_key_in_use_is_no_key(model: Any) -> None:
    with closing(LocalEngine(model, TOKENIZER).session()) as session:
        followed = Followed()
        session.submit(replace(requests(1, max_length=3)[0], prompt=np.arange(5, dtype=np.int32)), followed)
        assert followed.done.wait(HANG_SECONDS)
        assert [one.reason for one in followed.told if isinstance(one, Refusal)] == ["prompt_too_long"]
        session.submit(requests(1, max_new_tokens=10_000)[0], Followed())
        with pytest.raises(ValueError, match="request 0"):
            session.submit(requests(1)[0], Followed())


def test_others_use_the_model_between_the_steps_of_a_session(model: Any) -> None:
    engine = LocalEngine(model, TOKENIZER)
    request = requests(1)[0]
    alone = engine.score(request.prompt, 1)
    followed, begun = Followed(), Event()

    def follow(told: NewTokens | Refusal) -> None:
        begun.set()
        followed(told)

    with closing(engine.session()) as session:
        session.submit(replace(request, settings=GenerateConfig(max_new_tokens=500)), follow)
        assert begun.wait(HANG_SECONDS)
        assert np.array_equal(engine.score(request.prompt, 1), alone)
        other = replace(requests(2)[1], key=9)
        assert [one.key for one in engine.generate([other])] == [9]
        assert not followed.done.is_set()
        assert len(followed.ids()) == 500


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"repetition_penalty": 1.2}])
def test_scores_that_are_no_numbers_are_told(model: Any, settings: dict[str, Any]) -> None:
    broken = deepcopy(model)
    with torch.no_grad():
        broken.get_output_embeddings().weight[7].fill_(torch.nan)
    with pytest.raises(ModelError) as caught:
        answers(broken, requests(3, **settings), 2)
    assert "no numbers" in caught.value.message and "model.dtype" in str(caught.value.hint)
