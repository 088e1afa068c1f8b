"""Tiny models that watch take merged features: a video means the same in company as alone, its sound track too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from luthier.config.inputs import MediaConfig
from luthier.media.processors.calling import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader, MediaHeader
from tests.media.test_media_audio_families import sound
from tests.media.test_media_interleaving import PICTURE, decoded, film
from tests.media.tiny_av_processors import AUDIO, VIDEO

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SENSITIVE = {"initializer_range": 0.1}
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **SENSITIVE,
}  # fmt: skip
PATCHES: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, **SENSITIVE,
}  # fmt: skip
OF_14 = {**PATCHES, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
OF_16 = {**PATCHES, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
HEARS: dict[str, Any] = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
    "output_dim": 32, **SENSITIVE,
}  # fmt: skip
Token = Callable[[str], int]


def qwen2_5_vl(token: Token, size: int) -> Any:
    text = {**TEXT, "vocab_size": size, "rope_parameters": MROPE}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config=text, vision_config={**OF_14, "tokens_per_second": 4}, **_marks(token))
    )


def qwen3_vl(token: Token, size: int) -> Any:
    text = {**TEXT, "vocab_size": size, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    return hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=OF_16, **_marks(token)))


def _marks(token: Token) -> dict[str, int]:
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return {f"{name}_id": token(mark) for name, mark in zip(names, marks, strict=True)}


def qwen2_5_omni(token: Token, size: int) -> Any:
    return Qwen2_5OmniThinkerForConditionalGeneration(
        hf.Qwen2_5OmniThinkerConfig(
            text_config={**TEXT, "vocab_size": size, "rope_parameters": MROPE},
            vision_config=OF_14,
            audio_config={**HEARS, "n_window": 10, "max_source_positions": 400},
            image_token_index=token("<|IMAGE|>"),
            video_token_index=token("<|VIDEO|>"),
            audio_token_index=token("<|AUDIO|>"),
            audio_start_token_id=token("<|audio_bos|>"),
            audio_end_token_id=token("<|audio_eos|>"),
            vision_start_token_id=token("<|vision_bos|>"),
            vision_end_token_id=token("<|vision_eos|>"),
        )
    )


def qwen3_omni_moe(token: Token, size: int) -> Any:
    return Qwen3OmniMoeThinkerForConditionalGeneration(
        hf.Qwen3OmniMoeThinkerConfig(
            text_config={
                **TEXT,
                "vocab_size": size,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "rope_parameters": {**MROPE, "mrope_interleaved": True},
            },
            vision_config=OF_16,
            audio_config={**HEARS, "downsample_hidden_size": 8},
            image_token_id=token("<|IMAGE|>"),
            video_token_id=token("<|VIDEO|>"),
            audio_token_id=token("<|AUDIO|>"),
            audio_start_token_id=token("<|audio_bos|>"),
            vision_start_token_id=token("<|vision_bos|>"),
            vision_end_token_id=token("<|vision_eos|>"),
        )
    )


def gemma4(token: Token, size: int) -> Any:
    return hf.Gemma4ForConditionalGeneration(
        hf.Gemma4Config(
            text_config={
                **TEXT,
                "vocab_size": size,
                "global_head_dim": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": size,
                "use_bidirectional_attention": "vision",
                "pad_token_id": 0,
            },
            vision_config={
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 64, **SENSITIVE,
            },
            audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
            image_token_id=token("<|image|>"),
            video_token_id=token("<|video|>"),
            audio_token_id=token("<|audio|>"),
            boi_token_id=token("<|image>"),
            eoi_token_id=token("<image|>"),
        )
    )  # fmt: skip


MODELS = {make.__name__: make for make in (qwen2_5_vl, qwen3_vl, qwen2_5_omni, qwen3_omni_moe, gemma4)}
SILENT: list[list[MediaHeader]] = [[film(9, 6.0, None)], [PICTURE, film(21, 12.0, None)], [], [PICTURE]]
# no silent video among them: the models' own counting of positions takes all videos of a batch to be alike
LOUD: list[list[MediaHeader]] = [
    [film(9, 4.0, 2.2)],
    [sound(20_000), film(16, 4.0, 4.1), PICTURE],
    [film(8, 4.0, 1.0)],
    [],
]
OMNI = {"qwen2_5_omni", "qwen3_omni_moe"}


def around(family: str, item: MediaHeader) -> str:
    """What chat templates write around an item where the models look for its beginning."""
    if family in OMNI:
        return "<|audio_bos|>{}<|audio_eos|>" if isinstance(item, AudioHeader) else "<|vision_bos|>{}<|vision_eos|>"
    return "<|vision_start|>{}<|vision_end|>" if family == "qwen2_5_vl" else "{}"


def media_of(family: str) -> MediaProcessor:
    processor = (VIDEO | AUDIO)[family]()
    return MediaProcessor.of(processor, MediaConfig(use_audio_in_video=True) if family in OMNI else None)


def tiny(family: str, media: MediaProcessor) -> Any:
    torch.manual_seed(0)
    tokenizer = media.processor.tokenizer
    return MODELS[family](tokenizer.convert_tokens_to_ids, len(tokenizer)).float().eval()


def inputs_of(family: str, media: MediaProcessor, rows: list[list[MediaHeader]]) -> tuple[list[int], dict[str, Any]]:
    """Lengths, and the rows padded on the right: ids, what goes along them, and merged features."""
    columns: dict[str, list[torch.Tensor]] = {"input_ids": [], "attention_mask": []}
    features = []
    for row in rows:
        items = zip(row, media.expand(row), strict=True)
        text = "see " + " and ".join(around(family, item).format(string) for item, string in items) + " that"
        ids = np.asarray(media.processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        made = media.features([(item, decoded(media, item)) for item in row])
        for name, values in media.token_inputs(ids, made).items():
            columns.setdefault(name, []).append(torch.from_numpy(values))
        columns["input_ids"].append(torch.from_numpy(ids))
        columns["attention_mask"].append(torch.ones(len(ids), dtype=torch.long))
        features.append(made)
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in columns.items() if values
    }
    merged = {key: torch.from_numpy(value) for key, value in merge_features(media.family, features).items()}
    heard = {"use_audio_in_video": True} if family in OMNI else {}
    return [len(ids) for ids in columns["input_ids"]], {**padded, **merged, **heard}


@pytest.mark.parametrize("family", MODELS)
def test_a_video_means_the_same_in_a_batch_as_alone(family: str) -> None:
    media = media_of(family)
    model = tiny(family, media)
    rows = LOUD if family in OMNI else SILENT
    lengths, inputs = inputs_of(family, media, rows)
    logits = model(**inputs).logits
    for number, row in enumerate(rows):
        _, alone = inputs_of(family, media, [row])
        expected = model(**alone).logits[0]
        torch.testing.assert_close(logits[number, : lengths[number]], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_gradients_reach_what_watches(family: str) -> None:
    media = media_of(family)
    model = tiny(family, media)
    _, inputs = inputs_of(family, media, LOUD[:1] if family in OMNI else SILENT[:1])
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    modules = media.family.modules
    there = [name for name in (*modules.tower, *modules.projector, *modules.language[:-1]) if _has(model, name)]
    if family not in OMNI:  # nothing to hear in this row
        there = [name for name in there if "audio" not in name]
    assert len(there) >= 3
    for name in there:
        assert any(weight.startswith(f"{name}.") for weight in reached), name


def _has(model: torch.nn.Module, name: str) -> bool:
    return any(module == name for module, _ in model.named_modules())
