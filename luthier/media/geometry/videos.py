"""What video processors compute of a video's size: grids, frames and chunks, from headers alone.

Every public function is the ``measure`` of a `Rule`: (settings, headers of the videos of one context) -> the entries
that the processor's ``replace_video_token`` reads; it raises `ValueError` for a size that the processor refuses. N
videos, F frames taken, C chunks of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError, RowError
from luthier.media.families import Measured, Settings
from luthier.media.geometry import slices
from luthier.media.geometry.pictures import (
    aim_patches,
    check_shape,
    fill_patches,
    fit_area,
    fit_budget,
    fit_canvas,
    fit_volume,
)
from luthier.media.geometry.tiles import any_resolution, shaped_tokens
from luthier.records import ImageHeader, VideoHeader
from luthier.writing import counted

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata


def sampled_frames(settings: Settings, header: VideoHeader) -> list[int]:
    """The frames that are taken of a video: their numbers in it, in order of time; a number may come twice.

    How many there are is up to the processor's class and its settings ``fps``, ``num_frames``, ``min_frames`` …, and to
    the options of the call: ``fps`` is the rate, ``num_frames`` or ``max_frames`` the most that may be left. A video
    with fewer frames than the class wants is taken whole, and so is one whose frames are ``extracted``. Where a batch
    holds its videos as one array (``Rule.stacked``), the most frames are how many each video gets.
    """
    return [int(index) for index in _indices(settings, header)]


def video_metadata(settings: Settings, header: VideoHeader) -> VideoMetadata:
    """What a video processor keeps of a video of which it took `sampled_frames`.

    ``frames_indices`` is of the class's own type: with a float32 tensor timestamps round differently than with a list.
    """
    from transformers.video_utils import VideoMetadata

    indices: object = _indices(settings, header)
    return VideoMetadata(
        total_num_frames=header.num_frames,
        fps=header.fps,
        width=header.width,
        height=header.height,
        duration=header.seconds,
        frames_indices=indices,
    )


def _indices(settings: Settings, header: VideoHeader) -> Any:
    rate, options = settings.kwargs.get("fps"), settings.kwargs
    indices: Any = list(range(header.num_frames))
    if not header.extracted and (rate is not None or settings["do_sample_frames"]):
        indices = _sample(settings, header, rate)
    limit = options.get("num_frames") or options.get("max_frames")
    if limit is None or len(indices) == limit or (len(indices) < limit and not settings.stacked):
        return indices
    # ``limit`` of ``length`` positions, evenly: 5 of 9 -> 0, 2, 4, 6, 8; 4 of 2 -> 0, 0, 1, 1.
    spread = np.linspace(0, len(indices) - 1, limit).round().astype(np.int64)
    return [indices[place] for place in spread] if isinstance(indices, list) else indices[spread]


def _sample(settings: Settings, header: VideoHeader, rate: float | None) -> object:
    """The indices that the class's ``sample_frames`` gives, called as its ``preprocess`` calls it."""
    from transformers.video_processing_utils import BaseVideoProcessor
    from transformers.video_utils import VideoMetadata

    part, total = settings.part, header.num_frames
    arguments = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
    arguments |= {name: value for name, value in settings.kwargs.items() if name != "num_frames"}
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_OF_SAMPLING}
    if rate is not None:  # most classes take a rate or a number; the number is that of their files
        arguments["num_frames"] = None
    if type(part).sample_frames is BaseVideoProcessor.sample_frames and arguments["num_frames"] is None:
        # The base class prefers the number in its files to the rate of a call, and refuses a rate above the video's.
        rate, arguments["fps"] = arguments["fps"], None
        arguments["num_frames"] = total if rate is None else max(1, int(total / header.fps * rate))
    if (wanted := arguments.get("num_frames")) is not None and wanted > total:
        arguments["num_frames"] = total
    metadata = VideoMetadata(
        total_num_frames=total, fps=header.fps, width=header.width, height=header.height, duration=header.seconds
    )
    try:
        indices = part.sample_frames(metadata=metadata, **arguments)
    except ZeroDivisionError:
        indices = ()
    if len(indices):
        return indices
    # too short for one frame at this rate, or for one pair of frames: the middle, as often as a patch is deep
    return [total // 2] * (arguments.get("temporal_patch_size") or 1)


_NOT_OF_SAMPLING = frozenset({"do_sample_frames", "video_metadata", "return_metadata", "return_tensors", "device"})


# (settings, frames taken, height, width) -> (height, width) that the frames are resized to
FitVideo = Callable[[Settings, int, int, int], tuple[int, int]]


# ------------------------------------------------------------------------------------------- grids of patches


def frame_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Each frame within an area of its own (Qwen2-VL, Qwen2.5-VL, EXAONE 4.5): ``video_grid_thw`` int64[N, 3]."""
    return _grids(settings, headers, _fit_frame, temporal=settings["temporal_patch_size"])


def volume_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """All frames within one volume (GLM-4.1V, GLM-4.6V, Qwen3-VL): ``video_grid_thw`` int64[N, 3]."""
    return _grids(settings, headers, _fit_volume, temporal=settings["temporal_patch_size"])


def ended_rows_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """All frames within one number of tokens, those that end rows among them (Hy4): ``video_grid_thw`` int64[N, 3]."""
    return _grids(settings, headers, _fit_ended_rows, temporal=settings["temporal_patch_size"])


def canvas_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """All frames within one volume, padded and not stretched (GLM-5): ``video_grid_thw`` int64[N, 3]."""
    return _grids(settings, headers, _fit_canvas, temporal=settings["temporal_patch_size"])


def canvas_of_pictures(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Pictures as videos of one temporal patch (GLM-5): ``image_grid_thw`` int64[N, 3]."""
    patch, frames = settings["patch_size"], settings["temporal_patch_size"]
    grids = []
    for header in headers:
        height, width = header.height, header.width
        if settings["do_resize"]:
            height, width = _fit_canvas(settings, frames, height, width)
        grids.append((1, height // patch, width // patch))
    return {"image_grid_thw": _rows(grids)}


def any_resolution_of_pictures(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """As LLaVA-NeXT, whose video class looks for the size of a tile once for every picture (LLaVA-NeXT-Video)."""
    measured = any_resolution(settings, headers)
    return measured | {"pixel_values": [measured["pixel_values"][0]] * len(headers)}


def plain_frame_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Each frame a step of the grid, an odd last one twice (ERNIE 4.5): ``video_grid_thw`` int64[N, 3]."""
    measured = _grids(settings, headers, _fit_plain_frame, temporal=1)
    measured["video_grid_thw"][:, 0] += measured["video_grid_thw"][:, 0] % settings["temporal_patch_size"]
    return measured


def shared_area_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Frames that share one area (VideoLLaMA 3): ``video_grid_thw`` int64[N, 3], and that no token is left out.

    The processor can leave out tokens of frames that hardly change. How many is up to the pixels, which no header
    tells: that raises `ModelError`.
    """
    import torch

    if settings["use_token_compression"]:
        raise ModelError(
            "this processor leaves out video tokens by what is on the frames, so they cannot be counted from a header",
            hint='set "use_token_compression": false in the video processor\'s files, for inference too',
        )
    measured = _grids(settings, headers, _fit_shared_area, temporal=settings["temporal_patch_size"])
    merge = settings["merge_size"]
    tokens = int(measured["video_grid_thw"].prod(-1).sum()) // merge**2
    return measured | {
        "video_merge_sizes": [merge] * len(headers),
        "video_compression_mask": torch.ones(tokens, dtype=torch.bool),
    }


def chunked_patch_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """A grid for each ``temporal_patch_size`` frames (Kimi K2.5): ``video_grid_thw`` int64[C, 3]."""
    patch, temporal = settings["patch_size"], settings["temporal_patch_size"]
    metadata = [video_metadata(settings, header) for header in headers]
    grids, chunks = [], []
    for header, meta in zip(headers, metadata, strict=True):
        height, width = _resized(settings, header, 0, lambda own, _, *size: fit_budget(own, *size))
        left = range(len(meta.frames_indices), 0, -temporal)
        grids += [(min(temporal, frames), height // patch, width // patch) for frames in left]
        chunks.append(len(left))
    return {"video_grid_thw": _rows(grids), "num_chunks_per_video": chunks, "video_metadata": metadata}


def shaped_frame_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Each frame within a budget of tokens, near its own shape (Muse): ``video_grid_thw`` int64[N, 3]."""
    return _grids(settings, headers, _fit_shape, temporal=settings["temporal_patch_size"])


def segmented_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Grids of at most ``vision_segment_max_frames`` temporal patches (MiniMax-M3): ``video_grid_thw`` int64[C, 3]."""
    whole = _grids(settings, headers, _fit_pixels, temporal=settings["temporal_patch_size"])
    limit = settings["vision_segment_max_frames"]
    grids, chunks = [], []
    for time, height, width in whole["video_grid_thw"].tolist():
        longest = limit or time
        parts = [(min(longest, time - start), height, width) for start in range(0, time, longest)]
        grids += parts
        chunks.append(len(parts))
    return whole | {"video_grid_thw": _rows(grids), "num_chunks_per_video": chunks}


# ------------------------------------------------------------------------------------ frames of a size that is given


def fixed_frames(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Frames of the size in the settings (LLaVA, InternVL): ``pixel_values_videos``, N of [F, 3, H, W] with no data."""
    size = settings["crop_size"] if settings["do_center_crop"] else settings["size"]
    height, width = size["height"], size["width"]
    return {
        "pixel_values_videos": [
            np.broadcast_to(np.float32(0), (_count(settings, header), 3, height, width)) for header in headers
        ]
    }


def padded_frames(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Square frames, as many for each video as the longest has (SmolVLM): ``pixel_values`` [N, F, 3, S, S]."""
    metadata = [video_metadata(settings, header) for header in headers]
    side = settings["max_image_size"]["longest_edge"]
    frames = max(len(meta.frames_indices) for meta in metadata)
    pixels = np.broadcast_to(np.float32(0), (len(headers), frames, 3, side, side))
    return {"pixel_values": pixels, "video_metadata": metadata}


def soft_tokens(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Frames of as many tokens as their shape allows (Gemma 4): ``num_soft_tokens_per_video`` [N]."""
    patch, pooling = settings["patch_size"], settings["pooling_kernel_size"]
    tokens = []
    for header in headers:
        height, width = _resized(settings, header, 0, _fill_patches)
        tokens.append((height // patch) * (width // patch) // pooling**2)
    metadata = [video_metadata(settings, header) for header in headers]
    return {"num_soft_tokens_per_video": tokens, "video_metadata": metadata}


def pooled_grid(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Square frames whose patches are pooled (Molmo 2): ``video_grids`` int64[N, 3] of (F, rows, columns).

    Raises as `_check_one`.
    """
    _check_one(headers)
    metadata = [video_metadata(settings, header) for header in headers]
    patches = settings["size"]["height"] // settings["patch_size"]
    rows, columns = (-(-patches // pooling) for pooling in settings["pooling_size"])
    grids = _rows([(len(meta.frames_indices), rows, columns) for meta in metadata])
    return {"video_grids": grids, "video_metadata": metadata}


def _check_one(headers: Sequence[VideoHeader]) -> None:
    """Raise `RowError` under ``media_count`` for a context with several videos."""
    if len(headers) > 1:
        found = counted(len(headers), "video")
        raise RowError("media_count", f"{found} in one conversation, and this model's processor takes one")


def tubelets(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """Frames of about ``video_target_num_patches`` patches (Nemotron Omni): ``num_tokens`` of a frame [N], and what
    transformers takes them from as of 5.24: ``num_frames`` [N], and pixels of which only the shape is read.

    Raises as `_check_one`: the processor would make one of two videos.
    """
    _check_one(headers)
    downsampling, patch = round(1.0 / settings["downsample_ratio"]), settings["patch_size"]
    metadata = [video_metadata(settings, header) for header in headers]
    num_frames = [len(meta.frames_indices) for meta in metadata]
    measured: Measured = {"num_tokens": [], "num_frames": num_frames, "video_metadata": metadata}
    for header, frames in zip(headers, num_frames, strict=True):
        rows, columns = aim_patches(
            header.height,
            header.width,
            target=settings["video_target_num_patches"],
            multiple=downsampling,
            keep_shape=settings["video_maintain_aspect_ratio"],
        )
        measured["num_tokens"].append(rows * columns // downsampling**2)
        groups = -(-frames // settings.processor.video_temporal_patch_dim)
        measured["pixel_values_videos"] = np.broadcast_to(np.uint8(0), (1, groups, 3, rows * patch, columns * patch))
    return measured


# ------------------------------------------------------------------------------------------------ how frames are fitted


def _fit_frame(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    size, factor = settings["size"], settings["patch_size"] * settings["merge_size"]
    limit = size["longest_edge"]
    if settings["cap_pixels_per_frame"]:
        pixels = int(settings["max_video_tokens"] * factor * factor * 0.9)
        share = pixels * settings["temporal_patch_size"] // frames
        limit = max(min(limit, share), int(size["shortest_edge"] * 1.05))
    return fit_area(height, width, factor=factor, min_pixels=size["shortest_edge"], max_pixels=limit)


def _fit_volume(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    size, factor = settings["size"], settings["patch_size"] * settings["merge_size"]
    limit = size["longest_edge"]
    if hasattr(settings.part, "cap_pixels_per_frame") and settings["cap_pixels_per_frame"]:
        of_frame = min(settings["max_video_tokens"] * factor * factor, limit // frames)
        limit = max(of_frame, int(size["shortest_edge"] * 1.05)) * frames
    temporal = settings["temporal_patch_size"]
    shortest = size["shortest_edge"]
    return fit_volume(frames, height, width, factor=factor, temporal=temporal, min_pixels=shortest, max_pixels=limit)


def _fit_ended_rows(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    """Never scaled up; the most rows for which as many columns as their shape asks for are within both limits.

    A frame of R rows and C columns of squares costs R * (C + 1) tokens.
    """
    check_shape(height, width)
    side = settings["patch_size"] * settings["merge_size"]
    whole, single = settings["size"]["longest_edge"] // side**2, settings["max_image_size"]["longest_edge"] // side**2
    for rows in range(max(1, height // side), 0, -1):
        least = max(1, width * rows // height) if rows > 1 else 1
        widest = max(1, math.ceil(width * (rows + 1) / height) - 1)
        columns = min(widest, max(1, width // side), whole // (frames * rows) - 1, single // rows)
        if columns >= least:
            return rows * side, columns * side
    return side, side


def _fit_canvas(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"] * settings["patch_expand_factor"]
    temporal = settings["temporal_patch_size"]
    pixels_per_token = temporal * factor**2
    return fit_canvas(
        frames,
        height,
        width,
        factor=factor,
        temporal=temporal,
        min_pixels=settings["min_image_tokens"] * pixels_per_token,
        max_pixels=settings["max_image_tokens"] * pixels_per_token,
    )


def _fit_plain_frame(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    size, factor = settings["size"], settings["patch_size"] * settings["merge_size"]
    return fit_area(height, width, factor=factor, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def _fit_shared_area(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    size, factor = settings["size"], settings["patch_size"] * settings["merge_size"]
    limit = size["longest_edge"] // frames
    return fit_area(height, width, factor=factor, min_pixels=size["shortest_edge"], max_pixels=limit)


def _fit_pixels(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"]
    return fit_area(height, width, factor=factor, min_pixels=settings["min_pixels"], max_pixels=settings["max_pixels"])


def _fit_shape(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    side = settings["patch_size"] * settings["merge_size"]
    rows, columns = shaped_tokens(height, width, side=side, most=settings["max_video_frame_tokens"])
    return rows * side, columns * side


def _fill_patches(settings: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    pooling = settings["pooling_kernel_size"]
    limit = settings["max_soft_tokens"] * pooling**2
    return fill_patches(height, width, patch=settings["patch_size"], max_patches=limit, multiple=pooling)


# ------------------------------------------------------------------------------------------------------------- parts


def _grids(settings: Settings, headers: Sequence[VideoHeader], fit: FitVideo, *, temporal: int) -> Measured:
    patch = settings["patch_size"]
    metadata = [video_metadata(settings, header) for header in headers]
    grids = []
    for header, meta in zip(headers, metadata, strict=True):
        frames = len(meta.frames_indices)
        height, width = _resized(settings, header, frames, fit)
        grids.append((-(-frames // temporal), height // patch, width // patch))
    return {"video_grid_thw": _rows(grids), "video_metadata": metadata}


def _resized(settings: Settings, header: VideoHeader, frames: int, fit: FitVideo) -> tuple[int, int]:
    """Raises `ValueError` if the processor refuses the size."""
    if not settings["do_resize"]:
        factor = settings["patch_size"] * settings["merge_size"]
        if header.height % factor or header.width % factor:
            raise ValueError(f"the processor does not resize videos, and wants sides in multiples of {factor}")
        return header.height, header.width
    return fit(settings, frames, header.height, header.width)


def _count(settings: Settings, header: VideoHeader) -> int:
    return len(sampled_frames(settings, header))


def _rows(grids: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
    return np.array(grids, dtype=np.int64).reshape(-1, 3)


# --------------------------------------------------------------------------------------------------------------------
# Videos whose frames are cut into slices (MiniCPM-V): sizes from headers alone.
#
# F frames, P pictures: each frame and its slices.


def frame_slices(settings: Settings, headers: Sequence[VideoHeader]) -> Measured:
    """A frame whole and, if it is large, in slices: ``target_sizes_videos`` int64[P, 2] in patches, ``grids_videos``
    int64[F, 2] of (rows, columns), ``num_frames_per_video`` [N].

    Raises `ModelError` where frames are joined to one picture a second (``stack_frames``).
    """
    if settings["stack_frames"] != 1:
        raise ModelError(
            f"this video processor joins {counted(settings['stack_frames'], 'frame')} to one image, "
            f"which is not counted",
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


def write_slices(settings: Settings, measured: Measured, index: int) -> str:
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
