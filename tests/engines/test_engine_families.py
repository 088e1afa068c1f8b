"""Whatever a model keeps between two tokens, it answers in company as it does alone."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_local_engine import NEW, SAMPLED, TOKENIZER, Followed, answers, ids_of, requests
from transformers import AutoModelForCausalLM

from luthier.engines import Completion, Refusal, Request
from luthier.engines.answering import Answerer
from luthier.engines.joined import JoinedCache, read_prompts, rows_can_join
from luthier.engines.local import LocalEngine
from luthier.engines.next_tokens import USUAL_ROUNDING
from tests.conftest import HANG_SECONDS

SIZES = {
    "vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
# config class, what is its own, and whether rows can join others
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "sliding window": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "keys longer than values": ("DeepseekV3Config", {**LATENT, **EXPERTS, "num_key_value_heads": 4}, True),
    "convolutions beside attention": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, False),
}


LONG = {"rope_theta": 10000.0, "original_max_position_embeddings": 24, "short_factor": [1.0] * 4}
# what a row is told by others: the longest of them, or the padding before it
BY_COMPANY: dict[str, tuple[str, dict[str, Any], bool]] = {
    "two sets of factors": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {**LONG, "rope_type": "longrope", "long_factor": [1.0, 2.0, 4.0, 8.0]},
        },
        True,
    ),
    "stretched by length": (
        "LlamaConfig",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        True,
    ),
    "attention by place": (
        "Llama4TextConfig",
        {"floor_scale": 16, "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 64},
        True,
    ),
    "padding in the state": (
        "MiniMaxConfig",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "block_size": 16},
        False,
    ),
}


def model_of(family: str) -> Any:
    name, own, _ = {**FAMILIES, **BY_COMPANY}[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **own})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(3.0)
    return made


def greedy(model: Any, ids_1T: torch.Tensor, **asked: bool) -> Any:
    """What transformers itself answers to one row."""
    return model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=list(TOKENIZER.stop_token_ids),
        pad_token_id=TOKENIZER.pad_token_id,
        **asked,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_company_are_those_of_generate_alone(family: str) -> None:
    model = model_of(family)
    with torch.no_grad():
        assert rows_can_join(model, model) is FAMILIES[family][2]
    asked = requests(5)
    found = answers(model, asked, 3)
    for request in asked:
        ids_1T = torch.from_numpy(request.prompt.astype(np.int64))[None]
        out = greedy(model, ids_1T)
        one = found[request.key, 0]
        assert one.ids.tolist() == out[0, ids_1T.shape[1] :].tolist()
        whole = np.concatenate([request.prompt, one.ids]).astype(np.int32)
        scored = LocalEngine(model, TOKENIZER).score(whole, len(request.prompt))
        assert np.allclose(one.logprobs, scored, atol=1e-4)
    drawn = requests(4, num_samples=2, max_new_tokens=4, **SAMPLED)
    assert ids_of(answers(model, drawn, 3)) == {
        key: ids for request in drawn for key, ids in ids_of(answers(model, [request], 1)).items()
    }


def certain(model: Any) -> Any:
    """Few of whose draws are close, so that forward passes of a row alone do not hide what others change."""
    with torch.no_grad():
        model.lm_head.weight[100:108] *= 6.0
    return model


@pytest.mark.parametrize("family", BY_COMPANY)
def test_rows_that_others_would_change_are_answered_and_scored_by_themselves(family: str) -> None:
    """After longer ones, too: positions that these have stretched are forgotten."""
    model, fresh = certain(model_of(family)), certain(model_of(family))
    assert LocalEngine(model, TOKENIZER)._answerer.joins is BY_COMPANY[family][2]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 2000, size).astype(np.int32) for size in (28, 40, 3, 12, 20, 8, 30)]
    how = requests(1)[0].settings
    asked = [Request(prompt=ids, settings=how, key=number) for number, ids in enumerate(prompts)]
    engine = LocalEngine(model, TOKENIZER, batch_size=4)
    found = {one.key: one for one in engine.generate(asked) if isinstance(one, Completion)}
    for request in asked:
        ids_1T = torch.from_numpy(request.prompt.astype(np.int64))[None]
        with torch.no_grad():
            fresh(ids_1T[:, :1], use_cache=False)
            out = greedy(fresh, ids_1T, output_logits=True, return_dict_in_generate=True)
        new = out.sequences[0, ids_1T.shape[1] :]
        assert found[request.key].ids.tolist() == new.tolist()
        right = [float(one_1V[0].log_softmax(-1)[token]) for one_1V, token in zip(out.logits, new, strict=True)]
        assert np.allclose(found[request.key].logprobs, right, atol=1e-5)
        with torch.no_grad():
            fresh(ids_1T[:, :1], use_cache=False)
            plain_TV = fresh(ids_1T, use_cache=False).logits[0].log_softmax(-1)
        scored = engine.score(np.append(request.prompt, 7).astype(np.int32), len(request.prompt))
        assert scored[0] == pytest.approx(float(plain_TV[-1, 7]), abs=1e-5)


def test_an_answer_ends_where_the_positions_that_a_model_has_learned_end() -> None:
    sizes = {"vocab_size": 2048, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    how = requests(1, max_new_tokens=20, stop_token_ids=[])[0].settings
    asked = [Request(prompt=np.full(size, 9, np.int32), settings=how, key=size) for size in (3, 25, 31, 32, 50)]
    found = {one.key: one for one in LocalEngine(model, TOKENIZER).generate(asked)}
    assert {key: one.reason for key, one in found.items() if isinstance(one, Refusal)} == dict.fromkeys(
        (32, 50), "prompt_too_long"
    )
    whole = {key: key + len(one.ids) for key, one in found.items() if isinstance(one, Completion)}
    assert whole == {3: 23, 25: 32, 31: 32}


def test_prompts_longer_than_a_model_was_made_for_are_answered_and_told_once(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 12)
    assert len(answers(model, requests(9))) == 9
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def test_answers_are_the_same_where_batches_are_rounded_more_than_usual(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in recurrent models, whose state sums rounding up. How much it is in a model is seen on a trial."""
    own = model.lm_head.forward

    def rounded(hidden: torch.Tensor) -> torch.Tensor:
        scores = own(hidden)
        return scores + 5e-4 * torch.sin(7.0 * torch.arange(scores.shape[-1]) * len(scores)) * (len(scores) > 1)

    monkeypatch.setattr("luthier.engines.local.rows_can_join", lambda *_: False)
    with torch.no_grad():
        plain = LocalEngine(model, TOKENIZER)._answerer.alone
        assert plain is not None and USUAL_ROUNDING <= plain.rounding < 2 * USUAL_ROUNDING
    monkeypatch.setattr(model.lm_head, "forward", rounded)
    asked = requests(300)
    alone = {key: ids for one in asked for key, ids in ids_of(answers(model, [one], 1)).items()}
    assert ids_of(answers(model, asked, 16)) == alone
    with monkeypatch.context() as patch:  # that this can fail
        patch.setattr(Answerer, "_rounding_seen", lambda self: 0.0)
        assert ids_of(answers(model, asked, 16)) != alone


def test_rows_do_not_join_where_the_trial_shows_another_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not heed the positions that it is given."""
    with torch.no_grad():
        assert rows_can_join(model, model)
        forward = model.model.forward

        def heedless(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        monkeypatch.setattr(model.model, "forward", heedless)
        assert not rows_can_join(model, model)


def test_the_cache_is_no_larger_than_its_rows_however_often_they_change(model: Any) -> None:
    """500 rows come and go, so that it is never empty. It has room for twice as many rows, and half as many tokens."""
    cache = JoinedCache()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        read, _ = read_prompts(model, [np.arange(40, dtype=np.int32)])
        for turn in range(500):
            cache.join([(read, 0, int(rng.integers(1, 40)))])
            if turn >= 4:
                cache.leave(int(rng.integers(0, 5)))
            cache.read(model, [7] * len(cache.lengths))
            longest = max(cache.lengths)
            for layer in cache.cache.layers if cache.cache is not None else ():
                assert layer.keys.shape[0] <= 10 and layer.end - layer.start == longest
                assert layer.keys.shape[2] <= 1.5 * max(longest, 300) + 64
        while cache.lengths:
            cache.leave(0)
    assert cache.cache is None


def test_a_session_tells_batches_token_by_token_and_can_end_them_where_rows_cannot_join(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(5, num_samples=2, **SAMPLED)
    expected = ids_of(answers(model, asked, 3))
    monkeypatch.setattr("luthier.engines.local.rows_can_join", lambda *_: False)
    assert ids_of(answers(model, asked, 3)) == expected
    endless, begun = replace(requests(1, max_new_tokens=100_000)[0], key=99), Event()
    session = LocalEngine(model, TOKENIZER, batch_size=3).session()
    session.submit(endless, lambda _: begun.set())
    assert begun.wait(HANG_SECONDS)
    followed = {one.key: Followed(one.num_samples) for one in asked}
    for one in asked:
        session.submit(one, followed[one.key])
    session.cancel(endless.key)
    assert {key: followed[key[0]].ids(key[1]) for key in expected} == expected
    begun.clear()
    session.submit(endless, lambda _: begun.set())
    assert begun.wait(HANG_SECONDS)
    since = time.monotonic()
    session.close()
    assert time.monotonic() - since < 10
