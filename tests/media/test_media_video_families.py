"""Families of videos: what stands for a video, from its header alone, is what the processor writes for its frames."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest

from luthier.config.inputs import MediaConfig
from luthier.errors import ModelError, RowError
from luthier.media.families import MediaKind
from luthier.media.files.decoding import DecodedVideo
from luthier.media.geometry.videos import sampled_frames, video_metadata
from luthier.media.processors.processor import MediaProcessor
from luthier.records import VideoHeader
from tests.conftest import reason_is, refused
from tests.media.tiny_av_processors import AUDIO, VIDEO

# LUTHIER_MEDIA_SIZES=500 is the long form of these tests.
NUM_SIZES = int(os.environ.get("LUTHIER_MEDIA_SIZES", "25"))
FAMILIES = sorted(VIDEO)


def clip(width: int, height: int, num_frames: int, fps: float) -> VideoHeader:
    return VideoHeader(width=width, height=height, num_frames=num_frames, fps=fps)


def frames_of(video: VideoHeader, seed: int = 0) -> np.ndarray:
    """uint8[F, H, W, 3], each frame of one colour: nothing is compared but sizes."""
    colours = np.random.default_rng(seed).integers(0, 256, (video.num_frames, 1, 1, 3), dtype=np.uint8)
    return np.broadcast_to(colours, (video.num_frames, video.height, video.width, 3)).copy()


def metadata_of(videos: list[VideoHeader]) -> list[dict[str, Any]]:
    """What a processor is told of whole videos."""
    return [
        {
            "total_num_frames": video.num_frames,
            "fps": video.fps,
            "width": video.width,
            "height": video.height,
            "duration": video.seconds,
            "frames_indices": list(range(video.num_frames)),
        }
        for video in videos
    ]


# What a class refuses, and we do not: fewer frames than it wants, less than a second, a slower video than its rate.
LEAST_FRAMES = {"gemma4": 5, "gemma4_unified": 5, "glm46v": 6}
LEAST_SECONDS = {"glm5_next": 1.5, "molmo2": 1.5}
LEAST_FPS = {"kimi_k25": 2.0}


def random_videos(family: str, count: int) -> list[VideoHeader]:
    """Of all shapes, up to 8 times as long as wide, with 2 to 40 frames, slower and faster than any target rate."""
    rng = random.Random(family)
    videos: list[VideoHeader] = []
    while len(videos) < count:
        width, height = rng.randint(12, 96), rng.randint(12, 96)
        if family == "minimax_m3_vl":  # does not resize unless it is told to
            width, height = 28 * -(-width // 28), 28 * -(-height // 28)
        video = clip(width, height, rng.randint(2, 40), rng.choice([1.0, 2.0, 7.5, 12.0, 29.97]))
        if (
            video.num_frames >= LEAST_FRAMES.get(family, 0)
            and video.seconds >= LEAST_SECONDS.get(family, 0)
            and video.fps >= LEAST_FPS.get(family, 0)
        ):
            videos.append(video)
    return videos


def own_ids(processor: Any, text: str, videos: list[VideoHeader], **options: Any) -> list[int]:
    """The ids that the processor makes of a text and whole videos, of which it takes frames itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some classes put tensors into numpy's functions
        output = processor(
            text=[text],
            videos=[frames_of(video) for video in videos],
            videos_kwargs={"video_metadata": metadata_of(videos), "return_metadata": True, **options},
            return_tensors="pt",
        )
    ids: list[int] = output["input_ids"][0].tolist()
    return ids[1:] if ids[0] == processor.tokenizer.bos_token_id else ids


def our_ids(media: MediaProcessor, text: str, videos: list[VideoHeader]) -> list[int]:
    strings = iter(media.expand(videos))
    first, *rest = text.split(media.placeholder("video"))
    whole = first + "".join(next(strings) + part for part in rest)
    return media.processor.tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_expansion_from_a_header_is_what_the_processor_writes_for_the_whole_video(family: str) -> None:
    processor = VIDEO[family]()
    media = MediaProcessor.of(processor)
    assert media.family.name == family
    for video in random_videos(family, NUM_SIZES):
        text = media.placeholder("video")
        assert our_ids(media, text, [video]) == own_ids(processor, text, [video]), video


# Nemotron's class takes one video a call, and reads what is known of it as an object of transformers' own.


def nemotron_ids(media: MediaProcessor, video: VideoHeader) -> list[int]:
    settings = media.settings(MediaKind.VIDEO)
    output = media.processor(
        text=["<video>"],
        videos=[frames_of(video)[sampled_frames(settings, video)]],
        videos_kwargs={"video_metadata": video_metadata(settings, video), "do_sample_frames": False},
        text_kwargs={"return_tensors": "pt"},
    )
    ids: list[int] = output["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("options", [{}, {"fps": 2}, {"max_frames": 5}])
def test_nemotron_writes_pairs_of_frames_with_their_times(options: dict[str, Any]) -> None:
    media = MediaProcessor.of(AUDIO["nemotron_h_omni"](), MediaConfig(**options))
    for video in random_videos("nemotron_h_omni", NUM_SIZES):
        assert our_ids(media, "<video>", [video]) == nemotron_ids(media, video), video


def test_nemotron_and_molmo_take_one_video_a_conversation() -> None:
    media = MediaProcessor.of(AUDIO["nemotron_h_omni"]())
    for each in (media, MediaProcessor.of(VIDEO["molmo2"]())):
        with pytest.raises(RowError, check=reason_is("media_count")):
            each.expand([clip(40, 40, 4, 2.0)] * 2)
    video = clip(40, 40, 5, 2.0)
    taken = DecodedVideo(frames=frames_of(video), frame_indices=tuple(range(5)), fps=2.0)
    frames = media.features([(video, taken)])["pixel_values_videos"].shape[-4]
    assert frames == 5 or frames == 3  # pairs, as of transformers 5.24


def test_tokens_that_only_pixels_decide_are_not_guessed() -> None:
    processor = VIDEO["video_llama_3"]()
    compressing = type(processor)(processor.image_processor, processor.tokenizer, type(processor.video_processor)())
    with pytest.raises(ModelError, match=r"(?s)leaves out video tokens.*use_token_compression"):
        MediaProcessor.of(compressing).expand([clip(60, 60, 4, 2.0)])


def test_frames_joined_to_one_picture_are_not_guessed() -> None:
    processor = VIDEO["minicpmv4_6"]()
    videos = type(processor.video_processor)(stack_frames=4)
    joining = type(processor)(processor.image_processor, videos, processor.tokenizer)
    with refused(ModelError, "4", "stack_frames"):
        MediaProcessor.of(joining).expand([clip(60, 60, 4, 2.0)])


def test_a_wrong_header_is_noticed() -> None:
    """The comparisons above can fail: a header that lies gives other ids."""
    processor = VIDEO["qwen3_vl"]()
    media = MediaProcessor.of(processor)
    text, video = media.placeholder("video"), clip(90, 60, 12, 4.0)
    own = own_ids(processor, text, [video])
    assert our_ids(media, text, [video]) == own
    for lie in (clip(90, 60, 16, 4.0), clip(90, 60, 12, 3.0), clip(30, 60, 12, 4.0)):
        assert our_ids(media, text, [lie]) != own


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "glm4v", "kimi_k25", "gemma4", "minicpmv4_6", "video_llama_3", "qwen3_omni_moe"]
)
def test_videos_that_share_a_context_are_expanded_in_their_order(family: str) -> None:
    processor = VIDEO[family]()
    media = MediaProcessor.of(processor)
    videos = random_videos(family, 3)
    text = " and ".join([media.placeholder("video")] * 3)
    assert our_ids(media, text, videos) == own_ids(processor, text, videos)
