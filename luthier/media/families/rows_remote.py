"""Families whose code is in the model's own folder: rows from the interface that their authors published."""

from __future__ import annotations

from luthier.media.families import odd_calls
from luthier.media.families.family import CAT, Attention, Family, Modules, PackingSupport, Rule
from luthier.media.geometry import pictures
from luthier.media.processors import expansion

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

ROWS = (
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
