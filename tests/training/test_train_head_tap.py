"""The tapped head: the log-probabilities and gradients of the model's own logits, from targets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import SIZES, tiny_model, tree
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from luthier.collation.collator import collate_packs
from luthier.errors import ModelError
from luthier.models.passes import OutputHead, find_head, prove_head, score_targets
from luthier.objectives import AnyHead, Head
from luthier.objectives.token_scores import token_scores
from luthier.records import Pack

LEAVES = [segment for seed in (1, 2) for segment in tree(9, 5, 7, seed=seed).segments()]
BATCH = collate_packs([Pack(segments=tuple(LEAVES[:3])), Pack(segments=tuple(LEAVES[3:]))], packed=True, pad_token_id=0)
TARGETS = BATCH.targets
PEFT_NOISE = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
WITHOUT_HEAD_DIM: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "head_dim"}

MODELS = {
    "llama": lambda: tiny_model("llama"),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=8.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**WITHOUT_HEAD_DIM, logit_scale=0.25)),
    "gpt_oss": lambda: tiny_model("gpt_oss"),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def log_probabilities(hidden_KD: torch.Tensor, head: AnyHead) -> torch.Tensor:
    return token_scores(hidden_KD, head, TARGETS.ids_K).logps_K


def by_own_logits(model: nn.Module) -> torch.Tensor:
    logits_NV = model(**BATCH.model_inputs).logits.flatten(0, 1)
    return logits_NV.log_softmax(-1)[TARGETS.positions_K, TARGETS.ids_K]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, called: nn.Module, head: OutputHead) -> None:
    expected_K = by_own_logits(model)
    found_K = score_targets(called, BATCH.model_inputs, TARGETS.positions_K, log_probabilities, head=head).scores
    torch.testing.assert_close(found_K, expected_K, atol=1e-4, rtol=1e-4)
    expected, found = gradients(model, expected_K.sum()), gradients(model, found_K.sum())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tapped", [True, False])
def test_scores_and_gradients_are_those_of_the_models_own_logits(name: str, tapped: bool) -> None:
    model = built(name)
    head = find_head(model)
    assert prove_head(model, head, BATCH.model_inputs) is head and model.training
    assert_same(model, model, head if tapped else OutputHead(layer=head.layer, tapped=False, keeps=head.keeps))


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_control_a_scale_that_is_left_out_is_found(name: str) -> None:
    model = built(name)
    head = find_head(model)
    assert (head.scale, head.softcap) == {"gemma2": (1, 2), "granite": (1 / 8, None), "cohere": (0.25, None)}[name]
    proven = prove_head(model, OutputHead(layer=head.layer), BATCH.model_inputs)
    assert not proven.tapped and proven.note is not None and "differ by" in proven.note
    assert_same(model, model, proven)


@pytest.mark.filterwarnings(PEFT_NOISE)
@pytest.mark.parametrize("on_head", ["lora", "copy", "nothing"])
def test_a_head_under_an_adapter_is_scored_with_it(on_head: str) -> None:
    modules = {"target_modules": ["q_proj", "lm_head"] if on_head == "lora" else ["q_proj"]}
    saved = ["lm_head"] if on_head == "copy" else None
    model = get_peft_model(built("llama"), LoraConfig(r=4, init_lora_weights=False, modules_to_save=saved, **modules))
    if on_head == "copy":
        nn.init.normal_(find_head(model).layer.modules_to_save["default"].weight)
    assert_same(model, model, find_head(model))
    with model.disable_adapter(), torch.no_grad():
        found_K = score_targets(
            model, BATCH.model_inputs, TARGETS.positions_K, log_probabilities, head=find_head(model)
        ).scores
        torch.testing.assert_close(found_K, by_own_logits(model), atol=1e-4, rtol=1e-4)


def test_no_tensor_of_positions_times_vocabulary_is_made() -> None:
    model = built("llama")
    shapes = []
    head = find_head(model)
    head.layer.register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))
    score_targets(model, BATCH.model_inputs, TARGETS.positions_K, log_probabilities, head=head)
    assert shapes == [(2, 1, 96)]
    assert not head.layer._forward_pre_hooks  # the tap is gone


def test_the_tap_is_taken_off_when_the_forward_pass_fails() -> None:
    model = built("llama")
    head = find_head(model)

    def fails(hidden_KD: torch.Tensor, head: AnyHead) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        score_targets(model, BATCH.model_inputs, TARGETS.positions_K, fails, head=head)
    assert not head.layer._forward_pre_hooks


class Roundabout(LlamaForCausalLM):
    """A model that makes its logits without calling its output layer."""

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        out = super().forward(input_ids, **inputs, logits_to_keep=1)
        hidden = self.model(input_ids, **inputs).last_hidden_state
        out.logits = nn.functional.linear(hidden, self.lm_head.weight)
        return out


def test_a_model_whose_layer_is_not_called_on_all_positions_makes_its_own_logits() -> None:
    model = Roundabout(built("llama").config)
    proven = prove_head(model, find_head(model), BATCH.model_inputs)
    assert not proven.tapped and "Roundabout" in proven.note
    assert "(2, 1, 32)" in proven.note and "(2, 44)" in proven.note
    assert_same(model, model, proven)


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="LlamaModel has no output layer"):
        find_head(built("llama").model)


@pytest.mark.parametrize("tapped", [True, False])
def test_a_batch_without_targets_reaches_every_parameter(tapped: bool) -> None:
    model = built("llama")
    head = find_head(model)
    head = head if tapped else OutputHead(layer=head.layer, tapped=False)

    def score(hidden_KD: torch.Tensor, head: AnyHead) -> torch.Tensor:
        return token_scores(hidden_KD, head, torch.zeros(0, dtype=torch.int64)).logps_K

    scored = score_targets(model, BATCH.model_inputs, torch.zeros(0, dtype=torch.int64), score, head=head)
    assert len(scored.scores) == 0
    found = gradients(model, scored.scores.sum() + scored.anchor)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert all(gradient.abs().max() == 0 for gradient in found.values())


def test_scores_come_through_ddp_and_checkpointing() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = built("gemma2")
        expected = gradients(model, by_own_logits(model).sum())
        model.activation_checkpointing_enable({"use_reentrant": False})
        wrapped = DistributedDataParallel(model)
        scored = score_targets(
            wrapped, BATCH.model_inputs, TARGETS.positions_K, log_probabilities, head=find_head(model)
        )
        found = gradients(model, scored.scores.sum() + scored.anchor)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_a_plain_head_is_scored_by_its_weights_and_no_function() -> None:
    seen: list[AnyHead] = []
    model = built("llama")
    score_targets(
        model, BATCH.model_inputs, TARGETS.positions_K, lambda _, head: seen.append(head), head=find_head(model)
    )
    assert isinstance(seen[0], Head) and seen[0].weight_VD is model.lm_head.weight
