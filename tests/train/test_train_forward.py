"""Logits at target positions only are the logits of the whole forward, for every kind of head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import make_segments
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from luthier.collation import collate_packs
from luthier.config.schema import AdapterConfig, AdapterType
from luthier.objectives import TokenLoss, token_loss_sum
from luthier.records import Batch, Pack, Segment
from luthier.train.adapters import apply_adapter
from luthier.train.forward import batch_loss, keeps_logits

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CPU = torch.device("cpu")


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _qwen3_tied() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def _gemma2_softcapped() -> PreTrainedModel:
    # a small cap, so that leaving it out would show
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.05, attn_implementation="eager"))


def _llama_lora() -> Any:
    return apply_adapter(_llama(), AdapterConfig(type=AdapterType.LORA))


def _batch(*, packed: bool) -> Batch:
    segments = make_segments(6, seed=4)
    packs = [Pack(segments=tuple(segments[:3])), Pack(segments=tuple(segments[3:]))]
    if not packed:
        packs = [Pack(segments=(segment,)) for segment in segments]
    return collate_packs(packs, packed=packed, pad_token_id=0)


def _grads(model: torch.nn.Module, loss: TokenLoss) -> list[torch.Tensor]:
    model.zero_grad()
    loss.loss_sum.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("build", [_llama, _qwen3_tied, _gemma2_softcapped, _llama_lora])
def test_kept_positions_give_the_loss_and_gradients_of_full_logits(build: Any, packed: bool) -> None:
    torch.manual_seed(0)
    model = build().train()
    batch = _batch(packed=packed)
    assert keeps_logits(model)
    full = batch_loss(model, batch, token_loss_sum, device=CPU, keep=False)
    expected = _grads(model, full)
    kept = batch_loss(model, batch, token_loss_sum, device=CPU, keep=True)
    torch.testing.assert_close(kept.loss_sum, full.loss_sum, rtol=1e-5, atol=1e-5)
    assert (kept.num_targets, int(kept.num_correct)) == (full.num_targets, int(full.num_correct))
    for one, other in zip(_grads(model, kept), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_soft_capping_is_part_of_the_loss() -> None:
    """Negative control of the test above: without the cap the loss is another one."""
    torch.manual_seed(0)
    model = _gemma2_softcapped()
    batch = _batch(packed=False)
    capped = batch_loss(model, batch, token_loss_sum, device=CPU, keep=True).loss_sum.item()
    model.config.final_logit_softcapping = None
    plain = batch_loss(model, batch, token_loss_sum, device=CPU, keep=True).loss_sum.item()
    assert abs(capped - plain) > 1e-3


@pytest.mark.parametrize("keep", [False, True])
def test_a_blank_adds_nothing_and_reaches_every_parameter(keep: bool) -> None:
    model = _llama().train()
    segment = make_segments(1)[0]
    blank = Segment(input_ids=segment.input_ids[:2], target=segment.target[:2] & False)
    batch = collate_packs([Pack(segments=(blank,))], packed=False, pad_token_id=0)
    loss = batch_loss(model, batch, token_loss_sum, device=CPU, keep=keep)
    assert loss.loss_sum.item() == 0 and loss.num_targets == 0
    grads = _grads(model, loss)
    assert len(grads) == len(list(model.parameters()))
    assert not any(grad.any() for grad in grads)
