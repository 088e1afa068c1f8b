"""transformers' own processors that see videos or hear, built from settings with a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import transformers as hf
from tokenizers import Tokenizer
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor

from tests.media import tiny_processors as tiny

VIDEO: dict[str, Callable[[], Any]] = {}
AUDIO: dict[str, Callable[[], Any]] = {}


def sees(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a processor of videos under the name of its family."""
    VIDEO[make.__name__] = tiny.kept(make)
    return VIDEO[make.__name__]


def hears(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a processor of sounds under the name of its family."""
    AUDIO[make.__name__] = tiny.kept(make)
    return AUDIO[make.__name__]


def _area(least: int, most: int, side: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": least * side * side, "longest_edge": most * side * side}}


def _qwen_tokenizer() -> Any:
    return tiny.tiny_tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


# ------------------------------------------------------------------------------------------------------------ videos


@sees
def qwen2_vl() -> Any:
    videos = hf.Qwen2VLVideoProcessor(**_area(2, 9, 28), fps=2, do_sample_frames=True, cap_pixels_per_frame=False)
    return hf.Qwen2VLProcessor(hf.Qwen2VLImageProcessor(**_area(2, 9, 28)), _qwen_tokenizer(), videos)


@sees
def qwen2_5_vl() -> Any:
    videos = hf.Qwen2VLVideoProcessor(**_area(2, 9, 28), cap_pixels_per_frame=True, max_video_tokens=30)
    return hf.Qwen2_5_VLProcessor(hf.Qwen2VLImageProcessor(**_area(2, 9, 28)), _qwen_tokenizer(), videos)


@sees
def qwen3_vl() -> Any:
    videos = hf.Qwen3VLVideoProcessor(**_area(2, 40, 32), cap_pixels_per_frame=False)
    images = hf.Qwen2VLImageProcessor(patch_size=16, **_area(2, 9, 32))
    return hf.Qwen3VLProcessor(images, _qwen_tokenizer(), videos)


@sees
def lfm3_vl() -> Any:
    videos = hf.Qwen3VLVideoProcessor(patch_size=14, **_area(1, 40, 28), cap_pixels_per_frame=True, max_video_tokens=6)
    return hf.Lfm3VlProcessor(hf.Qwen2VLImageProcessor(**_area(2, 9, 28)), _qwen_tokenizer(), videos)


@sees
def cohere_compass() -> Any:
    videos = hf.CohereCompassVideoProcessor(**_area(2, 40, 32), cap_pixels_per_frame=False)
    images = hf.CohereCompassImageProcessor(**_area(2, 9, 32))
    return hf.CohereCompassProcessor(images, tiny.BUILDERS["cohere_compass"]().tokenizer, videos)


@sees
def cosmos3_edge() -> Any:
    videos = hf.Cosmos3EdgeVideoProcessor(**_area(2, 40, 32))
    images = hf.Cosmos3EdgeImageProcessor(**_area(2, 9, 32))
    return hf.Cosmos3EdgeProcessor(images, _qwen_tokenizer(), videos)


@sees
def hy_v4_vl() -> Any:
    videos = hf.HYV4VLVideoProcessor(
        size={"longest_edge": 60 * 32 * 32}, max_image_size={"longest_edge": 12 * 32 * 32}, patch_size=8, merge_size=2
    )
    images = hf.HYV4VLImageProcessor(patch_size=8, **_area(2, 9, 16))
    return hf.HYV4VLProcessor(images, _qwen_tokenizer(), videos)


@sees
def exaone4_5() -> Any:
    videos = hf.Qwen2VLVideoProcessor(**_area(2, 9, 28), cap_pixels_per_frame=False)
    return hf.Exaone4_5_Processor(hf.Qwen2VLImageProcessor(**_area(2, 9, 28)), _qwen_tokenizer(), videos)


@sees
def video_llama_3() -> Any:
    videos = hf.VideoLlama3VideoProcessor(**_area(2, 60, 28), use_token_compression=False, fps=1, do_sample_frames=True)
    images = hf.VideoLlama3ImageProcessor(**_area(2, 9, 28))
    return hf.VideoLlama3Processor(images, _qwen_tokenizer(), videos)


@sees
def glm4v() -> Any:
    size = _area(2, 60, 28)
    return hf.Glm4vProcessor(
        hf.Glm4vImageProcessor(**size), tiny.tiny_tokenizer(*tiny.GLM), hf.Glm4vVideoProcessor(**size)
    )


@sees
def glm46v() -> Any:
    size = _area(2, 60, 28)
    return hf.Glm46VProcessor(
        hf.Glm46VImageProcessor(**size), tiny.tiny_tokenizer(*tiny.GLM), hf.Glm46VVideoProcessor(**size)
    )


@sees
def glm5_next() -> Any:
    budget = {"min_image_tokens": 2, "max_image_tokens": 30}
    return hf.Glm5NextProcessor(
        hf.Glm5NextImageProcessor(**budget), tiny.tiny_tokenizer(*tiny.GLM), hf.Glm5NextVideoProcessor(**budget)
    )


@sees
def ernie4_5_vl_moe() -> Any:
    images = hf.Ernie4_5_VLMoeImageProcessor(**_area(2, 9, 28))
    tokenizer = tiny.BUILDERS["ernie4_5_vl_moe"]().tokenizer
    videos = hf.Ernie4_5_VLMoeVideoProcessor(**_area(2, 9, 28), draw_on_frames=False, fps=2, min_frames=2)
    return hf.Ernie4_5_VLMoeProcessor(images, tokenizer, videos)


@sees
def kimi_k25() -> Any:
    size = {"size": {"max_height": 12, "max_width": 12}, "max_patches": 90}
    tokenizer = tiny.tiny_tokenizer(
        "<|media_pad|>",
        "<|kimi_k25_video_placeholder|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_end|>",
    )
    return hf.Kimi_K25Processor(hf.Kimi_K25ImageProcessor(**size), tokenizer, hf.Kimi_K25VideoProcessor(**size))


@sees
def internvl() -> Any:
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=4)
    videos = hf.InternVLVideoProcessor(size={"height": 28, "width": 28})
    return hf.InternVLProcessor(images, tiny.tiny_tokenizer(**tiny.INTERNVL), videos, image_seq_length=4)


@sees
def llava_onevision() -> Any:
    return tiny.BUILDERS["llava_onevision"]()


@sees
def llava_next_video() -> Any:
    return hf.LlavaNextVideoProcessor(
        hf.LlavaNextVideoVideoProcessor(**tiny.CLIP_SIZE),
        hf.LlavaNextImageProcessor(**tiny.CLIP_SIZE, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]),
        tiny.tiny_tokenizer("<image>", "<video>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@sees
def video_llava() -> Any:
    return hf.VideoLlavaProcessor(
        hf.VideoLlavaImageProcessor(**tiny.CLIP_SIZE),
        hf.VideoLlavaVideoProcessor(**tiny.CLIP_SIZE),
        tiny.tiny_tokenizer("<image>", "<video>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@sees
def smolvlm() -> Any:
    processor = tiny.BUILDERS["smolvlm"]()
    videos = hf.SmolVLMVideoProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, fps=1, num_frames=6, do_sample_frames=True
    )
    tokenizer = tiny.tiny_tokenizer(*tiny.IDEFICS, *tiny.TILES)
    return hf.SmolVLMProcessor(processor.image_processor, tokenizer, videos, image_seq_len=3)


def _minicpm(cls: str) -> Any:
    processor = tiny.BUILDERS["minicpmv4_6"]()
    videos = hf.MiniCPMV4_6VideoProcessor(scale_resolution=56, patch_size=7, max_slice_nums=4, max_num_frames=5)
    return getattr(hf, cls)(processor.image_processor, videos, processor.tokenizer)


@sees
def minicpmv4_6() -> Any:
    return _minicpm("MiniCPMV4_6Processor")


@sees
def minicpmv4_7() -> Any:
    return _minicpm("MiniCPMV4_7Processor")


@sees
def molmo2() -> Any:
    processor = tiny.BUILDERS["molmo2"]()
    videos = hf.Molmo2VideoProcessor(size={"height": 56, "width": 56}, patch_size=7, num_frames=6)
    return hf.Molmo2Processor(processor.image_processor, videos, processor.tokenizer)


@sees
def minimax_m3_vl() -> Any:
    limits = {"min_pixels": 2 * 28 * 28, "max_pixels": 9 * 28 * 28}
    marks = ("image", "video", "start of image", "end of image")
    return hf.MiniMaxM3VLProcessor(
        hf.MiniMaxM3VLImageProcessor(**_area(2, 9, 28)),
        tiny.tiny_tokenizer(*(f"]<]{mark}[>[" for mark in marks)),
        hf.MiniMaxM3VLVideoProcessor(**limits),
    )


GEMMA4 = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


@sees
@hears
def gemma4() -> Any:
    return hf.Gemma4Processor(
        feature_extractor=hf.Gemma4AudioFeatureExtractor(),
        image_processor=hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),
        tokenizer=tiny.tiny_tokenizer(**GEMMA4),
        video_processor=hf.Gemma4VideoProcessor(patch_size=4, num_frames=5),
    )


@sees
@hears
def gemma4_unified() -> Any:
    return hf.Gemma4UnifiedProcessor(
        feature_extractor=hf.Gemma4UnifiedAudioFeatureExtractor(),
        image_processor=hf.Gemma4UnifiedImageProcessor(patch_size=4, max_soft_tokens=70),
        tokenizer=tiny.tiny_tokenizer(**GEMMA4),
        video_processor=hf.Gemma4UnifiedVideoProcessor(patch_size=4, num_frames=5),
    )


OMNI = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni(cls: str, side: int, **extractor: Any) -> Any:
    videos = hf.Qwen2VLVideoProcessor(patch_size=side // 2, cap_pixels_per_frame=False, **_area(2, 9, side))
    processor = getattr(hf, cls)(
        image_processor=hf.Qwen2VLImageProcessor(patch_size=side // 2, **_area(2, 9, side)),
        video_processor=videos,
        feature_extractor=hf.WhisperFeatureExtractor(feature_size=8, **extractor),
        tokenizer=tiny.tiny_tokenizer(**OMNI),
    )
    processor.videos_kwargs = _area(2, 9, side)
    return processor


@sees
@hears
def qwen2_5_omni() -> Any:
    return _omni("Qwen2_5OmniProcessor", 28, chunk_length=8)


@sees
@hears
def qwen3_omni_moe() -> Any:
    return _omni("Qwen3OmniMoeProcessor", 32)


# ------------------------------------------------------------------------------------------------------------ sounds


@hears
def gemma3n() -> Any:
    tokenizer = tiny.tiny_tokenizer(
        **tiny.GEMMA, audio_token="<audio_soft_token>", boa_token="<start_of_audio>", eoa_token="<end_of_audio>"
    )
    return hf.Gemma3nProcessor(
        feature_extractor=hf.Gemma3nAudioFeatureExtractor(),
        image_processor=hf.SiglipImageProcessor(size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        audio_seq_length=26,
        image_seq_length=4,
    )


@hears
def phi4_multimodal() -> Any:
    return hf.Phi4MultimodalProcessor(
        hf.Phi4MultimodalImageProcessor(size={"height": 28, "width": 28}, patch_size=14),
        hf.Phi4MultimodalFeatureExtractor(),
        tiny.tiny_tokenizer(image_token="<|endoftext10|>", audio_token="<|endoftext11|>"),
    )


@hears
def nemotron_h_omni() -> Any:
    marks = ("<image>", "<video>", "<so_embedding>", "<so_start>", "<so_end>", "<img>", "</img>")
    normal = {"norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.5, 0.5, 0.5]}
    return hf.NemotronH_Omni_Reasoning_V3Processor(
        hf.NemotronH_Omni_Reasoning_V3ImageProcessor(**normal),
        hf.NemotronH_Omni_Reasoning_V3VideoProcessor(**normal, video_target_num_patches=20),
        tiny.tiny_tokenizer(*marks),
        hf.ParakeetFeatureExtractor(),
    )


def _whisper(**settings: Any) -> Any:
    return hf.WhisperFeatureExtractor(feature_size=8, **settings)


@hears
def qwen2_audio() -> Any:
    tokenizer = tiny.tiny_tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    return hf.Qwen2AudioProcessor(_whisper(chunk_length=8), tokenizer)


@hears
def audioflamingo3() -> Any:
    return hf.AudioFlamingo3Processor(_whisper(chunk_length=3), tiny.tiny_tokenizer("<sound>"), max_audio_len=9)


@hears
def musicflamingo() -> Any:
    tokenizer = tiny.tiny_tokenizer("<sound>", "<|sound_bos|>", "<|sound_eos|>")
    return hf.MusicFlamingoProcessor(_whisper(chunk_length=3), tokenizer, max_audio_len=9)


@hears
def glmasr() -> Any:
    return hf.GlmAsrProcessor(_whisper(chunk_length=4), tiny.tiny_tokenizer("<|pad|>"), max_audio_len=12)


@hears
def qwen3_asr() -> Any:
    tokenizer = tiny.tiny_tokenizer(
        audio_token="<|audio_pad|>", audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>"
    )
    return hf.Qwen3ASRProcessor(hf.Qwen3ASRFeatureExtractor(feature_size=8), tokenizer)


@hears
def voxtral() -> Any:
    """Its class takes the token of this id for that of a sound, whatever it is."""
    tokenizer = tiny.tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {index: token for token, index in state["model"]["vocab"].items()}
    names[24], names[256] = "[AUDIO]", names[24]
    state["model"]["vocab"] = {token: index for index, token in names.items()}
    state["added_tokens"] = [
        {**state["added_tokens"][0], "id": index, "content": name}
        for index, name in ((24, "[AUDIO]"), (257, "<pad>"), (258, "<s>"), (259, "</s>"))
    ]
    whole = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    return hf.VoxtralProcessor(_whisper(), whole)


def granite_speech() -> Any:
    """Its extractor needs a package that is not here, or what stands in for it."""
    extractor = GraniteSpeechFeatureExtractor()
    return hf.GraniteSpeechProcessor(extractor, tiny.tiny_tokenizer("<|audio|>"))


@hears
def inkling() -> Any:
    marks = ("<|unused_200054|>", "<|unused_200053|>", "<|content_image|>", "<|content_audio_input|>")
    return hf.InklingProcessor(
        hf.InklingFeatureExtractor(feature_size=8), hf.InklingImageProcessor(), tiny.tiny_tokenizer(*marks)
    )


@hears
def omniasr() -> Any:
    return hf.OmniASRProcessor(hf.OmniASRFeatureExtractor(), tiny.tiny_tokenizer("<extra_id_1>"))


@hears
def apertus1p5() -> Any:
    return tiny.BUILDERS["apertus1p5"]()
