"""Families of videos that are not among the others."""

from __future__ import annotations

from dataclasses import replace

from luthier.media import geometry, geometry_video, rules_video, token_inputs
from luthier.media.families import CAT, PAD_CAT, Family, Modules, Packing, Rule

AREA = {"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"}
PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))

ROWS = (
    Family(
        name="llava_next_video",
        processors=("LlavaNextVideoProcessor",),
        model_types=("llava_next_video",),
        image=Rule(measure=geometry_video.any_resolution_of_pictures),
        video=rules_video.STACKED_FRAMES,
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT, "pixel_values_videos": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="video_llava",
        processors=("VideoLlavaProcessor",),
        model_types=("video_llava",),
        image=Rule(measure=geometry.square),
        video=rules_video.STACKED_FRAMES,
        batching={"pixel_values_images": CAT, "pixel_values": CAT, "pixel_values_videos": CAT},
        modules=Modules(tower=("model.image_tower", "model.video_tower"), projector=("model.multi_modal_projector",)),
    ),
    Family(
        name="glm5_next",
        processors=("Glm5NextProcessor",),
        model_types=("glm5_next",),
        image=Rule(measure=geometry_video.canvas_of_pictures, fold=4),
        video=rules_video.CANVAS_GRID,
        batching={"pixel_values": CAT, "image_grid_thw": CAT, "pixel_values_videos": CAT, "video_grid_thw": CAT},
        token_inputs={"mm_token_type_ids": token_inputs.kinds},
        packing=Packing.PADDED,
        reason="its linear attention carries a state along the row, and its indexer chooses among all keys of it",
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger",)),
    ),
    Family(
        name="cosmos3_edge",
        processors=("Cosmos3EdgeProcessor",),
        model_types=("cosmos3_edge",),
        image=Rule(measure=geometry.volume_grid, options=AREA, fold=4),
        video=replace(rules_video.VOLUME_GRID, swallows=("vision_start_token", "vision_end_token")),
        batching={"pixel_values": CAT, "image_grid_thw": CAT, "pixel_values_videos": CAT, "video_grid_thw": CAT},
        token_inputs={"mm_token_type_ids": token_inputs.kinds},
        positions="grid_frames",
        modules=Modules(tower=("model.visual",), projector=("model.projector",)),
    ),
)
