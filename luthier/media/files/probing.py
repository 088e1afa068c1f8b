"""What is known of a media item without decoding it, within the caps of the section ``media``."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from luthier.config.inputs import MediaConfig
from luthier.errors import RowError
from luthier.media.files.access import Content, MediaAccess
from luthier.media.files.containers import probe_audio, probe_video
from luthier.media.files.image_headers import read_stored_size
from luthier.media.files.waves import read_wave
from luthier.records import Audio, AudioHeader, Image, ImageHeader, Media, MediaHeader, Video, VideoHeader
from luthier.writing import counted

DEFAULT_LIST_FPS = 2.0  # frames of a list that says no fps, and so does ``media.fps``


def probe(media: Media, access: MediaAccess) -> MediaHeader:
    """The header of an item: of images and WAV files from a few bytes, of others by PyAV.

    Raises `RowError` and its kind `RowForbidden` as `MediaAccess.open`; ``media_format`` for a file of another type,
    ``media_broken`` for a header that is cut off or cannot be, ``media_limit`` for what is over a cap; `SourceError`
    where PyAV is needed and not installed.
    """
    match media:
        case Image():
            with access.open(media.source, media.root) as content:
                return _image(content, access)
        case Audio():
            with access.open(media.source, media.root) as content:
                header = _audio(content, access)
                return header if media.window is None else _of_window(header, media.window, content)
        case Video() if isinstance(media.source, tuple):
            return _frame_list(media, media.source, access)
        case Video():
            with access.open(media.source, media.root) as content:
                video = probe_video(content)
                check_video(video, access.config, content.name)
                return video
        case _:
            raise AssertionError(f"no media: {media!r}")


def _image(content: Content, access: MediaAccess) -> ImageHeader:
    stored = read_stored_size(content)
    width, height = stored.shown
    header = ImageHeader(width=width, height=height, version=content.version)
    check_image(header, access.config, content.name)
    check_image_bytes(stored.decoded_bytes, access.config, f"{content.name}: {width} x {height}")
    return header


def _audio(content: Content, access: MediaAccess) -> AudioHeader:
    wave = read_wave(content)
    if wave is None:
        header = probe_audio(content)
    else:
        header = AudioHeader(num_samples=wave.num_samples, sampling_rate=wave.sampling_rate, version=content.version)
    check_audio(header, access.config, content.name)
    return header


def _of_window(whole: AudioHeader, window: tuple[int, int], content: Content) -> AudioHeader:
    start, end = window
    if end > whole.num_samples:
        what = f"{content.name} has {counted(whole.num_samples, 'sample')}, and its part up to {end:,} was planned with"
        raise RowError("media_changed", f"{what}; prepare again")
    return replace(whole, num_samples=end - start)


def _frame_list(media: Video, sources: tuple[str | bytes, ...], access: MediaAccess) -> VideoHeader:
    """A video of images, which all have one size."""
    digest = hashlib.blake2b(digest_size=16)
    first: ImageHeader | None = None
    for number, source in enumerate(sources):
        with access.open(source, media.root) as content:
            header = _image(content, access)
            digest.update(header.version.encode())
            first = first or header
            if (header.width, header.height) != (first.width, first.height):
                sizes = f"{header.width} x {header.height}, the first has {first.width} x {first.height}"
                raise RowError("media_broken", f"frame {number} ({content.name}) has {sizes}")
    if first is None:
        raise RowError("media_broken", "the video has no frames")
    video = VideoHeader(
        width=first.width,
        height=first.height,
        num_frames=len(sources),
        fps=media.fps or access.config.fps or DEFAULT_LIST_FPS,
        extracted=True,
        version=digest.hexdigest(),
    )
    check_video(video, access.config, f"a list of {counted(len(sources), 'frame')}")
    return video


# --------------------------------------------------------------------------------------------------------------------
# The caps of the section ``media``, asked of headers, before anything is decoded. All raise `RowError`.


_SAMPLING_RATES = range(1_000, 768_001)


def check_image(header: ImageHeader | VideoHeader, config: MediaConfig, name: str) -> None:
    """An image, or the frames of a video: pixels, shortest side, ratio of the sides (``media_limit``)."""
    width, height = header.width, header.height
    if width * height > config.max_image_pixels:
        what = f"{width} x {height} are {width * height:,} pixels"
        raise _over(f"{what}, media.max_image_pixels is {config.max_image_pixels:,}", name)
    short, long = min(width, height), max(width, height)
    if short < config.min_image_side:
        raise _over(f"{width} x {height} pixels, media.min_image_side is {config.min_image_side}", name)
    if long > short * config.max_side_ratio:
        ratio = f"one side is {long / short:.0f} times the other"
        raise _over(f"{width} x {height}: {ratio}, media.max_side_ratio is {config.max_side_ratio:g}", name)


def check_image_bytes(num_bytes: int, config: MediaConfig, name: str) -> None:
    """The memory that decoding an image takes, by its format and mode (``media_limit``)."""
    if num_bytes > config.max_image_bytes:
        hint = f"media.max_image_bytes is {config.max_image_bytes:,}"
        raise _over(f"decoding takes {counted(num_bytes, 'byte')} in a file of this kind, {hint}", name)


def check_video(header: VideoHeader, config: MediaConfig, name: str) -> None:
    """Frames, seconds (``media_limit``), and what holds for images; no frame at all is ``media_broken``."""
    if header.num_frames < 1 or not header.fps > 0:
        raise RowError("media_broken", f"{name} has {counted(header.num_frames, 'frame')} at {header.fps:g} a second")
    check_image(header, config, name)
    if header.num_frames > config.max_video_frames:
        raise _over(
            f"{counted(header.num_frames, 'frame')}, media.max_video_frames is {config.max_video_frames:,}", name
        )
    if header.seconds > config.max_video_seconds:
        raise _over(f"{header.seconds:,.0f} s, media.max_video_seconds is {config.max_video_seconds:g}", name)


def check_audio(header: AudioHeader, config: MediaConfig, name: str) -> None:
    """Seconds (``media_limit``) and a sampling rate that there is (``media_broken``)."""
    if header.sampling_rate not in _SAMPLING_RATES:
        raise RowError("media_broken", f"{name} claims {counted(header.sampling_rate, 'sample')} a second")
    if header.seconds > config.max_audio_seconds:
        raise _over(f"{header.seconds:,.0f} s, media.max_audio_seconds is {config.max_audio_seconds:g}", name)
    if header.seconds < config.min_audio_seconds:
        what = f"{counted(header.num_samples, 'sample')} at {header.sampling_rate:,} a second"
        raise _over(f"{what} are less than media.min_audio_seconds, {config.min_audio_seconds:g}", name)


def check_frames(header: VideoHeader, num_frames: int, config: MediaConfig, name: str) -> None:
    """The memory that the chosen frames of a video take (``media_limit``)."""
    size = num_frames * header.width * header.height * 3
    if size > config.max_decoded_bytes:
        what = f"{counted(num_frames, 'frame')} of {header.width} x {header.height} are {counted(size, 'byte')}"
        hint = f"media.max_decoded_bytes is {config.max_decoded_bytes:,}; lower media.fps or media.max_frames"
        raise _over(f"{what}, {hint}", name)


def _over(what: str, name: str) -> RowError:
    return RowError("media_limit", f"{name}: {what}")
