"""What is known of a media item without decoding it, within the caps of the section ``media``; wave files whole."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.config.inputs import MediaConfig
from luthier.errors import RowError
from luthier.media.files.access import Content, MediaAccess
from luthier.media.files.containers import probe_audio, probe_video
from luthier.media.files.image_headers import read_stored_size
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


# ----------------------------------------------------------------------------------------------------------- wave files


_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FRAMES_AT_ONCE = 1 << 18
# The type on disk, what is subtracted, what is divided by. 24 bits are read as the upper bytes of 32.
_SAMPLES: dict[tuple[int, int], tuple[str, float, float]] = {
    (_PCM, 8): ("u1", 128.0, 128.0),
    (_PCM, 16): ("<i2", 0.0, 32768.0),
    (_PCM, 24): ("<i4", 0.0, 2147483648.0),
    (_PCM, 32): ("<i4", 0.0, 2147483648.0),
    (_FLOAT, 32): ("<f4", 0.0, 1.0),
    (_FLOAT, 64): ("<f8", 0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """Where the samples of a WAV file are and how they are written. ``num_samples`` are those of one channel."""

    sampling_rate: int
    num_channels: int
    coding: int
    bits: int
    start: int
    num_samples: int


def read_wave(content: Content) -> Wave | None:
    """The header of a WAV file; None if the file is none, or compressed.

    Raises `RowError` (``media_broken``) if the header promises more than the file has, or contradicts itself.
    """
    start = content.read(0, 12)
    if start[:4] != b"RIFF" or start[8:12] != b"WAVE":
        return None
    form: tuple[int, ...] = ()
    at = 12
    while len(head := content.read(at, 8)) == 8:
        (length,) = struct.unpack_from("<I", head, 4)
        if head[:4] == b"fmt ":
            data = content.read(at + 8, min(length, 40))
            if len(data) < 16:
                break
            form = struct.unpack_from("<HHIIHH", data)
            if form[0] == _EXTENSIBLE and len(data) >= 26:  # the coding begins the GUID of its sub-format
                form = (int.from_bytes(data[24:26], "little"), *form[1:])
        elif head[:4] == b"data":
            return _wave(content, form, at + 8, length) if form else None
        at += 8 + length + (length & 1)
    raise RowError("media_broken", f"{content.name} begins like a WAV but holds no samples")


def decode_wave(content: Content, wave: Wave, window: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """The samples from -1 to 1, the mean of all channels, float32[num_samples]; of a ``window`` [start, end) those."""
    kind, shift, scale = _SAMPLES[wave.coding, wave.bits]
    start, end = window or (0, wave.num_samples)
    samples = np.empty(end - start, dtype=np.float32)
    frame = wave.num_channels * wave.bits // 8
    for first in range(0, end - start, _FRAMES_AT_ONCE):
        count = min(_FRAMES_AT_ONCE, end - start - first)
        data = content.read(wave.start + (start + first) * frame, count * frame)
        if len(data) < count * frame:
            raise RowError("media_broken", f"{content.name} ends before its samples do")
        if wave.bits == 24:
            wide = np.zeros((count * wave.num_channels, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
            data = wide.tobytes()
        with np.errstate(all="ignore"):  # NaN and inf are found, and told, by who decodes
            values = (np.frombuffer(data, dtype=kind).astype(np.float64) - shift) / scale
            samples[first : first + count] = values.reshape(count, wave.num_channels).mean(axis=1)
    return samples


def _wave(content: Content, form: tuple[int, ...], start: int, length: int) -> Wave | None:
    coding, num_channels, sampling_rate, _, block, bits = form
    if (coding, bits) not in _SAMPLES:
        return None
    if num_channels < 1 or block != num_channels * bits // 8:
        what = f"{num_channels} channels of {bits} bits, and {counted(block, 'byte')} for one sample of each"
        raise RowError("media_broken", f"the header of {content.name} says {what}")
    if start + length > content.size:
        there = max(content.size - start, 0)
        raise RowError(
            "media_broken", f"{content.name} promises {counted(length, 'byte')} of samples but has {there:,}"
        )
    return Wave(
        sampling_rate=sampling_rate,
        num_channels=num_channels,
        coding=coding,
        bits=bits,
        start=start,
        num_samples=length // block,
    )
