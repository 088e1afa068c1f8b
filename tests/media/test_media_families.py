"""Families of pictures: what stands for a picture, from its header alone, is what the processor itself writes."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from luthier.errors import RowError
from luthier.media.processors.processor import MediaProcessor
from luthier.records import AudioHeader, ImageHeader
from tests.conftest import reason_is
from tests.media.tiny_processors import BUILDERS

# LUTHIER_MEDIA_SIZES=500 is the long form of these tests.
NUM_SIZES = int(os.environ.get("LUTHIER_MEDIA_SIZES", "25"))
FAMILIES = sorted(BUILDERS)
# Processors that write the same for every size.
CONSTANT = {
    "llava",
    "aria",
    "paligemma",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "janus",
    "idefics2",
    "mllama",
    "chameleon",
}
# Processors that tell rows apart by the nesting of their pictures; the others take them as one list.
NESTED = {"idefics2", "idefics3", "smolvlm", "mllama", "llava_onevision", "gemma3", "lfm2_vl", "granite_docling"}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def random_sizes(family: str, count: int) -> list[tuple[int, int]]:
    """Widths and heights: of all shapes, with edges where formulas round, up to 16 times as long as wide."""
    rng = random.Random(family)
    special = [28, 32, 56, 64, 112, 30, 33, 55, 57]
    sizes = []
    while len(sizes) < count:
        width, height = rng.choice(special) if rng.random() < 0.2 else rng.randint(12, 200), rng.randint(12, 200)
        if rng.random() < 0.2:
            width = height
        sizes.append((width, height) if rng.random() < 0.5 else (height, width))
    return sizes


def around(family: str) -> tuple[str, str]:
    """What a family's chat template writes around a placeholder, where its processor insists on it."""
    return ("<|img_s|>", "<|img_e|>") if family == "hunyuan_vl" else ("", "")


def own_ids(family: str, processor: Any, texts: list[str], rows: list[list[Image.Image]]) -> list[list[int]]:
    """The ids that the processor makes of texts with their pictures, without what some put around every text."""
    output = processor(
        text=texts,
        images=rows if family in NESTED else [item for row in rows for item in row],
        images_kwargs={"return_tensors": "pt"},
        text_kwargs={"padding": True, "padding_side": "right", "return_tensors": None},
    )
    found = []
    for ids, shown in zip(output["input_ids"], output["attention_mask"], strict=True):
        kept = np.asarray(ids)[np.asarray(shown, dtype=bool)].tolist()
        if processor.tokenizer.bos_token_id in kept:
            kept.remove(processor.tokenizer.bos_token_id)
        found.append(kept[:-1] if family in {"paligemma", "chameleon"} else kept)  # they put an end to every prompt
    return found


def our_ids(media: MediaProcessor, parts: list[str], headers: list[ImageHeader]) -> list[int]:
    """The same from headers: ``parts`` are the texts before, between and behind the pictures."""
    strings = media.expand(headers, parts[1:])
    text = parts[0] + "".join(string + part for string, part in zip(strings, parts[1:], strict=True))
    return media.processor.tokenizer(text, add_special_tokens=False)["input_ids"]


ODD = {"molmo2": [(157, 14), (14, 60), (14, 14)]}  # as high or wide as the margins that it takes off


@pytest.mark.parametrize("family", FAMILIES)
def test_expansion_from_a_header_is_the_processors_own(family: str) -> None:
    processor = BUILDERS[family]()
    media = MediaProcessor.of(processor)
    assert media.family.name == family
    sizes = [*random_sizes(family, 3 if family in CONSTANT else NUM_SIZES), *ODD.get(family, ())]
    parts = list(around(family))
    pictures = [[picture(*size, seed)] for seed, size in enumerate(sizes)]
    own = own_ids(family, processor, [media.placeholder("image").join(parts)] * len(sizes), pictures)
    for (width, height), ids in zip(sizes, own, strict=True):
        assert our_ids(media, parts, [ImageHeader(width=width, height=height)]) == ids, (width, height)


@pytest.mark.parametrize("family", FAMILIES)
def test_expansions_of_pictures_that_share_a_context_are_the_processors_own(family: str) -> None:
    processor = BUILDERS[family]()
    media = MediaProcessor.of(processor)
    opened, closed = around(family)
    for sizes in (random_sizes(family, 2), random_sizes(family, 3)):
        between = [f"{closed} and{index} {opened}" for index in range(len(sizes) - 1)]
        parts = [f"one {opened}", *between, f"{closed} end"]
        if family == "paligemma":
            parts = [""] * len(sizes) + [" end"]
        headers = [ImageHeader(width=width, height=height) for width, height in sizes]
        pictures = [picture(*size, seed) for seed, size in enumerate(sizes)]
        own = own_ids(family, processor, [media.placeholder("image").join(parts)], [pictures])
        assert our_ids(media, parts, headers) == own[0]


def test_a_wrong_size_is_noticed() -> None:
    """The comparison above can fail: a header that lies gives other ids."""
    processor = BUILDERS["qwen2_vl"]()
    media = MediaProcessor.of(processor)
    own = own_ids("qwen2_vl", processor, [media.placeholder("image")], [[picture(200, 100)]])
    assert our_ids(media, ["", ""], [ImageHeader(width=200, height=100)]) == own[0]
    assert our_ids(media, ["", ""], [ImageHeader(width=100, height=100)]) != own[0]


def test_idefics2_shares_marks_between_neighbours_and_spaces_words() -> None:
    processor = BUILDERS["idefics2"]()
    media = MediaProcessor.of(processor)
    headers = [ImageHeader(width=40, height=40)] * 2
    for parts in (["", "", "word"], ["", "x", "<b>"], ["a", " ", "\n"], ["", "", ""]):
        own = own_ids("idefics2", processor, ["<image>".join(parts)], [[picture(40, 40)] * 2])
        assert our_ids(media, parts, headers) == own[0], parts


def test_a_kind_that_the_model_does_not_take_is_the_rows_fault() -> None:
    media = MediaProcessor.of(BUILDERS["llava"]())
    with pytest.raises(RowError, check=reason_is("media_kind")):
        media.expand([AudioHeader(num_samples=16000, sampling_rate=16000)])
    with pytest.raises(RowError, check=reason_is("media_kind")):
        media.placeholder("video")


def test_a_shape_that_the_processor_refuses_is_the_rows_fault() -> None:
    media = MediaProcessor.of(BUILDERS["qwen2_vl"]())
    with pytest.raises(RowError, match=r"media_size.*\(2010x10\)"):
        media.expand([ImageHeader(width=2010, height=10)])
