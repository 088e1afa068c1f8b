"""Families that write the same tokens for every picture, whatever its size; then those whose code is remote."""

from __future__ import annotations

from luthier.media.families import odd_calls, rules
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
    "{%- for part in message['content'] if part['type'] == 'image' -%}" + expansion.PICTURE_MARK + "{%- endfor -%}"
    "{{ bos_token }}"
    "{%- for part in message['content'] if part['type'] == 'text' and part['text'] | trim -%}"
    "{{ part['text'] | trim }}"
    "{%- else -%}"
    "{{ task_prompt | default('<predict_bbox><predict_classes><output_markdown>') }}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)

REMOTE_ROWS = (
    Family(
        name="kimi_vl",
        processors=("KimiVLProcessor",),
        model_types=("kimi_vl",),
        image=Rule(measure=pictures.limited_grid, replace=expansion.merged_slots, fold=4),
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
        image=Rule(measure=pictures.nothing, replace=expansion.decoder_start, mark=expansion.PICTURE_MARK, fold=13_184),
        batching={"pixel_values": CAT},
        call=odd_calls.beside_text,
        decoder_names={
            "input_ids": "decoder_input_ids",
            "attention_mask": "decoder_attention_mask",
            "position_ids": "",  # it has none: order comes of its causal mask
        },
        chat_template=PARSING,
        attention=Attention.ENCODED,
        packing=PackingSupport.PADDED,
        reason="its decoder attends to the picture of the whole row",
        modules=Modules(tower=("encoder.model_encoder",), projector=("encoder",), language=("decoder", "lm_head")),
    ),
)
