"""Families that write the same tokens for every picture, whatever its size."""

from __future__ import annotations

from luthier.media.families import rules
from luthier.media.families.family import CAT, STACK, Attention, Batching, Family, Modules, PackingSupport, Rule
from luthier.media.geometry import pictures
from luthier.media.processors import expansion

PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
ALIGNED = Modules(tower=("model.vision_model",), projector=("model.aligner",))

ROWS = (
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
        image=Rule(measure=pictures.nothing, replace=expansion.framed, seam=expansion.framed_seam, fold=64),
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
        reason="its cross-attention sees pictures of the whole row",
        modules=Modules(tower=("model.vision_model",), projector=("model.multi_modal_projector",)),
    ),
)
