"""Families that hear: with pictures or videos, and alone; then those of other senses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from luthier.media.families import (
    CAT,
    PAD_CAT,
    SHOWN,
    Attention,
    Batching,
    Family,
    Features,
    MediaKind,
    Modules,
    OwnFrames,
    PackingSupport,
    Rule,
    rules,
)
from luthier.media.families.rows_grid import FRAMES, IMAGES, QWEN
from luthier.media.geometry import pictures, tiles
from luthier.media.processors import expand_with_sound_tracks

AREA = {"min_pixels": "size.shortest_edge", "max_pixels": "size.longest_edge"}
# Both classes take it from there, and then want the sound tracks along with the sounds.
SOUND_TRACK = {"use_audio_in_video": "use_audio_in_video"}
OMNI_VIDEO = Rule(measure=rules.FRAME_GRID.measure, options={**rules.FRAME_GRID.options, **SOUND_TRACK}, fold=4)
OMNI_MEASURES = {
    MediaKind.IMAGE: pictures.area_grid,
    MediaKind.VIDEO: OMNI_VIDEO.measure,
}
GRIDS = {
    "pixel_values": CAT,
    "image_grid_thw": CAT,
    "pixel_values_videos": CAT,
    "video_grid_thw": CAT,
    "video_second_per_grid": CAT,
}
GEMMA4 = {
    "pixel_values": CAT,
    "image_position_ids": CAT,
    "pixel_values_videos": CAT,
    "video_position_ids": CAT,
    "num_frames_per_video": CAT,
    "input_features": PAD_CAT,
    "input_features_mask": PAD_CAT,
}
THINKER = Modules(
    tower=("thinker.model.visual", "thinker.model.audio_tower", "model.visual", "model.audio_tower"),
    projector=(
        "thinker.model.visual.merger",
        "thinker.model.audio_tower.proj",
        "model.visual.merger",
        "model.audio_tower.proj",
    ),
    language=("thinker.model.language_model", "thinker.lm_head", "model.language_model", "lm_head"),
)
THINKER_3 = replace(
    THINKER,
    projector=tuple(
        f"{model}.{part}"
        for model in ("thinker.model", "model")
        for part in ("visual.merger", "visual.merger_list", "audio_tower.proj1", "audio_tower.proj2")
    ),
)


def _all_frames(features: Features) -> NDArray[np.generic] | None:
    """bool[N, T]: Phi-4's processor gives no mask to a sound that is alone in its call."""
    sounds = features.get("audio_input_features")
    return None if sounds is None else np.ones(sounds.shape[:2], dtype=bool)


def _shown(features: Features) -> NDArray[np.generic] | None:
    """int64[1, 3]: of a sample of Nemotron's frames (groups of them, as of transformers 5.24), height and width of its
    video, or 0, how many pictures, 0."""
    frames, grids = features.get("pixel_values_videos"), features.get("image_grid_hw")
    if frames is not None:
        return np.array([[frames.shape[-4], *frames.shape[-2:]]], dtype=np.int64)
    return None if grids is None else np.array([[0, len(grids), 0]], dtype=np.int64)


ROWS = (
    Family(
        name="qwen2_5_omni",
        processors=("Qwen2_5OmniProcessor",),
        model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=OMNI_VIDEO,
        audio=rules.WHOLE_WINDOWS,
        together=partial(
            expand_with_sound_tracks,
            measures={**OMNI_MEASURES, MediaKind.AUDIO: rules.WHOLE_WINDOWS.measure},
            nominal_rate=2.0,
        ),
        batching={**GRIDS, "input_features": CAT, "feature_attention_mask": CAT},
        positions="grid_sound",
        modules=THINKER,
    ),
    Family(
        name="qwen3_omni_moe",
        processors=("Qwen3OmniMoeProcessor",),
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        image=Rule(measure=pictures.area_grid, options=AREA, fold=4),
        video=OMNI_VIDEO,
        audio=rules.WINDOW_STEPS,
        together=partial(
            expand_with_sound_tracks,
            measures={**OMNI_MEASURES, MediaKind.AUDIO: rules.WINDOW_STEPS.measure},
            nominal_rate=1.0,
        ),
        batching={**GRIDS, "input_features": PAD_CAT, "feature_attention_mask": PAD_CAT},
        positions="grid_sound_fractional",
        modules=THINKER_3,
    ),
    Family(
        name="gemma3n",
        processors=("Gemma3nProcessor",),
        model_types=("gemma3n",),
        image=Rule(measure=pictures.nothing, fold=9),
        audio=rules.FIXED_LENGTH,
        batching={"pixel_values": CAT, "input_features": PAD_CAT, "input_features_mask": PAD_CAT},
        token_inputs={"token_type_ids": rules.kinds},
        modules=Modules(
            tower=("model.vision_tower", "model.audio_tower"), projector=("model.embed_vision", "model.embed_audio")
        ),
    ),
    Family(
        name="gemma4",
        processors=("Gemma4Processor",),
        model_types=("gemma4",),
        image=Rule(measure=pictures.soft_tokens, fold=9),
        video=rules.SOFT_TOKENS,
        audio=rules.VALID_FRAMES,
        batching=GEMMA4,
        token_inputs={"mm_token_type_ids": rules.kinds},
        attention=Attention.IMAGE_BLOCKS,
        modules=Modules(
            tower=("model.vision_tower", "model.audio_tower"), projector=("model.embed_vision", "model.embed_audio")
        ),
    ),
    Family(
        name="gemma4_unified",
        processors=("Gemma4UnifiedProcessor",),
        model_types=("gemma4_unified",),
        image=Rule(measure=pictures.soft_tokens),
        video=rules.SOFT_TOKENS,
        audio=rules.WAVEFORM_FRAMES,
        batching=GEMMA4,
        token_inputs={"mm_token_type_ids": rules.kinds},
        attention=Attention.WHOLE_BLOCKS,
        modules=Modules(tower=(), projector=("model.embed_vision", "model.embed_audio")),
    ),
    Family(
        name="phi4_multimodal",
        processors=("Phi4MultimodalProcessor",),
        model_types=("phi4_multimodal",),
        image=Rule(measure=tiles.dynamic_tiles, fold=4),
        audio=rules.COMPRESSED_FRAMES,
        batching={
            "image_pixel_values": PAD_CAT,
            "image_sizes": CAT,
            "image_attention_mask": Batching(pad=1),  # so its class fills up the tiles of a picture of few
            "audio_input_features": PAD_CAT,
            "audio_embed_sizes": CAT,
            "audio_attention_mask": PAD_CAT,
        },
        derived={"audio_attention_mask": _all_frames},
        own_frames=OwnFrames(
            module="model.embed_tokens_extend.audio_embed.encoder", features="hidden_states", mask="mask"
        ),
        both_ways="model.embed_tokens_extend.image_embed.img_processor",
        modules=Modules(
            tower=(
                "model.embed_tokens_extend.image_embed.img_processor",
                "model.embed_tokens_extend.audio_embed.encoder",
            ),
            projector=("model.embed_tokens_extend.image_embed", "model.embed_tokens_extend.audio_embed"),
            language=("model.layers", "model.embed_tokens", "model.norm", "lm_head"),
        ),
    ),
    Family(
        name="nemotron_h_omni",
        processors=("NemotronH_Omni_Reasoning_V3Processor",),
        model_types=("nemotron_h_omni",),
        image=Rule(measure=pictures.context_grid, fold=4),
        video=rules.TUBELETS,
        one_kind="its model cannot tell frames from images",
        audio=rules.SUBSAMPLED_FRAMES,
        videos_apart=True,
        derived={SHOWN: _shown},
        batching={
            "pixel_values": CAT,
            "image_grid_hw": CAT,
            "pixel_values_videos": PAD_CAT,
            SHOWN: Batching(beside="pixel_values_videos"),
            "input_features": PAD_CAT,
            "input_features_mask": PAD_CAT,
        },
        own_frames=OwnFrames(module="audio_tower", features="input_features", mask="attention_mask", beyond=1),
        modules=Modules(
            tower=("vision_model", "audio_tower"),
            projector=("multi_modal_projector", "embed_audio"),
            language=("language_model",),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Families that hear and do not see.


HEARING = Modules(tower=("model.audio_tower",), projector=("model.multi_modal_projector",))
# Windows of a fixed length, of which a sound takes as many as it needs.
WINDOWS = {"input_features": CAT, "input_features_mask": CAT}

AUDIO_ROWS = (
    Family(
        name="qwen2_audio",
        processors=("Qwen2AudioProcessor",),
        model_types=("qwen2_audio",),
        audio=rules.WHOLE_WINDOWS,
        batching={"input_features": CAT, "feature_attention_mask": CAT},
        modules=HEARING,
    ),
    Family(
        name="audioflamingo3",
        processors=("AudioFlamingo3Processor",),
        model_types=("audioflamingo3",),
        audio=rules.POOLED_WINDOWS,
        call=rules.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="musicflamingo",
        processors=("MusicFlamingoProcessor",),
        model_types=("musicflamingo",),
        audio=rules.POOLED_WINDOWS,
        call=rules.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="glmasr",
        processors=("GlmAsrProcessor",),
        model_types=("glmasr",),
        audio=rules.MERGED_WINDOWS,
        call=rules.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="qwen3_asr",
        processors=("Qwen3ASRProcessor",),
        model_types=("qwen3_asr",),
        audio=rules.PADDED_WINDOW_STEPS,
        call=rules.one_sound_each,
        batching={"input_features": PAD_CAT, "input_features_mask": PAD_CAT},
        modules=HEARING,
    ),
    Family(
        name="voxtral",
        processors=("VoxtralProcessor",),
        model_types=("voxtral",),
        audio=rules.WHOLE_CHUNKS,
        call=rules.transcribed,
        batching={"input_features": CAT},
        modules=HEARING,
    ),
    Family(
        name="granite_speech",
        processors=("GraniteSpeechProcessor",),
        model_types=("granite_speech", "granite_speech_plus"),
        audio=rules.PROJECTED_BLOCKS,
        batching={"input_features": PAD_CAT, "input_features_mask": PAD_CAT},
        own_frames=OwnFrames(module="model.encoder", features="hidden_states"),
        modules=Modules(tower=("model.encoder",), projector=("model.projector",)),
    ),
    Family(
        name="omniasr",
        processors=("OmniASRProcessor",),
        model_types=("omniasr",),
        audio=rules.CONVOLVED_FRAMES,
        call=rules.one_sound_each,
        batching={"input_values": PAD_CAT, "padding_mask": PAD_CAT},
        dropped=("num_audio_tokens",),
        modules=HEARING,
    ),
    Family(
        name="inkling",
        processors=("InklingProcessor",),
        model_types=("inkling_mm_model",),
        audio=rules.DMEL_FRAMES,
        batching={"audio_input_ids": PAD_CAT, "audio_input_ids_mask": PAD_CAT},
        packing=PackingSupport.PADDED,
        reason="its short convolutions would carry state from one sample of a row into the next",
        modules=Modules(tower=("model.audio_tower", "model.vision_tower")),
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Families of several senses and of pictures drawn from codebooks, which came later than the others.


PROJECTED = Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",))
MUSE = Rule(measure=tiles.shaped_grid, fold=4)
# The model flattens items and their tiles (or frames), which may therefore all be those of one item.
TILES = Batching(axis=1)

LATER_ROWS = (
    Family(
        name="perception_lm",
        processors=("PerceptionLMProcessor",),
        model_types=("perception_lm",),
        image=Rule(measure=tiles.thumbnail_and_tiles, fold=4),
        video=rules.FIXED_FRAMES,
        call=rules.one_by_one,
        batching={"pixel_values": TILES, "pixel_values_videos": TILES},
        modules=PROJECTED,
    ),
    Family(
        name="emu3",
        processors=("Emu3Processor",),
        model_types=("emu3",),
        opens=True,
        image=Rule(measure=tiles.sizes_in_area),
        # as its class fills up smaller pictures of a call, though its encoder then gives them other codes than alone
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT},
        modules=Modules(tower=("model.vqmodel",), language=("model.text_model", "lm_head")),
    ),
    Family(
        name="apertus1p5",
        processors=("Apertus1p5Processor",),
        model_types=("apertus1p5",),
        image=Rule(
            measure=tiles.codes_in_area, options={"min_pixels": "size.min_pixels", "max_pixels": "size.max_pixels"}
        ),
        audio=rules.SAMPLE_CODES,
        # its model cuts off what fills up a picture or a sound before it encodes it
        batching={"pixel_values": PAD_CAT, "image_sizes": CAT, "input_values": PAD_CAT, "padding_mask": PAD_CAT},
        modules=Modules(tower=("model.vision_tokenizer", "model.audio_tokenizer")),
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
        model_types=("inkling2", "inkling2_loop"),
        image=Rule(measure=tiles.padded_grid),
        batching=IMAGES,
        packing=PackingSupport.PADDED,
        reason="its convolutions would carry state from one sample of a row into the next",
        modules=Modules(tower=("model.vision_tower",), projector=("model.vision_tower.merger",)),
    ),
)
