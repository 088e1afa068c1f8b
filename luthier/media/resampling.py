"""Sound at another sampling rate: a band-limited interpolation, the same on every machine.

The filter is a sinc under a Hann window, six zero crossings to each side, as `torchaudio.functional.resample` has it by
default (Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/).
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np
from numpy.typing import NDArray

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
