"""The processor of a stand-in for MOSS-VL in small, written as code for transformers 4 is.

Version 5 cannot call it as it is: `tests.training.tiny_moss_vl` puts it into a folder.
"""

import torch
from transformers import BatchFeature
from transformers.image_processing_utils_fast import SizeDict
from transformers.models.qwen2_vl.image_processing_qwen2_vl_fast import Qwen2VLImageProcessorFast
from transformers.video_processing_utils import BASE_VIDEO_PROCESSOR_DOCSTRING

from tests.training import tiny_moss_vl

PATCH = tiny_moss_vl.PATCH


class MossVLImageProcessor(Qwen2VLImageProcessorFast):
    """Chooses sizes itself, and then asks for the usual resizing."""

    __doc__ += BASE_VIDEO_PROCESSOR_DOCSTRING

    def _preprocess(self, images, interpolation=None, **kwargs):
        pixels, grids = [], []
        for image in images:
            rows, columns = (min(4, max(1, side // 10)) for side in image.shape[-2:])
            size = SizeDict(height=rows * PATCH, width=columns * PATCH)
            made = self.resize(image=image, size=size, interpolation=interpolation) / 255
            patches = made.reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 0, 2, 4)
            pixels.append(patches.reshape(rows * columns, -1))
            grids.append([1, rows, columns])
        return BatchFeature({"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)})


class MossVLProcessor(tiny_moss_vl.MossVLProcessor):
    """As elsewhere."""
