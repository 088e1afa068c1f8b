"""The section ``media``: which files rows may name, how large they may be, and how the processor sees them."""

# ruff: noqa: RUF012 (pydantic copies defaults; the base class is in another file, so ruff cannot know)

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from luthier.config.choices import Count, PathLike, Positive, Texts, as_enum, as_list
from luthier.config.inputs import Section

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?")


def _check_hosts(hosts: list[str]) -> list[str]:
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"holds {host!r}, which is not a host: write images.example.org, or example.org:8080")
    return hosts


class MediaCache(StrEnum):
    """What of the work on media is kept for later epochs and runs."""

    NONE = "none"
    ENCODER_FEATURES = "encoder_features"  # what frozen towers and projectors make of images and videos


class LongAudio(StrEnum):
    """What becomes of a sound that is longer than the model hears."""

    CUT = "cut"
    SPLIT = "split"
    QUARANTINE = "quarantine"


class MediaConfig(Section):
    """Images, videos and sounds of rows: where they may be, how large, and how the model's processor is to see them.
    The processor's options are its own where they are ``null`` ([media.md](media.md))."""

    roots: Annotated[list[PathLike], BeforeValidator(as_list)] = []
    """Folders in which rows may name files by absolute paths; a relative path stays in its source's ``media_root``."""
    url_hosts: Annotated[Texts, AfterValidator(_check_hosts)] = []
    """Hosts from which rows may have files fetched by http(s), as ``name`` or ``name:port``. Default: none; a row that
    names an address then stops the run, and nothing is fetched."""
    max_bytes: Count = 2_000_000_000
    """Largest file, in bytes."""
    max_url_bytes: Count = 100_000_000
    """Largest file that is fetched, in bytes."""
    max_image_pixels: Count = 50_000_000
    """Most pixels of an image, or of a video's frame. 50 million are 200 MB when decoded, in a WebP 850."""
    max_image_bytes: Count = 500_000_000
    """Most memory that decoding one image may take, in bytes: 4 a pixel for RGB, 8 with transparency or turned by EXIF,
    10 for 16 bits a channel, 17 for WebP, as its header says."""
    min_image_side: Count = 4
    """Shortest side, in pixels. Processors take a side of 1 or 3 for colour channels."""
    max_side_ratio: Positive = 200.0
    """Most that one side may be longer than the other, as for Qwen-VL."""
    max_video_frames: Count = 500_000
    """Most frames of a video, before any are chosen."""
    max_video_seconds: Positive = 7200.0
    """Longest video, in seconds."""
    min_audio_seconds: Positive = 0.01
    """Shortest sound, in seconds: below one step of a feature extractor nothing is left of it."""
    max_audio_seconds: Positive = 2400.0
    """Longest sound, in seconds. 40 minutes at 48 kHz are 460 MB when decoded."""
    long_audio: Annotated[LongAudio, as_enum(LongAudio)] = LongAudio.CUT
    """A sound of more seconds than the model's own feature extractor takes (30 for Qwen2-Audio): ``cut`` lets it cut
    the end off, as inference does, and counts it in the ledger; ``split`` puts as many sounds of equal length in its
    place as are needed ([media.md](media.md)); ``quarantine`` takes the row out."""
    max_decoded_bytes: Count = 2_000_000_000
    """Most memory that the chosen frames of one video may take, in bytes: 320 frames of 1920 x 1080."""
    cache: Annotated[MediaCache, as_enum(MediaCache)] = MediaCache.NONE
    """``encoder_features``: what the model's frozen towers make of images and videos is computed once, before training,
    and kept beside the encoded samples; later epochs and runs decode nothing."""
    min_pixels: Count | None = None
    """Images with fewer pixels are enlarged to so many."""
    max_pixels: Count | None = None
    """Images with more pixels are shrunk to so many."""
    video_min_pixels: Count | None = None
    """Fewest pixels of a video's frame."""
    video_max_pixels: Count | None = None
    """Most pixels of a video's frame; some families count those of all frames together."""
    fps: Positive | None = None
    """Frames that are taken of a second of video; of a list of frames, how many a second they are (2 if ``null``)."""
    max_frames: Count | None = None
    """Most frames that are taken of a video."""
    sampling_rate: Count | None = None
    """Samples of a second of sound, to which all are resampled."""
    use_audio_in_video: bool | None = None
    """Hear a video's sound track, its tokens between those of the frames (omni models)."""
    crop_to_patches: bool | None = None
    """Cut large images into tiles."""
    pan_and_scan: bool | None = None
    """Add crops of images that are far from square (Gemma 3)."""
