"""How sounds and videos become tokens, as rules that the rows of families name, and model inputs along the tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luthier.media.families.family import Features, Measured, Processor, Rule, Settings
from luthier.media.geometry import sounds as audio
from luthier.media.geometry.videos import (
    canvas_grid,
    chunked_patch_grid,
    fixed_frames,
    frame_grid,
    frame_slices,
    padded_frames,
    plain_frame_grid,
    pooled_grid,
    segmented_grid,
    shaped_frame_grid,
    shared_area_grid,
    soft_tokens,
    tubelets,
    volume_grid,
    write_slices,
)


def _own_string(settings: Settings, measured: Measured, index: int) -> str:
    """For classes whose ``replace_audio_token`` takes no options."""
    return str(settings.processor.replace_audio_token(measured, index))


def _repeated(settings: Settings, measured: Measured, index: int) -> str:
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


# --------------------------------------------------------------------------------------------------------------------
# How videos become tokens, as rules that the rows of families name.
#
# The options say which keys of the run's ``media`` section the class of video processor has a setting for. Where a
# class does not look at ``max_frames``, ``num_frames`` stands for it: `sampling` thins what the class has chosen.


def _write_tubelets(settings: Settings, measured: Measured, index: int) -> str:
    """The class's rule gets the frames and where they stand in arguments of its own."""
    metadata = measured["video_metadata"][index]
    replace = settings.processor.replace_video_token
    return str(replace(measured, index, num_frames=len(metadata.frames_indices), video_metadata=metadata))


_SIZE = {"video_min_pixels": "size.shortest_edge", "video_max_pixels": "size.longest_edge"}
_FRAME_RATE, _MOST = {"fps": "fps"}, {"max_frames": "max_frames"}
_NUMBER = {"max_frames": "num_frames"}

# qwen2_vl, qwen2_5_vl, exaone4_5: do not sample unless they are told a rate
FRAME_GRID = Rule(measure=frame_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=4)
# qwen3_vl, qwen3_5, lfm3_vl: 2 frames a second unless told
VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _FRAME_RATE | _NUMBER, fold=4)
# glm4v; glm46v chooses its rate itself, by duration
TIMED_VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _FRAME_RATE | _NUMBER, fold=4)
DYNAMIC_VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _NUMBER, fold=4)
# glm5_next
CANVAS_GRID = Rule(measure=canvas_grid, options=_FRAME_RATE | _MOST, fold=4)
# ernie4_5_vl_moe
PLAIN_FRAME_GRID = Rule(measure=plain_frame_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=8)
# video_llama_3
SHARED_AREA_GRID = Rule(measure=shared_area_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=4)
# kimi_k25
CHUNKED_PATCH_GRID = Rule(measure=chunked_patch_grid, options=_FRAME_RATE | _NUMBER, fold=4)
# muse_glimmer, muse_spark
SHAPED_FRAME_GRID = Rule(measure=shaped_frame_grid, options=_FRAME_RATE | _NUMBER, fold=8)
# minimax_m3_vl
SEGMENTED_GRID = Rule(
    measure=segmented_grid,
    options={"video_min_pixels": "min_pixels", "video_max_pixels": "max_pixels"} | _FRAME_RATE | _NUMBER,
    fold=4,
)
# internvl
FIXED_FRAMES = Rule(measure=fixed_frames, options=_FRAME_RATE | _NUMBER, fold=4)
# llava_next_video, llava_onevision, video_llava
STACKED_FRAMES = Rule(measure=fixed_frames, options=_FRAME_RATE | _NUMBER, stacked=True, fold=4)
# smolvlm
PADDED_FRAMES = Rule(measure=padded_frames, options=_FRAME_RATE | _NUMBER, fold=16)
# gemma4
SOFT_TOKENS = Rule(measure=soft_tokens, options=_FRAME_RATE | _NUMBER, fold=9)
# molmo2
POOLED_GRID = Rule(measure=pooled_grid, options=_FRAME_RATE | _NUMBER, fold=9)
# nemotron_h_omni
TUBELETS = Rule(measure=tubelets, replace=_write_tubelets, options=_FRAME_RATE | _NUMBER, fold=8)
# minicpmv4_6, minicpmv4_7
FRAME_SLICES = Rule(measure=frame_slices, replace=write_slices, options={"max_frames": "max_num_frames"}, fold=16)


# --------------------------------------------------------------------------------------------------------------------
# Model inputs along the tokens: T tokens of one sample, from their ids and the outputs for its media.


TokenIds = NDArray[np.int64]


def kinds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: 0 text, 1 image, 2 video, 3 audio, by the processor's own rule (``mm_token_type_ids``)."""
    return np.asarray(processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int64)


def expert_kinds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: the same with the tokens around an item counted in, by which ERNIE 4.5 VL routes to experts."""
    return np.asarray(processor.create_moe_mm_token_type_ids(input_ids[None].tolist())[0], dtype=np.int64)


def seen_images(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T, images, tiles]: which tiles of which pictures a token attends to across (Mllama).

    A picture is seen from its token on up to the next picture's; pictures next to each other are seen together, by what
    the last of them is seen by. ``<image><image>ab<image>c`` -> 1, 1 and 2, 1 and 2, 1 and 2, 3, 3.
    """
    places = np.flatnonzero(input_ids == processor.image_token_id)
    tiles = processor.image_processor.max_image_tiles
    seen = np.zeros((len(input_ids), len(places), tiles), dtype=np.int64)
    if len(places) == 0:
        return seen
    shown = np.asarray(features["aspect_ratio_mask"])[0].sum(axis=-1)
    ends = [*places[1:].tolist(), len(input_ids)]
    for image in range(len(places) - 2, -1, -1):
        if places[image] + 1 == places[image + 1]:
            ends[image] = ends[image + 1]
    for image, (start, end) in enumerate(zip(places, ends, strict=True)):
        seen[start:end, image, : shown[image]] = 1
    return seen
