"""Pixels to normalised patches in one pass, compiled. Imported when the first picture comes, because numba takes long.

H x W pixels of C = 3 channels become P patches of A = ``patch ** 2`` pixels. Channel by channel a patch is written
``depth`` times, since models see a picture as a film of that many frames:

    pixel 0, 0 of a 2 x 2 patch, depth 2, first two channels      r0 r1 r2 r3  r0 r1 r2 r3  g0 g1 g2 g3  g0 g1 g2 g3
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


def write_patches(
    pixels_HWC: NDArray[np.uint8],
    mean_C: NDArray[np.float32],
    std_C: NDArray[np.float32],
    values_PV: NDArray[np.float32],
    *,
    patch: int,
    merge: int,
) -> None:
    """Write ``(pixel - mean) / std`` into ``values_PV``, V = C * depth * A, by blocks of ``merge`` x ``merge`` patches.

    ``H`` and ``W`` are multiples of ``patch * merge``; P is what they make. A fourth channel is left out.
    """
    height, width, channels = pixels_HWC.shape
    assert channels in (3, 4), f"{channels} channels"
    assert height % (patch * merge) == 0 and width % (patch * merge) == 0, f"{width} x {height} in {patch * merge}"
    assert len(values_PV) == (height // patch) * (width // patch), f"{len(values_PV)} patches for {width} x {height}"
    values_PCDA = values_PV.reshape(len(values_PV), 3, -1, patch * patch)
    assert np.shares_memory(values_PCDA, values_PV), "a copy would be filled and lost"
    _fill(pixels_HWC, mean_C, std_C, patch, merge, values_PCDA)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill(
    pixels_HWC: NDArray[np.uint8],
    mean_C: NDArray[np.float32],
    std_C: NDArray[np.float32],
    patch: int,
    merge: int,
    values_PCDA: NDArray[np.float32],
) -> None:
    height, width, _ = pixels_HWC.shape
    _, channels, depth, area = values_PCDA.shape
    bytes_CA = np.empty((channels, area), dtype=np.uint8)  # one patch, sorted by channel: it stays in the nearest cache
    red_A, green_A, blue_A = bytes_CA[0], bytes_CA[1], bytes_CA[2]
    block = patch * merge
    number = 0
    for top in range(0, height, block):
        for left in range(0, width, block):
            for y in range(top, top + block, patch):
                for x in range(left, left + block, patch):
                    for row in range(patch):
                        for column in range(patch):
                            place = row * patch + column
                            red_A[place] = pixels_HWC[y + row, x + column, 0]
                            green_A[place] = pixels_HWC[y + row, x + column, 1]
                            blue_A[place] = pixels_HWC[y + row, x + column, 2]
                    for channel in range(channels):
                        mean, std = mean_C[channel], std_C[channel]
                        first_A, source_A = values_PCDA[number, channel, 0], bytes_CA[channel]
                        for place in range(area):  # a subtraction and a division, each rounded, as torch has them
                            first_A[place] = (np.float32(source_A[place]) - mean) / std
                        for copy in range(1, depth):
                            values_PCDA[number, channel, copy] = first_A
                    number += 1
