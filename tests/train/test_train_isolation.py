"""Packed runs are refused for models that mix the segments of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import make_segments
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from luthier.collation import CollateSettings
from luthier.errors import ModelError
from luthier.train.isolation import check_isolation

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
HOW = CollateSettings(packed=True, pad_token_id=0)
CPU = torch.device("cpu")


class Forgetful(LlamaForCausalLM):
    """A model that does not look at positions."""

    def forward(self, position_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


def _check(model: torch.nn.Module) -> None:
    check_isolation(model, make_segments(3), HOW, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_isolate_pass_in_every_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for model in (
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    ):
        model.to(dtype).train()
        _check(model)
        assert model.training


def test_a_model_that_ignores_positions_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"Forgetful does not keep packed sequences apart(.|\n)*train.packing: none"):
        _check(Forgetful(LlamaConfig(**SIZES)))


def test_a_real_architecture_that_mixes_segments_is_refused() -> None:
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(ModelError, match="GptOssForCausalLM does not keep packed sequences apart"):
        _check(model)
