"""Sizes that pictures and frames are resized to: pure functions of integers, as the processors compute them.

Each gives (height, width) in pixels. They follow their processor to the last rounding: Python's ``round`` rounds halves
to even, and where the processor divides floats before it rounds down, so do we. What a processor refuses raises
`ValueError` here, with the processor's reason.
"""

from __future__ import annotations

import math

MAX_SIDE_RATIO = 200  # of Qwen's image processors and their many heirs


def fit_area(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Multiples of ``factor`` with an area within the two limits and about the same shape (Qwen2-VL's smart resize)."""
    _check_shape(height, width)
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
        raise ValueError(f"a video of {num_frames} frames, and the model looks at {temporal} at a time")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_shape(height, width)
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
        raise ValueError(f"{aligned_frames} frames of one patch are more than the {max_pixels} pixels that are allowed")
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


def _check_shape(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_SIDE_RATIO:
        raise ValueError(f"one side is {ratio:.0f} times the other, and the processor takes up to {MAX_SIDE_RATIO}")


def _floor(size: float, factor: int) -> int:
    return max(factor, math.floor(size / factor) * factor)


def _ceil(size: float, factor: int) -> int:
    return math.ceil(size / factor) * factor
