"""Loops that numba compiles. Imported where they are first needed, because numba takes long to load."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

# ----------------------------------------------------------------------------------------------------------------------
# `packing.balance._fill_packs`, compiled: for large inputs.


@njit(cache=True)  # type: ignore[untyped-decorator]
def _lowest_bit(word: np.uint64) -> int:
    low = word & (~word + np.uint64(1))
    place = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if low >> np.uint64(shift):
            low >>= np.uint64(shift)
            place += shift
    return place


@njit(cache=True)  # type: ignore[untyped-decorator]
def _next_bit(words: NDArray[np.uint64], place: int) -> int:
    """The first set bit at or after ``place``, or -1."""
    index = place >> 6
    if index >= len(words):
        return -1
    word = words[index] >> np.uint64(place & 63)
    if word:
        return int(place + _lowest_bit(word))
    for later in range(index + 1, len(words)):
        if words[later]:
            return int((later << 6) + _lowest_bit(words[later]))
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill_packs(sizes: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The pack of each size (longest first), and how many packs there are."""
    num_words = (capacity >> 6) + 1
    rooms = np.zeros(num_words, np.uint64)  # bit r: a pack has r tokens of room
    busy = np.zeros((num_words >> 6) + 1, np.uint64)  # bit w: rooms[w] is not zero
    newest = np.full(capacity + 1, -1, np.int64)  # room -> the pack that came last, a linked stack
    below = np.empty(len(sizes), np.int64)  # pack -> the next one on its stack
    pack_of = np.empty(len(sizes), np.int64)
    num_packs = 0
    for i in range(len(sizes)):
        size = sizes[i]
        word = size >> 6
        left = -1
        bits = rooms[word] >> np.uint64(size & 63)
        if bits:
            left = size + _lowest_bit(bits)
        else:
            word = _next_bit(busy, word + 1)
            if word >= 0:
                left = (word << 6) + _lowest_bit(rooms[word])
        if left >= 0:
            pack = newest[left]
            newest[left] = below[pack]
            if newest[left] < 0:
                rooms[word] ^= np.uint64(1) << np.uint64(left & 63)
                if rooms[word] == 0:
                    busy[word >> 6] ^= np.uint64(1) << np.uint64(word & 63)
        else:
            left = capacity
            pack = num_packs
            num_packs += 1
        left -= size
        below[pack] = newest[left]
        newest[left] = pack
        rooms[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
        busy[left >> 12] |= np.uint64(1) << np.uint64((left >> 6) & 63)
        pack_of[i] = pack
    return pack_of, num_packs


# ----------------------------------------------------------------------------------------------------------------------
# Pixels to normalised patches in one pass.
#
# H x W pixels of C = 3 channels become P patches of A = ``patch ** 2`` pixels. Channel by channel a patch is written
# ``depth`` times, since models see a picture as a film of that many frames:
#
#     pixel 0, 0 of a 2 x 2 patch, depth 2, first two channels      r0 r1 r2 r3  r0 r1 r2 r3  g0 g1 g2 g3  g0 g1 g2 g3


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
