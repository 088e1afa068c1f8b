"""`best_fit._fill_packs`, compiled. Imported only for large inputs, because numba takes long to load."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


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
