"""transformers' processors that came later than the others, or take their media in a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.media import tiny_processors as tiny

LATER: dict[str, Callable[[], Any]] = {}


def later(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a processor under the name of its family."""
    LATER[make.__name__] = tiny.kept(make)
    return LATER[make.__name__]


@later
def perception_lm() -> Any:
    tokenizer = tiny.tiny_tokenizer(image_token="<|image|>", video_token="<|video|>")
    images = hf.PerceptionLMImageProcessor(tile_size=28, max_num_tiles=9, size={"height": 28, "width": 28})
    videos = hf.PerceptionLMVideoProcessor(size={"height": 28, "width": 28}, do_sample_frames=True, fps=2)
    return hf.PerceptionLMProcessor(videos, images, tokenizer, patch_size=7)


@later
def fuyu() -> Any:
    images = hf.FuyuImageProcessor(size={"height": 60, "width": 90}, patch_size={"height": 15, "width": 15})
    tokenizer = tiny.tiny_tokenizer("|SPEAKER|", "|NEWLINE|", "<0x04>")
    tokenizer.__class__ = OpeningTokenizer
    return hf.FuyuProcessor(images, tokenizer)


class OpeningTokenizer(hf.PreTrainedTokenizerFast):
    """Puts the mark of a word's start before every text, before control tokens too, as Fuyu's does."""

    def __call__(self, text: Any, **options: Any) -> Any:
        return super().__call__(" " + text, **options)


@later
def muse_spark() -> Any:
    glimmer = tiny.BUILDERS["muse_glimmer"]()
    marks = ("patch", "image_start", "image_end", "video", "vid_frame_separator", "vid_start", "vid_end", "audio")
    sounds = ("soft_audio_start", "soft_audio_end")
    return hf.MuseSparkProcessor(
        glimmer.image_processor,
        glimmer.video_processor,
        tiny.tiny_tokenizer(*(f"<|{mark}|>" for mark in (*marks, *sounds))),
        hf.MuseSparkFeatureExtractor(sampling_rate=16000, samples_per_token=640),
    )


@later
def dots3_note() -> Any:
    from transformers.models.dots3_note.feature_extraction_dots3_note import Dots3NoteFeatureExtractor

    size = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28}}
    return hf.Dots3NoteProcessor(
        hf.Qwen2VLImageProcessor(temporal_patch_size=1, **size),
        tiny.tiny_tokenizer("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>"),
        hf.Qwen3VLVideoProcessor(patch_size=14, temporal_patch_size=1, **size),
        Dots3NoteFeatureExtractor(feature_size=8, chunk_length=2),
    )
