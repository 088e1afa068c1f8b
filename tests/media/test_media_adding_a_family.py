"""The worked example of docs/adding_a_family.md: a family that nobody has thought of takes one row and one test."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import make_flat_list_of_images

from luthier.errors import PluginError
from luthier.media.families import CAT, Family, Modules, Rule, Settings
from luthier.media.processors.calling import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.plugins import Table
from luthier.records import ImageHeader
from tests.media.test_media_batching import decoded
from tests.media.test_media_families import our_ids, own_ids, picture, random_sizes
from tests.media.tiny_processors import tiny_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_family.md"


class PostcardImageProcessor(BaseImageProcessor):
    """Shrinks pictures to a number of columns and cuts them into squares, row by row."""

    patch_size, max_columns = 8, 5

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        patches, shapes = [], []
        for image in make_flat_list_of_images(images):
            columns = min(self.max_columns, math.ceil(image.width / self.patch_size))
            rows = max(1, round(columns * image.height / image.width))
            small = np.asarray(image.resize((columns * self.patch_size, rows * self.patch_size)), dtype=np.float32)
            squares = small.reshape(rows, self.patch_size, columns, self.patch_size, 3).transpose(0, 2, 1, 3, 4)
            patches.append(torch.from_numpy(squares.reshape(rows * columns, -1).copy()))
            shapes.append([rows, columns])
        return BatchFeature({"pixel_values": torch.cat(patches), "card_shapes": torch.tensor(shapes)})


class PostcardProcessor(ProcessorMixin):
    """Writes a slot for every square, and a mark behind every row of them."""

    image_token, row_token = "<card>", "<row>"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        super().__init__(image_processor, tokenizer)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        rows, columns = (int(side) for side in image_inputs["card_shapes"][image_idx])
        return (self.image_token * columns + self.row_token) * rows


# 1. what the processor computes of sizes
def postcard_shapes(settings: Settings, headers: Sequence[ImageHeader]) -> dict[str, Any]:
    """Squares in a limited number of columns (Postcard): ``card_shapes`` int64[N, 2], rows and columns."""
    shapes = []
    for item in headers:
        columns = min(settings["max_columns"], math.ceil(item.width / settings["patch_size"]))
        shapes.append((max(1, round(columns * item.height / item.width)), columns))
    return {"card_shapes": np.array(shapes, dtype=np.int64)}


# 2. the row
POSTCARD = Family(
    name="postcard",
    processors=("PostcardProcessor",),
    model_types=("postcard",),
    image=Rule(measure=postcard_shapes),
    batching={"pixel_values": CAT, "card_shapes": CAT},
    modules=Modules(tower=("model.vision_tower",), projector=("model.multi_modal_projector",)),
)


@pytest.fixture
def media(monkeypatch: pytest.MonkeyPatch) -> MediaProcessor:
    monkeypatch.setattr("luthier.media.families.table.FAMILIES", {POSTCARD.name: POSTCARD})
    return MediaProcessor.of(PostcardProcessor(PostcardImageProcessor(), tiny_tokenizer("<card>", "<row>")))


# 3. the test
def test_postcards_are_planned_and_batched_as_their_processor_does(media: MediaProcessor) -> None:
    sizes = random_sizes("postcard", 25)
    pictures = [[picture(*size, seed)] for seed, size in enumerate(sizes)]
    own = own_ids("postcard", media.processor, ["<card>"] * len(sizes), pictures)
    for (width, height), ids in zip(sizes, own, strict=True):
        assert our_ids(media, ["", ""], [ImageHeader(width=width, height=height)]) == ids, (width, height)
    merged = merge_features(media.family, [media.features(decoded(row)) for row in pictures])
    together = media.processor(text=["<card>"] * len(sizes), images=pictures)
    for key, value in merged.items():
        np.testing.assert_array_equal(value, together[key], err_msg=key)


def test_what_a_plugins_family_raises_is_told_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings, headers: Sequence[ImageHeader]) -> dict[str, Any]:
        return {"card_shapes": headers[len(headers)]}

    table = Table("family", {})
    table.add("broken", replace(POSTCARD, name="broken", image=Rule(measure=broken)))
    for module in ("families.table", "processors.processor"):
        monkeypatch.setattr(f"luthier.media.{module}.FAMILIES", table)
    media = MediaProcessor.of(PostcardProcessor(PostcardImageProcessor(), tiny_tokenizer("<card>", "<row>")))
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(PluginError, match=f"'broken' of this program.*{Path(__file__).name}:{line}.*IndexError"):
        media.expand([ImageHeader(width=30, height=20)])


def test_the_page_shows_the_code_of_this_file() -> None:
    """Every Python block of the page is in this file, word for word, so that what it shows is tested."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(blocks) == 3
    for block in blocks:
        assert block.strip() in source, block
