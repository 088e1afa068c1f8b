"""Media items: what is known of each without decoding it, within the caps of the section ``media``, and its pixels or
samples, decoded once and checked against the header that was planned with.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.config.inputs import MediaConfig
from luthier.errors import RowError
from luthier.media.files import Content, MediaAccess
from luthier.media.files.containers import decode_wave, probe_audio, probe_video, read_audio, read_frames, read_wave
from luthier.media.files.image_headers import FORMATS, read_stored_size
from luthier.records import Audio, AudioHeader, Image, ImageHeader, Media, MediaHeader, Video, VideoHeader
from luthier.writing import counted

if TYPE_CHECKING:
    import PIL.Image

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
        check_samples(header, access.config, content.name)
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


def check_frames(header: VideoHeader, num_frames: int, config: MediaConfig) -> None:
    """The memory that the chosen frames of a video take (``media_limit``)."""
    size = num_frames * header.width * header.height * 3
    if size > config.max_decoded_bytes:
        what = f"{counted(num_frames, 'frame')} of {header.width} x {header.height} are {counted(size, 'byte')}"
        hint = f"media.max_decoded_bytes is {config.max_decoded_bytes:,}; lower media.fps or media.max_frames"
        raise _over(f"{what}, {hint}", "the chosen part of a video")


def check_samples(header: AudioHeader, config: MediaConfig, name: str) -> None:
    """The memory that a compressed sound takes: silence of hours is a file of some kilobytes (``media_limit``)."""
    size = header.num_samples * 4
    if size > config.max_decoded_bytes:
        what = f"{counted(header.num_samples, 'sample')} are {counted(size, 'byte')}"
        raise _over(f"{what}, media.max_decoded_bytes is {config.max_decoded_bytes:,}", name)


def _over(what: str, name: str) -> RowError:
    return RowError("media_limit", f"{name}: {what}")


# ----------------------------------------------------------------------------------------------------- decoded items


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodedImage:
    """``pixels``: a PIL image of the mode RGB, turned as its EXIF says, of the size that the header says."""

    pixels: PIL.Image.Image


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodedAudio:
    """``samples``: float32[n] from about -1 to 1, one channel, ``sampling_rate`` of them a second."""

    samples: NDArray[np.float32]
    sampling_rate: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodedVideo:
    """The chosen frames of a video.

    frames         uint8[F, H, W, 3], RGB
    frame_indices  of the frames in the whole video, ascending, F of them
    fps            frames a second of the whole video
    audio          its sound track, if it was asked for and there is one
    """

    frames: NDArray[np.uint8]
    frame_indices: tuple[int, ...]
    fps: float
    audio: DecodedAudio | None = None


Decoded = DecodedImage | DecodedVideo | DecodedAudio


def decode(
    media: Media,
    header: MediaHeader,
    access: MediaAccess,
    *,
    frame_indices: Sequence[int] | None = None,
    sampling_rate: int | None = None,
    with_audio: bool = False,
) -> Decoded:
    """Decode an item whose header was probed earlier.

    ``frame_indices`` (ascending) are those of a video that are wanted; None: all. ``sampling_rate`` is what sound is
    resampled to, to `resampled_length` samples; None: as it is. ``with_audio``: the sound track of a video too.

    Raises `RowError`: as `MediaAccess.open`; ``media_changed`` if the file is not the one that was probed;
    ``media_broken`` for data that ends early or is damaged; ``media_values`` for samples that are no finite numbers;
    ``media_limit`` for more frames than fit into ``media.max_decoded_bytes``.
    """
    match media, header:
        case Image(), ImageHeader():
            with _unchanged(media.source, media.root, header.version, access) as content:
                return DecodedImage(pixels=_decode_image(content, (header.width, header.height)))
        case Audio(), AudioHeader():
            with _unchanged(media.source, media.root, header.version, access) as content:
                return _decode_audio(content, header, sampling_rate, media.window)
        case Video(), VideoHeader():
            indices = tuple(range(header.num_frames)) if frame_indices is None else tuple(frame_indices)
            assert all(0 <= index < header.num_frames for index in indices), f"{indices} of {header.num_frames}"
            assert list(indices) == sorted(indices), f"frames are taken in their order, not {indices}"
            check_frames(header, len(indices), access.config)
            return _decode_video(media, header, access, indices, with_audio=with_audio, sampling_rate=sampling_rate)
        case _:
            raise AssertionError(f"{type(media).__name__} with {type(header).__name__}")


def _decode_video(
    media: Video,
    header: VideoHeader,
    access: MediaAccess,
    indices: tuple[int, ...],
    *,
    with_audio: bool,
    sampling_rate: int | None,
) -> DecodedVideo:
    audio = None
    if isinstance(media.source, tuple):
        frames = _decode_frame_list(media, media.source, header, access, indices)
    else:
        with _unchanged(media.source, media.root, header.version, access) as content:
            frames = read_frames(content, header, indices)
            if with_audio and header.audio is not None:
                check_samples(header.audio, access.config, content.name)
                audio = _decode_audio(content, header.audio, sampling_rate)
    return DecodedVideo(frames=frames, frame_indices=indices, fps=header.fps, audio=audio)


def _decode_frame_list(
    media: Video,
    sources: tuple[str | bytes, ...],
    header: VideoHeader,
    access: MediaAccess,
    indices: tuple[int, ...],
) -> NDArray[np.uint8]:
    if probe(media, access).version != header.version:
        raise RowError("media_changed", "a frame of the video is not the one that was planned with")
    frames = np.empty((len(indices), header.height, header.width, 3), dtype=np.uint8)
    for place, index in enumerate(indices):
        with access.open(sources[index], media.root) as content:
            frames[place] = np.asarray(_decode_image(content, (header.width, header.height)))
    return frames


# ------------------------------------------------------------------------------------------------------------- images


def _decode_image(content: Content, size: tuple[int, int]) -> PIL.Image.Image:
    """RGB as transformers' ``load_image`` gives it: turned as EXIF says, transparency dropped; of 16 bits the upper 8.

    Of an animation the first frame.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    stored = read_stored_size(content)
    if stored.shown != size:  # also refuses what PIL must not see
        raise RowError("media_changed", f"{content.name} is not {size[0]} x {size[1]} pixels any more")
    try:
        with content.file() as file, Image.open(file, formats=FORMATS) as image:
            if sorted(image.size) != sorted(size):  # before its pixels are made: a GIF's frame may be larger than it
                raise RowError("media_broken", f"{content.name} is {image.size}, its header says {size}")
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            pixels: PIL.Image.Image = image
    except UnidentifiedImageError:
        raise RowError("media_broken", f"{content.name} cannot be read as an image") from None
    except Image.DecompressionBombError as error:
        raise RowError("media_limit", f"{content.name}: {error}") from None
    except (OSError, SyntaxError, ValueError, TypeError, IndexError, struct.error) as error:  # as PIL's readers do
        raise RowError("media_broken", f"{content.name}: {error}") from None
    if pixels.size != size:
        raise RowError("media_broken", f"{content.name} is {pixels.size}, its header says {size}")
    return _as_rgb(pixels, content)


def _as_rgb(image: PIL.Image.Image, content: Content) -> PIL.Image.Image:
    from PIL import Image

    match image.mode:
        case "RGB":
            pixels = image
        case "I;16" | "I;16L" | "I;16B":
            values: NDArray[np.uint16] = np.asarray(image)
            pixels = Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
        case "I" | "F":
            detail = f"{content.name} has gray values of 32 bits, which say no shade that is white"
            raise RowError("media_format", detail)
        case _:
            pixels = image.convert("RGB")
    pixels.info.pop("transparency", None)  # a colour of the file, which some processors would paint white
    return pixels


# -------------------------------------------------------------------------------------------------------------- sound


def _decode_audio(
    content: Content, header: AudioHeader, sampling_rate: int | None, window: tuple[int, int] | None = None
) -> DecodedAudio:
    wave = read_wave(content)
    samples = read_audio(content, header, window) if wave is None else decode_wave(content, wave, window)
    if not np.isfinite(samples).all():
        number = int(np.flatnonzero(~np.isfinite(samples))[0])
        detail = f"{content.name}: sample {number} is {samples[number]}, and samples are numbers"
        raise RowError("media_values", detail)
    target = sampling_rate or header.sampling_rate
    return DecodedAudio(samples=resample(samples, header.sampling_rate, target), sampling_rate=target)


def _unchanged(
    source: str | bytes | tuple[str | bytes, ...], root: str | None, version: str, access: MediaAccess
) -> Content:
    """The open content, if it is the one that was probed."""
    assert not isinstance(source, tuple)
    content = access.open(source, root)
    if content.version != version:
        content.close()
        detail = f"{content.name} is not what was planned with: its version is {content.version}, it was {version}"
        raise RowError("media_changed", f"{detail}; prepare again")
    return content


# --------------------------------------------------------------------------------------------------------------------
# Sound at another sampling rate: a band-limited interpolation, the same on every machine.
#
# The filter is a sinc under a Hann window, six zero crossings to each side, as `torchaudio.functional.resample` has
# it by default (Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/).


_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99  # of the lower rate's Nyquist frequency is kept
_SAMPLES_AT_ONCE = 1 << 15


def resampled_length(num_samples: int, sampling_rate: int, target_rate: int) -> int:
    """Samples after resampling: all of them, rounded up. 44101 samples at 44.1 kHz are 16001 at 16 kHz."""
    return -(-num_samples * target_rate // sampling_rate)


def resample(samples: NDArray[np.float32], sampling_rate: int, target_rate: int) -> NDArray[np.float32]:
    """Samples [n] at another rate, [resampled_length(n, sampling_rate, target_rate)]; silence is around them."""
    if sampling_rate == target_rate:
        return samples
    common = gcd(sampling_rate, target_rate)
    step, phases = sampling_rate // common, target_rate // common
    kernel, width = _kernel(step, phases)
    length = resampled_length(len(samples), sampling_rate, target_rate)
    resampled = np.empty(length, dtype=np.float32)
    for first in range(0, length, _SAMPLES_AT_ONCE):
        outputs = np.arange(first, min(first + _SAMPLES_AT_ONCE, length))
        starts = outputs * step // phases - width  # of the samples that each output is made of
        low, high = int(starts[0]), int(starts[-1]) + kernel.shape[1]
        inside = samples[max(low, 0) : max(high, 0)]
        padded = np.pad(inside, (max(-low, 0), max(high - low - max(-low, 0) - len(inside), 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1])[starts - low]
        resampled[outputs] = np.einsum("kt,kt->k", windows, kernel[outputs % phases])
    return resampled


@lru_cache(maxsize=8)
def _kernel(step: int, phases: int) -> tuple[NDArray[np.float32], int]:
    """The filter for each phase, [phases, 2 * width + 2], and ``width``, the samples before the one it begins at.

    Output k stands at the place k * step / phases of the input: phase p = k % phases is (p * step % phases) / phases
    of a sample behind the input sample that it begins at.
    """
    cutoff = min(step, phases) * _ROLLOFF / step  # in units of the input's Nyquist frequency
    width = ceil(_ZERO_CROSSINGS / cutoff)
    behind = (np.arange(phases) * step % phases) / phases
    distance = np.arange(-width, width + 2) - behind[:, None]
    crossings = np.clip(distance * cutoff, -_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = np.cos(crossings * np.pi / _ZERO_CROSSINGS / 2) ** 2
    return (np.sinc(crossings) * window * cutoff).astype(np.float32), width
