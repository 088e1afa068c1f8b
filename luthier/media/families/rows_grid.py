"""Families whose pictures are grids of patches, each of its own size; then those that are made for videos."""

from __future__ import annotations

from dataclasses import replace

from luthier.media.families import rules
from luthier.media.families.family import CAT, PAD_CAT, Family, FrameMarks, Modules, PackingSupport, Rule, SharedSlots
from luthier.media.geometry import pictures, videos
from luthier.media.processors.patches import quick_patches

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
