"""Tiny random models that are far from blind to their context, and trees of tokens for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from luthier.records import Branch, Sample

VOCABULARY = 96
WINDOW = 4  # shorter than every sequence, so that it takes part
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
    "initializer_range": 0.2,  # at the usual 0.02 a model hardly looks at other tokens, and every leak is small
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=BOTH)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    # soft-capped scores and attention sinks, for which no fused kernel exists
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=WINDOW, attn_logit_softcapping=1.0)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def tiny_model(name: str) -> nn.Module:
    """In training mode, with the same weights every time."""
    torch.manual_seed(0)
    return MODELS[name]().train()


def tree(*lengths: int, seed: int = 0) -> Sample:
    """A prompt and continuations of it, all of whose tokens are targets."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, sum(lengths), dtype=np.int32)
    return Sample(
        input_ids=ids,
        target=np.arange(len(ids)) >= lengths[0],
        branches=tuple(Branch(parent=0 if node else -1, length=length) for node, length in enumerate(lengths)),
    )
