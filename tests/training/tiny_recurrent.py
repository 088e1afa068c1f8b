"""Tiny random models with recurrent layers, one for each class of `luthier.models.mixers.MIXERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tiny_models import SIZES
from torch import nn

KINDS = ["linear_attention", "full_attention"]
CONV = ["conv", "full_attention"]
# without ``head_dim``, which not every config has, and with half as many heads, as latent attention wants them
PLAIN = {name: size for name, size in SIZES.items() if name != "head_dim"}
HEADS = {name: size for name, size in PLAIN.items() if name != "num_key_value_heads"} | {"num_key_value_heads": 4}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": KINDS,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "layer_types": KINDS, **LOCAL_EXPERTS,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip

RECURRENT_MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS)),
    "qwen3_5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**SIZES, **DELTA)),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS)),
    "olmo_hybrid": lambda: hf.OlmoHybridForCausalLM(
        hf.OlmoHybridConfig(**PLAIN, **{**DELTA, "linear_num_key_heads": 4})
    ),
    "kimi_linear": lambda: hf.KimiLinearForCausalLM(
        hf.KimiLinearConfig(**HEADS, **LATENT, linear_head_dim=8, linear_num_heads=4)
    ),
    "bailing_hybrid": lambda: hf.BailingHybridForCausalLM(hf.BailingHybridConfig(**HEADS, **LATENT, head_dim=8)),
    "minimax": lambda: hf.MiniMaxForCausalLM(
        hf.MiniMaxConfig(**SIZES, **LOCAL_EXPERTS, layer_types=KINDS, block_size=16)
    ),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**PLAIN, layer_types=CONV)),
    "lfm2_moe": lambda: hf.Lfm2MoeForCausalLM(
        hf.Lfm2MoeConfig(
            **PLAIN, layer_types=CONV, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            num_dense_layers=1,
        )
    ),
    "lfm3": lambda: hf.Lfm3ForCausalLM(hf.Lfm3Config(**PLAIN, layer_types=CONV)),
    "bamba": lambda: hf.BambaForCausalLM(hf.BambaConfig(**PLAIN, **MAMBA, attn_layer_indices=[1])),
    "falcon_h1": lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=64)),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridForCausalLM(
        hf.GraniteMoeHybridConfig(
            **PLAIN, **MAMBA, **LOCAL_EXPERTS, layer_types=["mamba", "attention"], shared_intermediate_size=16
        )
    ),
    "nemotron_h": lambda: hf.NemotronHForCausalLM(
        hf.NemotronHConfig(
            **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"}, mamba_num_heads=8,
            layers_block_type=["mamba", "attention", "moe"], mamba_head_dim=8, n_groups=1, ssm_state_size=8,
            chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
            moe_shared_expert_intermediate_size=16, topk_group=1,
        )
    ),
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **PLAIN, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0,
            num_experts=4, mamba_d_state=8,
        )
    ),
    "zamba": lambda: hf.ZambaForCausalLM(
        hf.ZambaConfig(**PLAIN, layers_block_type=["linear_attention", "hybrid"], mamba_d_state=8, n_mamba_heads=2)
    ),
    "zamba2": lambda: hf.Zamba2ForCausalLM(
        hf.Zamba2Config(
            **PLAIN, layers_block_type=["linear_attention", "hybrid"], mamba_d_state=8, mamba_ngroups=1,
            n_mamba_heads=8, chunk_size=16, num_mem_blocks=1,
        )
    ),
}  # fmt: skip


def recurrent_model(name: str) -> Any:
    """In training mode, with the same weights every time."""
    torch.manual_seed(0)
    return RECURRENT_MODELS[name]().train()
