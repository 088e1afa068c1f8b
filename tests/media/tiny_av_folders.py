"""A tiny Qwen2-Audio and a tiny Qwen2.5-Omni (its thinker) in folders, as users have models; no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf

from tests.media.tiny_processors import tiny_tokenizer

TURNS = ("<|im_start|>", "<|im_end|>")
OMNI = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
SOUND = {"num_mel_bins": 128, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}
SEEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [0],
    "out_hidden_size": 32,
}


def template(**slots: str) -> str:
    """A chat template in Qwen's manner; ``slots`` are what it prints for each kind of part."""
    cases = "".join(f"{{% elif content['type'] == '{kind}' %}}{text}" for kind, text in slots.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
        "{% if 'text' in content %}{{ content['text'] }}" + cases + "{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def write_audio_folder(folder: Path) -> Path:
    """Qwen2-Audio: half a minute of sound becomes 750 tokens at most."""
    tokenizer = tiny_tokenizer(*TURNS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    tokenizer.eos_token = TURNS[1]
    chat = template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>")
    hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(feature_size=128), tokenizer, chat_template=chat).save_pretrained(
        folder
    )
    number = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    config = hf.Qwen2AudioConfig(
        text_config=hf.Qwen2Config(**TEXT, **_vocabulary(tokenizer)),
        audio_config={**SOUND, "max_source_positions": 1500},
        audio_token_index=number,
        audio_token_id=number,
    )
    return _finish(folder, config, tokenizer)


def write_omni_folder(folder: Path) -> Path:
    """The thinker of Qwen2.5-Omni, with frames of few tokens."""
    tokenizer = tiny_tokenizer(*TURNS, **OMNI)
    tokenizer.eos_token = TURNS[1]
    size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 16 * 28 * 28}}
    seen = "<|vision_bos|>{}<|vision_eos|>".format
    hf.Qwen2_5OmniProcessor(
        hf.Qwen2VLImageProcessor(**size),
        hf.Qwen2VLVideoProcessor(**size),
        hf.WhisperFeatureExtractor(feature_size=128),
        tokenizer,
        chat_template=template(
            image=seen("<|IMAGE|>"), video=seen("<|VIDEO|>"), audio="<|audio_bos|><|AUDIO|><|audio_eos|>"
        ),
    ).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in OMNI.items()}
    config = hf.Qwen2_5OmniThinkerConfig(
        text_config={
            **TEXT,
            **_vocabulary(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config=SEEN,
        audio_config={**SOUND, "output_dim": 32, "n_window": 100},
        **{
            f"{kind}_token_{end}": ids[f"{kind}_token"]
            for kind in ("image", "video", "audio")
            for end in ("id", "index")
        },
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
    )
    return _finish(folder, config, tokenizer)


def _vocabulary(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _finish(folder: Path, config: Any, tokenizer: Any) -> Path:
    config.save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder
