"""WAV files, read without a library: most sounds of data sets are such, and their headers lie most often."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.media.files.access import Content
from luthier.writing import counted

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
