"""Families whose code is in the model's own folder: rows from the interface that their authors published."""

from __future__ import annotations

from luthier.media import expansion, geometry
from luthier.media.families import CAT, Family, Modules, Rule

ROWS = (
    Family(
        name="kimi_vl",
        processors=("KimiVLProcessor",),
        model_types=("kimi_vl",),
        image=Rule(measure=geometry.limited_grid, replace=expansion.merged_slots, fold=4),
        batching={"pixel_values": CAT, "image_grid_hws": CAT},
        modules=Modules(tower=("vision_tower",), projector=("multi_modal_projector",), language=("language_model",)),
    ),
    Family(
        name="llava_onevision1_5",
        processors=("Qwen2_5_VLProcessor",),
        model_types=("llavaonevision1_5",),
        image=Rule(
            measure=geometry.area_grid,
            options={"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"},
            fold=4,
        ),
        batching={"pixel_values": CAT, "image_grid_thw": CAT},
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger",)),
    ),
)
