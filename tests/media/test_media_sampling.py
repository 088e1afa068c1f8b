"""Which frames are taken: those of the family's class, at the run's rate and within its limit, without decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from luthier.config.inputs import MediaConfig
from luthier.errors import RowError
from luthier.media.families import MediaKind
from luthier.media.geometry.videos import sampled_frames, video_metadata
from luthier.media.processors.calling import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.records import VideoHeader
from tests.conftest import refused
from tests.media.test_media_av_batching import decoded
from tests.media.test_media_video_families import FAMILIES, clip, our_ids, own_ids
from tests.media.tiny_av_processors import VIDEO

# Classes that choose the rate themselves, or have another word for it.
OF_OWN_RATE = {"glm46v", "minicpmv4_6", "minicpmv4_7"}
# Classes that take the rate of a call (the others refuse one beside the number in their files).
TAKE_A_RATE = sorted(set(FAMILIES) - OF_OWN_RATE - {"gemma4", "gemma4_unified", "molmo2", "smolvlm", "minimax_m3_vl"})


def media_of(family: str, **options: Any) -> MediaProcessor:
    return MediaProcessor.of(VIDEO[family](), MediaConfig(**options))


def taken(media: MediaProcessor, video: VideoHeader) -> list[int]:
    return sampled_frames(media.settings(MediaKind.VIDEO), video)


@pytest.mark.parametrize("family", TAKE_A_RATE)
def test_a_rate_of_the_run_is_what_the_class_makes_of_it(family: str) -> None:
    media = media_of(family, fps=4)
    text = media.placeholder("video")
    for video in (clip(56, 40, 31, 12.0), clip(40, 70, 40, 29.97), clip(33, 61, 24, 7.5)):
        own = own_ids(media.processor, text, [video], fps=4, do_sample_frames=True)
        assert our_ids(media, text, [video]) == own, video


def test_a_rate_is_obeyed_where_the_class_refuses_it_beside_its_number() -> None:
    """Gemma 4 has 32 frames in its files, and transformers' own call then takes no rate."""
    assert taken(media_of("gemma4", fps=2), clip(50, 50, 40, 8.0)) == list(range(0, 40, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_frames_are_taken_than_the_run_allows(family: str) -> None:
    media = media_of(family, max_frames=4)
    for video in (clip(56, 56, 40, 8.0), clip(56, 56, 20, 4.0), clip(56, 56, 3, 1.0)):
        frames = taken(media, video)
        assert 1 <= len(frames) <= 4
        assert frames == sorted(frames)
        assert 0 <= frames[0] <= frames[-1] < video.num_frames


@pytest.mark.parametrize("family", FAMILIES)
def test_rate_and_limit_together(family: str) -> None:
    media = media_of(family, max_frames=4, **({} if family in OF_OWN_RATE else {"fps": 1}))
    assert len(taken(media, clip(56, 56, 60, 6.0))) <= 4


def test_a_limit_spreads_what_is_left_evenly() -> None:
    media = media_of("qwen3_vl", max_frames=5, fps=1)
    assert taken(media, clip(64, 64, 90, 10.0)) == [0, 22, 44, 67, 89]


@pytest.mark.parametrize("family", ["llava_next_video", "llava_onevision", "video_llava"])
def test_videos_that_a_model_takes_as_one_array_get_as_many_frames_each(family: str) -> None:
    media = media_of(family, max_frames=4)
    clips = [clip(40, 40, 2, 1.0), clip(40, 40, 4, 1.0), clip(30, 60, 19, 6.0)]
    assert [taken(media, video) for video in clips] == [[0, 0, 1, 1], [0, 1, 2, 3], [0, 6, 12, 18]]
    rows = [media.features(decoded(media, [video])) for video in clips]
    assert merge_features(media.family, rows)["pixel_values_videos"].shape[:2] == (3, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_an_extracted_video_are_all_taken(family: str) -> None:
    video = VideoHeader(width=56, height=56, num_frames=7, fps=2.0, extracted=True)
    media = media_of(family)
    assert taken(media, video) == list(range(7))
    text = media.placeholder("video")
    assert our_ids(media, text, [video]) == own_ids(media.processor, text, [video], do_sample_frames=False)


def test_an_extracted_video_is_thinned_only_by_the_limit() -> None:
    video = VideoHeader(width=56, height=56, num_frames=9, fps=2.0, extracted=True)
    assert taken(media_of("qwen3_vl", fps=1), video) == list(range(9))
    assert taken(media_of("qwen3_vl", fps=1, max_frames=5), video) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("family", "video", "frames"),
    [
        ("gemma4", clip(50, 50, 2, 1.0), [0, 1]),  # wants 5
        ("kimi_k25", clip(50, 50, 6, 1.0), [0, 1, 2, 3, 4, 5]),  # wants two a second
        ("glm5_next", clip(50, 50, 11, 30.0), [5, 5]),  # wants two a second, and this is a third of one
        ("qwen2_vl", clip(50, 50, 1, 1.0), [0, 0]),  # looks at two at a time
    ],
)
def test_a_video_too_short_for_the_class_is_taken_as_it_is(family: str, video: VideoHeader, frames: list[int]) -> None:
    """Transformers' own sampling refuses all of these."""
    media = media_of(family)
    text = media.placeholder("video")
    with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)):
        own_ids(media.processor, text, [video])
    assert taken(media, video) == frames
    assert media.expand([video])[0]


def test_a_video_that_no_sampling_can_save_is_the_rows_fault() -> None:
    with refused(RowError, "media_size", "1", "2"):
        media_of("qwen3_vl").expand([clip(64, 64, 1, 1.0)])


def test_frames_that_the_processor_would_not_resize_are_the_rows_fault() -> None:
    with refused(RowError, "media_size", "28"):
        media_of("minimax_m3_vl").expand([clip(30, 56, 4, 1.0)])


def test_timestamps_are_made_of_the_numbers_that_the_class_makes() -> None:
    """0.15 is 0.1 to one digit as a double and 0.2 as a float32, which it is if frames are numbered by a tensor."""
    media = media_of("video_llama_3", fps=20)
    video = clip(56, 56, 4, 20.0)
    metadata = video_metadata(media.settings(MediaKind.VIDEO), video)
    assert [f"{time:.1f}" for time in metadata.timestamps] == ["0.0", "0.1", "0.1", "0.2"]
    assert [f"{time:.1f}" for time in np.arange(4) / 20.0] == ["0.0", "0.1", "0.1", "0.1"]
    text = media.placeholder("video")
    assert our_ids(media, text, [video]) == own_ids(media.processor, text, [video], fps=20, do_sample_frames=True)
