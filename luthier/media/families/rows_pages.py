"""Families that read pages: charts, scans, documents."""

from __future__ import annotations

from luthier.media.families import odd_calls, rules
from luthier.media.families.family import CAT, CAT_LAST, STACK, Family, Modules, Rule
from luthier.media.geometry import pages
from luthier.media.processors import expansion

PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
CROP = {"crop_to_patches": "crop_to_patches"}

ROWS = (
    Family(
        name="got_ocr2",
        processors=("GotOcr2Processor",),
        model_types=("got_ocr2",),
        image=Rule(
            measure=pages.pages,
            replace=expansion.paged,
            options=CROP,
            around=("img_start_token", "img_end_token"),
            fold=16,
        ),
        call=odd_calls.flat_pictures,
        batching={"pixel_values": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="granite_docling",
        processors=("GraniteDoclingProcessor",),
        model_types=("granite_docling",),
        image=Rule(measure=pages.page_tiles, options=CROP, fold=16),
        batching={"pixel_values": STACK, "pixel_attention_mask": STACK},
        dropped=("rows", "cols"),
        modules=Modules(
            tower=("model.vision_model",),
            projector=("model.vision_model.connector",),
            language=("model.text_model", "lm_head"),
        ),
    ),
    Family(
        name="minicpm_ocr",
        processors=("MiniCPMOcrProcessor",),
        model_types=("minicpm_ocr",),
        image=Rule(measure=pages.page_slices, replace=expansion.sliced, fold=16),
        video=rules.FRAME_SLICES,
        number=expansion.numbered,
        batching={
            "pixel_values": CAT_LAST,
            "target_sizes": CAT,
            "pixel_values_videos": CAT_LAST,
            "target_sizes_videos": CAT,
        },
        modules=Modules(tower=("model.vision_tower",), projector=("model.merger",)),
    ),
    Family(
        name="fuyu",
        processors=("FuyuProcessor",),
        model_types=("fuyu",),
        image=Rule(measure=pages.shown_rows, replace=expansion.lined),
        call=odd_calls.pictures_in_front,
        batching={"pixel_values": CAT},
        modules=Modules(tower=("model.vision_embed_tokens",)),
    ),
)
