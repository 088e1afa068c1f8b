"""Configs of tiny models that hear; the sizes are those of the tiny processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf

from tests.families_matrix.tiny_other_configs import apertus_parts

# at the usual 0.02 a model hardly looks at other tokens, and every leak is small
SENSITIVE = {"initializer_range": 0.1}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WOVEN: dict[str, Any] = {**MROPE, "mrope_interleaved": True}
HEARS: dict[str, Any] = {
    "num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    **SENSITIVE,
}  # fmt: skip
HEARS_OF_QWEN: dict[str, Any] = {
    "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    **SENSITIVE,
}  # fmt: skip
THINKS: dict[str, Any] = {
    "image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>", "vision_start": "<|vision_bos|>",
    "vision_end": "<|vision_eos|>", "audio_start": "<|audio_bos|>", "audio_end": "<|audio_eos|>",
}  # fmt: skip
WINDOWS: dict[str, Any] = {"window_size": 56, "fullatt_block_indexes": [1]}
DEEPSTACK: dict[str, Any] = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
GEMMA = {"image": "<|image|>", "audio": "<|audio|>", "boi": "<|image>", "eoi": "<image|>"}
PATCHES: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, **SENSITIVE,
}  # fmt: skip
SEES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, **SENSITIVE,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class Words:
    """The tokenizer of a family's processor, as configs want to know it."""

    size: int
    number: Callable[[str], int]

    def ids(self, **tokens: str) -> dict[str, int]:
        """``ids(audio="<sound>")`` is ``{"audio_token_id": 257}``."""
        return {f"{name}_token_id": self.number(token) for name, token in tokens.items()}

    def text(self, **more: Any) -> dict[str, Any]:
        """A language model of two layers over these tokens."""
        return {
            "vocab_size": self.size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "head_dim": 16,
            "pad_token_id": self.number("<pad>"), "bos_token_id": None, "eos_token_id": None, **SENSITIVE, **more,
        }  # fmt: skip


def qwen2_audio(words: Words) -> Any:
    return hf.Qwen2AudioConfig(
        text_config={**words.text(), "model_type": "qwen2"},
        audio_config={**HEARS_OF_QWEN, "max_source_positions": 400},
        audio_token_index=words.number("<|AUDIO|>"),
    )


def audioflamingo3(words: Words) -> Any:
    return hf.AudioFlamingo3Config(
        text_config={**words.text(), "model_type": "qwen2"},
        audio_config={**HEARS, "max_source_positions": 150},
        audio_token_id=words.number("<sound>"),
    )


def musicflamingo(words: Words) -> Any:
    return hf.MusicFlamingoConfig(
        text_config={**words.text(), "model_type": "qwen2"},
        audio_config={**HEARS, "max_source_positions": 150, "model_type": "audioflamingo3_encoder"},
        rope_parameters={"rope_type": "default", "rope_theta": 1200, "partial_rotary_factor": 0.25},
        **words.ids(audio="<sound>", audio_bos="<|sound_bos|>", audio_eos="<|sound_eos|>"),
    )


def glmasr(words: Words) -> Any:
    heard = {**HEARS, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 200}
    return hf.GlmAsrConfig(
        text_config={**words.text(), "model_type": "llama"}, audio_config=heard, audio_token_id=words.number("<|pad|>")
    )


def qwen3_asr(words: Words) -> Any:
    heard = {**HEARS_OF_QWEN, "output_dim": 32, "downsample_hidden_size": 8}
    return hf.Qwen3ASRConfig(
        text_config={**words.text(), "model_type": "qwen3"},
        audio_config=heard,
        audio_token_id=words.number("<|audio_pad|>"),
    )


def voxtral(words: Words) -> Any:
    return hf.VoxtralConfig(
        text_config={**words.text(), "model_type": "llama"},
        audio_config={**HEARS, "intermediate_size": 128},
        audio_token_id=words.number("[AUDIO]"),
    )


def granite_speech(words: Words) -> Any:
    return hf.GraniteSpeechConfig(
        text_config={**words.text(), "model_type": "granite"},
        encoder_config={
            "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 12, "dropout": 0.0,
            "conv_kernel_size": 5, "max_pos_emb": 64, "context_size": 50, **SENSITIVE,
        },
        projector_config={
            "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 48, "encoder_hidden_size": 32, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        audio_token_index=words.number("<|audio|>"),
        has_lora_adapter=False,
        **SENSITIVE,
    )  # fmt: skip


def inkling(words: Words) -> Any:
    text = words.text(swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=16, sliding_window_size=8)
    return hf.InklingConfig(
        text_config={
            **text, "d_rel": 4, "rel_extent": 16, "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "dense"], "n_routed_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 16, "n_shared_experts": 1, "logits_mup_width_multiplier": 1.0,
        },
        audio_config={"n_mel_bins": 8, "mel_vocab_size": 16, **SENSITIVE},
        vision_config={
            "patch_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, **SENSITIVE,
        },
        **words.ids(image="<|unused_200054|>", audio="<|unused_200053|>", image_bos="<|content_image|>"),
        audio_bos_token_id=words.number("<|content_audio_input|>"),
    )  # fmt: skip


def qwen2_5_omni(words: Words) -> Any:
    numbers = words.ids(**THINKS)
    return hf.Qwen2_5OmniThinkerConfig(
        text_config=words.text(rope_parameters=MROPE),
        vision_config={**PATCHES, **WINDOWS, "patch_size": 14},
        audio_config={**HEARS_OF_QWEN, "output_dim": 32, "n_window": 100},
        image_token_index=numbers["image_token_id"],
        video_token_index=numbers["video_token_id"],
        audio_token_index=numbers["audio_token_id"],
        user_token_id=3,
        **numbers,
    )


def qwen3_omni_moe(words: Words) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return hf.Qwen3OmniMoeThinkerConfig(
        text_config=words.text(rope_parameters=WOVEN, **experts),
        vision_config={**PATCHES, **DEEPSTACK, "patch_size": 16},
        audio_config={**HEARS_OF_QWEN, "output_dim": 32, "n_window": 50, "downsample_hidden_size": 8},
        user_token_id=3,
        **words.ids(**THINKS),
    )


def gemma3n(words: Words) -> Any:
    return hf.Gemma3nConfig(
        text_config=words.text(
            vocab_size=words.size + 2, num_key_value_heads=2, layer_types=LAYERS, sliding_window=8,
            num_kv_shared_layers=0, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=words.size, laurel_rank=4, altup_num_inputs=2, intermediate_size=[48, 48],
            activation_sparsity_pattern=[0.0, 0.0],
        ),
        vision_config={
            "hidden_size": 2048, "vocab_size": 1, "vocab_offset": words.size,
            "model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": 2},
        },
        audio_config={
            "vocab_size": 1, "vocab_offset": words.size + 1, "hidden_size": 32, "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2, "sscp_conv_channel_size": (8, 4), **SENSITIVE,
        },
        audio_soft_tokens_per_image=26,
        vision_soft_tokens_per_image=4,
        image_token_id=words.number("<image_soft_token>"),
        audio_token_id=words.number("<audio_soft_token>"),
        **SENSITIVE,
    )  # fmt: skip


def gemma4(words: Words) -> Any:
    return hf.Gemma4Config(
        text_config=words.text(
            global_head_dim=16, sliding_window=8, layer_types=LAYERS, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=words.size, use_bidirectional_attention="vision",
        ),
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 128, **SENSITIVE,
        },
        audio_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 32,
            "subsampling_conv_channels": [128, 4], **SENSITIVE,
        },
        video_token_id=words.size - 1,
        **words.ids(**GEMMA),
    )  # fmt: skip


def gemma4_unified(words: Words) -> Any:
    return hf.Gemma4UnifiedConfig(
        text_config=words.text(
            global_head_dim=16, sliding_window=96, layer_types=LAYERS, use_bidirectional_attention="vision"
        ),
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 32,
            "mm_posemb_size": 64,
            "output_proj_dims": 32,
            **SENSITIVE,
        },
        audio_config={"audio_embed_dim": 640, **SENSITIVE},
        **words.ids(**GEMMA),
    )


def phi4_multimodal(words: Words) -> Any:
    return hf.Phi4MultimodalConfig(
        **words.text(), original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        vision_config={**SEES, "crop_size": 28, "image_token_id": words.number("<|endoftext10|>")},
        audio_config={
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8, "input_size": 80,
            "audio_token_id": words.number("<|endoftext11|>"), **SENSITIVE,
        },
    )  # fmt: skip


def nemotron_h_omni(words: Words) -> Any:
    return hf.NemotronH_Omni_Reasoning_V3_Config(
        text_config={
            **words.text(), "model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention"],
            "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8,
        },
        vision_config={
            "model_type": "radio", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "mlp_ratio": 2.0, "patch_size": 16, "image_size": 64, "max_img_size": 256,
            "video_temporal_patch_size": 2, **SENSITIVE,
        },
        audio_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
            "subsampling_conv_channels": 8, "projection_hidden_size": 32, "projection_bias": False, "dropout": 0.0,
            "layerdrop": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "conv_kernel_size": 5, **SENSITIVE,
        },
        projector_hidden_size=32, vision_hidden_size=16,
        **words.ids(image="<image>", video="<video>", audio="<so_embedding>"),
    )  # fmt: skip


def omniasr(words: Words) -> Any:
    heard = {
        "hidden_size": 32, "conv_dim": [8] * 7, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 48, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
        "hidden_dropout": 0.0, "layerdrop": 0.0, "activation_dropout": 0.0, **SENSITIVE,
    }  # fmt: skip
    return hf.OmniASRConfig(
        text_config={**words.text(), "model_type": "llama"}, audio_config=heard,
        audio_token_id=words.number("<extra_id_1>"), **SENSITIVE,
    )  # fmt: skip


def apertus1p5(words: Words) -> Any:
    return hf.Apertus1p5Config(**apertus_parts(words.text, words.size, words.number))


CONFIGS: dict[str, Callable[[Words], Any]] = {
    make.__name__: make
    for make in (
        qwen2_audio, audioflamingo3, musicflamingo, glmasr, qwen3_asr, voxtral, granite_speech, inkling, qwen2_5_omni,
        qwen3_omni_moe, gemma3n, gemma4, gemma4_unified, phi4_multimodal, nemotron_h_omni, omniasr, apertus1p5,
    )
}  # fmt: skip
