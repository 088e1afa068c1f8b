"""Videos and sounds: wave files, and all others by PyAV, which nothing else touches. Containers are closed before a
reader returns.

FFmpeg would open what a file names (playlists, lists of files, addresses). So the type is told from the first bytes,
only these types are opened, by their own reader, from the open file, and whatever that reader wants opened is refused.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError, SourceError
from luthier.media.files import Content
from luthier.media.files.image_headers import found_type
from luthier.records import AudioHeader, VideoHeader
from luthier.writing import counted

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream, VideoFrame, VideoStream
    from av.container import InputContainer

_VIDEO_READERS = ("mov", "avi", "matroska", "flv", "asf", "mpeg", "mpegts", "ogg", "gif")
_AUDIO_READERS = ("wav", "flac", "mp3", "aac", "ogg", "aiff", "amr", "mov", "matroska", "avi", "flv", "asf", "mpegts")
_READER_OF_START: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (8, b"AVI ", "avi"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (0, b"FLV\x01", "flv"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (0, b"\0\0\x01\xba", "mpeg"),
    (0, b"OggS", "ogg"),
    (0, b"GIF8", "gif"),
    (8, b"WAVE", "wav"),
    (0, b"fLaC", "flac"),
    (0, b"ID3", "mp3"),
    (8, b"AIFF", "aiff"),
    (8, b"AIFC", "aiff"),
    (0, b"#!AMR", "amr"),
)
_INDEXED_READERS = ("mov", "matroska")  # in which a place is found exactly
_GUESSING_READERS = ("mp3", "aac")  # whose headers say no length, and FFmpeg guesses it from the bit rate
_PACKET_OF_TRANSPORT_STREAM = 188
# How far the length in a header may be from the truth: encoders pad the ends of lossy sound, indexes miss frames.
_SECONDS_OFF = 0.1
_PADDING = 3 * 576  # samples: three packets of MP3 at low rates, which last longer there
_SHARE_OF_FRAMES_OFF = 0.02
_FRAMES_OFF = 2


@dataclass(frozen=True, slots=True)
class _ShownFrames:
    """The frames of a video in the order in which they are shown.

    times  of each, in the stream's own units; None where the container does not say all of them
    keys   numbers of those that decoding can begin with; () where places cannot be looked up
    """

    num_frames: int
    times: list[int] | None
    keys: list[int]


# ------------------------------------------------------------------------------------------------------------ headers


def probe_video(content: Content) -> VideoHeader:
    """The header of a video file; one frame is decoded, which tells how it is turned.

    Raises `RowError` (``media_format``, ``media_broken``), and `SourceError` where PyAV is not installed.
    """
    with _opened(content, "video", _VIDEO_READERS) as container:
        stream = _stream(container, "video", content)
        width, height = stream.codec_context.width, stream.codec_context.height
        fps = stream.average_rate or stream.guessed_rate
        num_frames = stream.frames
        tracks = container.streams.audio
        audio = _audio_header(container, tracks[0]) if tracks else None
    if not num_frames:
        num_frames = _shown_frames(content).num_frames
    rotation = _first_rotation(content)
    if rotation % 180:
        width, height = height, width
    return VideoHeader(
        width=width,
        height=height,
        num_frames=num_frames,
        fps=float(fps or 0),
        audio=audio,
        version=content.version,
    )


def probe_audio(content: Content) -> AudioHeader:
    """The header of a sound, or of the first sound track of a video.

    Raises `RowError` (``media_format``, ``media_broken``), and `SourceError` where PyAV is not installed.
    """
    with _opened(content, "sound", _AUDIO_READERS) as container:
        header = _audio_header(container, _stream(container, "audio", content))
    return AudioHeader(num_samples=header.num_samples, sampling_rate=header.sampling_rate, version=content.version)


def _audio_header(container: InputContainer, stream: AudioStream) -> AudioHeader:
    stated = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
    seconds = stated
    if not stated or container.format.name in _GUESSING_READERS:
        packets = sum(packet.duration or 0 for packet in container.demux(stream) if packet.size)
        there = float(packets * stream.time_base)
        # an encoder's padding is in the packets and not in the statement
        seconds = stated if abs(stated - there) <= _samples_off(stream.rate) / stream.rate else there
    return AudioHeader(num_samples=round(seconds * stream.rate), sampling_rate=stream.rate)


def _samples_off(sampling_rate: int) -> int:
    """How many samples the length in a header may be from the truth."""
    return max(round(_SECONDS_OFF * sampling_rate), _PADDING)


def _first_rotation(content: Content) -> int:
    """Degrees that the pictures are to be turned by, against the clock."""
    with _opened(content, "video", _VIDEO_READERS) as container:
        stream = _stream(container, "video", content)
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            rotation: float = frame.rotation
            return round(rotation)
    raise RowError("media_broken", f"{content.name} has no frame that can be decoded")


# ------------------------------------------------------------------------------------------------------------- frames


def read_frames(content: Content, header: VideoHeader, indices: Sequence[int]) -> NDArray[np.uint8]:
    """The frames with these numbers (ascending, from 0), uint8[F, H, W, 3], turned as they are shown.

    Only what is needed is decoded: from the last keyframe before each of them on. Raises `RowError` (``media_broken``)
    for frames that are missing or of another size than the header says.
    """
    shown = _shown_frames(content)
    if shown.num_frames < header.num_frames - max(_FRAMES_OFF, header.num_frames * _SHARE_OF_FRAMES_OFF):
        what = f"promises {counted(header.num_frames, 'frame')} and has {shown.num_frames:,}"
        raise RowError("media_broken", f"{content.name} {what}")
    wanted = [min(index, shown.num_frames - 1) for index in indices]
    frames = np.empty((len(indices), header.height, header.width, 3), dtype=np.uint8)
    filled = 0
    with _opened(content, "video", _VIDEO_READERS) as container:
        stream = _stream(container, "video", content)
        stream.codec_context.thread_count = 1  # many videos are decoded at once, in processes of their own
        decoded = _decode_wanted(container, stream, shown, wanted)
        for place, frame in enumerate(decoded):
            if sorted((frame.width, frame.height)) != sorted((header.width, header.height)):
                sizes = f"{frame.width} x {frame.height}, the header says {header.width} x {header.height}"
                raise RowError("media_broken", f"{content.name}: frame {indices[place]} has {sizes}")
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation) // 90)
            if pixels.shape != frames.shape[1:]:
                sizes = f"{pixels.shape[1]} x {pixels.shape[0]}, the header says {header.width} x {header.height}"
                raise RowError("media_broken", f"{content.name}: frame {indices[place]} has {sizes}")
            frames[place] = pixels
            filled = place + 1
    if filled < len(indices):
        raise RowError("media_broken", f"{content.name}: frame {indices[filled]} cannot be decoded")
    return frames


def _shown_frames(content: Content) -> _ShownFrames:
    """All frames of a video, counted without decoding any."""
    with _opened(content, "video", _VIDEO_READERS) as container:
        stream = _stream(container, "video", content)
        packets = [
            (packet.pts, packet.is_keyframe)
            for packet in container.demux(stream)
            if packet.size and not packet.is_discard
        ]
        has_index = container.format.name.startswith(_INDEXED_READERS)
    if any(time is None for time, _ in packets):  # as in AVI: they are counted off
        return _ShownFrames(len(packets), None, [])
    packets.sort()
    keys = [number for number, (_, is_key) in enumerate(packets) if is_key] if has_index else []
    return _ShownFrames(len(packets), [time for time, _ in packets], keys)


def _decode_wanted(
    container: InputContainer, stream: VideoStream, shown: _ShownFrames, wanted: list[int]
) -> Iterator[VideoFrame]:
    """The wanted frames, as long as they are found."""
    decoding = container.decode(stream)
    frame: VideoFrame | None = None
    at = -1  # number of the frame that was decoded last
    for number in wanted:
        before = bisect_right(shown.keys, number)
        if shown.times is not None and before and shown.keys[before - 1] > at + 1:
            container.seek(shown.times[shown.keys[before - 1]], stream=stream, backward=True)
            decoding = container.decode(stream)
        while at < number:
            frame = next(decoding, None)
            if frame is None:
                return
            at = at + 1 if shown.times is None or frame.pts is None else bisect_left(shown.times, frame.pts)
        if at > number:
            return
        yield frame


# -------------------------------------------------------------------------------------------------------------- sound


def read_audio(content: Content, header: AudioHeader, window: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """The samples, the mean of all channels, float32[header.num_samples]; of a ``window`` [start, end) those.

    A tenth of a second (or 1,728 samples) more or less than the header says is cut off or silence, as encoders pad
    lossy sound; more is `RowError` (``media_broken``). Decoding stops there, so a header cannot hide hours.
    """
    slack = _samples_off(header.sampling_rate)
    start, end = window or (0, header.num_samples)
    samples = np.zeros(end - start, dtype=np.float32)
    total = 0
    with _opened(content, "sound", _AUDIO_READERS) as container:
        stream = _stream(container, "audio", content)
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            if frame.sample_rate != header.sampling_rate:
                rates = f"{header.sampling_rate} to {counted(frame.sample_rate, 'sample')} a second"
                raise RowError("media_broken", f"{content.name} changes from {rates}")
            block = _mono(frame)
            low, high = max(start, total), min(end, total + len(block))
            if low < high:
                samples[low - start : high - start] = block[low - total : high - total]
            total += len(block)
            if total > end + slack:
                break
    if total < max(end - slack, 1) or (window is None and total > end + slack):
        more = "at least " if total > end else ""
        what = f"promises {counted(end, 'sample')} and has {more}{total:,}"
        raise RowError("media_broken", f"{content.name} {what}")
    return samples


def _mono(frame: AudioFrame) -> NDArray[np.float32]:
    """[channels, n] of planar formats, [1, n * channels] of interleaved ones -> float32[n], from -1 to 1."""
    values: NDArray[np.generic] = frame.to_ndarray()
    channels = frame.layout.nb_channels
    if not frame.format.is_planar:
        values = values.reshape(-1, channels).T
    scale, shift = 1.0, 0.0
    if values.dtype.kind != "f":
        scale = 2.0 ** (8 * values.dtype.itemsize - 1)
        shift = scale if values.dtype.kind == "u" else 0.0
    with np.errstate(all="ignore"):  # NaN and inf are found, and told, by who decodes
        mean: NDArray[np.float64] = values.mean(axis=0, dtype=np.float64)
        return ((mean - shift) / scale).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ opening


@contextmanager
def _opened(content: Content, what: str, readers: Sequence[str]) -> Iterator[InputContainer]:
    """The container, open; PyAV's errors come out as ``media_broken``."""
    start = content.read(0, _PACKET_OF_TRANSPORT_STREAM + 1)
    reader = _reader_of(start)
    if reader is None or reader not in readers:
        raise RowError("media_format", f"{content.name} is {found_type(start)}, no {what} of a type that is read")
    try:
        import av
    except ImportError:
        raise SourceError(
            f"{content.name}: videos, and audio other than WAV, need PyAV, which is not installed",
            hint="install it: pip install av",
        ) from None
    try:
        with (
            content.file() as file,
            av.open(file, format=reader, io_open=_refuse, metadata_errors="replace") as container,
        ):
            yield container
    except av.FFmpegError as error:
        raise RowError("media_broken", f"{content.name}: {error.strerror or error}") from None


def _refuse(url: str, flags: int, options: object) -> NoReturn:
    raise RowError("media_format", f"a file that wants another one opened: {url[:100]!r}")


def _reader_of(start: bytes) -> str | None:
    for offset, mark, reader in _READER_OF_START:
        if start.startswith(mark, offset):
            return reader
    if start[:1] == b"G" and start[_PACKET_OF_TRANSPORT_STREAM:] == b"G":
        return "mpegts"
    if len(start) > 1 and start[0] == 0xFF and start[1] & 0xE0 == 0xE0:  # the sync word of MPEG sound
        return "mp3" if start[1] & 0x06 else "aac"
    return None


def _stream(container: InputContainer, kind: str, content: Content) -> VideoStream | AudioStream:
    streams = container.streams.video if kind == "video" else container.streams.audio
    what = "video" if kind == "video" else "sound"
    if not streams:
        raise RowError("media_broken", f"{content.name} has no {what} in it")
    if streams[0].codec_context is None:
        raise RowError("media_format", f"{content.name}: its {what} is of a coding that FFmpeg does not know")
    return streams[0]


# --------------------------------------------------------------------------------------------------------------------
# Wave files, which need no library.


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
