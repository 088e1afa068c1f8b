"""Families of videos that are not among the others."""

from __future__ import annotations

from dataclasses import replace

from luthier.media.families import rules
from luthier.media.families.family import CAT, PAD_CAT, Family, Modules, PackingSupport, Rule
from luthier.media.geometry import pictures, videos

AREA = {"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"}
PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))

ROWS = (
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
