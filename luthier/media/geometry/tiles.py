"""What image processors that cut images into tiles, and those that came later, compute of a size, from headers alone.

Every public function is the ``measure`` of a `Rule`, as in `pictures`. The entries are those that the processor's
``replace_image_token`` reads; N pictures, (rows, columns) a grid of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from luthier.errors import ModelError
from luthier.media import geometry
from luthier.media.families import Measured, Settings
from luthier.media.geometry.pictures import fit_area, no_pixels
from luthier.records import ImageHeader
from luthier.writing import counted


def nearest_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of the nearest shape and a thumbnail (InternVL, Aya Vision): ``num_patches`` [N]."""
    size = settings["size"]
    grids = geometry.grids_of(settings["min_patches"], settings["max_patches"])
    counts = []
    for item in headers:
        tiles = 1
        if settings["crop_to_patches"]:
            area = size["height"] * size["width"]
            tiles = math.prod(geometry.nearest_shape(item.height, item.width, tile_area=area, candidates=grids))
        counts.append(tiles + (tiles > 1))
    return {"num_patches": counts}


def fitting_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles that the picture is least enlarged for, and a thumbnail (Cohere2 Vision): ``num_patches`` [N]."""
    tile, most = settings["size"]["height"], settings["max_patches"]
    counts = []
    for item in headers:
        tiles = 1
        if settings["crop_to_patches"]:
            tiles = math.prod(geometry.least_upscaling(item.height, item.width, tile=tile, max_tiles=most))
        counts.append(tiles + (tiles > 1))
    return {"num_patches": counts}


def covering_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The fewest tiles that show nearly all (Ovis2): ``grids`` [N, 2] as the processor calls them, (rows, columns)."""
    most, tile = settings["max_patches"], settings["size"]["height"]
    if not settings["crop_to_patches"] or most <= 1:
        return {"grids": np.ones((len(headers), 2), dtype=np.int64)}
    grids = []
    for item in headers:
        if settings["use_covering_area_grid"]:
            grids.append(geometry.covering(item.height, item.width, tile=tile, max_tiles=most))
        else:
            area, candidates = tile * settings["size"]["width"], geometry.grids_of(settings["min_patches"], most)
            grids.append(geometry.nearest_shape(item.height, item.width, tile_area=area, candidates=candidates))
    return {"grids": np.array(grids, dtype=np.int64)}


def local_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Local tiles besides the whole picture if it is larger than one (DeepSeek-OCR2): ``num_local_patches`` [N]."""
    tile = settings["tile_size"]
    grids = geometry.grids_of(settings["min_patches"], settings["max_patches"])
    counts = []
    for item in headers:
        cut = settings["crop_to_patches"] and max(item.height, item.width) > tile
        grid = geometry.nearest_shape(item.height, item.width, tile_area=tile * tile, candidates=grids)
        counts.append(math.prod(grid) if cut else 0)
    return {"num_local_patches": counts}


def canvas_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of the best canvas (Llama 4): ``aspect_ratios`` (rows, columns), and pixels of one tile for their size."""
    tile, most = settings["size"]["height"], settings["max_patches"]
    largest = bool(settings["resize_to_max_canvas"])
    grids = [
        geometry.best_canvas(item.height, item.width, tile=tile, max_tiles=most, largest=largest) for item in headers
    ]
    return {"aspect_ratios": grids, "pixel_values": [no_pixels(3, tile, tile)]}


def rows_and_columns(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of the picture at a fixed longest side (Idefics3, SmolVLM): ``rows``, ``cols``, each [[N]]."""
    if not settings["do_image_splitting"]:
        return {"rows": [[0] * len(headers)], "cols": [[0] * len(headers)]}
    tile, longest = settings["max_image_size"]["longest_edge"], settings["size"]["longest_edge"]
    grids = [geometry.split_rows(item.height, item.width, longest=longest, tile=tile) for item in headers]
    return {"rows": [[rows for rows, _ in grids]], "cols": [[columns for _, columns in grids]]}


def any_resolution(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The processor's own arithmetic needs sizes alone (LLaVA-NeXT): ``image_sizes`` [N, 2], pixels of one tile."""
    size, crop = settings["size"], settings["crop_size"]
    if settings["do_center_crop"] and crop is not None:
        tile = crop["height"], crop["width"]
    else:
        tile = (size.get("height") or size["shortest_edge"],) * 2
    return {
        "image_sizes": [(item.height, item.width) for item in headers],
        "pixel_values": no_pixels(1, 1, 3, *tile),
    }


def any_resolution_alone(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The same; pictures that are not alone in their context are not cut (LLaVA-OneVision): ``batch_num_images``."""
    return {**any_resolution(settings, headers), "batch_num_images": [len(headers)]}


def crops(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Crops of elongated pictures besides themselves (Gemma 3): ``num_crops`` [N]."""
    if not settings["do_pan_and_scan"]:
        return {"num_crops": [0] * len(headers)}
    limits = {
        "min_crop": settings["pan_and_scan_min_crop_size"],
        "max_crops": settings["pan_and_scan_max_num_crops"],
        "min_ratio": settings["pan_and_scan_min_ratio_to_activate"],
    }
    return {"num_crops": [geometry.pan_and_scan(item.height, item.width, **limits) for item in headers]}


def equal_crops(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Squares of the best resolution, and every picture of a call gets as many slots as the largest (Aria)."""
    side = settings["max_image_size"]
    most = 1
    if settings["split_image"]:
        resolutions = settings["split_resolutions"]
        best = [geometry.best_resolution(item.height, item.width, resolutions) for item in headers]
        most = max(math.ceil(height / side) * math.ceil(width / side) for height, width in best)
    return {"num_crops": most, "pixel_values": no_pixels(1, 3, side, side)}


def dynamic_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of which those that are mostly padding count less (Phi-4 multimodal): ``num_img_tokens`` [N]."""
    return {"num_img_tokens": [_tokens_of_shown(settings, item) for item in headers]}


def tiles_or_whole(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Tiles of large pictures, small ones whole (LFM2-VL): ``image_rows``, ``image_cols``, ``image_sizes``."""
    fitted = [_whole_size(settings, item) for item in headers]
    grids = [_tiles_of_large(settings, item) for item in headers]
    return {
        "image_rows": [rows for rows, _ in grids],
        "image_cols": [columns for _, columns in grids],
        "image_sizes": fitted,
    }


def slices(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The picture and its slices (MiniCPM-V): ``grids``, ``num_patches_per_image``, ``target_sizes`` in patches."""
    patch = settings["patch_size"]
    merge = patch * (2 if settings["downsample_mode"] == "4x" else 4)
    resolution, most = settings["scale_resolution"], settings["max_slice_nums"]
    grids, counts, targets = [], [], []
    for item in headers:
        size, grid = (item.height, item.width), None
        if settings["slice_mode"]:
            grid = geometry.slices(*size, max_slices=most, resolution=resolution)
        whole = _merged_size(*size, resolution, merge, enlarge=grid is None)
        targets.append([side // patch for side in whole])
        if grid is not None:
            tall, wide = (_multiple(side, parts) / parts for side, parts in zip(size, grid, strict=True))
            one = _merged_size(tall, wide, resolution, merge, enlarge=True)
            targets.extend([[side // patch for side in one]] * math.prod(grid))
        grids.append(list(grid or (0, 0)))
        counts.append(1 + (math.prod(grid) if grid else 0))
    return {"grids": grids, "num_patches_per_image": counts, "target_sizes": np.array(targets, dtype=np.int32)}


def window_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Windows over large or elongated pictures (Step-3.7): ``num_local_patches`` [N], ``patch_newline_masks``."""
    grids = [_windows(settings, item) for item in headers]
    newlines = [
        [column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)]
        for rows, columns in grids
    ]
    return {"num_local_patches": [math.prod(grid) for grid in grids], "patch_newline_masks": newlines}


def overlapping_tiles(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Pooled patches of the whole picture and of its overlapping crops (Molmo2): ``image_grids`` [N, 4]."""
    patch, (pool_rows, pool_columns) = settings["patch_size"], settings["pooling_size"]
    side = settings["size"]["height"] // patch
    margin = sum(settings["overlap_margins"])
    window = (side - margin) * patch
    grids = []
    for item in headers:
        rows, columns = geometry.least_upscaling_single(
            item.height - margin * patch, item.width - margin * patch, tile=window, max_tiles=settings["max_crops"]
        )
        tall, wide = rows * (side - margin) + margin, columns * (side - margin) + margin
        whole = (math.ceil(side / pool_rows), math.ceil(side / pool_columns))
        grids.append([*whole, math.ceil(tall / pool_rows), math.ceil(wide / pool_columns)])
    return {"image_grids": np.array(grids, dtype=np.int64).reshape(-1, 4)}


def _tokens_of_shown(settings: Settings, item: ImageHeader) -> int:
    tile, patch, most = settings["size"]["height"], settings["patch_size"], settings["dynamic_hd"]
    height, width, side = item.height, item.width, settings["size"]["height"] // settings["patch_size"]
    rows, columns = math.ceil(height / tile), math.ceil(width / tile)
    if rows * columns > most:
        candidates = geometry.hashed_grids(1, most)
        rows, columns = geometry.nearest_shape(height, width, tile_area=tile * tile, candidates=candidates)
    scale_width, scale_height = columns * tile / width, rows * tile / height
    tall, wide = rows * tile, columns * tile
    if scale_width < scale_height:
        tall = int(height * scale_width)
    else:
        wide = int(width * scale_height)
    if min(tall, wide) < 10:
        raise ValueError(f"resized to {wide}x{tall} pixels, and the processor takes no side below 10")
    # patches of padding alone are masked, then every second patch of each tile is looked at
    shown_rows = _every_second(rows, side, rows * side - (rows * tile - tall) // patch)
    shown_columns = _every_second(columns, side, columns * side - (columns * tile - wide) // patch)
    return 256 + 1 + shown_rows * shown_columns + shown_rows + 16


def _every_second(tiles: int, side: int, shown: int) -> int:
    """Of the patches 0, 2, 4 … of each tile of ``side`` patches, how many are among the first ``shown`` of all."""
    return sum(len(range(0, min(side, max(0, shown - tile * side)), 2)) for tile in range(tiles))


def _whole_size(settings: Settings, item: ImageHeader) -> list[int]:
    factor = settings["encoder_patch_size"] * settings["downsample_factor"]
    least, most = settings["min_image_tokens"] * factor**2, settings["max_image_tokens"] * factor**2
    height, width = item.height, item.width
    fitted = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(fitted) > most:
        scale = math.sqrt(height * width / most)
        return [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
    if math.prod(fitted) < least:
        scale = math.sqrt(least / (height * width))
        return [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return fitted


def _tiles_of_large(settings: Settings, item: ImageHeader) -> tuple[int, int]:
    patch, least, most = settings["encoder_patch_size"], settings["min_tiles"], settings["max_tiles"]
    factor = patch * settings["downsample_factor"]
    area = math.prod(max(patch, round(side / factor) * factor) for side in (item.height, item.width))
    large = area > settings["max_image_tokens"] * factor**2 * settings["max_pixels_tolerance"]
    if not settings["do_image_splitting"] or least == most == 1 or not large:
        return 1, 1
    tile = settings["tile_size"]
    candidates = geometry.hashed_grids(least, most)
    return geometry.nearest_shape(item.height, item.width, tile_area=tile * tile, candidates=candidates)


def _merged_size(height: float, width: float, resolution: int, merge: int, *, enlarge: bool) -> tuple[int, int]:
    if height * width > resolution * resolution or enlarge:
        shape = width / height
        height = int(resolution / math.sqrt(shape))
        width = int(height * shape)
    return _multiple(height, merge), _multiple(width, merge)


def _multiple(length: float, divisor: int) -> int:
    return max(round(length / divisor) * divisor, divisor)


def _windows(settings: Settings, item: ImageHeader) -> tuple[int, int]:
    """Rows and columns of windows; (0, 0) if the whole picture is enough."""
    height, width, view = item.height, item.width, settings["size"]["height"]
    if min(width, height) < 32 and max(width / height, height / width) > 4:
        width = height = max(width, height)
    limit: Any = settings.part.max_image_size
    if max(height, width) > limit:
        scale = limit / max(height, width)
        width, height = int(width * scale), int(height * scale)
    short, long = min(height, width), max(height, width)
    if long <= view:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, settings["patch_size"]) if long / short > 4 else settings["patch_size"]
    if window == 0:
        return 0, 0
    return _snapped(height, window), _snapped(width, window)


def _snapped(side: int, window: int) -> int:
    """How many windows: one more where over a fifth of one is left."""
    return max(1, side // window + (side % window > 0.2 * window)) if side >= window else 1


# ------------------------------------------------------------------------------------------- processors that came later


_DOCLING_LONGEST = 16  # tiles of a side; written into Granite Docling's processor, not into its settings


def sizes_in_area(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Within two limits of area, as its own attributes have them (Emu3): ``image_sizes`` [N] of (height, width)."""
    part = settings.part
    sizes = [(item.height, item.width) for item in headers]
    if settings["do_resize"]:
        limits = {"min_pixels": part.min_pixels, "max_pixels": part.max_pixels}
        sizes = [fit_area(*size, factor=part.spatial_factor, **limits) for size in sizes]
    return {"image_sizes": sizes}


def codes_in_area(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The same with the limits where other processors have them (Apertus 1.5): ``image_sizes`` [N]."""
    sizes = [(item.height, item.width) for item in headers]
    if settings["do_resize"]:
        limits, factor = settings["size"], settings["spatial_factor"]
        least, most = limits["min_pixels"], limits["max_pixels"]
        sizes = [fit_area(*size, factor=factor, min_pixels=least, max_pixels=most) for size in sizes]
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
                tiles += math.prod(geometry.fullest_canvas(item.height, item.width, tile=tile, max_tiles=most))
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
            "this processor enlarges small images by what is on them, so their tokens cannot be counted from headers",
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
    candidates = [grid for grid in geometry.grids_of(least, most) if max(grid) <= _DOCLING_LONGEST]
    area = size["height"] * size["width"]
    return geometry.nearest_shape(item.height, item.width, tile_area=area, candidates=candidates)
