"""Tiny models of the families in `tiny_later_processors`, and of later ones in `tiny_processors`: random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers.models.dots3_note.configuration_dots3_note import Dots3NoteAudioConfig, Dots3NoteVisionConfig

# at the usual 0.02 a model hardly looks at other tokens, and every mistake is small
SENSITIVE = {"initializer_range": 0.1}
Token = Callable[[str], int]


def text(size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **SENSITIVE, **more,
    }  # fmt: skip


def tower(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, **SENSITIVE,
        **more,
    }  # fmt: skip


def got_ocr2(token: Token, size: int) -> Any:
    seen = tower(image_size=28, patch_size=4, output_channels=16, mlp_dim=24, window_size=4, global_attn_indexes=[1])
    config = hf.GotOcr2Config(
        text_config={**text(size), "model_type": "qwen2"}, vision_config=seen, image_token_index=token("<imgpad>")
    )
    return hf.GotOcr2ForConditionalGeneration(config)


def granite_docling(token: Token, size: int) -> Any:
    config = hf.GraniteDoclingConfig(
        text_config=text(size),
        vision_config=tower(image_size=28, patch_size=7, out_hidden_size=32, scale_factor=2),
        image_token_id=token("<image>"),
        pad_token_id=0,
    )
    return hf.GraniteDoclingForConditionalGeneration(config)


def minicpm_ocr(token: Token, size: int) -> Any:
    config = hf.MiniCPMOcrConfig(
        text_config={**text(size), "model_type": "qwen2"},
        vision_config=tower(image_size=56, patch_size=7, insert_layer_id=0),
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        insert_layer_id=0,
    )
    return hf.MiniCPMOcrForConditionalGeneration(config)


def _muse_parts(token: Token, size: int) -> dict[str, Any]:
    return {
        "text_config": text(size, qk_scale_factor=1.0, sliding_window=64, layer_rope_theta=[10000.0, 0.0]),
        "vision_config": tower(patch_size=4, pos_emb_height=8, pos_emb_width=8, max_position_embeddings=64),
        "image_token_id": token("<|patch|>"), "video_token_id": token("<|video|>"),
        "out_hidden_size": 128, "projector_hidden_size": 24,
    }  # fmt: skip


def muse_glimmer(token: Token, size: int) -> Any:
    return hf.MuseGlimmerForConditionalGeneration(hf.MuseGlimmerConfig(**_muse_parts(token, size)))


def muse_spark(token: Token, size: int) -> Any:
    parts = _muse_parts(token, size)
    parts["text_config"] |= {
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_hidden_size": 16,
    }  # fmt: skip
    heard = {"patch_sizes": [16, 10, 2, 2], "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
    config = hf.MuseSparkConfig(
        **parts, audio_config={**heard, "out_hidden_size": 32}, audio_token_id=token("<|audio|>")
    )
    return hf.MuseSparkForConditionalGeneration(config)


def dots3_note(token: Token, size: int) -> Any:
    thinks = text(
        size, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_experts_intermediate_size=16, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, index_topk=4096, index_head_dim=8, index_n_heads=2,
    )  # fmt: skip
    seen = tower(adapter_in_dim=32, adapter_out_dim=32, mlp_layer_types=["dense", "dense"])
    heard = tower(feature_size=8, downsample_hidden_size=8, adapter_input_size=32, adapter_out_dim=32, head_dim=16)
    config = hf.Dots3NoteConfig(
        text_config=thinks,
        vision_config=Dots3NoteVisionConfig(**seen),
        audio_config=Dots3NoteAudioConfig(**heard),
        image_token_id=token("<|imgpad|>"), video_token_id=token("<|video_pad|>"),
        audio_token_id=token("<|audio_comp_pad|>"),
    )  # fmt: skip
    return hf.Dots3NoteForConditionalGeneration(config)


def hyperclovax_vision_v2(token: Token, size: int) -> Any:
    seen = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 56,
        "fullatt_block_indexes": [1], **SENSITIVE,
    }  # fmt: skip
    config = hf.HyperCLOVAXVisionV2Config(
        text_config={**text(size), "model_type": "hyperclovax"}, vision_config=seen,
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
    )  # fmt: skip
    return hf.HyperCLOVAXVisionV2ForConditionalGeneration(config)


def inkling2(token: Token, size: int) -> Any:
    thinks = text(
        size, unpadded_vocab_size=size, swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=16,
        d_rel=4, rel_extent=64, n_routed_experts=4, num_experts_per_tok=2, n_layers_per_attn_res_block=1,
        moe_intermediate_size=16,
    )  # fmt: skip
    seen = tower(posemb_grid_size=8, projection_hidden_dim=24, text_hidden_size=32)
    config = hf.Inkling2Config(text_config=thinks, vision_config=seen, image_token_id=token("<|content_image|>"))
    return hf.Inkling2ForConditionalGeneration(config)


def fuyu(token: Token, size: int) -> Any:
    thinks = {**text(size), "model_type": "persimmon", "num_key_value_heads": 2}
    config = hf.FuyuConfig(text_config=thinks, patch_size=15, image_token_id=token("|SPEAKER|"), pad_token_id=0)
    return hf.FuyuForCausalLM(config)


def emu3(token: Token, size: int) -> Any:
    drawn = 16  # codes of pictures, each a token of its own
    vocabulary = {f"<|visual token {code:06d}|>": size + code for code in range(drawn)}
    config = hf.Emu3Config(
        text_config=text(size + drawn, attention_dropout=0.0, pad_token_id=0, bos_token_id=0, eos_token_id=0),
        vq_config={"codebook_size": drawn, "base_channels": 32, "hidden_size": 128, "num_res_blocks": 1},
        vocabulary_map={**vocabulary, "<image>": token("<image>"), "<|extra_200|>": 5},
    )
    return hf.Emu3ForConditionalGeneration(config)


MAKERS: dict[str, Callable[[Token, int], Any]] = {
    make.__name__: make
    for make in (
        got_ocr2, granite_docling, minicpm_ocr, muse_glimmer, muse_spark, dots3_note,
        hyperclovax_vision_v2, inkling2, fuyu, emu3,
    )
}  # fmt: skip
