"""Families whose processors cut pictures into tiles; then those that read pages."""

from __future__ import annotations

from luthier.media.families import odd_calls, rules
from luthier.media.families.family import (
    CAT,
    CAT_LAST,
    PAD_CAT,
    STACK,
    Attention,
    Batching,
    Family,
    FrameMarks,
    Modules,
    PackingSupport,
    Rule,
    SharedSlots,
)
from luthier.media.geometry import pages, tiles
from luthier.media.processors import expansion

PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
IDEFICS = Modules(
    tower=("model.vision_model",), projector=("model.connector",), language=("model.text_model", "lm_head")
)
CROP = {"crop_to_patches": "crop_to_patches"}
KINDS = {"mm_token_type_ids": rules.kinds}
SLICED = {
    "pixel_values": CAT_LAST,
    "target_sizes": CAT,
    "pixel_values_videos": CAT_LAST,
    "target_sizes_videos": CAT,
}
TILED_IN_ROWS = {"pixel_values": STACK, "pixel_attention_mask": STACK}

ROWS = (
    Family(
        name="internvl",
        processors=("InternVLProcessor",),
        model_types=("internvl",),
        image=Rule(measure=tiles.nearest_tiles, options=CROP, fold=4),
        video=rules.FIXED_FRAMES,
        batching={"pixel_values": CAT},
        dropped=("num_patches",),
        modules=PROJECTED,
    ),
    Family(
        name="qianfan_ocr",
        processors=("QianfanOCRProcessor",),
        model_types=("qianfan_ocr",),
        image=Rule(measure=tiles.nearest_tiles, options=CROP, placeholder="image_placeholder_token", fold=4),
        batching={"pixel_values": CAT},
        dropped=("num_patches",),
        modules=PROJECTED,
    ),
    Family(
        name="aya_vision",
        processors=("AyaVisionProcessor",),
        model_types=("aya_vision",),
        image=Rule(measure=tiles.nearest_tiles, options=CROP, fold=4),
        batching={"pixel_values": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="cohere2_vision",
        processors=("Cohere2VisionProcessor",),
        model_types=("cohere2_vision",),
        image=Rule(measure=tiles.fitting_tiles, options=CROP, fold=4),
        batching={"pixel_values": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="ovis2",
        processors=("Ovis2Processor",),
        model_types=("ovis2",),
        image=Rule(measure=tiles.covering_tiles, options=CROP, fold=4),
        batching={"pixel_values": CAT},
        modules=Modules(tower=("model.vision_tower",), projector=("model.visual_embeddings_table",)),
    ),
    Family(
        name="deepseek_ocr2",
        processors=("DeepseekOcr2Processor",),
        model_types=("deepseek_ocr2",),
        image=Rule(measure=tiles.local_tiles, options=CROP, fold=16),
        batching={"pixel_values": CAT, "pixel_values_local": CAT, "num_local_patches": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="llama4",
        processors=("Llama4Processor",),
        model_types=("llama4",),
        image=Rule(measure=tiles.canvas_tiles, fold=4),
        batching={"pixel_values": CAT},
        modules=Modules(tower=("vision_model",), projector=("multi_modal_projector",), language=("language_model",)),
    ),
    Family(
        name="idefics3",
        processors=("Idefics3Processor",),
        model_types=("idefics3",),
        image=Rule(measure=tiles.rows_and_columns, fold=4),
        batching=TILED_IN_ROWS,
        modules=IDEFICS,
    ),
    Family(
        name="smolvlm",
        processors=("SmolVLMProcessor",),
        model_types=("smolvlm",),
        image=Rule(measure=tiles.rows_and_columns, fold=16),
        video=rules.PADDED_FRAMES,
        one_kind="its processor puts frames in the place of pictures",
        batching=TILED_IN_ROWS,
        modules=IDEFICS,
    ),
    Family(
        name="llava_next",
        processors=("LlavaNextProcessor",),
        model_types=("llava_next",),
        image=Rule(measure=tiles.any_resolution),
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="granite4_vision",
        processors=("Granite4VisionProcessor",),
        model_types=("granite4_vision",),
        image=Rule(measure=tiles.any_resolution),
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=Modules(
            tower=("model.vision_tower",), projector=("model.layerwise_projectors", "model.spatial_projectors")
        ),
    ),
    Family(
        name="llava_onevision",
        processors=("LlavaOnevisionProcessor",),
        model_types=("llava_onevision",),
        image=Rule(measure=tiles.any_resolution_alone),
        video=rules.STACKED_FRAMES,
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT, "batch_num_images": CAT, "pixel_values_videos": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="gemma3",
        processors=("Gemma3Processor",),
        model_types=("gemma3",),
        image=Rule(measure=tiles.crops, options={"pan_and_scan": "do_pan_and_scan"}, fold=16),
        batching={"pixel_values": CAT},
        token_inputs={"token_type_ids": rules.kinds},
        attention=Attention.IMAGE_BLOCKS,
        modules=PROJECTED,
    ),
    Family(
        name="aria",
        processors=("AriaProcessor",),
        model_types=("aria",),
        image=Rule(measure=tiles.equal_crops, fold=9),
        batching={"pixel_values": CAT, "pixel_mask": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="lfm2_vl",
        processors=("Lfm2VlProcessor",),
        model_types=("lfm2_vl",),
        image=Rule(measure=tiles.tiles_or_whole, replace=expansion.marked, fold=4),
        batching={"pixel_values": CAT, "pixel_attention_mask": CAT, "spatial_shapes": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="minicpmv4_6",
        processors=("MiniCPMV4_6Processor",),
        model_types=("minicpmv4_6",),
        image=Rule(measure=tiles.slices, replace=expansion.sliced, fold=16),
        video=rules.FRAME_SLICES,
        number=expansion.numbered,
        batching=SLICED,
        modules=Modules(tower=("model.vision_tower",), projector=("model.merger",)),
    ),
    Family(
        name="minicpmv4_7",
        processors=("MiniCPMV4_7Processor",),
        model_types=("minicpmv4_7",),
        image=Rule(measure=tiles.slices, replace=expansion.sliced, fold=16),
        video=rules.FRAME_SLICES,
        number=expansion.numbered_pictures,
        batching=SLICED,
        token_inputs=KINDS,
        positions="canvas",
        modules=Modules(tower=("model.vision_tower",), projector=("model.merger",)),
    ),
    Family(
        name="step3p7",
        processors=("Step3p7Processor",),
        model_types=("step3p7",),
        image=Rule(measure=tiles.window_tiles, fold=4),
        batching={"pixel_values": CAT, "pixel_values_local": CAT, "num_local_patches": CAT},
        modules=Modules(tower=("model.vision_model",), projector=("model.multi_modal_projector",)),
    ),
    Family(
        name="molmo2",
        processors=("Molmo2Processor",),
        model_types=("molmo2",),
        opens=True,
        image=Rule(measure=tiles.overlapping_tiles, fold=4),
        video=rules.POOLED_GRID,
        batching={
            "pixel_values": CAT,
            "image_token_pooling": Batching(offset="pixel_values", offset_axes=2),
            "image_grids": CAT,
            "image_num_crops": CAT,
            "pixel_values_videos": CAT,
            "video_token_pooling": Batching(offset="pixel_values_videos", offset_axes=2),
            "video_grids": CAT,
        },
        shared_slots=SharedSlots(
            pictures=("pixel_values", "image_token_pooling", "image_grids"),
            videos=("pixel_values_videos", "video_token_pooling", "video_grids"),
            frames=FrameMarks.BORDERS,
        ),
        token_inputs=KINDS,
        attention=Attention.IMAGE_BLOCKS,
        packing=PackingSupport.PADDED,
        reason="its mask lets all pictures of a row see each other",
        modules=PROJECTED,
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Families that read pages: charts, scans, documents.


PAGE_ROWS = (
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
