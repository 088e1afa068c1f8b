"""What image processors that came later compute of a picture's size, from headers alone: pages, canvases, budgets.

Every public function is the ``measure`` of a `Rule`, as in `geometry` and `geometry_tiles`: N pictures, and the entries
that the processor's ``replace_image_token`` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from luthier.errors import ModelError
from luthier.media.families.family import Measured, Settings
from luthier.media.geometry import tiling
from luthier.media.geometry.pictures import fit_area, no_pixels
from luthier.media.geometry.tiles import nearest_tiles, slices
from luthier.records import ImageHeader
from luthier.writing import counted

_DOCLING_LONGEST = 16  # tiles of a side; written into Granite Docling's processor, not into its settings


def sizes_in_area(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Within two limits of area, as its own attributes have them (Emu3): ``image_sizes`` [N] of (height, width)."""
    part = settings.part
    sizes = [(item.height, item.width) for item in headers]
    if settings["do_resize"]:
        limits = {"min_pixels": part.min_pixels, "max_pixels": part.max_pixels}
        sizes = [fit_area(*size, factor=part.spatial_factor, **limits) for size in sizes]
    return {"image_sizes": sizes}


def shown_rows(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Scaled down into a frame, of which only what is shown is cut into patches (Fuyu): ``rows``, ``columns`` [N]."""
    frame, patch = settings["size"], settings["patch_size"]
    rows: list[int] = []
    columns: list[int] = []
    for item in headers:
        height, width = item.height, item.width
        if height > frame["height"] or width > frame["width"]:
            scale = min(frame["height"] / height, frame["width"] / width)
            height, width = int(height * scale), int(width * scale)
        for sides, side, whole, one in (
            (rows, height, frame["height"], patch["height"]),
            (columns, width, frame["width"], patch["width"]),
        ):
            shown = min(whole, math.ceil(side / one) * one)
            if shown % one:
                raise ValueError(f"a side of {counted(side, 'pixel')} fills the frame of {whole}, no multiple of {one}")
            sides.append(shown // one)
    return {"rows": rows, "columns": columns}


def padded_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Never resized, padded to whole patches (Inkling 2): ``image_grid_thw`` int64[N, 3]."""
    size = settings["size"]
    grids = [(1, math.ceil(item.height / size["height"]), math.ceil(item.width / size["width"])) for item in headers]
    return {"image_grid_thw": np.array(grids, dtype=np.int64).reshape(-1, 3)}


def shaped_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Within a budget of tokens, the shape kept as well as whole tokens allow (Muse): ``image_grid_thw`` [N, 3]."""
    merge, most = settings["merge_size"], settings["max_image_tokens"]
    side = settings["patch_size"] * merge
    grids = []
    for item in headers:
        if settings["do_resize"]:
            rows, columns = shaped_tokens(item.height, item.width, side=side, most=most)
            grids.append((1, rows * merge, columns * merge))
        else:
            grids.append((1, item.height // settings["patch_size"], item.width // settings["patch_size"]))
    return {"image_grid_thw": np.array(grids, dtype=np.int64).reshape(-1, 3)}


def shaped_tokens(height: int, width: int, *, side: int, most: int) -> tuple[int, int]:
    """(rows, columns) of tokens of ``side`` pixels, at most ``most``, of the shape nearest to the picture's (Muse)."""
    rows, columns = height / side, width / side
    if rows * columns > most:
        shape = columns / rows
        rows = (most / shape) ** 0.5
        columns = rows * shape
    # of grids that are equally near the first of the set is taken, which is therefore made as the processor makes it
    near = {*product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns)))}
    allowed = [grid for grid in near if min(grid) >= 1 and math.prod(grid) <= most]
    if not allowed:
        return max(1, round(rows)), max(1, round(columns))
    return min(allowed, key=lambda grid: abs(grid[0] / grid[1] - height / width))


def thumbnail_and_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The picture small, then its tiles (Perception LM): ``pixel_values`` N of [tiles, 3, S, S], without memory."""
    tile, most = settings["tile_size"], settings["max_num_tiles"]
    pixels = []
    for item in headers:
        height, width, tiles = item.height, item.width, 1
        if settings["do_resize"]:
            height = width = tile
            if settings["vision_input_type"] == "thumb+tile":
                tiles += math.prod(tiling.fullest_canvas(item.height, item.width, tile=tile, max_tiles=most))
        pixels.append(no_pixels(tiles, 3, height, width))
    return {"pixel_values": pixels}


def pages(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """As InternVL's tiles, each picture a page of its own (GOT-OCR 2): ``num_patches`` [N] and what counts pages."""
    tiles = nearest_tiles(settings, headers)
    ends = np.arange(1, len(headers) + 1)
    return {**tiles, "num_pages_per_batch": [1] * len(headers), "patch_indices": ends}


def page_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of the nearest shape, more of them for dense pages (Granite Docling): ``rows``, ``cols``, each [[N]]."""
    grids = [_page_grid(settings, item) for item in headers]
    measured: Measured = {"rows": [[rows for rows, _ in grids]], "cols": [[columns for _, columns in grids]]}
    return measured | ({"tile_fine_mask": None} if settings["fine_route"] else {})


def page_slices(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """As MiniCPM-V's slices (MiniCPM-OCR). Raises `ModelError` where the size depends on what is on the page."""
    if settings["small_image_upsize"] != "always":
        raise ModelError(
            "this processor enlarges small pictures by what is on them, so their tokens cannot be counted from headers",
            hint='set "small_image_upsize": "always" in the image processor\'s files, for inference too',
        )
    return slices(settings, headers)


def _page_grid(settings: Settings, item: ImageHeader) -> tuple[int, int]:
    size, least, most = settings["size"], settings["min_patches"], settings["max_patches"]
    if not settings["crop_to_patches"] or most <= 1:
        return 1, 1
    grid = _nearest_page(item, size, least, most)
    if settings["dense_max_patches"] and _is_dense(settings, item, grid):
        most = settings["dense_max_patches"]
        return _nearest_page(item, size, least, most) if most > 1 else (1, 1)
    return grid


def _is_dense(settings: Settings, item: ImageHeader, grid: tuple[int, int]) -> bool:
    """Whether a page gets more tiles: by its shape, and by how much its tiles would enlarge it."""
    scale, narrow, wide = (settings[f"dense_{name}"] for name in ("max_scale", "min_aspect", "max_aspect"))
    shape = item.width / item.height
    if (scale <= 0 and narrow <= 0) or (narrow > 0 and shape <= narrow) or (0 < wide < shape):
        return False
    return bool(scale <= 0 or grid[1] * settings["size"]["width"] / item.width < scale)


def _nearest_page(item: ImageHeader, size: Mapping[str, int], least: int, most: int) -> tuple[int, int]:
    candidates = [grid for grid in tiling.grids_of(least, most) if max(grid) <= _DOCLING_LONGEST]
    area = size["height"] * size["width"]
    return tiling.nearest_shape(item.height, item.width, tile_area=area, candidates=candidates)
