"""Patches of pictures in fewer passes than the processor takes, and bit for bit the same.

A picture stays as it was decoded (pixel by pixel, not channel by channel), which is what torch resizes fastest, is cut
while its values are bytes, and is normalised once for both halves of a patch (`fast_pixels`). With other
settings than those for which this is the same, the processor does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.media.families.family import Measured, Settings
from luthier.media.geometry.pictures import area_grid
from luthier.records import ImageHeader

if TYPE_CHECKING:
    import PIL.Image
    import torch

# The class whose arithmetic this is; heirs and look-alikes may differ.
SAME_AS = "Qwen2VLImageProcessor"
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def quick_patches(settings: Settings, texts: Sequence[Sequence[PIL.Image.Image]]) -> list[Measured] | None:
    """For the N pictures of each text ``pixel_values`` float32[P, C * depth * patch * patch] and ``image_grid_thw``
    int64[N, 3]; None where these settings are not the ones that this is proven for.

    The patches of all texts lie one behind the other in one piece of memory, so that batching them copies nothing.
    """
    from torchvision.transforms import InterpolationMode  # type: ignore[import-untyped]

    if type(settings.part).__name__ != SAME_AS or not all(settings[step] for step in STEPS):
        return None
    if settings["resample"] not in (3, InterpolationMode.BICUBIC):  # 3: as PIL numbers it
        return None
    grids = [
        area_grid(settings, [ImageHeader(width=picture.width, height=picture.height) for picture in pictures])
        for pictures in texts
    ]
    num_patches = [int(grid["image_grid_thw"].prod(axis=1).sum()) for grid in grids]
    values_PV = np.empty(
        (sum(num_patches), 3 * settings["temporal_patch_size"] * settings["patch_size"] ** 2), np.float32
    )
    outputs = []
    for pictures, grid, end, num in zip(texts, grids, np.cumsum(num_patches), num_patches, strict=True):
        own_PV = values_PV[end - num : end]
        _write(settings, pictures, grid["image_grid_thw"], own_PV)
        outputs.append({"pixel_values": own_PV, **grid})
    return outputs


def _write(
    settings: Settings,
    pictures: Sequence[PIL.Image.Image],
    grids_N3: NDArray[np.int64],
    values_PV: NDArray[np.float32],
) -> None:
    from luthier.media.processors.patches_kernel import write_patches

    mean, std, _ = settings.part._fuse_mean_std_and_rescale_factor(
        do_normalize=True,
        image_mean=settings["image_mean"],
        image_std=settings["image_std"],
        do_rescale=True,
        rescale_factor=settings["rescale_factor"],
    )
    start = 0
    for picture, grid in zip(pictures, grids_N3, strict=True):
        end = start + int(grid.prod())
        write_patches(
            _fitted(settings, picture, grid),
            mean.numpy(),
            std.numpy(),
            values_PV[start:end],
            patch=settings["patch_size"],
            merge=settings["merge_size"],
        )
        start = end


def _fitted(settings: Settings, picture: PIL.Image.Image, grid: NDArray[np.int64]) -> NDArray[np.uint8]:
    """uint8[H, W, 3 or 4]: the picture resized to its grid of patches; a fourth channel means nothing."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional  # type: ignore[import-untyped]

    pixels_HWC = _pixels(picture if picture.mode == "RGB" else picture.convert("RGB"))
    size = [int(side) * settings["patch_size"] for side in grid[1:]]
    if list(pixels_HWC.shape[:2]) == size:
        return np.asarray(pixels_HWC.numpy())
    pixels_1CHW = pixels_HWC.permute(2, 0, 1)[None]
    resized = functional.resize(pixels_1CHW, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return np.asarray(resized[0].permute(1, 2, 0).numpy())


def _pixels(picture: PIL.Image.Image) -> torch.Tensor:
    """uint8[H, W, 4], the memory of an RGB picture itself, which has a byte to spare for each pixel; or a copy,
    [H, W, 3], where it lies in several pieces (from some four million pixels on) or Pillow is older than 11.2.
    """
    import pyarrow
    import torch
    from torch.utils.dlpack import from_dlpack

    if hasattr(picture, "__arrow_c_array__"):
        try:
            memory = pyarrow.array(picture)
        except ValueError:  # in pieces
            pass
        else:
            return from_dlpack(memory.flatten()).view(picture.height, picture.width, -1)
    return torch.from_numpy(np.array(picture))
