"""How pictures are cut into tiles: grids as (rows, columns), from sizes in pixels alone.

Each function is the rule of a group of processors and follows it to the order in which candidates are tried, since ties
are common (a square picture fits 1x1, 2x2 and 3x3 alike). `pictures` has the sizes of pictures that are not cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

TileGrid = tuple[int, int]  # rows, columns

# Idefics3 and SmolVLM never make a side longer than this.
LONGEST_SIDE = 4096


@lru_cache(maxsize=64)
def grids_of(min_tiles: int, max_tiles: int) -> tuple[TileGrid, ...]:
    """All (rows, columns) with a number of tiles in the range: few tiles first, then few columns.

    1 to 3 -> (1, 1), (2, 1), (1, 2), (3, 1), (1, 3)
    """
    pairs = [(rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles + 1)]
    return tuple(sorted((pair for pair in pairs if min_tiles <= math.prod(pair) <= max_tiles), key=math.prod))


def nearest_shape(height: int, width: int, *, tile_area: float, candidates: Sequence[TileGrid]) -> TileGrid:
    """The grid whose shape is nearest to the picture's; of equal ones a later one if the picture fills half of it.

    (GOT-OCR2, InternVL, Aya Vision, Ovis2, Phi-4 multimodal, LFM2-VL, DeepSeek-OCR2)
    """
    shape, area = width / height, width * height
    best, least = (1, 1), math.inf
    for rows, columns in candidates:
        difference = abs(shape - columns / rows)
        if difference < least:
            best, least = (rows, columns), difference
        elif difference == least and area > 0.5 * tile_area * rows * columns:
            best = (rows, columns)
    return best


@lru_cache(maxsize=64)
def hashed_grids(min_tiles: int, max_tiles: int) -> tuple[TileGrid, ...]:
    """The same grids in the order of processors that sort a *set* of (columns, rows) by the number of tiles alone.

    The order of equal ones is then that of CPython's hash table, which is why the set is built as they build it.
    """
    pairs = {
        (columns, rows)
        for most in range(min_tiles, max_tiles + 1)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if min_tiles <= columns * rows <= max_tiles
    }
    return tuple((rows, columns) for columns, rows in sorted(pairs, key=math.prod))


def least_upscaling(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The grid that the picture fits with the least upscaling, else the least downscaling (Cohere2 Vision)."""
    candidates = grids_of(1, max_tiles)
    best_up, best_down = (math.inf, candidates[0]), (-math.inf, candidates[0])
    for rows, columns in candidates:
        scale = min(columns * tile / width, rows * tile / height)
        if scale >= 1 and scale < best_up[0]:
            best_up = (scale, (rows, columns))
        if scale > best_down[0]:
            best_down = (scale, (rows, columns))
    return best_up[1] if best_up[0] < math.inf else best_down[1]


@lru_cache(maxsize=64)
def _tilings(max_tiles: int) -> tuple[TileGrid, ...]:
    return tuple(sorted(grids_of(1, max_tiles), key=lambda grid: (math.prod(grid), grid[0])))


def least_upscaling_single(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """As `least_upscaling`, in single precision and with ties broken on rows (Molmo2)."""
    tilings = _tilings(max_tiles)
    sizes = np.asarray(tilings, dtype=np.float32) * np.float32(tile)
    with np.errstate(divide="ignore"):  # a picture that is all margin fits into anything
        scales = (sizes / np.asarray([height, width], dtype=np.float32)).min(axis=1)
    if (scales < 1).all():
        return tilings[int(scales.argmax())]
    return tilings[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]


def covering(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The fewest tiles that show more than nine tenths of the image's area undistorted (Ovis2).

    The processor makes its candidates as (columns, rows) and then reads the first number as rows when it cuts the
    picture, and as columns when it resizes; so does this.
    """
    scored = []
    for second, first in grids_of(1, max_tiles):
        shown = _shown_area(height, width, first, second, tile) / (width * height)
        scored.append((first, second, shown))
    enough = [grid for grid in scored if grid[2] > 0.9]
    if enough:
        columns, rows, _ = min(enough, key=lambda grid: (grid[0] * grid[1], -grid[2]))
    else:
        columns, rows, _ = min(scored, key=lambda grid: (-grid[2], grid[0] * grid[1]))
    return rows, columns


def _shown_area(height: int, width: int, rows: int, columns: int, tile: int) -> float:
    row_height, column_width = height // rows, width // columns
    total = 0.0
    for row in range(rows):
        for column in range(columns):
            tall = height - row * row_height if row == rows - 1 else row_height
            wide = width - column * column_width if column == columns - 1 else column_width
            long: float = max(wide, tall)
            short: float = min(wide, tall)
            if long > tile:
                short, long = short / long * tile, tile
            total += long * short
    return total


@lru_cache(maxsize=64)
def canvases(max_tiles: int, tile: int) -> tuple[TileGrid, ...]:
    """Llama 4's canvases in pixels, in its order: by shape as it first comes up, most tiles first."""
    by_shape: dict[float, list[TileGrid]] = {}
    for tiles in range(max_tiles, 0, -1):
        for rows in (rows for rows in range(1, tiles + 1) if tiles % rows == 0):
            by_shape.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return tuple((rows * tile, columns * tile) for group in by_shape.values() for rows, columns in group)


def best_canvas(height: int, width: int, *, tile: int, max_tiles: int, largest: bool) -> TileGrid:
    """The canvas with the least upscaling (or ``largest``), else the least downscaling; of equal ones the smallest.

    Scales are compared in single precision, as Llama 4's processor does.
    """
    sizes = np.asarray(canvases(max_tiles, tile), dtype=np.float32)
    scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
    upscaling = scales[scales >= 1]
    candidates = upscaling if len(upscaling) else scales
    chosen = candidates.min() if len(upscaling) and not largest else candidates.max()
    fitting = sizes[scales == chosen]
    canvas = fitting[int((fitting[:, 0] * fitting[:, 1]).argmin())]
    return int(canvas[0]) // tile, int(canvas[1]) // tile


def fullest_canvas(height: int, width: int, *, tile: int, max_tiles: int) -> TileGrid:
    """The canvas that holds the whole picture and shows it largest, else the largest of its shape (Perception LM)."""
    grids = [(rows, columns) for columns, rows in canvases(max_tiles, 1)]
    holding = [grid for grid in grids if grid[0] * tile >= height and grid[1] * tile >= width]
    if holding:
        # of canvases that show it equally large the last one is taken
        return max(enumerate(holding), key=lambda one: (_shown_side(height, width, one[1], tile), one[0]))[1]
    shape = width / height
    shapes = [columns / rows for rows, columns in grids]
    if shape >= 1:
        nearest = min((one for one in shapes if one <= shape), key=lambda one: abs(one - shape))
    else:
        nearest = min((one for one in shapes if one > shape), key=lambda one: abs(1 / one - 1 / shape))
    return max((grid for grid in grids if grid[1] / grid[0] == nearest), key=math.prod)


def _shown_side(height: int, width: int, canvas: TileGrid, tile: int) -> int:
    """The shorter side of the picture on a canvas, in pixels."""
    rows, columns = canvas
    scale, shape = min(columns * tile / width, rows * tile / height), width / height
    return math.floor(scale * width / shape) if shape > 1 else math.floor(scale * height * shape)


def best_resolution(height: int, width: int, resolutions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Of the resolutions (height, width) the one that keeps the most pixels and wastes the fewest (LLaVA-NeXT)."""
    best, most, least_waste = (0, 0), 0, math.inf
    for target_height, target_width in resolutions:
        scale = min(target_width / width, target_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = target_width * target_height - kept
        if kept > most or (kept == most and waste < least_waste):
            best, most, least_waste = (target_height, target_width), kept, waste
    return best


def split_rows(height: int, width: int, *, longest: int, tile: int) -> TileGrid:
    """Tiles of the picture with its longest side at ``longest``; (0, 0) if it is one tile (Idefics3, SmolVLM)."""
    height, width = fit_longest(height, width, longest)
    shape = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / shape) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * shape) / tile) * tile
    # both are resized once more, as a size in (height, width) and not as a longest side
    return (height // tile, width // tile) if height > tile or width > tile else (0, 0)


def fit_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longest side at ``longest``, the other even, none over `LONGEST_SIDE` (Idefics3)."""
    shape = width / height
    if width >= height:
        width, height = longest, int(longest / shape)
        height += height % 2
    else:
        height, width = longest, int(longest * shape)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    shape = width / height
    if width >= height and width > LONGEST_SIDE:
        width, height = LONGEST_SIDE, int(LONGEST_SIDE / shape)
    elif height > width and height > LONGEST_SIDE:
        height, width = LONGEST_SIDE, int(LONGEST_SIDE * shape)
    return max(height, 1), max(width, 1)


def pan_and_scan(height: int, width: int, *, min_crop: int, max_crops: int, min_ratio: float) -> int:
    """How many crops an elongated picture gets besides itself; 0 for none (Gemma 3)."""
    long, short = max(height, width), min(height, width)
    if long / short < min_ratio:
        return 0
    crops = min(math.floor(long / min_crop), math.floor(long / short + 0.5))  # halves are rounded up
    crops = min(max_crops, max(2, crops))
    return 0 if min(math.ceil(long / crops), short) < min_crop else crops


def slices(height: int, width: int, *, max_slices: int, resolution: int) -> TileGrid | None:
    """MiniCPM-V's slices: the grid of about as many squares of ``resolution`` as the picture has; None if it is one."""
    wanted = min(math.ceil(width * height / (resolution * resolution)), max_slices)
    if wanted <= 1:
        return None
    shape = math.log(width / height)
    best, least = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > max_slices:
            continue
        for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
            columns = count // rows
            error = abs(shape - math.log(columns / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, columns), error
    return best
