"""Tiny models that see, of several families, in folders as users have them; no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from luthier.media.processors.processor import MediaProcessor
from tests.media.test_media_watching_models import TEXT
from tests.media.test_media_watching_models import qwen3_vl as qwen3_vl_model
from tests.media.tiny_folder import write_folder
from tests.media.tiny_processors import BUILDERS

SEES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "initializer_range": 0.1,
}  # fmt: skip
Token = Callable[[str], int]


def _qwen3_vl(token: Token, size: int) -> Any:
    return qwen3_vl_model(token, size).config


def _llava(token: Token, size: int) -> Any:
    return hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT, vocab_size=size),
        vision_config=hf.CLIPVisionConfig(**SEES, patch_size=7),
        image_token_index=token("<image>"),
    )


def _llava_next(token: Token, size: int) -> Any:
    return hf.LlavaNextConfig(
        text_config=hf.LlamaConfig(**TEXT, vocab_size=size),
        vision_config=hf.CLIPVisionConfig(**SEES, patch_size=7),
        image_token_index=token("<image>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    )


def _llava_onevision(token: Token, size: int) -> Any:
    return hf.LlavaOnevisionConfig(
        text_config=hf.Qwen2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"}, vocab_size=size),
        vision_config=hf.SiglipVisionConfig(**SEES, patch_size=7),
        image_token_index=token("<image>"),
        video_token_index=token("<video>"),
        image_grid_pinpoints=[[28 * rows, 28 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        vision_aspect_ratio="anyres_max_9",
    )


def _gemma3(token: Token, size: int) -> Any:
    return hf.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": size,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**SEES, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=token("<image_soft_token>"),
        boi_token_index=token("<start_of_image>"),
        eoi_token_index=token("<end_of_image>"),
    )


CONFIGS: dict[str, Callable[[Token, int], Any]] = {
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
}


def write_vlm(family: str, folder: Path) -> Path:
    """The folder with processor, tokenizer, chat template and config; of Gemma 3 weights too."""
    if family == "qwen2_5_vl":
        return write_folder(folder)
    processor = BUILDERS[family]()
    tokenizer = processor.tokenizer
    slot = MediaProcessor.of(processor).inline("image")
    template = (
        "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
        + slot
        + "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    config = CONFIGS[family](tokenizer.convert_tokens_to_ids, len(tokenizer))
    text = config.get_text_config()
    text.pad_token_id, text.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    if family == "gemma3":
        torch.manual_seed(0)
        filled(hf.Gemma3ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def filled(model: Any) -> Any:
    """The model with numbers in its matrices of zeros: Gemma 3's projector, as it is made, makes zeros of pictures."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model
