"""Configs of tiny models whose pictures are all as many tokens, and of those that hear too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.families_matrix.tiny_settings import MROPE, SENSITIVE, WOVEN, Vocabulary, patches, sees

SLIDING: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
HEARS: dict[str, Any] = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
    "output_dim": 32, **SENSITIVE,
}  # fmt: skip
OMNI = {
    "image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>", "vision_start": "<|vision_bos|>",
    "vision_end": "<|vision_eos|>", "audio_start": "<|audio_bos|>", "audio_end": "<|audio_eos|>",
}  # fmt: skip


def llava(words: Vocabulary) -> Any:
    return hf.LlavaConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.CLIPVisionConfig(**sees()),
        image_token_index=words.number("<image>"),
    )


def vipllava(words: Vocabulary) -> Any:
    return hf.VipLlavaConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.CLIPVisionConfig(**sees()),
        vision_feature_layers=[-2, -1],
        image_token_index=words.number("<image>"),
    )


def paligemma(words: Vocabulary) -> Any:
    return hf.PaliGemmaConfig(
        text_config=hf.GemmaConfig(**words.text(pad_token_id=0)),
        vision_config=hf.SiglipVisionConfig(**sees(patch_size=14), vision_use_head=False),
        image_token_index=words.number("<image>"),
        projection_dim=32,
    )


def deepseek_vl(words: Vocabulary) -> Any:
    return hf.DeepseekVLConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.SiglipVisionConfig(**sees(patch_size=14), vision_use_head=False),
        **words.ids(image="<image_placeholder>"),
    )


def deepseek_vl_hybrid(words: Vocabulary) -> Any:
    sam = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
        "patch_size": 7, "mlp_dim": 24, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 8,
        **SENSITIVE,
    }  # fmt: skip
    return hf.DeepseekVLHybridConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.SiglipVisionConfig(**sees(patch_size=14), vision_use_head=False),
        high_res_vision_config=hf.SamVisionConfig(**sam),
        **words.ids(image="<image_placeholder>"),
    )


def janus(words: Vocabulary) -> Any:
    return hf.JanusConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config={
            **sees(patch_size=14), "projection_dim": 32, "num_image_tokens": 4, "mlp_ratio": 2.0, "depth": 2,
        },
        vq_config={
            "embed_dim": 4, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1],
            "num_res_blocks": 1, "num_patches": 2, "projection_dim": 32, "image_token_embed_dim": 32,
        },
        **words.ids(image="<image_placeholder>"),
    )  # fmt: skip


def chameleon(words: Vocabulary) -> Any:
    vocabulary = {f"IMGIMG{chr(65 + index)}Z": index for index in range(8)}
    return hf.ChameleonConfig(
        **{name: value for name, value in words.text().items() if name != "head_dim"},
        vq_config={
            "embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 28, "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1,
        },
        vocabulary_map={**vocabulary, "<image>": words.number("<image>")},
        **words.ids(image="<image>"),
    )  # fmt: skip


def idefics2(words: Vocabulary) -> Any:
    return hf.Idefics2Config(
        text_config=hf.MistralConfig(**words.text(sliding_window=None)),
        vision_config=sees(70, 14),
        perceiver_config={
            "hidden_size": 32, "resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1, **SENSITIVE,
        },
        **words.ids(image="<image>"),
    )  # fmt: skip


def mllama(words: Vocabulary) -> Any:
    text = {name: value for name, value in words.text().items() if name != "head_dim"}
    return hf.MllamaConfig(
        text_config={**text, "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": words.number("<s>")},
        vision_config={
            **sees(patch_size=14), "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
            "vision_output_dim": 32, "intermediate_layers_indices": [0], "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        image_token_index=words.number("<|image|>"),
    )  # fmt: skip


def llava_next_video(words: Vocabulary) -> Any:
    return hf.LlavaNextVideoConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.CLIPVisionConfig(**sees()),
        image_token_index=words.number("<image>"),
        video_token_index=words.number("<video>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )


def video_llava(words: Vocabulary) -> Any:
    return hf.VideoLlavaConfig(
        text_config=hf.LlamaConfig(**words.text()),
        vision_config=hf.CLIPVisionConfig(**sees()),
        image_token_index=words.number("<image>"),
        video_token_index=words.number("<video>"),
    )


def qwen2_5_omni_thinker(words: Vocabulary) -> Any:
    ids = words.ids(**OMNI)
    indexes = {f"{kind}_token_index": ids[f"{kind}_token_id"] for kind in ("image", "video", "audio")}
    return hf.Qwen2_5OmniThinkerConfig(
        text_config=words.text(rope_parameters=MROPE),
        vision_config=patches(window_size=56, fullatt_block_indexes=[1]),
        audio_config={**HEARS, "n_window": 10, "max_source_positions": 400},
        **ids,
        **indexes,
    )


def qwen3_omni_moe_thinker(words: Vocabulary) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return hf.Qwen3OmniMoeThinkerConfig(
        text_config=words.text(**experts, rope_parameters=WOVEN),
        vision_config=patches(16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        audio_config={**HEARS, "downsample_hidden_size": 8},
        **words.ids(**OMNI),
    )


def gemma3n(words: Vocabulary) -> Any:
    size = words.size
    return hf.Gemma3nConfig(
        text_config=words.text(
            **SLIDING, intermediate_size=[48, 48], vocab_size_per_layer_input=size, hidden_size_per_layer_input=8,
            altup_num_inputs=2, num_kv_shared_layers=0, laurel_rank=8, activation_sparsity_pattern=[0.0, 0.0],
            pad_token_id=0,
        ),
        vision_config={
            "architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 4, "vocab_offset": size,
            "model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": 2},
        },
        audio_config={
            "vocab_size": 4, "vocab_offset": size + 4, "hidden_size": 32, "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [8, 8],
        },
        vision_soft_tokens_per_image=4,
        **words.ids(
            image="<image_soft_token>", boi="<start_of_image>", eoi="<end_of_image>", audio="<audio_soft_token>",
            boa="<start_of_audio>", eoa="<end_of_audio>",
        ),
    )  # fmt: skip


def perception_lm(words: Vocabulary) -> Any:
    tower = {
        "embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": [28, 28], "patch_size": 7, "ref_feat_shape": [4, 4],
        "global_pool": "", "use_post_transformer_norm": False,
    }  # fmt: skip
    return hf.PerceptionLMConfig(
        text_config={"model_type": "llama", **words.text()},
        vision_config={
            "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "do_pooling": False,
            "model_args": tower,
        },
        projector_pooling_ratio=2,
        **words.ids(image="<|image|>", video="<|video|>"),
    )  # fmt: skip


GEMMA4 = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>", "boi": "<|image>", "eoi": "<image|>"}


def gemma4(words: Vocabulary) -> Any:
    text = words.text(
        **SLIDING, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=words.size,
        use_bidirectional_attention="vision", pad_token_id=0,
    )  # fmt: skip
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
        "position_embedding_size": 128, **SENSITIVE,
    }  # fmt: skip
    return hf.Gemma4Config(
        text_config=text,
        vision_config=tower,
        audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
        **words.ids(**GEMMA4),
    )


def gemma4_unified(words: Vocabulary) -> Any:
    return hf.Gemma4UnifiedConfig(
        text_config=words.text(**SLIDING, global_head_dim=16, use_bidirectional_attention="vision", pad_token_id=0),
        vision_config={
            "mm_embed_dim": 32,
            "mm_posemb_size": 128,
            "output_proj_dims": 32,
            "patch_size": 4,
            "pooling_kernel_size": 3,
        },
        **words.ids(**GEMMA4),
    )


def phi4_multimodal(words: Vocabulary) -> Any:
    text = {name: value for name, value in words.text().items() if name != "head_dim"}
    return hf.Phi4MultimodalConfig(
        **{**text, "pad_token_id": 0},
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        vision_config={**sees(64, 2), "crop_size": 64, **words.ids(image="<|endoftext10|>")},
        audio_config={
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
            "input_size": 80, **words.ids(audio="<|endoftext11|>"),
        },
    )  # fmt: skip


def nemotron_h_omni(words: Vocabulary) -> Any:
    text = words.text(
        layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
        ssm_state_size=16, chunk_size=16, use_mamba_kernels=False,
    )  # fmt: skip
    del text["num_hidden_layers"]
    return hf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=hf.NemotronHConfig(**text),
        vision_config=hf.RadioConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2.0, patch_size=16, image_size=64,
            max_img_size=512, video_temporal_patch_size=2, **SENSITIVE,
        ),
        vision_hidden_size=16,
        projector_hidden_size=32,
        **words.ids(image="<image>", video="<video>", audio="<so_embedding>"),
    )  # fmt: skip


def inkling2_loop(words: Vocabulary) -> Any:
    """Its one loop runs over the second and the third of four layers, twice."""
    thinks = words.text(
        num_hidden_layers=4, unpadded_vocab_size=words.size, swa_num_attention_heads=2, swa_num_key_value_heads=1,
        swa_head_dim=16, d_rel=4, rel_extent=64, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
        loop_gate_rank=8,
    )  # fmt: skip
    seen = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "posemb_grid_size": 8, "projection_hidden_dim": 24, "text_hidden_size": 32, **SENSITIVE,
    }  # fmt: skip
    return hf.Inkling2LoopConfig(
        text_config=thinks, vision_config=seen, image_token_id=words.number("<|content_image|>")
    )


def apertus1p5(words: Vocabulary) -> Any:
    return hf.Apertus1p5Config(**apertus_parts(words.text, words.size, words.number))


def apertus_parts(text: Callable[..., dict[str, Any]], size: int, number: Callable[[str], int]) -> dict[str, Any]:
    """Codes of pictures and sounds stand behind the words, and only words are predicted."""
    drawn, heard = 16, 8
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "text_config": text(vocab_size=size + drawn + heard, output_vocab_size=size, rope_parameters=rope),
        "vision_config": {
            "codebook_size": drawn, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1,
            "channel_multiplier": [1, 1, 1, 1, 1], "attn_resolutions": [],
        },
        "audio_config": {
            "model_type": "wavtokenizer_encoder", "codebook_size": heard, "codebook_dim": 16, "hidden_size": 16,
            "num_filters": 4, "num_lstm_layers": 1,
        },
        "image_token_id": number("<|image_token|>"), "audio_token_id": number("<|audio_token|>"),
        "image_token_offset": size, "audio_token_offset": size + drawn,
    }  # fmt: skip


CONFIGS: dict[str, Callable[[Vocabulary], Any]] = {
    make.__name__: make
    for make in (
        llava, vipllava, paligemma, deepseek_vl, deepseek_vl_hybrid, janus, chameleon, idefics2, mllama,
        llava_next_video, video_llava, qwen2_5_omni_thinker, qwen3_omni_moe_thinker, gemma3n, perception_lm, gemma4,
        gemma4_unified, phi4_multimodal, nemotron_h_omni, inkling2_loop, apertus1p5,
    )
}  # fmt: skip
