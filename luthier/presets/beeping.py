"""Short sounds: tones one after another, each at one pitch or gliding, as the bytes of a WAV file.

Pitches, lengths, gaps and loudness differ a little from one sound to the next, as `Random` draws them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

SAMPLING_RATE = 4000
MOST_SECONDS = 2.0
PITCHES = {"low": 300.0, "middle": 600.0, "high": 1200.0}  # Hz, an octave apart
_NOISE = 0.01  # of the loudest that a sample can be
_RAMP = 0.01  # seconds in which a tone comes and goes, so that it does not click


@dataclass(frozen=True, kw_only=True, slots=True)
class Tone:
    """A tone of so many seconds that goes from one pitch to another, both in Hz."""

    start: float
    end: float
    seconds: float

    @classmethod
    def level(cls, pitch: float, seconds: float) -> Tone:
        """A tone that keeps its pitch."""
        return cls(start=pitch, end=pitch, seconds=seconds)


def play_tones(tones: Sequence[Tone], rng: Random) -> bytes:
    """A WAV of the tones with gaps of about a tenth of a second, one channel of 8 bits, 4,000 samples a second.

    Raises ``ValueError`` if they take more than two seconds.
    """
    tune, loudness = rng.uniform(0.95, 1.05), rng.uniform(0.4, 0.9)
    parts = [_silence(rng.uniform(0.02, 0.1))]
    for tone in tones:
        parts += [loudness * _tone(tone, tune, tone.seconds * rng.uniform(0.9, 1.1)), _silence(rng.uniform(0.08, 0.12))]
    samples = np.concatenate(parts)
    if len(samples) > MOST_SECONDS * SAMPLING_RATE:
        raise ValueError(f"{len(tones)} tones take {len(samples) / SAMPLING_RATE:.2f} s, the most is {MOST_SECONDS} s")
    noise = np.frombuffer(rng.randbytes(len(samples)), dtype=np.uint8) / 127.5 - 1
    return _wav(samples + _NOISE * noise)


def _tone(tone: Tone, tune: float, seconds: float) -> NDArray[np.float64]:
    count = round(seconds * SAMPLING_RATE)
    pitch = tune * np.geomspace(tone.start, tone.end, count)
    wave = np.sin(2 * np.pi * np.cumsum(pitch) / SAMPLING_RATE)
    ramp = np.arange(1, count + 1) / (_RAMP * SAMPLING_RATE)
    return np.asarray(wave * np.minimum(1, np.minimum(ramp, ramp[::-1])))


def _silence(seconds: float) -> NDArray[np.float64]:
    return np.zeros(round(seconds * SAMPLING_RATE))


def _wav(samples: NDArray[np.float64]) -> bytes:
    """Samples from -1 to 1 as PCM, in which 128 is silence."""
    data = np.clip(np.rint(128 + 127 * samples), 0, 255).astype(np.uint8).tobytes()
    data += b"\0" * (len(data) % 2)  # chunks have even lengths; the header counts without it
    form = struct.pack("<HHIIHH", 1, 1, SAMPLING_RATE, SAMPLING_RATE, 1, 8)
    chunks = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(samples)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks
