"""How sounds become tokens, as rules that the rows of families name."""

from __future__ import annotations

from typing import Any

from luthier.media import geometry_audio as audio
from luthier.media.families import Rule, Settings


def _own_string(settings: Settings, measured: dict[str, Any], index: int) -> str:
    """For classes whose ``replace_audio_token`` takes no options."""
    return str(settings.processor.replace_audio_token(measured, index))


def _repeated(settings: Settings, measured: dict[str, Any], index: int) -> str:
    """For classes that write nothing themselves."""
    return str(settings.processor.audio_token) * int(measured["num_audio_tokens"][index])


_RATE = {"sampling_rate": "sampling_rate"}

WHOLE_WINDOWS = Rule(  # qwen2_audio, qwen2_5_omni
    measure=audio.whole_windows, longest=audio.one_window, options=_RATE, fold=2
)
WINDOW_STEPS = Rule(  # qwen3_omni_moe
    measure=audio.window_steps, longest=audio.one_window_if_asked, options=_RATE
)
PADDED_WINDOW_STEPS = Rule(  # qwen3_asr
    measure=audio.padded_window_steps, longest=audio.one_window_if_asked, replace=_own_string, options=_RATE
)
POOLED_WINDOWS = Rule(  # audioflamingo3, musicflamingo
    measure=audio.pooled_windows, longest=audio.all_windows, options=_RATE, fold=2
)
MERGED_WINDOWS = Rule(measure=audio.merged_windows, longest=audio.all_windows, options=_RATE, fold=4)  # glmasr
WHOLE_CHUNKS = Rule(measure=audio.whole_chunks, replace=_repeated, options=_RATE, fold=4)  # voxtral
FIXED_LENGTH = Rule(measure=audio.fixed_length, longest=audio.half_a_minute, options=_RATE)  # gemma3n
VALID_FRAMES = Rule(measure=audio.valid_frames, longest=audio.half_a_minute, options=_RATE)  # gemma4
WAVEFORM_FRAMES = Rule(measure=audio.waveform_frames, options=_RATE)  # gemma4_unified
COMPRESSED_FRAMES = Rule(measure=audio.compressed_frames, options=_RATE, in_company=True)  # phi4_multimodal
PROJECTED_BLOCKS = Rule(measure=audio.projected_blocks, options=_RATE, fold=5)  # granite_speech
DMEL_FRAMES = Rule(measure=audio.dmel_frames, replace=_own_string, options=_RATE, in_company=True)  # inkling
WAVEFORM_BLOCKS = Rule(measure=audio.waveform_blocks, options=_RATE)  # muse_spark
LONG_CHUNKS = Rule(measure=audio.long_chunks, options=_RATE, fold=8)  # dots3_note
SUBSAMPLED_FRAMES = Rule(measure=audio.subsampled_frames, options=_RATE)  # nemotron_h_omni
