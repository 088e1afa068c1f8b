"""Families that cut images into tiles, those that read pages, and those whose images all take the same tokens."""

from __future__ import annotations

from dataclasses import replace

from luthier.media import processors
from luthier.media.families import (
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
    rules,
)
from luthier.media.geometry import pictures, tiles

PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
IDEFICS = Modules(
    tower=("model.vision_model",), projector=("model.connector",), language=("model.text_model", "lm_head")
)
CROP = {"crop_to_patches": "crop_to_patches"}
SLICES = {"crop_to_patches": "slice_mode"}
SPLIT = {"crop_to_patches": "do_image_splitting"}
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
        image=Rule(measure=tiles.rows_and_columns, options=SPLIT, fold=4),
        batching=TILED_IN_ROWS,
        modules=IDEFICS,
    ),
    Family(
        name="smolvlm",
        processors=("SmolVLMProcessor",),
        model_types=("smolvlm",),
        image=Rule(measure=tiles.rows_and_columns, options=SPLIT, fold=16),
        video=rules.PADDED_FRAMES,
        one_kind="its processor puts frames in the place of images",
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
        image=Rule(measure=tiles.any_resolution_alone, counts_together=True),
        video=rules.STACKED_FRAMES,
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT, "batch_num_images": CAT, "pixel_values_videos": CAT},
        modules=PROJECTED,
        version="2",
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
        image=Rule(measure=tiles.equal_crops, options={"crop_to_patches": "split_image"}, counts_together=True, fold=9),
        batching={"pixel_values": CAT, "pixel_mask": CAT},
        modules=PROJECTED,
        version="2",
    ),
    Family(
        name="lfm2_vl",
        processors=("Lfm2VlProcessor",),
        model_types=("lfm2_vl",),
        image=Rule(measure=tiles.tiles_or_whole, replace=processors.marked, options=SPLIT, fold=4),
        batching={"pixel_values": CAT, "pixel_attention_mask": CAT, "spatial_shapes": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="minicpmv4_6",
        processors=("MiniCPMV4_6Processor",),
        model_types=("minicpmv4_6",),
        image=Rule(measure=tiles.slices, replace=processors.sliced, options=SLICES, fold=16),
        video=rules.FRAME_SLICES,
        number=processors.numbered,
        batching=SLICED,
        modules=Modules(tower=("model.vision_tower",), projector=("model.merger",)),
    ),
    Family(
        name="minicpmv4_7",
        processors=("MiniCPMV4_7Processor",),
        model_types=("minicpmv4_7",),
        image=Rule(measure=tiles.slices, replace=processors.sliced, options=SLICES, fold=16),
        video=rules.FRAME_SLICES,
        number=processors.numbered_pictures,
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
        reason="its mask lets all images of a row see each other",
        modules=PROJECTED,
        version="2",
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
            measure=tiles.pages,
            replace=processors.paged,
            options=CROP,
            around=("img_start_token", "img_end_token"),
            fold=16,
        ),
        call=rules.flat_pictures,
        batching={"pixel_values": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="granite_docling",
        processors=("GraniteDoclingProcessor",),
        model_types=("granite_docling",),
        image=Rule(measure=tiles.page_tiles, options=CROP, fold=16),
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
        image=Rule(measure=tiles.page_slices, replace=processors.sliced, fold=16),
        video=rules.FRAME_SLICES,
        number=processors.numbered,
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
        image=Rule(measure=tiles.shown_rows, replace=processors.lined),
        call=rules.pictures_in_front,
        batching={"pixel_values": CAT},
        modules=Modules(tower=("model.vision_embed_tokens",)),
    ),
)


# ----------------------------------------------- families that write the same tokens for every image, whatever its size


ALIGNED = Modules(tower=("model.vision_model",), projector=("model.aligner",))

FIXED_ROWS = (
    Family(
        name="llava",
        processors=("LlavaProcessor",),
        model_types=("llava", "vipllava", "fast_vlm"),
        image=Rule(measure=pictures.square),
        batching={"pixel_values": CAT},
        modules=PROJECTED,
    ),
    Family(
        name="paligemma",
        processors=("PaliGemmaProcessor",),
        model_types=("paligemma",),
        image=Rule(measure=pictures.nothing),
        batching={"pixel_values": CAT},
        attention=Attention.PREFIX,
        packing=PackingSupport.PADDED,
        reason="its mask lets the prompts of a row see each other",
        modules=PROJECTED,
    ),
    Family(
        name="deepseek_vl",
        processors=("DeepseekVLProcessor",),
        model_types=("deepseek_vl",),
        image=Rule(measure=pictures.nothing),
        batching={"pixel_values": CAT},
        modules=ALIGNED,
    ),
    Family(
        name="deepseek_vl_hybrid",
        processors=("DeepseekVLHybridProcessor",),
        model_types=("deepseek_vl_hybrid",),
        image=Rule(measure=pictures.nothing),
        batching={"pixel_values": CAT, "high_res_pixel_values": CAT},
        modules=Modules(
            tower=("model.vision_model", "model.high_res_vision_model"),
            projector=("model.aligner", "model.high_res_vision_neck", "model.high_res_vision_proj"),
        ),
    ),
    Family(
        name="janus",
        processors=("JanusProcessor",),
        model_types=("janus",),
        image=Rule(measure=pictures.nothing),
        batching={"pixel_values": CAT},
        undrawn="its class has a generate function of its own, so Luthier cannot choose its tokens",
        modules=ALIGNED,
    ),
    Family(
        name="chameleon",
        processors=("ChameleonProcessor",),
        model_types=("chameleon",),
        image=Rule(measure=pictures.nothing),
        batching={"pixel_values": CAT},
        modules=Modules(
            tower=("model.vqmodel",),
            language=("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
        ),
    ),
    Family(
        name="idefics2",
        processors=("Idefics2Processor",),
        model_types=("idefics2",),
        image=Rule(measure=pictures.nothing, replace=processors.framed, seam=processors.framed_seam, fold=64),
        batching={"pixel_values": STACK, "pixel_attention_mask": STACK},
        modules=Modules(
            tower=("model.vision_model",), projector=("model.connector",), language=("model.text_model", "lm_head")
        ),
    ),
    Family(
        name="mllama",
        processors=("MllamaProcessor",),
        model_types=("mllama",),
        opens=True,
        image=Rule(measure=pictures.nothing, fold=6400),
        batching={
            "pixel_values": STACK,
            "aspect_ratio_ids": STACK,
            # of a picture that is not there it says one tile, so that no row of the tower's mask is empty
            "aspect_ratio_mask": Batching(axis=1, by_row=True, pad=(1, 0)),
        },
        token_inputs={"cross_attention_mask": rules.seen_images},
        attention=Attention.CROSS,
        packing=PackingSupport.PADDED,
        reason="its cross-attention sees images of the whole row",
        modules=Modules(tower=("model.vision_model",), projector=("model.multi_modal_projector",)),
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Families whose code is in the model's own folder: rows from the interface that their authors published.


# The picture first, wherever the row has it; then what the user says or, of a picture alone, the usual task
PARSING = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- if loop.index > 2 -%}{{ raise_exception('Nemotron-Parse gives one answer') }}{%- endif -%}"
    "{{ message['content'] }}{{ eos_token }}"
    "{%- elif message['role'] != 'user' -%}"
    "{{ raise_exception('Nemotron-Parse knows user and assistant only') }}"
    "{%- elif message['content'] is string -%}{{ bos_token }}{{ message['content'] }}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}" + processors.PICTURE_MARK + "{%- endfor -%}"
    "{{ bos_token }}"
    "{%- for part in message['content'] if part['type'] == 'text' and part['text'] | trim -%}"
    "{{ part['text'] | trim }}"
    "{%- else -%}"
    "{{ task_prompt | default('<predict_bbox><predict_classes><output_markdown>') }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)

MINICPMV = Family(
    name="minicpmv",
    processors=("MiniCPMVProcessor",),
    model_types=("minicpmv",),
    image=Rule(measure=pictures.sizes, replace=processors.bounded, mark=processors.BOUNDED_MARK, fold=16),
    batching={"pixel_values": CAT_LAST, "target_sizes": CAT},
    call=rules.in_one_piece,
    token_inputs={"mm_token_type_ids": rules.bounded_kinds},
    in_lists=True,
    modules=Modules(tower=("vpm",), projector=("resampler",), language=("llm.model", "llm.lm_head")),
)

REMOTE_ROWS = (
    Family(
        name="kimi_vl",
        processors=("KimiVLProcessor",),
        model_types=("kimi_vl",),
        image=Rule(measure=pictures.limited_grid, replace=processors.merged_slots, fold=4),
        batching={"pixel_values": CAT, "image_grid_hws": CAT},
        modules=Modules(tower=("vision_tower",), projector=("multi_modal_projector",), language=("language_model",)),
    ),
    Family(
        name="llava_onevision1_5",
        processors=("Qwen2_5_VLProcessor",),
        model_types=("llavaonevision1_5",),
        image=Rule(
            measure=pictures.area_grid,
            options={"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"},
            fold=4,
        ),
        batching={"pixel_values": CAT, "image_grid_thw": CAT},
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger",)),
    ),
    Family(
        name="nemotron_parse",
        processors=("NemotronParseProcessor",),
        model_types=("nemotron_parse",),
        # the usual picture of 2048 x 1648 pixels has 13,184 patches
        image=Rule(
            measure=pictures.nothing, replace=processors.decoder_start, mark=processors.PICTURE_MARK, fold=13_184
        ),
        batching={"pixel_values": CAT},
        call=rules.beside_text,
        decoder_names={
            "input_ids": "decoder_input_ids",
            "attention_mask": "decoder_attention_mask",
            "position_ids": "",  # it has none: order comes of its causal mask
        },
        chat_template=PARSING,
        attention=Attention.ENCODED,
        packing=PackingSupport.PADDED,
        reason="its decoder attends to the image of the whole row",
        modules=Modules(tower=("encoder.model_encoder",), projector=("encoder",), language=("decoder", "lm_head")),
    ),
    Family(
        name="moss_vl",
        processors=("MossVLProcessor",),
        model_types=("moss_vl",),
        # its text does not depend on sizes; an image of 1024 x 1024 pixels has 4,096 patches
        image=Rule(measure=pictures.nothing, replace=processors.one_slot, placeholder="image_placeholder", fold=4_096),
        batching={"pixel_values": CAT, "grid_thw": CAT},
        dropped=("cross_attention_mask", "media_nums_per_sample"),
        looks_across=True,
        attention=Attention.CROSS,
        packing=PackingSupport.PADDED,
        reason="its cross-attention sees images of the whole row",
        undrawn="its class keeps caches as older versions of transformers had them",
        older_code=True,
        modules=Modules(tower=("model.visual",), projector=("model.visual.merger",)),
    ),
    MINICPMV,
    replace(
        MINICPMV,
        name="minicpmo",
        processors=("MiniCPMOProcessor",),
        model_types=("minicpmo",),
        audio=rules.AVERAGED_FRAMES,
        batching={**MINICPMV.batching, "audio_features": PAD_CAT, "audio_frames": CAT},
        token_inputs={"mm_token_type_ids": rules.bounded_kinds_and_sounds},
        modules=Modules(
            tower=("vpm", "apm"),
            projector=("resampler", "audio_projection_layer"),
            language=("llm.model", "llm.lm_head"),
        ),
    ),
)
