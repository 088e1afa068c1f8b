"""Families that hear and do not see."""

from __future__ import annotations

from luthier.media.families import odd_calls, rules
from luthier.media.families.family import CAT, PAD_CAT, Family, Modules, OwnFrames, PackingSupport

HEARING = Modules(tower=("model.audio_tower",), projector=("model.multi_modal_projector",))
# Windows of a fixed length, of which a sound takes as many as it needs.
WINDOWS = {"input_features": CAT, "input_features_mask": CAT}

ROWS = (
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
        call=odd_calls.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="musicflamingo",
        processors=("MusicFlamingoProcessor",),
        model_types=("musicflamingo",),
        audio=rules.POOLED_WINDOWS,
        call=odd_calls.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="glmasr",
        processors=("GlmAsrProcessor",),
        model_types=("glmasr",),
        audio=rules.MERGED_WINDOWS,
        call=odd_calls.one_sound_each,
        batching=WINDOWS,
        modules=HEARING,
    ),
    Family(
        name="qwen3_asr",
        processors=("Qwen3ASRProcessor",),
        model_types=("qwen3_asr",),
        audio=rules.PADDED_WINDOW_STEPS,
        call=odd_calls.one_sound_each,
        batching={"input_features": PAD_CAT, "input_features_mask": PAD_CAT},
        modules=HEARING,
    ),
    Family(
        name="voxtral",
        processors=("VoxtralProcessor",),
        model_types=("voxtral",),
        audio=rules.WHOLE_CHUNKS,
        call=odd_calls.transcribed,
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
