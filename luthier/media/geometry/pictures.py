"""What image processors compute of a picture's size, from headers alone: grids of patches.

Every public function is the ``measure`` of a `Rule`: (settings, headers of the pictures of one context) -> the entries
that the processor's ``replace_image_token`` reads. N pictures. `tiles` has the processors that cut pictures into
tiles, this folder the integers of their grids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError
from luthier.media.families import Measured, Processor, Settings
from luthier.records import ImageHeader
from luthier.writing import counted

# (settings, height, width) -> (height, width) in pixels that a picture is resized to
Fit = Callable[[Settings, int, int], tuple[int, int]]

_KIMI_LONGEST = 512  # patches; written into Kimi-VL's processor, not into its settings


def nothing(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """For processors that write the same string for every picture."""
    return {}


def sizes(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """For processors that count by a picture's own size (MiniCPM-V up to 4.5): ``sizes`` [N, 2], (width, height)."""
    return {"sizes": [(item.width, item.height) for item in headers]}


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
    return _grid(settings, headers, fit_budget)


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


def stepped_grid(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """Scaled down in steps to a limit of patches that the processor's class is called with (Youtu-VL):
    ``spatial_shapes`` int64[N, 2], rows and columns of patches.
    """
    patch, most = settings["patch_size"], default_of(settings.processor, "max_image_patches")
    sizes = [fit_in_steps(item.height, item.width, patch=patch, max_patches=most) for item in headers]
    return {"spatial_shapes": np.array(sizes, dtype=np.int64).reshape(-1, 2) // patch}


def default_of(processor: Processor, name: str) -> int:
    """What a processor is called with where nobody says it. Raises `ModelError` if its class names no default."""
    argument = signature(type(processor).__call__).parameters.get(name)
    if argument is None or not isinstance(argument.default, int):
        raise ModelError(
            f"{type(processor).__name__} has no default for {name!r}, which the token count of this family needs",
            hint="the family's row describes another version of the processor's files",
        )
    return argument.default


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


def fit_budget(settings: Settings, height: int, width: int) -> tuple[int, int]:
    """Height and width within a budget of patches."""
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


def _sides(size: Mapping[str, int]) -> tuple[int, int]:
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


# --------------------------------------------------------------------------------------------------------------------
# Sizes that pictures and frames are resized to: pure functions of integers, as the processors compute them.
#
# Each gives (height, width) in pixels. They follow their processor to the last rounding: Python's ``round`` rounds
# halves to even, and where the processor divides floats before it rounds down, so do we. What a processor refuses
# raises `ValueError` here, with the processor's reason.


MAX_SIDE_RATIO = 200  # of Qwen's image processors and their many heirs


def fit_area(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Multiples of ``factor`` with an area within the two limits and about the same shape (Qwen2-VL's smart resize)."""
    check_shape(height, width)
    fitted_height, fitted_width = round(height / factor) * factor, round(width / factor) * factor
    if fitted_height * fitted_width > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        return _floor(height / scale, factor), _floor(width / scale, factor)
    if fitted_height * fitted_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        return _ceil(height * scale, factor), _ceil(width * scale, factor)
    return fitted_height, fitted_width


def fit_volume(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The same where the limits are for all frames together (GLM-4.1V, Qwen3-VL), in multiples of ``temporal``."""
    if num_frames < temporal:
        raise ValueError(f"a video of {counted(num_frames, 'frame')}, and the model looks at {temporal} at a time")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_shape(height, width)
    fitted_height, fitted_width = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / temporal) * temporal * fitted_height * fitted_width
    if volume > max_pixels:
        scale = math.sqrt((num_frames * height * width) / max_pixels)
        return _floor(height / scale, factor), _floor(width / scale, factor)
    if volume < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        return _ceil(height * scale, factor), _ceil(width * scale, factor)
    return fitted_height, fitted_width


def fit_canvas(
    num_frames: int, height: int, width: int, *, factor: int, temporal: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The canvas that a video is padded to, of at most ``max_pixels`` in all frames together (GLM-5)."""
    aligned_frames = max(temporal, round(num_frames / temporal) * temporal)
    fitted = _ceil(height, factor), _ceil(width, factor)
    if aligned_frames * fitted[0] * fitted[1] < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        fitted = _ceil(max(1, math.ceil(height * scale)), factor), _ceil(max(1, math.ceil(width * scale)), factor)
    if aligned_frames * fitted[0] * fitted[1] <= max_pixels:
        return fitted
    if max_pixels < aligned_frames * factor**2:
        raise ValueError(
            f"{counted(aligned_frames, 'frame')} of one patch are more than the {max_pixels} pixels that are allowed"
        )
    low, high, best = 1, height, (factor, factor)
    while low <= high:  # the tallest content whose canvas is within the limit
        middle = (low + high) // 2
        canvas = _ceil(middle, factor), _ceil(max(1, math.floor(width * middle / height)), factor)
        if aligned_frames * canvas[0] * canvas[1] <= max_pixels:
            best, low = canvas, middle + 1
        else:
            high = middle - 1
    return best


def fit_patches(
    height: int, width: int, *, patch: int, max_patches: int, max_side: int, multiple: int
) -> tuple[int, int]:
    """Never larger than it is, within ``max_patches``, then padded to ``multiple`` patches (Kimi-VL, Kimi-K2.5)."""
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    limit = max_side * patch
    scale = min(1.0, math.sqrt(max_patches / patches), limit / height, limit / width)
    new_height = min(max(1, int(height * scale)), limit)
    new_width = min(max(1, int(width * scale)), limit)
    return _ceil(new_height, multiple * patch), _ceil(new_width, multiple * patch)


def fit_in_steps(height: int, width: int, *, patch: int, max_patches: int) -> tuple[int, int]:
    """Sides rounded up to two patches, of a picture made smaller by 2 % of itself until it has few enough (Youtu-VL).

    The scale is what floats make of 1 - 0.02 - 0.02 - …, which rounds otherwise than 1 - 0.02 * n.
    """
    side, most, scale = 2 * patch, max_patches * patch**2, 1.0
    fitted = _ceil(height, side), _ceil(width, side)
    while fitted[0] * fitted[1] > most and scale > 0:
        scale -= 0.02
        fitted = max(side, _ceil(height * scale, side)), max(side, _ceil(width * scale, side))
    if fitted[0] * fitted[1] > most:
        raise ValueError(f"the least are four patches, and {max_patches} are allowed")
    return fitted


def fill_patches(height: int, width: int, *, patch: int, max_patches: int, multiple: int) -> tuple[int, int]:
    """As near to ``max_patches`` patches as the shape allows, sides in multiples of ``multiple`` patches (Gemma 4)."""
    side, area = multiple * patch, max_patches * patch**2
    scale = math.sqrt(area / (height * width))
    fitted_height = math.floor(scale * height / side) * side
    fitted_width = math.floor(scale * width / side) * side
    longest = (max_patches // multiple**2) * side
    if not fitted_height and not fitted_width:
        raise ValueError(f"{width}x{height} pixels resized to nothing")
    if not fitted_height:
        fitted_height, fitted_width = side, min(math.floor(width / height) * side, longest)
    elif not fitted_width:
        fitted_height, fitted_width = min(math.floor(height / width) * side, longest), side
    if fitted_height * fitted_width > area:
        raise ValueError(f"{width}x{height} pixels take more than {max_patches} patches")
    return fitted_height, fitted_width


def aim_patches(height: int, width: int, *, target: int, multiple: int, keep_shape: bool) -> tuple[int, int]:
    """The patches (not pixels) of a frame: about ``target`` of them, in multiples of ``multiple`` (Nemotron Omni)."""
    if not keep_shape:
        side = max(multiple, int(math.sqrt(target)) // multiple * multiple)
        return side, side
    shape = width / max(height, 1)
    rows, columns = max(round(math.sqrt(target / shape)), 1), max(round(math.sqrt(target * shape)), 1)
    if multiple <= 1:
        return rows, columns
    more = math.ceil(rows / multiple) * multiple, math.ceil(columns / multiple) * multiple
    if more[0] * more[1] <= target:
        return more
    return max(multiple, rows // multiple * multiple), max(multiple, columns // multiple * multiple)


def check_shape(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_SIDE_RATIO:
        raise ValueError(f"one side is {ratio:.0f} times the other, and the processor takes up to {MAX_SIDE_RATIO}")


def _floor(size: float, factor: int) -> int:
    return max(factor, math.floor(size / factor) * factor)


def _ceil(size: float, factor: int) -> int:
    return math.ceil(size / factor) * factor
