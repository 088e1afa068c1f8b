"""Families whose pictures are grids of patches, each of its own size; then those that are made for videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.media.families import (
    CAT,
    PAD_CAT,
    Family,
    FrameMarks,
    Measured,
    Modules,
    PackingSupport,
    Rule,
    Settings,
    SharedSlots,
    rules,
)
from luthier.media.geometry import pictures, videos
from luthier.media.geometry.pictures import area_grid
from luthier.media.processors import four_a_slot
from luthier.records import ImageHeader

if TYPE_CHECKING:
    import PIL.Image
    import torch

# ---- Patches of pictures in fewer passes than the processor takes, and bit for bit the same.
#
# A picture stays as it was decoded (pixel by pixel, not channel by channel), which is what torch resizes fastest, is
# cut while its values are bytes, and is normalised once for both halves of a patch (`quick_patches`). With other
# settings than those for which this is the same, the processor does it.

# The class whose arithmetic this is; heirs and look-alikes may differ.
SAME_AS = "Qwen2VLImageProcessor"
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def quick_patches(settings: Settings, texts: Sequence[Sequence[PIL.Image.Image]]) -> list[Measured] | None:
    """For the N pictures of each text ``pixel_values`` float32[P, C * depth * patch * patch] and ``image_grid_thw``
    int64[N, 3]; None where these settings are not the ones that this is proven for.

    The patches of all texts lie one behind the other in one piece of memory, so that batching them copies nothing.
    """
    from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]

    if type(settings.part).__name__ != SAME_AS or not all(settings[step] for step in STEPS):
        return None
    if settings["resample"] not in (3, InterpolationMode.BICUBIC):  # 3: as PIL numbers it
        return None
    grids = [
        area_grid(settings, [ImageHeader(width=picture.width, height=picture.height) for picture in pictures])
        for pictures in texts
    ]
    num_patches = [int(grid["image_grid_thw"].prod(axis=1).sum()) for grid in grids]
    values_PV = np.empty(
        (sum(num_patches), 3 * settings["temporal_patch_size"] * settings["patch_size"] ** 2), np.float32
    )
    outputs = []
    for texts_pictures, grid, end, num in zip(texts, grids, np.cumsum(num_patches), num_patches, strict=True):
        own_PV = values_PV[end - num : end]
        _write(settings, texts_pictures, grid["image_grid_thw"], own_PV)
        outputs.append({"pixel_values": own_PV, **grid})
    return outputs


def _write(
    settings: Settings,
    pictures: Sequence[PIL.Image.Image],
    grids_N3: NDArray[np.int64],
    values_PV: NDArray[np.float32],
) -> None:
    from luthier.kernels import write_patches

    mean, std, _ = settings.part._fuse_mean_std_and_rescale_factor(
        do_normalize=True,
        image_mean=settings["image_mean"],
        image_std=settings["image_std"],
        do_rescale=True,
        rescale_factor=settings["rescale_factor"],
    )
    start = 0
    for picture, grid in zip(pictures, grids_N3, strict=True):
        end = start + int(grid.prod())
        write_patches(
            _fitted(settings, picture, grid),
            mean.numpy(),
            std.numpy(),
            values_PV[start:end],
            patch=settings["patch_size"],
            merge=settings["merge_size"],
        )
        start = end


def _fitted(settings: Settings, picture: PIL.Image.Image, grid: NDArray[np.int64]) -> NDArray[np.uint8]:
    """uint8[H, W, 3 or 4]: the picture resized to its grid of patches; a fourth channel means nothing."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional  # type: ignore[import-untyped]

    pixels_HWC = _pixels(picture if picture.mode == "RGB" else picture.convert("RGB"))
    size = [int(side) * settings["patch_size"] for side in grid[1:]]
    if list(pixels_HWC.shape[:2]) == size:
        return np.asarray(pixels_HWC.numpy())
    pixels_1CHW = pixels_HWC.permute(2, 0, 1)[None]
    resized = functional.resize(pixels_1CHW, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return np.asarray(resized[0].permute(1, 2, 0).numpy())


def _pixels(picture: PIL.Image.Image) -> torch.Tensor:
    """uint8[H, W, 4], the memory of an RGB picture itself, which has a byte to spare for each pixel; or a copy,
    [H, W, 3], where it lies in several pieces (from some four million pixels on) or Pillow is older than 11.2.
    """
    import pyarrow
    import torch
    from torch.utils.dlpack import from_dlpack

    if hasattr(picture, "__arrow_c_array__"):
        try:
            memory = pyarrow.array(picture)
        except ValueError:  # in pieces
            pass
        else:
            return from_dlpack(memory.flatten()).view(picture.height, picture.width, -1)
    return torch.from_numpy(np.array(picture))


# ---- The rows

# What the caps of a run's `media` section are called by processors that limit the area of a picture.
AREA = {"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"}
# Qwen2-VL's own image processor, which many others use.
QWEN = Rule(measure=pictures.area_grid, options=AREA, quick=quick_patches, fold=4)
VISUAL = Modules(tower=("model.visual",), projector=("model.visual.merger",))
IMAGES = {"pixel_values": CAT, "image_grid_thw": CAT}
FRAMES = {**IMAGES, "pixel_values_videos": CAT, "video_grid_thw": CAT}
FRAMES_AS_PICTURES = SharedSlots(
    pictures=("pixel_values", "image_grid_thw"),
    videos=("pixel_values_videos", "video_grid_thw"),
    frames=FrameMarks.TYPES,
)
KINDS = {"mm_token_type_ids": rules.kinds}
# Qwen3VLProcessor writes each frame with marks of its own, and leaves those that the chat template writes around the
# video; vLLM takes the latter away (vllm-project/vllm#46817, open in June 2026).
QWEN_VIDEO = replace(rules.VOLUME_GRID, vllm_drops=("vision_start_token", "vision_end_token"))

ROWS = (
    Family(
        name="qwen2_vl",
        processors=("Qwen2VLProcessor",),
        model_types=("qwen2_vl",),
        image=QWEN,
        video=rules.FRAME_GRID,
        batching=FRAMES,
        token_inputs=KINDS,
        positions="grid",
        modules=VISUAL,
    ),
    Family(
        name="qwen2_5_vl",
        processors=("Qwen2_5_VLProcessor",),
        model_types=("qwen2_5_vl",),
        image=QWEN,
        video=rules.FRAME_GRID,
        batching={**FRAMES, "second_per_grid_ts": CAT},
        token_inputs=KINDS,
        positions="grid_seconds",
        modules=VISUAL,
    ),
    Family(
        name="qwen3_vl",
        processors=("Qwen3VLProcessor",),
        model_types=("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni"),
        image=QWEN,
        video=QWEN_VIDEO,
        batching=FRAMES,
        token_inputs=KINDS,
        positions="grid_frames",
        modules=Modules(
            tower=("model.visual",), projector=("model.visual.merger", "model.visual.deepstack_merger_list")
        ),
    ),
    Family(
        name="qwen3_5",
        processors=("Qwen3VLProcessor",),
        model_types=("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        image=QWEN,
        video=QWEN_VIDEO,
        batching=FRAMES,
        token_inputs=KINDS,
        positions="grid_frames",
        modules=VISUAL,
    ),
    Family(
        name="glm4v",
        processors=("Glm4vProcessor",),
        model_types=("glm4v", "glm4v_moe"),
        image=Rule(measure=pictures.volume_grid, options=AREA, fold=4),
        video=rules.TIMED_VOLUME_GRID,
        batching=FRAMES,
        shared_slots=FRAMES_AS_PICTURES,
        token_inputs=KINDS,
        positions="grid_frames",
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger", "model.visual.downsample")),
    ),
    Family(
        name="glm46v",
        processors=("Glm46VProcessor",),
        model_types=("glm46v", "glm_ocr"),
        image=Rule(measure=pictures.volume_grid, options=AREA, fold=4),
        video=rules.DYNAMIC_VOLUME_GRID,
        batching=FRAMES,
        shared_slots=FRAMES_AS_PICTURES,
        token_inputs=KINDS,
        positions="grid_frames",
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger", "model.visual.downsample")),
    ),
    Family(
        name="ernie4_5_vl_moe",
        processors=("Ernie4_5_VLMoeProcessor",),
        model_types=("ernie4_5_vl_moe",),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=rules.PLAIN_FRAME_GRID,
        batching=FRAMES,
        token_inputs={**KINDS, "moe_mm_token_type_ids": rules.expert_kinds},
        positions="grid_merged_time",
        modules=Modules(tower=("model.vision_tower",), projector=("model.resampler_model",)),
    ),
    Family(
        name="paddleocr_vl",
        processors=("PaddleOCRVLProcessor",),
        model_types=("paddleocr_vl",),
        image=Rule(measure=pictures.widened_grid, options=AREA, fold=4),
        batching=IMAGES,
        token_inputs=KINDS,
        positions="grid",
        modules=Modules(tower=("model.visual",), projector=("model.projector",)),
    ),
    Family(
        name="hunyuan_vl",
        processors=("HunYuanVLProcessor",),
        model_types=("hunyuan_vl",),
        image=Rule(measure=pictures.area_grid, options=AREA, around=("image_start_token", "image_end_token"), fold=4),
        batching=IMAGES,
        token_inputs=KINDS,
        positions="indexed",
        undrawn="its class gives pictures other positions when it generates than in its own forward pass",
        modules=Modules(tower=("model.vision_tower",), projector=("model.vision_tower.perceive",)),
    ),
    Family(
        name="hy_v4_vl",
        processors=("HYV4VLProcessor",),
        model_types=("hy_v4_vl",),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=rules.ENDED_ROWS_GRID,
        batching=FRAMES,
        token_inputs=KINDS,
        positions="grid_row_ends",
        packing=PackingSupport.PADDED,
        reason="its sparse attention chooses among the tokens of a row, and knows no segments",
        modules=Modules(tower=("model.vision_tower",), projector=("model.vision_tower.perceive",)),
    ),
    Family(
        name="video_llama_3",
        processors=("VideoLlama3Processor",),
        model_types=("video_llama_3",),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=rules.SHARED_AREA_GRID,
        batching={**FRAMES, "image_merge_sizes": CAT, "video_merge_sizes": CAT, "video_compression_mask": CAT},
        modules=Modules(tower=("model.vision_model",), projector=("model.projector",)),
    ),
    Family(
        name="kimi_k25",
        processors=("Kimi_K25Processor",),
        model_types=("kimi_k25",),
        image=Rule(measure=pictures.budget_grid, fold=4),
        video=rules.CHUNKED_PATCH_GRID,
        merges_frames=True,
        batching=FRAMES,
        modules=Modules(tower=("model.vision_tower",), projector=("model.mm_projector",)),
    ),
    Family(
        name="exaone4_5",
        processors=("Exaone4_5_Processor",),
        model_types=("exaone4_5",),
        image=QWEN,
        video=rules.FRAME_GRID,
        batching=FRAMES,
        modules=VISUAL,
    ),
    Family(
        name="minimax_m3_vl",
        processors=("MiniMaxM3VLProcessor",),
        model_types=("minimax_m3_vl",),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=rules.SEGMENTED_GRID,
        batching=FRAMES,
        packing=PackingSupport.PADDED,
        reason="its sparse attention chooses blocks of tokens, which know no segments",
        undrawn="its attention chooses blocks that begin with what fills a batch up, so answers depend on their batch",
        modules=Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",)),
    ),
    Family(
        name="lfm3_vl",
        processors=("Lfm3VlProcessor",),
        model_types=("lfm3_vl",),
        image=QWEN,
        video=rules.VOLUME_GRID,
        batching=FRAMES,
        modules=Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",)),
    ),
    Family(
        name="cohere_compass",
        processors=("CohereCompassProcessor",),
        model_types=("cohere_compass",),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=rules.VOLUME_GRID,
        batching=FRAMES,
        token_inputs=KINDS,
        positions="grid_frames",
        modules=Modules(
            tower=("model.visual",), projector=("model.visual.merger", "model.visual.deepstack_merger_list")
        ),
    ),
    Family(
        name="lighton_ocr",
        processors=("LightOnOcrProcessor",),
        model_types=("lighton_ocr",),
        image=Rule(measure=pictures.own_patch_rows, fold=4),
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=Modules(tower=("model.vision_encoder",), projector=("model.vision_projection",)),
    ),
    Family(
        name="youtu_vl",
        processors=("YoutuVLProcessor",),
        model_types=("youtu_vl",),
        image=Rule(measure=pictures.stepped_grid, replace=four_a_slot, fold=4),
        batching={"pixel_values": CAT, "spatial_shapes": CAT},
        call=rules.picture_by_picture,
        pictures_apart="siglip2",
        older_code=True,
        tower_attention=("eager", "flash_attention_2"),
        modules=Modules(tower=("siglip2",), projector=("merger",), language=("model", "lm_head")),
    ),
    Family(
        name="pixtral",
        processors=("PixtralProcessor",),
        model_types=("llava", "pixtral", "mistral3", "mistral4", "mistral_large4"),
        image=Rule(measure=pictures.patch_rows, fold=4),
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",)),
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Families of videos that are not among the others.


PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))

VIDEO_ROWS = (
    Family(
        name="llava_next_video",
        processors=("LlavaNextVideoProcessor",),
        model_types=("llava_next_video",),
        image=Rule(measure=videos.any_resolution_of_pictures),
        video=rules.STACKED_FRAMES,
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT, "pixel_values_videos": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="video_llava",
        processors=("VideoLlavaProcessor",),
        model_types=("video_llava",),
        image=Rule(measure=pictures.square),
        video=rules.STACKED_FRAMES,
        batching={"pixel_values_images": CAT, "pixel_values": CAT, "pixel_values_videos": CAT},
        modules=Modules(tower=("model.image_tower", "model.video_tower"), projector=("model.multi_modal_projector",)),
    ),
    Family(
        name="glm5_next",
        processors=("Glm5NextProcessor",),
        model_types=("glm5_next",),
        image=Rule(measure=videos.canvas_of_pictures, fold=4),
        video=rules.CANVAS_GRID,
        batching={"pixel_values": CAT, "image_grid_thw": CAT, "pixel_values_videos": CAT, "video_grid_thw": CAT},
        token_inputs={"mm_token_type_ids": rules.kinds},
        packing=PackingSupport.PADDED,
        reason="its linear attention carries a state along the row, and its indexer chooses among all keys of it",
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger",)),
    ),
    Family(
        name="cosmos3_edge",
        processors=("Cosmos3EdgeProcessor",),
        model_types=("cosmos3_edge",),
        image=Rule(measure=pictures.volume_grid, options=AREA, fold=4),
        video=replace(rules.VOLUME_GRID, swallows=("vision_start_token", "vision_end_token")),
        batching={"pixel_values": CAT, "image_grid_thw": CAT, "pixel_values_videos": CAT, "video_grid_thw": CAT},
        token_inputs={"mm_token_type_ids": rules.kinds},
        positions="grid_frames",
        modules=Modules(tower=("model.visual",), projector=("model.projector",)),
    ),
)
