"""Configs of tiny models whose processors cut pictures into tiles; the sizes are those of the tiny processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.families_matrix.tiny_settings import MROPE, SENSITIVE, Vocabulary, sees

SLIDING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


def internvl(words: Vocabulary) -> Any:
    return hf.InternVLConfig(
        text_config=hf.Qwen2Config(**words.text()),
        vision_config={**sees(), "image_size": [28, 28], "patch_size": [7, 7]},
        image_seq_length=4,
        **words.ids(image="<IMG_CONTEXT>"),
    )


def qianfan_ocr(words: Vocabulary) -> Any:
    return hf.QianfanOCRConfig(
        text_config=hf.Qwen3Config(**words.text()),
        vision_config={**sees(), "image_size": [28, 28], "patch_size": [7, 7], "drop_path_rate": 0.0},
        image_seq_length=4,
        **words.ids(image="<IMG_CONTEXT>"),
    )


def aya_vision(words: Vocabulary) -> Any:
    return hf.AyaVisionConfig(
        text_config=hf.Cohere2Config(**words.text(**SLIDING)),
        vision_config=hf.SiglipVisionConfig(**sees(patch_size=14), vision_use_head=False),
        downsample_factor=1,
        image_token_index=words.number("<|IMG_PATCH|>"),
    )


def cohere2_vision(words: Vocabulary) -> Any:
    return hf.Cohere2VisionConfig(
        text_config=hf.Cohere2Config(**words.text(**SLIDING)),
        vision_config=hf.SiglipVisionConfig(**sees(patch_size=7), vision_use_head=False),
        downsample_factor=2,
        alignment_intermediate_size=32,
        **words.ids(image="<|IMG_PATCH|>"),
    )


def ovis2(words: Vocabulary) -> Any:
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    return hf.Ovis2Config(
        text_config=hf.Qwen2Config(**words.text()),
        vision_config={**sees(patch_size=7), "vocab_size": 40, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
        visual_indicator_token_ids=[words.number(mark) for mark in marks],
        vocab_size=words.size,
        hidden_size=32,
        **words.ids(image="<IMG_ATOM>"),
    )


def deepseek_ocr2(words: Vocabulary) -> Any:
    text = words.text(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_layer_types=["dense", "sparse"],
        n_shared_experts=1,
    )  # fmt: skip
    sam = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
        "patch_size": 1, "mlp_dim": 24, "window_size": 8, "global_attn_indexes": [], "downsample_channels": [16, 32],
        **SENSITIVE,
    }  # fmt: skip
    encoder = words.text()
    return hf.DeepseekOcr2Config(
        text_config=text,
        vision_config={"sam_config": sam, "encoder_config": encoder},
        **words.ids(image="<image>"),
    )


def llama4(words: Vocabulary) -> Any:
    text = words.text(
        intermediate_size_mlp=48, num_local_experts=2, moe_layers=[1], attention_chunk_size=64,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    )  # fmt: skip
    tower = sees(
        vision_output_dim=32, intermediate_size=64, projector_input_dim=32, projector_output_dim=32,
        pixel_shuffle_ratio=0.5,
    )  # fmt: skip
    return hf.Llama4Config(
        text_config=text,
        vision_config=tower,
        boi_token_index=words.number("<|image_start|>"),
        eoi_token_index=words.number("<|image_end|>"),
        image_token_index=words.number("<|patch|>"),
    )


def idefics3(words: Vocabulary) -> Any:
    return hf.Idefics3Config(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=sees(28, 14),
        scale_factor=1,
        pad_token_id=None,
        **words.ids(image="<image>"),
    )


def smolvlm(words: Vocabulary) -> Any:
    return hf.SmolVLMConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=sees(28, 14),
        scale_factor=1,
        pad_token_id=None,
        **words.ids(image="<image>"),
    )


def llava_next(words: Vocabulary) -> Any:
    return hf.LlavaNextConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.CLIPVisionConfig(**sees()),
        image_token_index=words.number("<image>"),
        image_grid_pinpoints=PINPOINTS,
    )


def granite4_vision(words: Vocabulary) -> Any:
    return hf.Granite4VisionConfig(
        text_config=words.text(),
        vision_config=hf.CLIPVisionConfig(**{**sees(), "hidden_size": 64}),
        qformer_config={
            "num_hidden_layers": 1, "intermediate_size": 24, "cross_attention_frequency": 1,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **SENSITIVE,
        },
        image_token_index=words.number("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="default",
        downsample_rate="1/2",
        projector_dropout=0.0,
        deepstack_layer_map=[[-2, 0]],
        spatial_target_layers=[1],
    )  # fmt: skip


def llava_onevision(words: Vocabulary) -> Any:
    return hf.LlavaOnevisionConfig(
        text_config=hf.Qwen2Config(**words.text()),
        vision_config=hf.SiglipVisionConfig(**sees(), vision_use_head=False),
        image_token_index=words.number("<image>"),
        video_token_index=words.number("<video>"),
        image_grid_pinpoints=[[28 * rows, 28 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        vision_aspect_ratio="anyres_max_9",
    )


def gemma3(words: Vocabulary) -> Any:
    return hf.Gemma3Config(
        text_config=words.text(**SLIDING, pad_token_id=0),
        vision_config=sees(patch_size=14),
        mm_tokens_per_image=4,
        image_token_index=words.number("<image_soft_token>"),
        boi_token_index=words.number("<start_of_image>"),
        eoi_token_index=words.number("<end_of_image>"),
        **SENSITIVE,
    )


def aria(words: Vocabulary) -> Any:
    return hf.AriaConfig(
        text_config=words.text(moe_num_experts=2, moe_num_shared_experts=1, moe_topk=1, pad_token_id=0),
        vision_config=hf.Idefics3VisionConfig(**sees(490, 70)),
        projector_patch_to_query_dict={49: 8, 196: 16},
        image_token_index=words.number("<|img|>"),
    )


def lfm2_vl(words: Vocabulary) -> Any:
    return hf.Lfm2VlConfig(
        text_config=hf.Lfm2Config(**words.text(layer_types=["conv", "full_attention"])),
        vision_config=hf.Siglip2VisionConfig(**{**sees(patch_size=4), "num_patches": 64}, vision_use_head=False),
        projector_hidden_size=32,
        downsample_factor=2,
        **words.ids(image="<image>"),
    )


def _minicpm(cls: Any, words: Vocabulary, **more: Any) -> Any:
    return cls(
        text_config=hf.Qwen3_5TextConfig(
            **words.text(
                **RECURRENT, rope_parameters={**MROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True}
            )
        ),
        vision_config={**sees(56, 7), "insert_layer_id": 0},
        insert_layer_id=0,
        image_size=56,
        patch_size=7,
        **words.ids(image="<|image_pad|>", video="<|video_pad|>"),
        **more,
    )


def minicpmv4_6(words: Vocabulary) -> Any:
    return _minicpm(hf.MiniCPMV4_6Config, words)


def minicpmv4_7(words: Vocabulary) -> Any:
    return _minicpm(
        hf.MiniCPMV4_7Config,
        words,
        image_start_id=words.number("<image>"),
        image_end_id=words.number("</image>"),
        slice_start_id=words.number("<slice>"),
        slice_end_id=words.number("</slice>"),
        newline_id=words.number("Ċ"),
    )


def step3p7(words: Vocabulary) -> Any:
    text = words.text(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, share_expert_dim=24,
        **SLIDING, mlp_layer_types=["dense", "sparse"], num_sliding_attention_heads=2,
        query_pre_attn_scalar=16, pad_token_id=0,
    )  # fmt: skip
    return hf.Step3p7Config(
        text_config=text,
        vision_config=sees(112, 14, mlp_ratio=2.0, max_position_embeddings=64),
        **words.ids(image="<im_patch>"),
    )


def molmo2(words: Vocabulary) -> Any:
    text = words.text(additional_vocab_size=16, rope_scaling_layers=[0, 1])
    tower = sees(num_key_value_heads=2, head_dim=8, num_position_embeddings=64)
    return hf.Molmo2Config(
        text_config=text,
        vision_config={**tower, "image_size": [56, 56]},
        adapter_config={
            "vision_feature_layer": [0, 1], "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 8, "intermediate_size": 24, "text_hidden_size": 32, **SENSITIVE,
        },
        image_patch_id=words.number("<im_patch>"),
        **words.ids(
            image_start="<im_start>", low_res_image_start="<low_res_im_start>", image_end="<im_end>",
            frame_start="<frame_start>", frame_end="<frame_end>",
        ),
    )  # fmt: skip


CONFIGS: dict[str, Callable[[Vocabulary], Any]] = {
    make.__name__: make
    for make in (
        internvl, qianfan_ocr, aya_vision, cohere2_vision, ovis2, deepseek_ocr2, llama4, idefics3, smolvlm, llava_next,
        granite4_vision, llava_onevision, gemma3, aria, lfm2_vl, minicpmv4_6, minicpmv4_7, step3p7, molmo2,
    )
}  # fmt: skip
