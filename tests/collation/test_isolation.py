"""Packed rows through real (tiny, random) transformers models: the same as each segment alone."""

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from luthier.collation.collator import collate_packs
from luthier.objectives.loss_sums import token_loss_sum
from luthier.packing.packer import plan_packs
from luthier.records import Pack, Segment

VOCABULARY = 128
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # far from the small random start at which every model is nearly blind to its context
}
WINDOW = 4  # smaller than the segments, so that it takes part


def gemma3():
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**TINY, head_dim=8, sliding_window=WINDOW, layer_types=layers))


MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=WINDOW)),
    "gemma3_text": gemma3,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    built = MODELS[request.param]().train()
    assert built.config._attn_implementation == "sdpa"
    return built


def make_segments(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Segment(input_ids=rng.integers(3, VOCABULARY, n, dtype=np.int32), target=rng.random(n) < 0.6) for n in lengths
    ]


SEGMENTS = make_segments([11, 7, 19, 3])


def run(model, batch, **more_inputs):
    logits = model(**{**batch.model_inputs, **more_inputs}).logits
    flat = logits.reshape(-1, VOCABULARY)
    weights = None if batch.weights_BT is None else batch.weights_BT.reshape(-1)
    return logits, token_loss_sum(flat, batch.labels_BT.reshape(-1), weights)


def alone(model, segments):
    return [
        run(model, collate_packs([Pack(segments=(segment,))], packed=False, pad_token_id=0))[0][0].detach()
        for segment in segments
    ]


def split(logits_BT, batch, packs):
    return [
        logits_BT[row, start : start + len(segment)]
        for row, pack in enumerate(packs)
        for start, segment in zip(batch.segment_starts[row], pack.segments, strict=True)
    ]


def gradients(model, packs_of_batches, *, packed):
    """Gradients and loss of one step made of these micro-batches, normalised once."""
    model.zero_grad()
    batches = [collate_packs(packs, packed=packed, pad_token_id=0) for packs in packs_of_batches]
    num_targets = sum(batch.num_targets for batch in batches)
    total = 0.0
    for batch in batches:
        loss = run(model, batch)[1].loss_sum / num_targets
        loss.backward()
        total += loss.item()
    return total, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same_gradients(one, other):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("pad_to_multiple_of", [1, 16])
def test_packed_logits_equal_each_segment_alone(model, pad_to_multiple_of):
    packs = [Pack(segments=tuple(SEGMENTS[:3])), Pack(segments=(SEGMENTS[3],))]  # the second row has a long tail
    batch = collate_packs(packs, packed=True, pad_token_id=0, pad_to_multiple_of=pad_to_multiple_of)
    logits, _ = run(model, batch)
    for mine, expected in zip(split(logits, batch, packs), alone(model, SEGMENTS), strict=True):
        assert (mine - expected).abs().max() < 1e-5


def test_padded_logits_equal_each_segment_alone(model):
    packs = [Pack(segments=(segment,)) for segment in SEGMENTS]
    batch = collate_packs(packs, packed=False, pad_token_id=0)
    logits, _ = run(model, batch)
    for mine, expected in zip(split(logits, batch, packs), alone(model, SEGMENTS), strict=True):
        assert (mine - expected).abs().max() < 1e-5


def test_control_an_all_ones_mask_makes_segments_leak(model):
    packs = [Pack(segments=tuple(SEGMENTS))]
    batch = collate_packs(packs, packed=True, pad_token_id=0)
    logits, _ = run(model, batch, attention_mask=torch.ones_like(batch.model_inputs["input_ids"]))
    pairs = zip(split(logits, batch, packs), alone(model, SEGMENTS), strict=True)
    leaks = [(mine - expected).abs().max().item() for mine, expected in pairs]
    assert leaks[0] < 1e-5  # the first segment has nothing before it
    assert min(leaks[1:]) > 1e-2


def test_loss_and_gradients_of_a_step_do_not_depend_on_how_it_is_cut(model):
    segments = make_segments([11, 7, 19, 3, 14, 5], seed=1)
    rows = [Pack(segments=(segment,)) for segment in segments]
    packs = [Pack(segments=tuple(segments[i] for i in pack)) for pack in plan_packs([len(s) for s in segments], 24)]
    expected_loss, expected = gradients(model, [rows], packed=False)
    ways = {
        "padded, accumulated one by one": ([[row] for row in rows], False),
        "padded, unequal micro-batches": ([rows[:4], rows[4:]], False),
        "packed, accumulated": ([[pack] for pack in packs], True),
        "packed, one micro-batch": ([packs], True),
        "one pack": ([[Pack(segments=tuple(segments))]], True),
    }
    for name, (micro_batches, packed) in ways.items():
        loss, found = gradients(model, micro_batches, packed=packed)
        assert loss == pytest.approx(expected_loss, abs=1e-5), name
        assert_same_gradients(found, expected)


def test_control_a_mean_over_micro_batches_is_another_loss():
    torch.manual_seed(0)
    model = MODELS["llama"]()
    rows = [[Pack(segments=(segment,))] for segment in make_segments([11, 7, 19, 3], seed=1)]
    summed, _ = gradients(model, rows, packed=False)
    means = [gradients(model, [row], packed=False)[0] for row in rows]
    assert abs(np.mean(means) - summed) > 1e-3
