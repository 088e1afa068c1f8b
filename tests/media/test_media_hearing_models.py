"""Tiny models that hear take merged features: a sound means the same in company as alone, and gradients reach all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.media.families import Family
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader
from tests.media.test_media_audio_families import decoded, sound
from tests.media.tiny_av_processors import AUDIO

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "initializer_range": 0.1, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
HEARS: dict[str, Any] = {
    "num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
HEARS_OF_QWEN: dict[str, Any] = {
    "num_mel_bins": 8, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
}  # fmt: skip


def qwen2_audio(text: dict[str, Any], token: int) -> Any:
    heard = {**HEARS_OF_QWEN, "max_source_positions": 400}
    return hf.Qwen2AudioForConditionalGeneration(
        hf.Qwen2AudioConfig(text_config=text, audio_config=heard, audio_token_index=token)
    )


def audioflamingo3(text: dict[str, Any], token: int) -> Any:
    heard = {**HEARS, "max_source_positions": 150}
    return hf.AudioFlamingo3ForConditionalGeneration(
        hf.AudioFlamingo3Config(text_config=text, audio_config=heard, audio_token_id=token)
    )


def glmasr(text: dict[str, Any], token: int) -> Any:
    heard = {**HEARS, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 200}
    return hf.GlmAsrForConditionalGeneration(
        hf.GlmAsrConfig(text_config={**text, "model_type": "llama"}, audio_config=heard, audio_token_id=token)
    )


def qwen3_asr(text: dict[str, Any], token: int) -> Any:
    heard = {**HEARS_OF_QWEN, "output_dim": 32, "downsample_hidden_size": 8}
    return hf.Qwen3ASRForConditionalGeneration(
        hf.Qwen3ASRConfig(text_config=text, audio_config=heard, audio_token_id=token)
    )


def voxtral(text: dict[str, Any], token: int) -> Any:
    heard = {**HEARS, "intermediate_size": 128}
    return hf.VoxtralForConditionalGeneration(
        hf.VoxtralConfig(text_config={**text, "model_type": "llama"}, audio_config=heard, audio_token_id=token)
    )


MODELS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    make.__name__: make for make in (qwen2_audio, audioflamingo3, glmasr, qwen3_asr, voxtral)
}
ROWS = ([sound(24_000)], [sound(9_000)], [], [sound(40_007), sound(16_000)])


def tiny(family: str, media: MediaProcessor) -> Any:
    torch.manual_seed(0)
    tokenizer = media.processor.tokenizer
    vocabulary = {**TEXT, "vocab_size": len(tokenizer)}
    model = MODELS[family](vocabulary, tokenizer.convert_tokens_to_ids(media.placeholder("audio")))
    return model.float().eval()


def ids_of(media: MediaProcessor, row: list[AudioHeader]) -> torch.Tensor:
    text = "hear " + " and ".join(media.expand(row)) + " that"
    return torch.tensor(media.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def features_of(media: MediaProcessor, row: list[AudioHeader]) -> dict[str, np.ndarray]:
    """One sample a sound, joined: some classes take one sound a text."""
    return join_features(media.family, [media.features(decoded([header])) for header in row])


def tensors(family: Family, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in merge_features(family, rows).items()}


@pytest.mark.parametrize("family", MODELS)
def test_a_sound_means_the_same_in_a_batch_as_alone(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    model = tiny(family, media)
    texts, features = [ids_of(media, row) for row in ROWS], [features_of(media, row) for row in ROWS]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, **tensors(media.family, features)).logits
    for number, text in enumerate(texts):
        alone = model(input_ids=text[None], **tensors(media.family, features[number : number + 1])).logits[0]
        torch.testing.assert_close(logits[number, : len(text)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_gradients_reach_what_hears(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    model = tiny(family, media)
    row = [sound(24_000)]
    ids = ids_of(media, row)[None]
    model(input_ids=ids, labels=ids, **tensors(media.family, [features_of(media, row)])).loss.backward()
    for name in (*media.family.modules.tower, *media.family.modules.projector):
        gradients = [weight.grad for weight in model.get_submodule(name).parameters() if weight.grad is not None]
        assert any(gradient.abs().sum() > 0 for gradient in gradients), name
    for name in media.family.modules.language:
        assert any(weight.grad is not None for weight in model.get_submodule(name).parameters()), name
