"""Families that came later, or whose processors take media in a way of their own: counted and batched as they do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from luthier.config.inputs import MediaConfig
from luthier.errors import ModelError, RowError
from luthier.media.families import MediaKind
from luthier.media.processors.calling import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import ImageHeader
from tests.conftest import reason_is
from tests.media import test_media_audio_families as hearing
from tests.media import test_media_av_batching as watching
from tests.media.test_media_batching import decoded as seen
from tests.media.test_media_families import NUM_SIZES, picture, random_sizes
from tests.media.test_media_families import own_ids as own_picture_ids
from tests.media.test_media_video_families import clip, our_ids, own_ids, random_videos
from tests.media.tiny_later_processors import LATER
from tests.media.tiny_processors import BUILDERS

WATCH = {**LATER, "muse_glimmer": BUILDERS["muse_glimmer"], "minicpm_ocr": BUILDERS["minicpm_ocr"]}
VIDEOS = ("muse_glimmer", "muse_spark", "minicpm_ocr", "dots3_note", "perception_lm")
SOUNDS = ("muse_spark", "dots3_note")


@pytest.mark.parametrize("family", VIDEOS)
def test_videos_are_counted_as_the_processor_counts_them(family: str) -> None:
    processor = WATCH[family]()
    media = MediaProcessor.of(processor)
    assert media.family.name == family
    # the base class refuses videos that are slower than its rate, and we do not
    slowest = 2.0 if family == "perception_lm" else 0.0
    for video in (one for one in random_videos(family, NUM_SIZES) if one.fps >= slowest):
        text = media.placeholder("video")
        assert our_ids(media, text, [video]) == own_ids(processor, text, [video]), video


@pytest.mark.parametrize("family", [name for name in VIDEOS if name != "perception_lm"])
def test_videos_of_a_batch_are_batched_as_the_processor_does(family: str) -> None:
    media = MediaProcessor.of(WATCH[family]())
    rows = watching.rows_of(family, "mixed")
    ours = merge_features(media.family, [media.features(watching.decoded(media, row)) for row in rows])
    watching.assert_same(media, ours, watching.own_batch(family, media, rows))


@pytest.mark.parametrize("family", SOUNDS)
def test_pictures_of_families_that_hear_are_counted_and_batched_too(family: str) -> None:
    media = MediaProcessor.of(LATER[family]())
    for number, (width, height) in enumerate(random_sizes(family, NUM_SIZES)):
        [string] = media.expand([ImageHeader(width=width, height=height)])
        [own] = own_picture_ids(
            family, media.processor, [media.placeholder("image")], [[picture(width, height, number)]]
        )
        assert media.processor.tokenizer(string, add_special_tokens=False)["input_ids"] == own, (width, height)
    rows = [[picture(60, 41)], [], [picture(80, 30), picture(33, 90)]]
    texts = ["see " + " ".join([media.placeholder("image")] * len(row)) for row in rows]
    flat = [one for row in rows for one in row]
    own = media.processor(
        text=texts, images=flat, images_kwargs={"return_tensors": "pt"}, text_kwargs={"padding": True}
    )
    watching.assert_same(media, merge_features(media.family, [media.features(seen(row)) for row in rows]), dict(own))


@pytest.mark.parametrize("family", SOUNDS)
def test_sounds_are_counted_as_the_processor_counts_them(family: str) -> None:
    processor = LATER[family]()
    media = MediaProcessor.of(processor)
    for header in hearing.random_sounds(family, NUM_SIZES):
        text = media.placeholder("audio")
        assert hearing.our_ids(media, text, [header]) == hearing.own_ids(processor, text, [header]), header


@pytest.mark.parametrize("family", SOUNDS)
def test_sounds_of_a_row_and_of_one_length_are_batched_as_the_processor_does(family: str) -> None:
    media = MediaProcessor.of(LATER[family]())
    for rows in ([[hearing.sound(41_000)], [hearing.sound(41_000)], []], [[hearing.sound(n) for n in (9_000, 41_000)]]):
        own = hearing.own_batch(media.processor, hearing.texts_of(media, rows), [item for row in rows for item in row])
        hearing.assert_same(media, hearing.features_of(media, rows), own)


def test_sounds_of_many_lengths_are_muse_sparks_own_batch_and_those_of_dots_where_they_are_heard() -> None:
    rows = [[hearing.sound(24_000)], [hearing.sound(6_400)], [hearing.sound(60_800)]]
    for family in SOUNDS:
        media = MediaProcessor.of(LATER[family]())
        own = hearing.own_batch(media.processor, hearing.texts_of(media, rows), [item for row in rows for item in row])
        ours = hearing.features_of(media, rows)
        if family == "muse_spark":
            hearing.assert_same(media, ours, own)
            continue
        lengths = ours["chunk_sample_lengths"]
        np.testing.assert_array_equal(lengths, np.asarray(own["chunk_sample_lengths"]))
        for chunk, length in enumerate(lengths):  # what lies behind is 0 of ours, and silence of the class's
            frames = math.ceil(length / 160) - 1
            mine, theirs = ours["input_features"][chunk], np.asarray(own["input_features"])[chunk]
            np.testing.assert_array_equal(mine[:, :frames], theirs[:, :frames])


# ------------------------------------------------------------------------------------------------- one by one


def test_tiles_of_perception_lm_are_counted_as_its_processor_counts_them() -> None:
    processor = LATER["perception_lm"]()
    media = MediaProcessor.of(processor)
    for number, (width, height) in enumerate(random_sizes("perception_lm", 2 * NUM_SIZES)):
        [string] = media.expand([ImageHeader(width=width, height=height)])
        own = processor(text=["<|image|>"], images=[[picture(width, height, number)]], return_tensors="pt")
        assert processor.tokenizer(string)["input_ids"] == own["input_ids"][0].tolist(), (width, height)


def test_pictures_of_perception_lm_may_have_different_numbers_of_tiles() -> None:
    """Its own call fails on two that differ; the model flattens items and tiles, which here lie along one axis."""
    media = MediaProcessor.of(LATER["perception_lm"]())
    pictures = [picture(200, 60), picture(30, 30), picture(60, 90)]
    alone = [
        media.processor(text=["<|image|>"], images=[[one]], return_tensors="pt")["pixel_values"] for one in pictures
    ]
    assert len({one.shape[1] for one in alone}) > 1
    rows = [media.features(seen(pictures[:2])), {}, media.features(seen(pictures[2:]))]
    merged = merge_features(media.family, rows)["pixel_values"]
    np.testing.assert_array_equal(merged[0], np.concatenate([one.flatten(0, 1) for one in alone]))


def test_videos_of_perception_lm_may_have_different_numbers_of_frames() -> None:
    media = MediaProcessor.of(LATER["perception_lm"]())
    rows = [[clip(56, 40, 9, 6.0), ImageHeader(width=60, height=41)], [clip(40, 40, 2, 2.0)]]
    merged = merge_features(media.family, [media.features(watching.decoded(media, row)) for row in rows])
    own = [watching.own_batch("perception_lm", media, [row])["pixel_values_videos"] for row in rows]
    assert [len(one[0]) for one in own] == [3, 2]
    np.testing.assert_array_equal(merged["pixel_values_videos"][0], np.concatenate([np.asarray(one)[0] for one in own]))


# ------------------------------------------------------------------------------------------------------- Fuyu


def test_fuyus_rows_of_patches_are_those_that_its_processor_puts_in_front() -> None:
    processor = LATER["fuyu"]()
    media = MediaProcessor.of(processor)
    for number, (width, height) in enumerate(random_sizes("fuyu", NUM_SIZES)):
        [string] = media.expand([ImageHeader(width=width, height=height)])
        own = processor(text=["read"], images=[picture(width, height, number)], return_legacy_image_output=False)
        front = processor.tokenizer(string, add_special_tokens=False)["input_ids"]
        # the class drops the first token of what it writes, where its own tokenizer has put a mark of a word's start
        assert own["input_ids"][0].tolist()[: len(front) - 1] == front[1:], (width, height)
        made = media.features(seen([picture(width, height, number)]))
        np.testing.assert_array_equal(made["pixel_values"], own["pixel_values"])


def test_fuyus_pictures_of_a_batch_lie_one_behind_the_other() -> None:
    media = MediaProcessor.of(LATER["fuyu"]())
    pictures = [picture(100, 40), picture(33, 20), picture(61, 90)]
    own = media.processor(text=["a", "b", "c"], images=pictures, return_legacy_image_output=False)
    merged = merge_features(media.family, [media.features(seen(pictures[:1])), {}, media.features(seen(pictures[1:]))])
    np.testing.assert_array_equal(merged["pixel_values"], own["pixel_values"])


@pytest.mark.parametrize("family", ["fuyu", "perception_lm"])
def test_ids_of_a_text_are_those_of_its_expansions(family: str) -> None:
    """What verification compares rows with: for classes that are called in parts, too."""
    media = MediaProcessor.of(LATER[family]())
    pictures = [picture(70, 40), picture(33, 20)]
    token = media.placeholder("image")
    output = media.run(f"see {token} and {token} that", seen(pictures))
    first, second = media.expand([header for header, _ in seen(pictures)])
    whole = media.processor.tokenizer(f"see {first} and {second} that", add_special_tokens=False)["input_ids"]
    assert np.asarray(output["input_ids"]).tolist() == [whole]


# -------------------------------------------------------------------------------------------------- what is refused


def test_a_video_whose_length_only_the_class_writes_is_refused() -> None:
    media = MediaProcessor.of(BUILDERS["hyperclovax_vision_v2"]())
    with pytest.raises(RowError, check=reason_is("media_kind")):
        media.expand([clip(40, 40, 8, 2.0)])


def test_sizes_that_only_pixels_decide_are_not_guessed() -> None:
    media = MediaProcessor.of(BUILDERS["minicpm_ocr"]())
    settings = media.settings(MediaKind.IMAGE)
    kept: dict[str, Any] = dict(settings.kwargs)
    settings.kwargs["small_image_upsize"] = "adaptive"
    try:
        with pytest.raises(ModelError, match="by what is on them"):
            media.expand([ImageHeader(width=40, height=40)])
    finally:
        settings.kwargs = kept


# ------------------------------------------------------------------------------------------------- options of a run


@pytest.mark.parametrize(
    "family, key, name",
    [
        ("got_ocr2", "crop_to_patches", "crop_to_patches"),
        ("granite_docling", "crop_to_patches", "crop_to_patches"),
        ("internvl", "crop_to_patches", "crop_to_patches"),
        ("ovis2", "crop_to_patches", "crop_to_patches"),
        ("idefics3", "crop_to_patches", "do_image_splitting"),
        ("smolvlm", "crop_to_patches", "do_image_splitting"),
        ("lfm2_vl", "crop_to_patches", "do_image_splitting"),
        ("minicpmv4_6", "crop_to_patches", "slice_mode"),
        ("gemma3", "pan_and_scan", "do_pan_and_scan"),
    ],
)
def test_options_reach_the_processor_and_counts_stay_exact(family: str, key: str, name: str) -> None:
    processor = BUILDERS[family]()
    pictures = [picture(900, 280), picture(40, 130), picture(50, 50)]  # the first is wide enough for Gemma to crop it
    found = []
    for wanted in (True, False):
        media = MediaProcessor.of(processor, MediaConfig(**{key: wanted}))
        for one in pictures:
            [string] = media.expand([ImageHeader(width=one.width, height=one.height)])
            output = processor(
                text=[media.placeholder("image")], images=[one], images_kwargs={name: wanted, "return_tensors": "pt"}
            )
            ids = processor.tokenizer(string, add_special_tokens=False)["input_ids"]
            assert [token for token in output["input_ids"][0] if token != processor.tokenizer.bos_token_id] == ids
            assert media.features(seen([one]))["pixel_values"].size  # compared with the plan on the way
            found.append(len(ids))
    assert sum(found[:3]) > sum(found[3:])
