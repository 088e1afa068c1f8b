"""Families that hear: what stands for a sound, from its length alone, is what the processor writes for its samples."""

from __future__ import annotations

import os
import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor

from luthier.config.inputs import MediaConfig
from luthier.errors import ModelError, RowError
from luthier.media.families import Settings
from luthier.media.files.decoding import DecodedAudio, resample
from luthier.media.geometry import projected_blocks
from luthier.media.processors.calling import TOKEN_OUTPUTS, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader
from tests.conftest import refused
from tests.media.tiny_av_processors import AUDIO

# LUTHIER_MEDIA_SIZES=500 is the long form of these tests.
NUM_SIZES = int(os.environ.get("LUTHIER_MEDIA_SIZES", "25"))
FAMILIES = sorted(set(AUDIO) - {"voxtral"})  # whose own call takes no sounds
RATE = 16000
# Classes that take one sound for every text.
ONE_EACH = {"audioflamingo3", "musicflamingo", "glmasr", "qwen3_asr", "omniasr"}


def sound(num_samples: int, rate: int = RATE) -> AudioHeader:
    return AudioHeader(num_samples=num_samples, sampling_rate=rate)


def samples_of(header: AudioHeader, rate: int = RATE) -> np.ndarray:
    """float32[n] at the rate that a model hears."""
    noise = np.random.default_rng(header.num_samples).uniform(-1, 1, header.num_samples).astype(np.float32)
    return resample(noise, header.sampling_rate, rate)


def random_sounds(family: str, count: int) -> list[AudioHeader]:
    """A tenth of a second to four, some a sample off a round length; longer ones than a window are rare."""
    rng = random.Random(family)
    lengths = [
        rng.choice([rng.randint(1_600, 64_000), 160 * rng.randint(10, 400) + rng.randint(-1, 1)]) for _ in range(count)
    ]
    return [sound(9 * RATE + 77), sound(10 * RATE), *(sound(length) for length in lengths)][:count]


def own_batch(processor: Any, texts: list[str], sounds: list[AudioHeader]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(
            processor(
                text=texts,
                audio=[samples_of(header, rate_of(processor)) for header in sounds],
                text_kwargs={"padding": True, "padding_side": "right", "return_tensors": "pt"},
                audio_kwargs={"return_tensors": "pt"},
            )
        )


def own_ids(processor: Any, text: str, sounds: list[AudioHeader]) -> list[int]:
    ids: list[int] = own_batch(processor, [text], sounds)["input_ids"][0].tolist()
    return ids[1:] if ids[0] == processor.tokenizer.bos_token_id else ids


def our_ids(media: MediaProcessor, text: str, sounds: list[AudioHeader]) -> list[int]:
    strings = iter(media.expand(sounds))
    first, *rest = text.split(media.placeholder("audio"))
    whole = first + "".join(next(strings) + part for part in rest)
    return media.processor.tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_expansion_from_a_length_is_the_processors_own(family: str) -> None:
    processor = AUDIO[family]()
    media = MediaProcessor.of(processor)
    assert media.family.name == family
    for header in random_sounds(family, NUM_SIZES):
        text = media.placeholder("audio")
        assert our_ids(media, text, [header]) == own_ids(processor, text, [header]), header


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ONE_EACH])
def test_sounds_that_share_a_context_count_as_the_processor_counts_them(family: str) -> None:
    """Some classes cut all sounds of a call where the longest of them ends, so they count in company."""
    processor = AUDIO[family]()
    media = MediaProcessor.of(processor)
    for headers in ([sound(16_010), sound(15_930), sound(1_601)], random_sounds(family, 5)[2:]):
        text = "a".join([media.placeholder("audio")] * len(headers))
        assert our_ids(media, text, headers) == own_ids(processor, text, headers)


@pytest.mark.parametrize("family", [*FAMILIES, "voxtral"])
def test_a_sound_that_the_extractor_cuts_is_told_and_no_other(family: str) -> None:
    """Whatever the family: a sound half as long again either takes more tokens, or is told to be cut. (Gemma 3n
    counts all sounds alike, Voxtral those of one chunk of 30 s.)"""
    media = MediaProcessor.of(AUDIO[family]())
    for seconds in (8, 20, 31, 700, 1_300):
        header, longer = sound(seconds * RATE), sound(3 * seconds * RATE // 2)
        heard = media.cut_sound(longer)
        is_same = media.expand([header]) == media.expand([longer])
        assert heard is None or heard < longer.seconds
        if media.cut_sound(header) is not None:
            assert is_same
        elif is_same and family not in {"gemma3n", "voxtral"}:
            assert heard is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_sounds_of_another_rate_are_counted_as_they_will_be_decoded(family: str) -> None:
    processor = AUDIO[family]()
    media = MediaProcessor.of(processor)
    for header in (sound(44_101, 44_100), sound(30_003, 48_000), sound(7_999, 8_000)):
        text = media.placeholder("audio")
        assert our_ids(media, text, [header]) == own_ids(processor, text, [header])


def test_granite_counts_blocks_as_its_extractor_does() -> None:
    """The extractor itself needs a package that is not here; its arithmetic does not."""
    melspec = {"hop_length": 160}
    part = SimpleNamespace(
        sampling_rate=RATE, melspec_kwargs=melspec, projector_window_size=15, projector_downsample_rate=5
    )
    settings = Settings(processor=None, part=part, kwargs={})
    headers = random_sounds("granite_speech", 200)
    own = GraniteSpeechFeatureExtractor._get_num_audio_features(part, [header.num_samples for header in headers])
    assert projected_blocks(settings, headers)["audio_embed_sizes"] == own


def test_voxtral_hears_whole_chunks_of_thirty_seconds() -> None:
    """375 tokens a chunk: its encoder and projector make one of eight of the chunk's 3000 frames."""
    media = MediaProcessor.of(AUDIO["voxtral"]())
    headers = [sound(16_000), sound(480_000), sound(480_001)]
    assert [string.count("[AUDIO]") for string in media.expand(headers)] == [375, 375, 750]
    features = media.features(decoded(headers))
    assert features["input_features"].shape == (4, 8, 3000)
    alone = [media.features(decoded([header]))["input_features"] for header in headers]
    np.testing.assert_array_equal(features["input_features"], np.concatenate(alone))


def test_voxtral_compares_what_was_decoded_with_the_plan() -> None:
    media = MediaProcessor.of(AUDIO["voxtral"]())
    [(_, heard)] = decoded([sound(480_001)])
    with refused(RowError, "media_mismatch", "375", "[AUDIO]", "750"):
        media.features([(sound(16_000), heard)])


def test_a_sound_of_which_no_token_is_left_is_the_rows_fault() -> None:
    media = MediaProcessor.of(AUDIO["qwen2_audio"]())
    with refused(RowError, "media_size", "0.010"):
        media.expand([sound(160)])


def test_a_rate_that_the_model_does_not_hear_is_refused() -> None:
    media = MediaProcessor.of(AUDIO["qwen2_audio"](), MediaConfig(sampling_rate=8000))
    with refused(ModelError, "media.sampling_rate", "8000", "16,000"):
        media.expand([sound(16_000)])


def test_a_wrong_length_is_noticed() -> None:
    """The comparisons above can fail: a header that lies gives other ids."""
    processor = AUDIO["qwen3_asr"]()
    media = MediaProcessor.of(processor)
    text = media.placeholder("audio")
    assert our_ids(media, text, [sound(32_000)]) != own_ids(processor, text, [sound(16_000)])


# --------------------------------------------------------------------------------------------------------- features


def rate_of(processor: Any) -> int:
    """Samples a second that its extractor takes."""
    part = getattr(processor, "feature_extractor", None) or processor.audio_processor
    return int(part.sampling_rate)


def decoded(headers: list[AudioHeader], rate: int = RATE) -> list[tuple[AudioHeader, DecodedAudio]]:
    return [(header, DecodedAudio(samples=samples_of(header, rate), sampling_rate=rate)) for header in headers]


def features_of(media: MediaProcessor, rows: list[list[AudioHeader]]) -> dict[str, np.ndarray]:
    return merge_features(media.family, [media.features(decoded(row, rate_of(media.processor))) for row in rows])


def texts_of(media: MediaProcessor, rows: list[list[AudioHeader]]) -> list[str]:
    return ["hello " + " and ".join([media.placeholder("audio")] * len(row)) for row in rows]


def assert_same(media: MediaProcessor, ours: dict[str, np.ndarray], own: dict[str, Any]) -> None:
    skipped = TOKEN_OUTPUTS | set(media.family.token_inputs) | set(media.family.dropped)
    assert set(ours) == set(own) - skipped
    for key, value in ours.items():
        np.testing.assert_array_equal(value, np.asarray(own[key]), err_msg=key)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_one_row_are_the_processors_own(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    row = [sound(20_333)] if family in ONE_EACH else [sound(20_333), sound(9_000), sound(31_000)]
    own = own_batch(media.processor, texts_of(media, [row]), row)
    assert_same(media, features_of(media, [row]), own)


def test_phi4_gets_a_mask_for_sounds_that_are_alone_in_their_row() -> None:
    """Its processor leaves the mask out for one sound, and the batch needs it where another is longer."""
    media = MediaProcessor.of(AUDIO["phi4_multimodal"]())
    assert media.features(decoded([sound(16_000)]))["audio_attention_mask"].tolist() == [[True] * 98]


@pytest.mark.parametrize(
    "family, key, mask",
    [
        ("inkling", "audio_input_ids", "audio_input_ids_mask"),
        ("phi4_multimodal", "audio_input_features", "audio_attention_mask"),
    ],
)
def test_merged_features_agree_where_the_sounds_are(family: str, key: str, mask: str) -> None:
    """What fills up is 0 of ours and silence of the processor's; the mask keeps both from the model."""
    media = MediaProcessor.of(AUDIO[family]())
    rows = [[sound(24_000)], [sound(7_000)], [sound(63_111)]]
    own = own_batch(media.processor, texts_of(media, rows), [header for row in rows for header in row])
    ours, heard = features_of(media, rows), np.asarray(own[mask])
    np.testing.assert_array_equal(ours[mask], heard)
    np.testing.assert_array_equal(ours[key][heard], np.asarray(own[key])[heard])


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_features_of_sounds_of_one_length_are_the_processors_own_batch(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    rows = [[sound(24_000)], [sound(24_000)], []][: 2 if family in ONE_EACH else 3]
    own = own_batch(media.processor, texts_of(media, rows), [header for row in rows for header in row])
    assert_same(media, features_of(media, rows), own)


# These fill up to a fixed length or window, or look at no sample twice: what is next to a sound does not change it.
@pytest.mark.parametrize(
    "family", ["audioflamingo3", "glmasr", "gemma4", "gemma4_unified", "musicflamingo", "qwen2_audio", "qwen2_5_omni"]
)
def test_merged_features_of_sounds_of_many_lengths_are_the_processors_own_batch(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    rows = [[sound(24_000)], [sound(7_000)], [sound(63_111)]]
    own = own_batch(media.processor, texts_of(media, rows), [header for row in rows for header in row])
    assert_same(media, features_of(media, rows), own)


# These fill sounds up to the longest of a call before they look at frequencies, so the last frames of a sound are other
# ones in company. Ours are those of the sound alone, as at inference; the rest agrees.
@pytest.mark.parametrize("family", ["qwen3_omni_moe", "qwen3_asr", "nemotron_h_omni"])
def test_merged_features_of_sounds_of_many_lengths_agree_but_for_the_last_frames(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    rows = [[sound(24_000)], [sound(8_000)], [sound(63_200)]]
    own = own_batch(media.processor, texts_of(media, rows), [header for row in rows for header in row])
    ours = features_of(media, rows)
    assert set(ours) == set(own) - TOKEN_OUTPUTS
    for number, [header] in enumerate(rows):
        frames = header.num_samples // 160 - 3
        mine, theirs = ours["input_features"][number], np.asarray(own["input_features"])[number]
        along = 1 if family != "nemotron_h_omni" else 0
        np.testing.assert_allclose(
            mine.take(range(frames), axis=along), theirs.take(range(frames), axis=along), rtol=1e-4, atol=1e-4
        )
