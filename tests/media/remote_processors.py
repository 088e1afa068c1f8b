"""Stand-ins for processors whose code comes with their models: what their authors published, in small."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import make_flat_list_of_images


class KimiVLImageProcessor(BaseImageProcessor):
    """Scales down to a limit of patches, then pads (or crops) to whole ones."""

    model_input_names: ClassVar = ["pixel_values", "image_grid_hws"]

    def __init__(self, patch_size: int = 14, pad_input: bool = True, in_token_limit: int = 4096, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size, self.pad_input, self.in_token_limit = patch_size, pad_input, in_token_limit
        self.merge_kernel_size = [2, 2]

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        patches, grids = [], []
        for image in make_flat_list_of_images(images):
            pixels = np.asarray(self._fitted(image), dtype=np.float32) / 255
            rows, columns = pixels.shape[0] // self.patch_size, pixels.shape[1] // self.patch_size
            blocks = pixels.reshape(rows, self.patch_size, columns, self.patch_size, 3).transpose(0, 2, 4, 1, 3)
            patches.append(torch.from_numpy(blocks.reshape(-1, 3, self.patch_size, self.patch_size).copy()))
            grids.append((rows, columns))
        return BatchFeature({"pixel_values": torch.cat(patches), "image_grid_hws": np.array(grids)})

    def _fitted(self, image: Image.Image) -> Image.Image:
        width, height, patch = *image.size, self.patch_size
        if (width // patch) * (height // patch) > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / ((width // patch) * (height // patch)))
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        if not self.pad_input:
            return image.crop((0, 0, width - width % patch, height - height % patch))
        tall, wide = (side * patch for side in self.merge_kernel_size)
        return image.crop((0, 0, width + (wide - width % wide) % wide, height + (tall - height % tall) % tall))


class KimiVLProcessor(ProcessorMixin):
    """Writes slots into the text itself, where there is a placeholder."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<|media_pad|>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        merged = self._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        seen: dict[str, Any] = {}
        texts = list(text)
        if images is not None:
            seen = dict(self.image_processor(images, **merged["images_kwargs"]))
            grids = iter(seen["image_grid_hws"])
            for number, one in enumerate(texts):
                while self.image_token in one:
                    slots = next(grids).prod() // math.prod(self.image_processor.merge_kernel_size)
                    one = one.replace(self.image_token, "<|placeholder|>" * int(slots), 1)
                texts[number] = one.replace("<|placeholder|>", self.image_token)
        return BatchFeature({**self.tokenizer(texts, **merged["text_kwargs"]), **seen})


class NemotronParseImageProcessor(BaseImageProcessor):
    """Scales a picture into one size, keeping its ratio, and fills up below and to the right."""

    model_input_names: ClassVar = ["pixel_values"]

    def __init__(self, final_size: Any = (2048, 1648), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.final_size = list(final_size)  # height, width

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        height, width = self.final_size
        pages = []
        for image in make_flat_list_of_images(images):
            scale = min(width / image.width, height / image.height)
            size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
            fitted = image.convert("RGB").resize(size, Image.Resampling.BILINEAR).crop((0, 0, width, height))
            pages.append(torch.from_numpy(np.asarray(fitted, dtype=np.float32).transpose(2, 0, 1).copy() / 255))
        return BatchFeature({"pixel_values": torch.stack(pages)})


class NemotronParseProcessor(ProcessorMixin):
    """Pictures beside texts, which have no place for them; no chat template."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        merged = self._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        seen = {} if images is None else dict(self.image_processor(images, **merged["images_kwargs"]))
        return BatchFeature({**self.tokenizer(text, **merged["text_kwargs"]), **seen})
