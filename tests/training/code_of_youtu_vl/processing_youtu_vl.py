"""The processor of a stand-in for Youtu-VL in small, written as code for transformers 4 is.

Version 5 cannot import it as it is, so no test does: `tests.training.tiny_youtu_vl` puts it into a folder.
"""

import math

import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils_fast import BaseImageProcessorFast, DefaultFastImageProcessorKwargs, SizeDict
from transformers.image_utils import PILImageResampling

PATCH = 4


class Options(DefaultFastImageProcessorKwargs):
    """Declared as if none of them might be left out."""

    patch_size: int | None
    max_num_patches: int | None


class YoutuVLImageProcessor(BaseImageProcessorFast):
    """Cuts pictures into patches, blocks of two by two one behind the other; stacks what it makes of them."""

    resample = PILImageResampling.BILINEAR
    image_mean = image_std = [0.5, 0.5, 0.5]  # noqa: RUF012
    do_rescale = do_normalize = True
    patch_size = PATCH
    max_num_patches = 16
    valid_kwargs = Options

    def _preprocess(self, images, patch_size, max_num_patches, interpolation, image_mean, image_std, **kwargs):
        patches, sizes = [], []
        for image in images:
            rows, columns = self.fitted(*image.shape[1:], 2 * patch_size, max_num_patches)
            size = SizeDict(height=rows * patch_size, width=columns * patch_size)
            pixels = self.resize(image=image, size=size, interpolation=interpolation)
            pixels = self.rescale_and_normalize(pixels, True, 1 / 255, True, image_mean, image_std)
            blocks = pixels.reshape(3, rows // 2, 2, patch_size, columns // 2, 2, patch_size)
            patches.append(blocks.permute(1, 4, 2, 5, 3, 6, 0).reshape(rows * columns, -1))
            sizes.append((rows, columns))
        stacked = torch.stack(patches)
        mask = torch.ones(stacked.shape[:2], dtype=torch.int32)
        return BatchFeature(
            {"pixel_values": stacked, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(sizes)}
        )

    def fitted(self, height, width, block, most):
        scale = 1.0
        while True:
            rows, columns = (2 * max(1, math.ceil(side * scale / block)) for side in (height, width))
            if rows * columns <= most:
                return rows, columns
            scale -= 0.02


class YoutuVLProcessor(ProcessorMixin):
    """Says how many patches a picture may have, whatever its image processor says."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token = "<|image_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, max_image_patches: int = 96, **kwargs):
        tensors = kwargs.pop("return_tensors", None)
        seen, texts = {}, list(text) if isinstance(text, list) else [text]
        if images is not None:
            seen = self.image_processor(images=images, max_num_patches=max_image_patches, return_tensors=tensors)
            counts = iter((seen["spatial_shapes"].prod(dim=1) // 4).tolist())
            for number, one in enumerate(texts):
                first, *others = one.split(self.image_token)
                texts[number] = first + "".join(self.image_token * next(counts) + other for other in others)
        return BatchFeature({**self.tokenizer(texts, return_tensors=tensors, **kwargs), **seen})
