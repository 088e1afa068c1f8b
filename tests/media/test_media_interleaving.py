"""Sound tracks between the frames of their videos: what stands for them is what the omni processors write."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest

from luthier.config.inputs import MediaConfig
from luthier.media.families import MediaKind
from luthier.media.files.decoding import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from luthier.media.geometry.videos import sampled_frames
from luthier.media.processors import sounds_of
from luthier.media.processors.calling import TOKEN_OUTPUTS, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader
from tests.media.test_media_audio_families import samples_of, sound
from tests.media.test_media_av_batching import picture_of
from tests.media.test_media_video_families import frames_of, metadata_of
from tests.media.tiny_av_processors import AUDIO

FAMILIES = ["qwen2_5_omni", "qwen3_omni_moe"]
PICTURE = ImageHeader(width=70, height=60)


def film(num_frames: int, fps: float, seconds: float | None) -> VideoHeader:
    """A video with a sound track of so many seconds; None: it is silent."""
    track = None if seconds is None else sound(round(seconds * 16_000))
    return VideoHeader(width=60, height=50, num_frames=num_frames, fps=fps, audio=track)


def rows(seed: int) -> list[list[MediaHeader]]:
    rng = random.Random(seed)
    first = film(rng.randint(4, 30), 8.0, rng.uniform(0.5, 6))
    second = film(rng.randint(4, 30), 4.0, rng.uniform(0.5, 6))
    return [
        [first],
        [sound(rng.randint(2_000, 50_000)), first, PICTURE, second],
        [film(8, 4.0, None), second, sound(20_000)],
        [],
        [PICTURE, sound(9_000)],
    ]


def omni(family: str, **options: Any) -> MediaProcessor:
    return MediaProcessor.of(AUDIO[family](), MediaConfig(use_audio_in_video=True, **options))


def decoded(media: MediaProcessor, item: MediaHeader) -> Decoded:
    match item:
        case ImageHeader():
            return DecodedImage(pixels=picture_of(item))
        case AudioHeader():
            return DecodedAudio(samples=samples_of(item), sampling_rate=16_000)
        case VideoHeader():
            taken = sampled_frames(media.settings(MediaKind.VIDEO), item)
            track = None if item.audio is None else DecodedAudio(samples=samples_of(item.audio), sampling_rate=16_000)
            frames = frames_of(item)[taken]
            return DecodedVideo(frames=frames, frame_indices=tuple(taken), fps=item.fps, audio=track)
        case _:
            raise TypeError(item)


def text_of(media: MediaProcessor, row: list[MediaHeader]) -> str:
    kinds = {ImageHeader: "image", VideoHeader: "video", AudioHeader: "audio"}
    return "hello " + " ".join(media.placeholder(kinds[type(item)]) for item in row)


def own_output(media: MediaProcessor, row: list[MediaHeader], **sampling: Any) -> dict[str, Any]:
    """The processor's own output for one row: sounds and tracks in one list, with the video that each is of."""
    sounds, owners = sounds_of(row, with_tracks=True)
    pictures = [picture_of(item) for item in row if isinstance(item, ImageHeader)]
    videos = [item for item in row if isinstance(item, VideoHeader)]
    arguments: dict[str, Any] = {}
    if pictures:
        arguments["images"] = pictures
    if videos:
        arguments["videos"] = [frames_of(video) for video in videos]
        arguments["videos_kwargs"] = {"video_metadata": metadata_of(videos), **sampling}
        arguments |= {"load_audio_from_video": True, "audio_from_video_indices": owners}
    if sounds:
        arguments["audio"] = [samples_of(header) for header in sounds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(media.processor(text=[text_of(media, row)], return_tensors="pt", **arguments))


def our_ids(media: MediaProcessor, row: list[MediaHeader]) -> list[int]:
    ids: list[int] = media.processor.tokenizer("hello " + " ".join(media.expand(row)))["input_ids"]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_expansions_of_videos_with_sound_are_the_processors_own(family: str) -> None:
    media = omni(family)
    for seed in range(6):
        for row in rows(seed):
            assert our_ids(media, row) == own_output(media, row)["input_ids"][0].tolist(), row


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rate_that_is_asked_for_decides_what_stands_beside_a_sound(family: str) -> None:
    media = omni(family, fps=4)
    for row in rows(1)[:3]:
        own = own_output(media, row, fps=4, do_sample_frames=True)
        assert our_ids(media, row) == own["input_ids"][0].tolist(), row


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_option_a_track_is_not_heard(family: str) -> None:
    media = MediaProcessor.of(AUDIO[family]())
    [string] = media.expand([film(8, 4.0, 3.0)])
    assert media.placeholder("audio") not in string
    assert media.placeholder("audio") in omni(family).expand([film(8, 4.0, 3.0)])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_videos_with_sound_are_the_processors_own(family: str) -> None:
    media = omni(family)
    for row in rows(2):
        ours = merge_features(media.family, [media.features([(item, decoded(media, item)) for item in row])])
        own = own_output(media, row)
        assert set(ours) == set(own) - TOKEN_OUTPUTS
        for key, value in ours.items():
            np.testing.assert_array_equal(value, np.asarray(own[key]), err_msg=key)


def test_tracks_stand_among_the_sounds_in_the_order_of_their_videos() -> None:
    silent, loud = film(4, 2.0, None), film(4, 2.0, 1.0)
    row = [sound(10), silent, loud, sound(20), loud]
    assert sounds_of(row, with_tracks=True)[1] == [None, 1, None, 2]
    assert sounds_of(row, with_tracks=False)[1] == [None, None]
