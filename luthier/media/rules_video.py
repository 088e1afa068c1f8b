"""How videos become tokens, as rules that the rows of families name.

The options say which keys of the run's ``media`` section the class of video processor has a setting for. Where a class
does not look at ``max_frames``, ``num_frames`` stands for it: `sampling` thins what the class has chosen.
"""

from __future__ import annotations

from typing import Any

from luthier.media.families import Rule, Settings
from luthier.media.geometry_video import (
    canvas_grid,
    chunked_patch_grid,
    fixed_frames,
    frame_grid,
    padded_frames,
    plain_frame_grid,
    pooled_grid,
    segmented_grid,
    shaped_frame_grid,
    shared_area_grid,
    soft_tokens,
    tubelets,
    volume_grid,
)
from luthier.media.geometry_video_slices import frame_slices, write_slices


def _write_tubelets(settings: Settings, measured: dict[str, Any], index: int) -> str:
    """The class's rule gets the frames and where they stand in arguments of its own."""
    metadata = measured["video_metadata"][index]
    replace = settings.processor.replace_video_token
    return str(replace(measured, index, num_frames=len(metadata.frames_indices), video_metadata=metadata))


_SIZE = {"video_min_pixels": "size.shortest_edge", "video_max_pixels": "size.longest_edge"}
_RATE, _MOST = {"fps": "fps"}, {"max_frames": "max_frames"}
_NUMBER = {"max_frames": "num_frames"}

# qwen2_vl, qwen2_5_vl, exaone4_5: do not sample unless they are told a rate
FRAME_GRID = Rule(measure=frame_grid, options=_SIZE | _RATE | _MOST, fold=4)
# qwen3_vl, qwen3_5, lfm3_vl: 2 frames a second unless told
VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _RATE | _NUMBER, fold=4)
# glm4v; glm46v chooses its rate itself, by duration
TIMED_VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _RATE | _NUMBER, fold=4)
DYNAMIC_VOLUME_GRID = Rule(measure=volume_grid, options=_SIZE | _NUMBER, fold=4)
# glm5_next
CANVAS_GRID = Rule(measure=canvas_grid, options=_RATE | _MOST, fold=4)
# ernie4_5_vl_moe
PLAIN_FRAME_GRID = Rule(measure=plain_frame_grid, options=_SIZE | _RATE | _MOST, fold=8)
# video_llama_3
SHARED_AREA_GRID = Rule(measure=shared_area_grid, options=_SIZE | _RATE | _MOST, fold=4)
# kimi_k25
CHUNKED_PATCH_GRID = Rule(measure=chunked_patch_grid, options=_RATE | _NUMBER, fold=4)
# muse_glimmer, muse_spark
SHAPED_FRAME_GRID = Rule(measure=shaped_frame_grid, options=_RATE | _NUMBER, fold=8)
# minimax_m3_vl
SEGMENTED_GRID = Rule(
    measure=segmented_grid,
    options={"video_min_pixels": "min_pixels", "video_max_pixels": "max_pixels"} | _RATE | _NUMBER,
    fold=4,
)
# internvl
FIXED_FRAMES = Rule(measure=fixed_frames, options=_RATE | _NUMBER, fold=4)
# llava_next_video, llava_onevision, video_llava
STACKED_FRAMES = Rule(measure=fixed_frames, options=_RATE | _NUMBER, stacked=True, fold=4)
# smolvlm
PADDED_FRAMES = Rule(measure=padded_frames, options=_RATE | _NUMBER, fold=16)
# gemma4
SOFT_TOKENS = Rule(measure=soft_tokens, options=_RATE | _NUMBER, fold=9)
# molmo2
POOLED_GRID = Rule(measure=pooled_grid, options=_RATE | _NUMBER, fold=9)
# nemotron_h_omni
TUBELETS = Rule(measure=tubelets, replace=_write_tubelets, options=_RATE | _NUMBER, fold=8)
# minicpmv4_6, minicpmv4_7
FRAME_SLICES = Rule(measure=frame_slices, replace=write_slices, options={"max_frames": "max_num_frames"}, fold=16)
