"""Configs of tiny models whose pictures are grids of patches; the sizes are those of the tiny processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.families_matrix.tiny_settings import MROPE, WOVEN, Vocabulary, patches, sees

QWEN = {
    "image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}  # fmt: skip
COMPASS = {
    "image": "<|IMAGE_PAD|>", "video": "<|VIDEO_PAD|>", "vision_start": "<|VISION_START|>",
    "vision_end": "<|VISION_END|>",
}  # fmt: skip
GLM = {
    "image": "<|image|>", "video": "<|video|>", "image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>",
    "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>",
}  # fmt: skip
WINDOWS: dict[str, Any] = {"window_size": 56, "fullatt_block_indexes": [1]}
DEEPSTACK: dict[str, Any] = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def qwen2_vl(words: Vocabulary) -> Any:
    tower = {**patches(), "embed_dim": 32, "mlp_ratio": 2}
    return hf.Qwen2VLConfig(text_config=words.text(rope_parameters=MROPE), vision_config=tower, **words.ids(**QWEN))


def qwen2_5_vl(words: Vocabulary) -> Any:
    return hf.Qwen2_5_VLConfig(
        text_config=words.text(rope_parameters=MROPE),
        vision_config=patches(**WINDOWS, tokens_per_second=4),
        **words.ids(**QWEN),
    )


def qwen3_vl(words: Vocabulary) -> Any:
    return hf.Qwen3VLConfig(
        text_config=words.text(rope_parameters=WOVEN), vision_config=patches(16, **DEEPSTACK), **words.ids(**QWEN)
    )


def qwen3_vl_moe(words: Vocabulary) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return hf.Qwen3VLMoeConfig(
        text_config=words.text(rope_parameters=WOVEN, **experts),
        vision_config=patches(16, **DEEPSTACK),
        **words.ids(**QWEN),
    )


def qwen3_5(words: Vocabulary) -> Any:
    rope = {**WOVEN, "partial_rotary_factor": 1.0}
    return hf.Qwen3_5Config(
        text_config=words.text(**RECURRENT, rope_parameters=rope),
        vision_config=patches(16, num_position_embeddings=64),
        **words.ids(**QWEN),
    )


def glm4v(words: Vocabulary) -> Any:
    return hf.Glm4vConfig(
        text_config=words.text(rope_parameters=MROPE), vision_config=patches(image_size=56), **words.ids(**GLM)
    )


def glm46v(words: Vocabulary) -> Any:
    return hf.Glm46VConfig(
        text_config=words.text(rope_parameters=MROPE), vision_config=patches(image_size=56), **words.ids(**GLM)
    )


def glm5_next(words: Vocabulary) -> Any:
    text = words.text(
        layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"],
        indexer_types=["full", "full"], n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, v_head_dim=16, qk_nope_head_dim=16, head_dim=0,
        index_topk=4096, index_head_dim=16, index_n_heads=2, index_kpool=4, linear_head_dim=16, linear_num_heads=2,
        hc_mult=2, pad_token_id=0,
    )  # fmt: skip
    tower = patches(image_size=56, projection_intermediate_size=48)
    return hf.Glm5NextConfig(text_config=text, vision_config=tower, **words.ids(**GLM))


def ernie4_5_vl_moe(words: Vocabulary) -> Any:
    names = {f"{kind}{mark}": f"<|{kind.upper()}_{name}|>" for kind in ("image", "video")
             for mark, name in (("", "PLACEHOLDER"), ("_start", "START"), ("_end", "END"))}  # fmt: skip
    return hf.Ernie4_5_VLMoeConfig(
        text_config=words.text(
            moe_intermediate_size=[24, 16], moe_k=2, moe_num_experts=4, moe_num_shared_experts=1,
            mlp_layer_types=["dense", "sparse"], rope_parameters={**MROPE, "mrope_section": [3, 3, 2]},
        ),
        vision_config=patches(),
        **words.ids(**names),
    )  # fmt: skip


def paddleocr_vl(words: Vocabulary) -> Any:
    return hf.PaddleOCRVLConfig(
        text_config=words.text(rope_parameters=MROPE),
        vision_config=sees(56, 14, spatial_merge_size=2),
        **words.ids(image="<|IMAGE_PLACEHOLDER|>"),
    )


def hunyuan_vl(words: Vocabulary) -> Any:
    tower = sees(64, 16, num_key_value_heads=2, out_hidden_size=32, text_hidden_size=32, max_image_size=512)
    return hf.HunYuanVLConfig(
        text_config=words.text(rope_parameters={**MROPE, "mrope_section": [2, 2, 2, 2]}),
        vision_config=tower,
        im_start_id=words.number("<|img_s|>"),
        im_end_id=words.number("<|img_e|>"),
        **words.ids(image="<|img|>"),
    )


def video_llama_3(words: Vocabulary) -> Any:
    return hf.VideoLlama3Config(
        text_config=hf.Qwen2Config(**words.text()),
        vision_config=sees(56, 14),
        **words.ids(image="<|image_pad|>", video="<|video_pad|>"),
    )


def kimi_k25(words: Vocabulary) -> Any:
    text = words.text(
        num_key_value_heads=2, moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    del text["head_dim"]
    return hf.Kimi_K25Config(
        text_config=hf.DeepseekV3Config(**text),
        vision_config=sees(56, 14, pos_emb_height=8, pos_emb_width=8),
        projection_hidden_size=16,
        **words.ids(image="<|media_pad|>", video="<|kimi_k25_video_placeholder|>"),
    )


def exaone4_5(words: Vocabulary) -> Any:
    text = words.text(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    return hf.Exaone4_5_Config(
        text_config=hf.Exaone4Config(**text),
        vision_config=patches(**WINDOWS, num_key_value_heads=1),
        **words.ids(image="<|image_pad|>", video="<|video_pad|>"),
    )


def minimax_m3_vl(words: Vocabulary) -> Any:
    return hf.MiniMaxM3VLConfig(
        text_config=words.text(
            dense_intermediate_size=48, shared_intermediate_size=24, num_experts_per_tok=2, num_local_experts=4,
            rotary_dim=8, index_n_heads=1, index_head_dim=16, index_block_size=8, index_topk_blocks=2,
            layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense", "sparse"],
        ),
        vision_config=sees(56, 14),
        projector_hidden_size=32,
        merged_hidden_size=128,
        image_token_index=words.number("]<]image[>["),
        video_token_index=words.number("]<]video[>["),
    )  # fmt: skip


def lfm3_vl(words: Vocabulary) -> Any:
    return hf.Lfm3VlConfig(
        text_config=hf.Lfm3Config(**words.text(layer_types=["conv", "full_attention"])),
        vision_config=sees(56, 14, num_key_value_heads=1, layer_types=["conv", "full_attention"]),
        projector_hidden_size=32,
        **words.ids(**QWEN),
    )


def cohere_compass(words: Vocabulary) -> Any:
    return hf.CohereCompassConfig(
        text_config=words.text(
            layer_types=["sliding_attention", "full_attention"], sliding_window=8, logit_scale=1.0,
            rope_parameters={
                "sliding_attention": WOVEN, "full_attention": WOVEN,
            },
        ),
        vision_config=patches(16, **DEEPSTACK),
        **words.ids(**COMPASS),
    )  # fmt: skip


def hy_v4_vl(words: Vocabulary) -> Any:
    thinks = words.text(
        num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=16, qk_nope_head_dim=8, v_head_dim=16, index_topk=4096, index_head_dim=16,
        index_n_heads=2, hc_mult=2, rope_parameters=MROPE,
    )  # fmt: skip
    seen = {**sees(), "patch_size": 8, "max_image_size": 96, "spatial_merge_size": 2, "out_hidden_size": 32}
    del seen["image_size"]
    return hf.HYV4VLConfig(
        text_config=thinks, vision_config=seen, **words.ids(image="<|image_pad|>", video="<|video_pad|>")
    )


def cosmos3_edge(words: Vocabulary) -> Any:
    return hf.Cosmos3EdgeConfig(
        text_config=words.text(rope_parameters=MROPE),
        vision_config=sees(56, 16, num_patches=16),
        projector_hidden_size=32,
        **words.ids(**QWEN),
    )


def lighton_ocr(words: Vocabulary) -> Any:
    return hf.LightOnOcrConfig(
        text_config=hf.Qwen3Config(**words.text()),
        vision_config=hf.PixtralVisionConfig(**sees(112, 14, head_dim=8)),
        spatial_merge_size=2,
        **words.ids(image="<|image_pad|>"),
    )


def mistral3(words: Vocabulary) -> Any:
    return hf.Mistral3Config(
        text_config=hf.MistralConfig(**words.text(sliding_window=None)),
        vision_config=hf.PixtralVisionConfig(**sees(96, 8, head_dim=8)),
        image_token_index=words.number("[IMG]"),
        spatial_merge_size=2,
    )


CONFIGS: dict[str, Callable[[Vocabulary], Any]] = {
    make.__name__: make
    for make in (
        qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, glm4v, glm46v, glm5_next, ernie4_5_vl_moe, paddleocr_vl,
        hunyuan_vl, video_llama_3, kimi_k25, exaone4_5, minimax_m3_vl, lfm3_vl, cohere_compass, cosmos3_edge, hy_v4_vl,
        lighton_ocr, mistral3,
    )
}  # fmt: skip
