"""Videos whose frames are cut into slices (MiniCPM-V): sizes from headers alone.

F frames, P pictures: each frame and its slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from luthier.errors import ModelError
from luthier.media.families import Settings
from luthier.media.sampling import sampled_frames
from luthier.media.tiling import slices
from luthier.records import VideoHeader


def frame_slices(settings: Settings, headers: Sequence[VideoHeader]) -> dict[str, Any]:
    """A frame whole and, if it is large, in slices: ``target_sizes_videos`` int64[P, 2] in patches, ``grids_videos``
    int64[F, 2] of (rows, columns), ``num_frames_per_video`` [N].

    Raises `ModelError` where frames are joined to one picture a second (``stack_frames``).
    """
    if settings["stack_frames"] != 1:
        raise ModelError(
            f"this video processor joins {settings['stack_frames']} frames to one picture, which is not counted",
            hint='set "stack_frames": 1 in the video processor\'s files',
        )
    sizes: list[tuple[int, int]] = []
    grids: list[tuple[int, int]] = []
    counts = []
    for header in headers:
        frames = len(sampled_frames(settings, header))
        grid, of_frame = _sizes_of_frame(settings, header.height, header.width)
        sizes += of_frame * frames
        grids += [grid] * frames
        counts.append(frames)
    return {
        "target_sizes_videos": np.array(sizes, dtype=np.int64).reshape(-1, 2),
        "grids_videos": np.array(grids, dtype=np.int64).reshape(-1, 2),
        "num_frames_per_video": counts,
    }


def write_slices(settings: Settings, measured: dict[str, Any], index: int) -> str:
    """The processor's string for one video; without the number that it may get in its context."""
    divisor = _MERGED[settings["downsample_mode"]] ** 2
    return str(settings.processor.replace_video_token(measured, index, video_token_divisor=divisor))


# How many patches of a side become one token, by the mode of the connector.
_MERGED = {"4x": 2, "16x": 4}


def _sizes_of_frame(settings: Settings, height: int, width: int) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    patch, resolution = settings["patch_size"], settings["scale_resolution"]
    if not settings["do_resize"]:
        return (0, 0), [(height // patch, width // patch)]
    multiple = patch * _MERGED[settings["downsample_mode"]]
    grid = None
    if settings["slice_mode"]:
        grid = slices(height, width, max_slices=settings["max_slice_nums"], resolution=resolution)
    whole = _best_size(height, width, resolution, multiple, upscale=grid is None)
    sizes = [(whole[0] // patch, whole[1] // patch)]
    if grid is None:
        return (0, 0), sizes
    rows, columns = grid
    part = _round_to(height, rows) / rows, _round_to(width, columns) / columns
    slice_height, slice_width = _best_size(*part, resolution, multiple, upscale=True)
    return grid, sizes + [(slice_height // patch, slice_width // patch)] * (rows * columns)


def _best_size(height: float, width: float, resolution: int, multiple: int, *, upscale: bool) -> tuple[int, int]:
    if height * width > resolution * resolution or upscale:
        shape = width / height
        height = int(resolution / math.sqrt(shape))
        width = int(height * shape)
    return _round_to(height, multiple), _round_to(width, multiple)


def _round_to(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)
