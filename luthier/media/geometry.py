"""What image processors compute of a picture's size, from headers alone: grids of patches.

Every public function is the ``measure`` of a `Rule`: (settings, headers of the pictures of one context) -> the entries
that the processor's ``replace_image_token`` reads. N pictures. `geometry_tiles` has the processors that cut pictures
into tiles, `resizing` and `tiling` the integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.media.families import Settings
from luthier.media.resizing import fill_patches, fit_area, fit_patches, fit_volume
from luthier.records import ImageHeader

Measured = dict[str, Any]
# (settings, height, width) -> (height, width) in pixels that a picture is resized to
Fit = Callable[[Settings, int, int], tuple[int, int]]

_KIMI_LONGEST = 512  # patches; written into Kimi-VL's processor, not into its settings


def nothing(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """For processors that write the same string for every picture."""
    return {}


def area_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Within two limits of area (Qwen2-VL and its heirs): ``image_grid_thw`` int64[N, 3]."""
    return _grid(settings, headers, _fit_area)


def volume_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The same where the picture counts as often as a patch is deep (GLM-4.1V, GLM-4.6V)."""
    return _grid(settings, headers, _fit_volume)


def widened_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The same where a side below one patch is first scaled up (PaddleOCR-VL)."""
    return _grid(settings, headers, _fit_widened)


def budget_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Never scaled up, within a budget of patches (Kimi-K2.5)."""
    return _grid(settings, headers, _fit_budget)


def context_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Within a budget of patches that depends on the pictures of the call (Nemotron Omni): ``image_grid_hw``."""
    merge, most = round(1 / settings["downsample_ratio"]), settings["max_num_patches"]
    least = settings["min_num_patches"]
    budget = max((settings["max_model_len"] - 4) * merge**2, least * len(headers))
    budget = max(min(budget, most) if most else budget, least)
    grids = [_grid_in_budget(item, settings["patch_size"], merge, least, budget) for item in headers]
    return {"image_grid_hw": np.array(grids, dtype=np.int64).reshape(-1, 2)}


def limited_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Scaled down to a limit of patches, then padded or cropped to whole ones (Kimi-VL): ``image_grid_hws`` [N, 2]."""
    patch, most = settings["patch_size"], settings["in_token_limit"]
    whole = [side * patch if settings["pad_input"] else patch for side in settings["merge_kernel_size"]]
    grids = []
    for item in headers:
        height, width = item.height, item.width
        patches = (width // patch) * (height // patch)
        if patches > most:
            scale = math.sqrt(most / patches)
            height, width = int(height * scale), int(width * scale)
        sides = zip((height, width), whole, strict=True)
        grids.append(
            [(math.ceil if settings["pad_input"] else math.floor)(side / one) * one // patch for side, one in sides]
        )
        if max(grids[-1]) >= _KIMI_LONGEST:
            raise ValueError(f"a side of {max(grids[-1])} patches, and the model has positions for {_KIMI_LONGEST - 1}")
    return {"image_grid_hws": np.array(grids, dtype=np.int64).reshape(-1, 2)}


def soft_tokens(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """As many pooled patches as the budget allows (Gemma 4): ``num_soft_tokens_per_image``."""
    patch, pool, most = settings["patch_size"], settings["pooling_kernel_size"], settings["max_soft_tokens"]
    counts = []
    for item in headers:
        height, width = item.height, item.width
        if settings["do_resize"]:
            height, width = fill_patches(height, width, patch=patch, max_patches=most * pool**2, multiple=pool)
        counts.append((height // patch) * (width // patch) // pool**2)
    return {"num_soft_tokens_per_image": counts}


def patch_rows(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Whole patches of the picture, its longest side limited (Pixtral): ``image_sizes`` in pixels."""
    return _whole_patches(settings, headers, settings.processor.patch_size * settings.processor.spatial_merge_size)


def own_patch_rows(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """The same with the patches of the image processor itself (LightOnOCR)."""
    patch = settings["patch_size"]
    return _whole_patches(settings, headers, patch if isinstance(patch, int) else patch["height"])


def square(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """One picture of a size that the settings fix (LLaVA 1.5): ``pixel_values`` of that shape, without memory."""
    sizes = [_plain_size(settings, item) for item in headers]
    return {"pixel_values": [no_pixels(3, height, width) for height, width in sizes]}


def no_pixels(*shape: int) -> NDArray[np.float32]:
    """An array of this shape that takes no memory, for processors that read the shape of pixels."""
    return np.broadcast_to(np.float32(0), shape)


def _grid(settings: Settings, headers: Sequence[ImageHeader], fit: Fit) -> Measured:
    patch, resize = settings["patch_size"], settings["do_resize"]
    grids = []
    for item in headers:
        height, width = fit(settings, item.height, item.width) if resize else (item.height, item.width)
        grids.append((1, height // patch, width // patch))
    return {"image_grid_thw": np.array(grids, dtype=np.int64).reshape(-1, 3)}


def _fit_area(settings: Settings, height: int, width: int) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"]
    size = settings["size"]
    return fit_area(height, width, factor=factor, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def _fit_volume(settings: Settings, height: int, width: int) -> tuple[int, int]:
    deep, size = settings["temporal_patch_size"], settings["size"]
    return fit_volume(
        deep,
        height,
        width,
        factor=settings["patch_size"] * settings["merge_size"],
        temporal=deep,
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
    )


def _fit_widened(settings: Settings, height: int, width: int) -> tuple[int, int]:
    factor = settings["patch_size"] * settings["merge_size"]
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return _fit_area(settings, height, width)


def _fit_budget(settings: Settings, height: int, width: int) -> tuple[int, int]:
    return fit_patches(
        height,
        width,
        patch=settings["patch_size"],
        max_patches=settings["max_patches"],
        max_side=settings["size"]["max_height"],
        multiple=settings["merge_size"],
    )


def _grid_in_budget(item: ImageHeader, patch: int, merge: int, least: int, most: int) -> tuple[int, int]:
    rows, columns = round(item.height / patch + 0.5), round(item.width / patch + 0.5)
    factor = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = math.floor(factor * rows), math.floor(factor * columns)
    if most > least and rows * columns < least:
        factor = math.sqrt(least / (rows * columns))
        rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
    if rest := rows % merge:
        rows = rows + merge - rest if (rows + merge - rest) * columns <= most else max(merge, rows - rest)
    if rest := columns % merge:
        columns = columns + merge - rest if rows * (columns + merge - rest) <= most else max(merge, columns - rest)
    return rows, columns


def _whole_patches(settings: Settings, headers: Sequence[ImageHeader], patch: int) -> Measured:
    limit = _sides(settings["size"])
    sizes = []
    for item in headers:
        height, width = item.height, item.width
        if settings["do_resize"]:
            ratio = max(height / limit[0], width / limit[1])
            if ratio > 1:
                height, width = math.floor(height / ratio), math.floor(width / ratio)
            height, width = ((height - 1) // patch + 1) * patch, ((width - 1) // patch + 1) * patch
        sizes.append((height, width))
    return {"image_sizes": sizes}


def _sides(size: Any) -> tuple[int, int]:
    """(height, width) of a size that is given as such or as its longest side."""
    longest = size.get("longest_edge")
    return (longest, longest) if longest else (size["height"], size["width"])


def _plain_size(settings: Settings, item: ImageHeader) -> tuple[int, int]:
    """What resizing and cropping, each if it is on, make of a picture's height and width."""
    height, width = item.height, item.width
    if settings["do_resize"]:
        size = settings["size"]
        if size.get("shortest_edge"):
            short = size["shortest_edge"]
            shape = (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
            height, width = shape
        else:
            height, width = size["height"], size["width"]
    if settings["do_center_crop"]:
        height, width = settings["crop_size"]["height"], settings["crop_size"]["width"]
    return height, width
