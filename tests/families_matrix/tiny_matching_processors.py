"""Processors whose sizes a model can have, in the place of the tiny ones that no model fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.media import tiny_processors as tiny
from tests.media.tiny_av_processors import AUDIO, VIDEO

FITTING: dict[str, Callable[[], Any]] = {}


def fits(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a processor under the name of its family."""
    FITTING[make.__name__] = tiny.kept(make)
    return FITTING[make.__name__]


def _area(least: int, most: int, side: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": least * side * side, "longest_edge": most * side * side}}


@fits
def idefics3() -> Any:
    """Tiles of 2 x 2 patches."""
    known = tiny.BUILDERS["idefics3"]()
    return hf.Idefics3Processor(known.image_processor, known.tokenizer, image_seq_len=4)


@fits
def smolvlm() -> Any:
    known = VIDEO["smolvlm"]()
    return hf.SmolVLMProcessor(known.image_processor, known.tokenizer, known.video_processor, image_seq_len=4)


@fits
def ovis2() -> Any:
    """Of 4 x 4 patches two by two become one token."""
    known = tiny.BUILDERS["ovis2"]()
    return hf.Ovis2Processor(known.image_processor, known.tokenizer, image_seq_length=4)


@fits
def lighton_ocr() -> Any:
    known = tiny.BUILDERS["lighton_ocr"]()
    return hf.LightOnOcrProcessor(known.image_processor, known.tokenizer, patch_size=14, spatial_merge_size=2)


@fits
def deepseek_ocr2() -> Any:
    """The model has queries for 16 x 16 tokens of the whole and for 12 x 12 of a tile, whatever its config says."""
    images = hf.DeepseekOcr2ImageProcessor(size={"height": 64, "width": 64}, tile_size=48, max_patches=2)
    tokenizer = tiny.BUILDERS["deepseek_ocr2"]().tokenizer
    return hf.DeepseekOcr2Processor(images, tokenizer, patch_size=1, downsample_ratio=4)


@fits
def chameleon() -> Any:
    """Its encoder halves a picture three times."""
    images = hf.ChameleonImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return hf.ChameleonProcessor(images, tiny.BUILDERS["chameleon"]().tokenizer, image_seq_length=4)


@fits
def cohere_compass() -> Any:
    known = VIDEO["cohere_compass"]()
    images = hf.CohereCompassImageProcessor(**_area(2, 9, 32), patch_size=16)
    return hf.CohereCompassProcessor(images, known.tokenizer, known.video_processor)


@fits
def phi4_multimodal() -> Any:
    """The processor counts 16 x 16 tokens of the whole, whatever its size is."""
    images = hf.Phi4MultimodalImageProcessor(size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2)
    known = AUDIO["phi4_multimodal"]()
    return hf.Phi4MultimodalProcessor(images, known.audio_processor, known.tokenizer)
