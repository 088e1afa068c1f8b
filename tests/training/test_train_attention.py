"""One set of trees, laid out and isolated in every way there is: the same log-probabilities and the same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_models import MODELS, WINDOW, tiny_model, tree
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from luthier.collation import CollateSettings
from luthier.collation.collator import collate_packs, collate_trees
from luthier.errors import ModelError
from luthier.layout import tree_mask
from luthier.models import attention
from luthier.models.attention import (
    PLAN,
    SEGMENTS,
    AttentionPlan,
    plan_attention,
    register_attention,
    segments_attention,
)
from luthier.models.batch_invariance import turn_by_own_length
from luthier.models.isolation import check_rows
from luthier.models.mixers import Isolation, attention_inputs, layer_windows, tree_mask_mod
from luthier.records import Batch, Branch, Pack

SAMPLES = [tree(9, 5, 7, seed=1), tree(6, 11, 4, seed=2), tree(8, 6, seed=3)]
LEAVES = [segment for sample in SAMPLES for segment in sample.segments()]
SHARED = [collate_trees([SAMPLES[:2], SAMPLES[2:]], pad_token_id=0)]  # the second row ends in padding
PACKED = [
    collate_packs([Pack(segments=tuple(LEAVES[:3])), Pack(segments=tuple(LEAVES[3:]))], packed=True, pad_token_id=0)
]
PADDED = [collate_packs([Pack(segments=(leaf,)) for leaf in LEAVES], packed=False, pad_token_id=0)]
ALONE = [collate_packs([Pack(segments=(leaf,))], packed=False, pad_token_id=0) for leaf in LEAVES]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_attention()


def log_probabilities(model: nn.Module, batches: list[Batch], isolation: Isolation, **changes: Any) -> torch.Tensor:
    """[K], with their graph, from the model's own logits."""
    found = []
    for batch in batches:
        additive = model.config._attn_implementation == "eager"
        inputs = attention_inputs(batch, isolation, windows=layer_windows(model), additive=additive)
        logits_NV = model(**{**inputs, **changes}).logits.flatten(0, 1)
        targets = batch.targets
        found.append(logits_NV.log_softmax(-1)[targets.positions_K, targets.ids_K])
    return torch.cat(found)


def gradients(model: nn.Module, logps_K: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logps_K.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def ways(own: str) -> dict[str, tuple[str, list[Batch], Isolation]]:
    return {
        "shared, our attention": (SEGMENTS, SHARED, Isolation.SEGMENTS),
        "shared, our attention, each stretch by itself": (SEGMENTS, SHARED, Isolation.SEGMENTS),
        "packed, our attention": (SEGMENTS, PACKED, Isolation.SEGMENTS),
        "padded, our attention": (SEGMENTS, PADDED, Isolation.SEGMENTS),
        "padded, our attention without a plan": (SEGMENTS, PADDED, Isolation.PADDED),
        "shared, masks": (own, SHARED, Isolation.MASKS),
        "packed, masks": (own, PACKED, Isolation.MASKS),
        "padded": (own, PADDED, Isolation.PADDED),
        **({} if own == "eager" else {"shared, masks, eager": ("eager", SHARED, Isolation.MASKS)}),
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_gives_the_log_probabilities_and_gradients_of_the_sequences_alone(name: str) -> None:
    model = tiny_model(name)
    own = model.config._attn_implementation
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
    expected = gradients(model, expected_K)
    assert len(expected_K) == sum(batch.num_targets for batch in ALONE) == 33
    for way, (implementation, batches, isolation) in ways(own).items():
        model.set_attn_implementation(implementation)
        with mock.patch.object(attention, "_MOST_TOGETHER", 0 if "by itself" in way else 128):
            found_K = log_probabilities(model, batches, isolation)
        torch.testing.assert_close(found_K, expected_K, atol=1e-4, rtol=0, msg=lambda text, w=way: f"{w}: {text}")
        assert abs(float((found_K.sum() - expected_K.sum()).detach())) < 1e-3, way
        found = gradients(model, found_K)
        assert found.keys() == expected.keys(), way
        for weight, gradient in expected.items():
            torch.testing.assert_close(
                found[weight], gradient, atol=1e-4, rtol=1e-4, msg=lambda text, w=way, n=weight: f"{w}, {n}: {text}"
            )


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_control_a_plan_that_lets_one_branch_see_the_other_is_another_model(name: str) -> None:
    model = tiny_model(name)
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED).detach()
    model.set_attn_implementation(SEGMENTS)
    plan = plan_attention(SHARED[0].branches, width=SHARED[0].model_inputs["input_ids"].shape[1])
    assert plan.contexts[:3] == ((), (0,), (0,))
    leaking = replace(plan, contexts=((), (0,), (0, 1), *plan.contexts[3:]))
    found_K = log_probabilities(model, SHARED, Isolation.SEGMENTS, **{PLAN: leaking}).detach()
    moved_K = (found_K - expected_K).abs()
    assert moved_K[:5].max() < 1e-4  # the first branch has nothing before it to see
    assert moved_K[5:12].max() > 1e-2


def test_plans_are_plain_numbers() -> None:
    rows = [(Branch(parent=-1, length=3), Branch(parent=-1, length=2)), SAMPLES[0].branches]
    assert plan_attention(rows, width=21) == AttentionPlan(
        lengths=(3, 2, 16, 9, 5, 7), contexts=((), (), None, (), (3,), (3,))
    )


@pytest.mark.parametrize("batch", [SHARED[0], PACKED[0]], ids=["shared", "packed"])
@pytest.mark.parametrize("window", [None, 3])
def test_what_flex_attention_is_told_is_the_mask(batch: Batch, window: int | None) -> None:
    width = batch.model_inputs["input_ids"].shape[1]
    of_tokens = tree_mask_mod(batch, window=window, device="cpu")
    every = torch.arange(width)
    for row, branches in enumerate(batch.branches):
        size = sum(branch.length for branch in branches)
        seen = of_tokens(torch.tensor(row), torch.tensor(0), every[:, None], every)
        expected = torch.from_numpy(tree_mask(branches, width=width, window=window))
        assert torch.equal(seen[:size], expected[:size]) and seen.diagonal().all()
    blocks = attention_inputs(batch, Isolation.BLOCKS, windows={"full_attention": window})["attention_mask"]
    assert blocks.shape == (len(batch.branches), 1, width, width)


class _Layer(nn.Module):
    is_causal = True


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
    return segments_attention(_Layer(), query, key, value, None, **settings)[0]


@pytest.mark.parametrize("length", [5, 128, 300])
@pytest.mark.parametrize("window", [3, 150])
def test_a_window_in_blocks_is_the_window_of_a_mask(length: int, window: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 40 + length, 8), torch.randn(1, 2, 40 + length, 8), torch.randn(1, 2, 40 + length, 8)
    plan = AttentionPlan(lengths=(40, length), contexts=((), (0,)))
    distance = torch.arange(40 + length)[:, None] - torch.arange(40 + length)
    seen = (distance >= 0) & (distance < window)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    found = attend(q, k, v, sliding_window=window, scaling=None, **{PLAN: plan})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@given(st.data())
def test_stretches_that_attend_together_see_what_each_sees_alone(data: st.DataObject) -> None:
    row: list[Branch] = []
    for number in range(data.draw(st.integers(1, 9), label="branches")):
        parent = data.draw(st.integers(-1, number - 1), label="parent")
        row.append(Branch(parent=parent, length=data.draw(st.integers(1, 40), label="length")))
    window = data.draw(st.sampled_from([None, 3, 50, 200]), label="window")
    size = sum(branch.length for branch in row)
    width = size + data.draw(st.integers(0, 3), label="padding")
    plan = plan_attention([row, row], width=width)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, width, 8), torch.randn(2, 2, width, 8), torch.randn(2, 2, width, 8)
    seen = torch.from_numpy(tree_mask(row, width=width, window=window))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    calls = {}
    for most in (0, 60, 128):
        with mock.patch.object(attention, "_MOST_TOGETHER", most):
            plan.runs.clear()
            calls[most] = len(attention._runs(plan, window, q.device))
            found = attend(q, k, v, sliding_window=window, scaling=None, **{PLAN: plan})
        torch.testing.assert_close(found[:, :size], expected[:, :size], atol=1e-5, rtol=1e-5)
        assert width == size or found[:, size:].abs().max() == 0
    assert calls[128] <= calls[60] <= calls[0] == len(plan.lengths)


def test_few_tokens_attend_in_one_call() -> None:
    """A question and its three answers of 30 tokens, once more, then a longer one whose answers are in pairs."""
    short, long = [(-1, 20), (0, 30), (0, 30), (0, 30)], [(-1, 200), (0, 60), (0, 60), (0, 60)]
    rows = [[Branch(parent=parent, length=length) for parent, length in tree] for tree in (short, short, long)]
    plan = plan_attention([rows[0] + [Branch(parent=-1, length=10)], rows[1], rows[2]], width=380)
    runs = attention._runs(plan, None, torch.device("cpu"))
    of_two = [(run.own, run.context) for run in runs if len(run.own) > 1]
    assert of_two == [(range(5), ()), (range(6, 10), ()), (range(12, 14), (11,))]
    windowed = attention._runs(plan, 100, torch.device("cpu"))
    assert [run.own for run in windowed if len(run.own) > 1] == [range(3), range(6, 9)]


def test_padding_is_not_computed() -> None:
    q = torch.randn(2, 2, 6, 4)
    plan = AttentionPlan(lengths=(4, 2, 6), contexts=((), None, ()))
    out_BTHD = attend(q, q, q, **{PLAN: plan})
    assert out_BTHD[0, 4:].abs().max() == 0 and out_BTHD[0, :4].abs().min() > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"position_bias": torch.zeros(1)}, "gives its attention position_bias"),
        ({"indices": torch.zeros(1)}, "gives its attention indices"),
        ({PLAN: AttentionPlan(lengths=(3,), contexts=((),))}, "1 x 4 tokens, but its segments have 3"),
        ({"is_causal": False, PLAN: AttentionPlan(lengths=(4,), contexts=((),))}, "attends in both directions"),
    ],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any], says: str) -> None:
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises(ModelError, match=says):
        attend(q, q, q, **settings)


class Deaf(LlamaForCausalLM):
    """A model that does not hand on what it is called with."""

    def forward(self, attention_plan: Any = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


def test_a_model_that_does_not_hand_the_plan_on_is_refused_and_not_left_to_leak() -> None:
    model = Deaf(tiny_model("llama").config)
    model.set_attn_implementation(SEGMENTS)
    with pytest.raises(ModelError, match="LlamaAttention is not told where segments begin"):
        log_probabilities(model, PACKED, Isolation.SEGMENTS)


def test_a_layer_that_does_not_say_its_window_is_refused() -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation(SEGMENTS)
    model.model.layers[0].self_attn.config = tiny_model("llama").config  # it has no window
    model.model.layers[0].self_attn.config._attn_implementation = SEGMENTS
    with pytest.raises(ModelError, match=f"has a local mask of {WINDOW} tokens and tells its attention none"):
        log_probabilities(model, PACKED, Isolation.SEGMENTS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_gradient_checkpointing_and_an_adapter_change_nothing() -> None:
    model = get_peft_model(
        tiny_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.get_base_model().set_attn_implementation(SEGMENTS)
    plain = gradients(model, log_probabilities(model, SHARED, Isolation.SEGMENTS))
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    runs: list[int] = []
    model.get_base_model().model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
    again = gradients(model, log_probabilities(model, SHARED, Isolation.SEGMENTS))
    assert plain.keys() == again.keys() and len(plain) == 8 and len(runs) == 2  # once more in the backward pass
    for name in plain:
        torch.testing.assert_close(again[name], plain[name])


def test_boundaries_as_flash_attention_takes_them_do_as_well() -> None:
    model = tiny_model("gemma3")
    expected_K = log_probabilities(model, ALONE, Isolation.PADDED)
    model.set_attn_implementation(SEGMENTS)
    packs = [Pack(segments=tuple(LEAVES[:3])), Pack(segments=tuple(LEAVES[3:]))]
    batch = collate_packs(packs, packed=True, pad_token_id=0, varlen=True)
    logits_NV = model(**batch.model_inputs).logits.flatten(0, 1)
    found_K = logits_NV.log_softmax(-1)[batch.targets.positions_K, batch.targets.ids_K]
    torch.testing.assert_close(found_K, expected_K, atol=1e-4, rtol=0)


def test_autocast_keeps_segments_apart() -> None:
    model = tiny_model("gemma3")
    model.set_attn_implementation(SEGMENTS)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected_K = log_probabilities(model, SHARED, Isolation.SEGMENTS)
        other = collate_trees([[tree(9, 5, 7, seed=9), SAMPLES[1]], SAMPLES[2:]], pad_token_id=0)
        found_K = log_probabilities(model, [other], Isolation.SEGMENTS)
    assert torch.equal(found_K[12:], expected_K[12:]) and not torch.equal(found_K[:12], expected_K[:12])


def test_a_plan_reaches_the_model_through_ddp() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model("llama")
        model.set_attn_implementation(SEGMENTS)
        inputs = attention_inputs(SHARED[0], Isolation.SEGMENTS, windows={})
        wrapped = DistributedDataParallel(model)
        assert torch.equal(wrapped(**inputs).logits, model(**inputs).logits)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_the_same_model_generates(name: str) -> None:
    model = tiny_model(name).eval()
    own = model.config._attn_implementation
    asked: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 0, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]),
        "max_new_tokens": 8, "do_sample": False,
    }  # fmt: skip
    expected = model.generate(**asked)
    model.set_attn_implementation(SEGMENTS)
    assert model.config._attn_implementation == SEGMENTS != own
    assert torch.equal(model.generate(**asked), expected)


SHORT = 14  # of the leaves three are as long or shorter, two are longer
SIZE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
STRETCHED = {
    "longrope": lambda: Phi3Config(
        **SIZE, max_position_embeddings=64, original_max_position_embeddings=SHORT, rope_parameters=LONG
    ),
    "dynamic": lambda: LlamaConfig(**SIZE, max_position_embeddings=SHORT, rope_parameters=DYNAMIC),
    "dynamic in some layers": lambda: Gemma3TextConfig(
        **SIZE,
        max_position_embeddings=SHORT,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_long_sequence_stretches_its_own_positions_only(kind: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(STRETCHED[kind](), attn_implementation="eager").eval()

    expected = torch.cat([log_probabilities(model(), [batch], Isolation.PADDED) for batch in ALONE])
    once = model()
    assert turn_by_own_length(once) == 1
    lengths = [batch.model_inputs["input_ids"].shape[1] for batch in ALONE]
    assert min(lengths) < SHORT < max(lengths) and SHORT in lengths
    for batches, isolation in ((PACKED, Isolation.MASKS), (PADDED, Isolation.PADDED), (ALONE, Isolation.PADDED)):
        torch.testing.assert_close(log_probabilities(once, batches, isolation), expected)
    how = CollateSettings(packed=False, pad_token_id=0)
    check_rows(once, max(LEAVES, key=len), how, padded=True, device=torch.device("cpu"))
    # a long sequence leaves nothing behind, and transformers' own forward takes the longest for all
    own = log_probabilities(model(), PACKED, Isolation.MASKS)
    assert not torch.allclose(own, expected, atol=1e-6)
