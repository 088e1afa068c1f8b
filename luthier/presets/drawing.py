"""Small pictures: coloured shapes and digits on a plain ground, as the bytes of a PNG file.

A picture is a grid of cells, 16 pixels wide and high; in each there is one drawing or none. Sizes, places within the
cell and shades differ a little from one to the next, as `Random` draws them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from random import Random

import numpy as np
from numpy.typing import NDArray

CELL = 16
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 215, 50),
    "purple": (160, 50, 190),
    "white": (245, 245, 245),
}
Cell = tuple[int, int]  # row from the top, column from the left
Drawing = tuple[str, str]  # a colour, and a shape or a digit
Mask = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]

# Where a shape is: of points with y down and x to the right, -1 to 1 within its box.
SHAPES: dict[str, Mask] = {
    "circle": lambda y, x: y**2 + x**2 <= 1,
    "square": lambda y, x: np.maximum(abs(y), abs(x)) <= 0.85,
    "triangle": lambda y, x: (abs(x) <= (y + 1) / 2) & (y <= 0.9),
    "cross": lambda y, x: np.minimum(abs(y), abs(x)) <= 0.3,
    "ring": lambda y, x: abs(y**2 + x**2 - 0.7) <= 0.3,
    "diamond": lambda y, x: abs(y) + abs(x) <= 1,
}
# 3 x 5 dots, row by row
_DIGITS = {
    "0": "###|#.#|#.#|#.#|###", "1": ".#.|##.|.#.|.#.|###", "2": "###|..#|###|#..|###", "3": "###|..#|.##|..#|###",
    "4": "#.#|#.#|###|..#|..#", "5": "###|#..|###|..#|###", "6": "###|#..|###|#.#|###", "7": "###|..#|.#.|.#.|.#.",
    "8": "###|#.#|###|#.#|###", "9": "###|#.#|###|..#|###",
}  # fmt: skip
_DOT = (2, 3)  # pixels of a dot, high and wide: a digit is 10 by 9


def draw_picture(drawings: Mapping[Cell, Drawing], *, rows: int, columns: int, rng: Random) -> bytes:
    """A PNG of ``16 * rows`` by ``16 * columns`` pixels with ``drawings`` in their cells.

    The pixels follow from the arguments alone; their compression may differ from one zlib to another.
    """
    shade = rng.randrange(60, 90)
    pixels = np.full((CELL * rows, CELL * columns, 3), shade, dtype=np.uint8)
    for (row, column), (colour, what) in sorted(drawings.items()):
        mask = _digit(what, rng) if what in _DIGITS else _shape(SHAPES[what], rng)
        light = rng.uniform(0.85, 1.0)
        cell = pixels[CELL * row : CELL * (row + 1), CELL * column : CELL * (column + 1)]
        cell[mask] = [int(channel * light) for channel in COLOURS[colour]]
    return _png(pixels)


def _shape(mask: Mask, rng: Random) -> NDArray[np.bool_]:
    """bool[16, 16]"""
    radius = rng.uniform(5.5, 7.0)
    slack = CELL / 2 - radius
    y, x = (CELL / 2 + rng.uniform(-slack, slack) for _ in range(2))
    points = np.arange(CELL) + 0.5  # the middle of each pixel
    down, right = ((points - y) / radius)[:, None], ((points - x) / radius)[None, :]
    within: NDArray[np.bool_] = (abs(down) <= 1) & (abs(right) <= 1)
    return mask(down.astype(np.float64), right.astype(np.float64)) & within


def _digit(digit: str, rng: Random) -> NDArray[np.bool_]:
    """bool[16, 16]"""
    dots = np.array([[dot == "#" for dot in line] for line in _DIGITS[digit].split("|")])
    drawn = np.kron(dots, np.ones(_DOT)).astype(bool)
    height, width = drawn.shape
    top, left = rng.randint(1, CELL - 1 - height), rng.randint(1, CELL - 1 - width)
    mask = np.zeros((CELL, CELL), dtype=bool)
    mask[top : top + height, left : left + width] = drawn
    return mask


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """uint8[H, W, 3] as a file of 8 bits a channel, lines as they are."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
