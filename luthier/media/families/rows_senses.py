"""Families of several senses and of pictures drawn from codebooks, which came later than the others."""

from __future__ import annotations

from luthier.media.families import odd_calls, rules
from luthier.media.families.family import CAT, PAD_CAT, Batching, Family, Modules, PackingSupport, Rule
from luthier.media.families.rows_grid import FRAMES, IMAGES, QWEN
from luthier.media.geometry import pages

PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
MUSE = Rule(measure=pages.shaped_grid, fold=4)
# The model flattens items and their tiles (or frames), which may therefore all be those of one item.
TILES = Batching(axis=1)

ROWS = (
    Family(
        name="perception_lm",
        processors=("PerceptionLMProcessor",),
        model_types=("perception_lm",),
        image=Rule(measure=pages.thumbnail_and_tiles, fold=4),
        video=rules.FIXED_FRAMES,
        call=odd_calls.one_by_one,
        batching={"pixel_values": TILES, "pixel_values_videos": TILES},
        modules=PROJECTED,
    ),
    Family(
        name="emu3",
        processors=("Emu3Processor",),
        model_types=("emu3",),
        opens=True,
        image=Rule(measure=pages.sizes_in_area),
        # as its class fills up smaller pictures of a call, though its encoder then gives them other codes than alone
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=Modules(tower=("model.vqmodel",), language=("model.text_model", "lm_head")),
    ),
    Family(
        name="muse_glimmer",
        processors=("MuseGlimmerProcessor",),
        model_types=("muse_glimmer",),
        image=MUSE,
        video=rules.SHAPED_FRAME_GRID,
        batching=FRAMES,
        modules=Modules(tower=("model.vision_tower",), projector=("model.vision_adapter", "model.vision_projection")),
    ),
    Family(
        name="muse_spark",
        processors=("MuseSparkProcessor",),
        model_types=("muse_spark",),
        image=MUSE,
        video=rules.SHAPED_FRAME_GRID,
        audio=rules.WAVEFORM_BLOCKS,
        batching={**FRAMES, "input_values": PAD_CAT, "input_values_mask": PAD_CAT},
        modules=Modules(
            tower=("model.vision_tower", "model.audio_tower"),
            projector=("model.vision_adapter", "model.vision_projection"),
        ),
    ),
    Family(
        name="dots3_note",
        processors=("Dots3NoteProcessor",),
        model_types=("dots3_note",),
        image=QWEN,
        video=rules.VOLUME_GRID,
        audio=rules.LONG_CHUNKS,
        batching={**FRAMES, "input_features": PAD_CAT, "chunk_sample_lengths": CAT},
        packing=PackingSupport.PADDED,
        reason="its sparse attention chooses among the tokens of a row, and knows no segments",
        modules=Modules(
            tower=("model.vision_tower", "model.audio_tower"),
            projector=("model.vision_tower.merger", "model.audio_tower.adapter"),
        ),
    ),
    Family(
        name="hyperclovax_vision_v2",
        processors=("HyperCLOVAXVisionV2Processor",),
        model_types=("hyperclovax_vision_v2",),
        image=QWEN,  # no videos: its template leaves a place for their length, which only the class's call fills in
        batching=IMAGES,
        modules=Modules(tower=("model.vision_model",), projector=("model.projector",)),
    ),
    Family(
        name="inkling2",
        processors=("Inkling2Processor",),
        model_types=("inkling2",),
        image=Rule(measure=pages.padded_grid),
        batching=IMAGES,
        packing=PackingSupport.PADDED,
        reason="its convolutions would carry state from one sample of a row into the next",
        modules=Modules(tower=("model.vision_tower",), projector=("model.vision_tower.merger",)),
    ),
)
