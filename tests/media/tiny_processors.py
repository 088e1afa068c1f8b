"""transformers' own processors, built from settings with a tokenizer of bytes: small pictures, no files, no network."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.media.remote_processors import KimiVLImageProcessor, KimiVLProcessor

BUILDERS: dict[str, Callable[[], Any]] = {}
CLIP_SIZE = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def builder(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a processor under the name of its family."""
    BUILDERS[make.__name__] = kept(make)
    return BUILDERS[make.__name__]


def kept(make: Callable[[], Any]) -> Callable[[], Any]:
    """A processor that is made once. What it padded last is forgotten, or it would be saved with its tokenizer."""
    made = cache(make)

    @wraps(make)
    def processor() -> Any:
        made().tokenizer.backend_tokenizer.no_padding()
        return made()

    return processor


def tiny_tokenizer(*special: str, **named: str) -> Any:
    """Bytes as tokens, with control tokens: ``special`` ones, and ``named`` ones that get an attribute of that name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=named
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys([*special, *named.values()]))})
    return tokenizer


def _qwen_tokenizer() -> Any:
    return tiny_tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _area(least: int, most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": least, "longest_edge": most}}


@builder
def qwen2_vl() -> Any:
    size = _area(4 * 28 * 28, 40 * 28 * 28)
    return hf.Qwen2VLProcessor(
        hf.Qwen2VLImageProcessor(**size), _qwen_tokenizer(), hf.Qwen2VLVideoProcessor(**size), chat_template=""
    )


@builder
def qwen2_5_vl() -> Any:
    size = _area(4 * 28 * 28, 40 * 28 * 28)
    return hf.Qwen2_5_VLProcessor(
        hf.Qwen2VLImageProcessor(**size), _qwen_tokenizer(), hf.Qwen2VLVideoProcessor(**size), chat_template=""
    )


@builder
def qwen3_vl() -> Any:
    size = _area(4 * 32 * 32, 40 * 32 * 32)
    images = hf.Qwen2VLImageProcessor(patch_size=16, **size)
    return hf.Qwen3VLProcessor(images, _qwen_tokenizer(), hf.Qwen3VLVideoProcessor(), chat_template="")


@builder
def exaone4_5() -> Any:
    images = hf.Qwen2VLImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    return hf.Exaone4_5_Processor(images, _qwen_tokenizer(), hf.Qwen2VLVideoProcessor())


@builder
def lfm3_vl() -> Any:
    images = hf.Qwen2VLImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    return hf.Lfm3VlProcessor(images, _qwen_tokenizer(), hf.Qwen3VLVideoProcessor())


@builder
def video_llama_3() -> Any:
    images = hf.VideoLlama3ImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    return hf.VideoLlama3Processor(images, _qwen_tokenizer(), hf.VideoLlama3VideoProcessor())


GLM = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")


@builder
def glm4v() -> Any:
    images = hf.Glm4vImageProcessor(**_area(8 * 28 * 28, 80 * 28 * 28))
    return hf.Glm4vProcessor(images, tiny_tokenizer(*GLM), hf.Glm4vVideoProcessor())


@builder
def glm46v() -> Any:
    images = hf.Glm46VImageProcessor(**_area(8 * 28 * 28, 80 * 28 * 28))
    return hf.Glm46VProcessor(images, tiny_tokenizer(*GLM), hf.Glm46VVideoProcessor())


@builder
def ernie4_5_vl_moe() -> Any:
    tokenizer = tiny_tokenizer(
        image_token="<|IMAGE_PLACEHOLDER|>",
        image_start_token="<|IMAGE_START|>",
        image_end_token="<|IMAGE_END|>",
        video_token="<|VIDEO_PLACEHOLDER|>",
        video_start_token="<|VIDEO_START|>",
        video_end_token="<|VIDEO_END|>",
    )
    images = hf.Ernie4_5_VLMoeImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    return hf.Ernie4_5_VLMoeProcessor(images, tokenizer, hf.Ernie4_5_VLMoeVideoProcessor(draw_on_frames=False))


@builder
def paddleocr_vl() -> Any:
    images = hf.PaddleOCRVLImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    return hf.PaddleOCRVLProcessor(images, tiny_tokenizer(image_token="<|IMAGE_PLACEHOLDER|>"))


@builder
def hunyuan_vl() -> Any:
    tokenizer = tiny_tokenizer(image_token="<|img|>", image_start_token="<|img_s|>", image_end_token="<|img_e|>")
    return hf.HunYuanVLProcessor(hf.HunYuanVLImageProcessor(**_area(4 * 32 * 32, 40 * 32 * 32)), tokenizer)


@builder
def kimi_k25() -> Any:
    tokenizer = tiny_tokenizer("<|media_pad|>", "<|kimi_k25_video_placeholder|>")
    images = hf.Kimi_K25ImageProcessor(size={"max_height": 12, "max_width": 12}, max_patches=90)
    return hf.Kimi_K25Processor(images, tokenizer, hf.Kimi_K25VideoProcessor())


@builder
def minimax_m3_vl() -> Any:
    marks = ("image", "video", "start of image", "end of image")
    images = hf.MiniMaxM3VLImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    tokenizer = tiny_tokenizer(*(f"]<]{mark}[>[" for mark in marks))
    return hf.MiniMaxM3VLProcessor(images, tokenizer, hf.MiniMaxM3VLVideoProcessor())


@builder
def pixtral() -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 96}, patch_size=8)
    return hf.PixtralProcessor(
        images, tiny_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"), patch_size=8, spatial_merge_size=2
    )


INTERNVL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


@builder
def internvl() -> Any:
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=12)
    videos = hf.InternVLVideoProcessor(size={"height": 28, "width": 28})
    return hf.InternVLProcessor(images, tiny_tokenizer(**INTERNVL), videos, image_seq_length=4)


@builder
def aya_vision() -> Any:
    tokenizer = tiny_tokenizer(
        "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"
    )
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=12)
    return hf.AyaVisionProcessor(images, tokenizer, patch_size=14, img_size=28)


@builder
def cohere2_vision() -> Any:
    tokenizer = tiny_tokenizer(
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    images = hf.Cohere2VisionImageProcessor(size={"height": 28, "width": 28}, patch_size=2)
    return hf.Cohere2VisionProcessor(images, tokenizer)


@builder
def ovis2() -> Any:
    tokenizer = tiny_tokenizer(
        "<image>", "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"
    )
    images = hf.Ovis2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=9)
    return hf.Ovis2Processor(images, tokenizer, image_seq_length=3)


@builder
def deepseek_ocr2() -> Any:
    images = hf.DeepseekOcr2ImageProcessor(size={"height": 64, "width": 64}, tile_size=48)
    return hf.DeepseekOcr2Processor(images, tiny_tokenizer("<image>"), patch_size=4, downsample_ratio=4)


@builder
def llama4() -> Any:
    tokenizer = tiny_tokenizer(
        "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
    )
    images = hf.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=16)
    return hf.Llama4Processor(images, tokenizer, chat_template="", patch_size=7)


IDEFICS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


@builder
def idefics3() -> Any:
    images = hf.Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 28})
    return hf.Idefics3Processor(images, tiny_tokenizer(*IDEFICS, *TILES), image_seq_len=3)


@builder
def idefics2() -> Any:
    images = hf.Idefics2ImageProcessor(**_area(28, 70))
    return hf.Idefics2Processor(images, tiny_tokenizer(*IDEFICS), image_seq_len=5)


@builder
def llava() -> Any:
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(**CLIP_SIZE),
        tiny_tokenizer("<image>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@builder
def llava_next() -> Any:
    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    return hf.LlavaNextProcessor(
        hf.LlavaNextImageProcessor(**CLIP_SIZE, image_grid_pinpoints=pinpoints),
        tiny_tokenizer("<image>"),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@builder
def llava_onevision() -> Any:
    pinpoints = [[28 * rows, 28 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    size = {"size": {"height": 28, "width": 28}}
    return hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(**size, image_grid_pinpoints=pinpoints),
        tiny_tokenizer("<image>", "<video>"),
        hf.LlavaOnevisionVideoProcessor(**size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}


@builder
def gemma3() -> Any:
    images = hf.Gemma3ImageProcessor(
        size={"height": 28, "width": 28},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=24,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    return hf.Gemma3Processor(images, tiny_tokenizer(**GEMMA), image_seq_length=4)


@builder
def aria() -> Any:
    images = hf.AriaImageProcessor(max_image_size=490, min_image_size=56)
    return hf.AriaProcessor(images, tiny_tokenizer(image_token="<|img|>"), size_conversion={490: 8, 980: 16})


@builder
def lfm2_vl() -> Any:
    rows = (f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
    tokenizer = tiny_tokenizer("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *rows)
    images = hf.Lfm2VlImageProcessor(tile_size=32, encoder_patch_size=4, min_image_tokens=4, max_image_tokens=16)
    return hf.Lfm2VlProcessor(images, tokenizer)


def _minicpm(family: str) -> Any:
    tokenizer = tiny_tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    shared = "MiniCPMV4_6" if family == "MiniCPMV4_7" else family
    images = getattr(hf, f"{shared}ImageProcessor")(scale_resolution=56, patch_size=7)
    videos = getattr(hf, f"{shared}VideoProcessor")(scale_resolution=56, patch_size=7)
    return getattr(hf, f"{family}Processor")(images, videos, tokenizer)


@builder
def minicpmv4_6() -> Any:
    return _minicpm("MiniCPMV4_6")


@builder
def minicpmv4_7() -> Any:
    return _minicpm("MiniCPMV4_7")


@builder
def step3p7() -> Any:
    marks = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
    images = hf.Step3p7ImageProcessor(size={"height": 112, "width": 112}, patch_size=56)
    images.max_image_size = 400
    return hf.Step3p7Processor(images, tiny_tokenizer(*marks))


@builder
def molmo2() -> Any:
    marks = ("im_patch", "im_col", "im_start", "im_end", "im_low", "low_res_im_start", "frame_start", "frame_end")
    tokenizer = tiny_tokenizer("<|image|>", "<|video|>", *(f"<{mark}>" for mark in marks))
    images = hf.Molmo2ImageProcessor(size={"height": 56, "width": 56}, patch_size=7, overlap_margins=[1, 1])
    return hf.Molmo2Processor(images, hf.Molmo2VideoProcessor(size={"height": 56, "width": 56}), tokenizer)


@builder
def paligemma() -> Any:
    images = hf.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return hf.PaliGemmaProcessor(images, tiny_tokenizer("<image>"))


@builder
def deepseek_vl() -> Any:
    images = hf.DeepseekVLImageProcessor(size={"height": 28, "width": 28})
    return hf.DeepseekVLProcessor(images, tiny_tokenizer(image_token="<image_placeholder>"), num_image_tokens=4)


@builder
def deepseek_vl_hybrid() -> Any:
    images = hf.DeepseekVLHybridImageProcessor(
        size={"height": 28, "width": 28}, high_res_size={"height": 56, "width": 56}
    )
    return hf.DeepseekVLHybridProcessor(images, tiny_tokenizer(image_token="<image_placeholder>"), num_image_tokens=4)


@builder
def janus() -> Any:
    tokenizer = tiny_tokenizer(image_token="<image_placeholder>", boi_token="<begin>", eoi_token="<end>")
    return hf.JanusProcessor(hf.JanusImageProcessor(size={"height": 28, "width": 28}), tokenizer, num_image_tokens=4)


@builder
def mllama() -> Any:
    images = hf.MllamaImageProcessor(size={"height": 28, "width": 28})
    return hf.MllamaProcessor(images, tiny_tokenizer("<|image|>", "<|python_tag|>"))


@builder
def qianfan_ocr() -> Any:
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=12)
    return hf.QianfanOCRProcessor(images, tiny_tokenizer(**INTERNVL), image_seq_length=4)


@builder
def smolvlm() -> Any:
    from transformers.models.smolvlm import processing_smolvlm

    # its constructor refuses to work without a package that spells the number of a video's frames, and only that
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    images = hf.SmolVLMImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 28})
    return hf.SmolVLMProcessor(images, tiny_tokenizer(*IDEFICS, *TILES), hf.SmolVLMVideoProcessor(), image_seq_len=3)


@builder
def granite4_vision() -> Any:
    parent = llava_next()
    return hf.Granite4VisionProcessor(
        parent.image_processor, parent.tokenizer, 7, "full", downsample_rate="1/2", num_additional_image_tokens=0
    )


@builder
def cohere_compass() -> Any:
    images = hf.CohereCompassImageProcessor(**_area(4 * 28 * 28, 40 * 28 * 28))
    tokenizer = tiny_tokenizer("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
    return hf.CohereCompassProcessor(images, tokenizer, hf.CohereCompassVideoProcessor())


@builder
def lighton_ocr() -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14)
    tokenizer = tiny_tokenizer(
        image_token="<|image_pad|>", image_break_token="<|vision_pad|>", image_end_token="<|vision_end|>"
    )
    return hf.LightOnOcrProcessor(images, tokenizer, patch_size=7, spatial_merge_size=2)


@builder
def chameleon() -> Any:
    images = hf.ChameleonImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    tokenizer = tiny_tokenizer(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>")
    tokenizer.sep_token = "</s>"  # ends every prompt
    return hf.ChameleonProcessor(images, tokenizer, image_seq_length=4)


@builder
def kimi_vl() -> Any:
    tokenizer = tiny_tokenizer("<|media_start|>", "<|media_pad|>", "<|media_end|>")
    return KimiVLProcessor(KimiVLImageProcessor(patch_size=7, in_token_limit=60), tokenizer)


@builder
def got_ocr2() -> Any:
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28})
    marks = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>")
    processor = hf.GotOcr2Processor(images, tiny_tokenizer(*marks))
    processor.num_image_tokens = 4
    return processor


@builder
def granite_docling() -> Any:
    images = hf.GraniteDoclingImageProcessor(
        size={"height": 28, "width": 28},
        max_patches=6,
        dense_max_patches=20,
        dense_min_aspect=0.6,
        dense_max_aspect=1.5,
    )
    return hf.GraniteDoclingProcessor(images, tiny_tokenizer(*IDEFICS, *TILES), image_seq_len=4)


@builder
def minicpm_ocr() -> Any:
    return _minicpm("MiniCPMOcr")


@builder
def emu3() -> Any:
    tokenizer = tiny_tokenizer(
        image_token="<image>",
        boi_token="<|image start|>",
        eoi_token="<|image end|>",
        image_wrapper_token="<|image token|>",
        eof_token="<|extra_201|>",
    )
    return hf.Emu3Processor(hf.Emu3ImageProcessor(min_pixels=56 * 56, max_pixels=96 * 96), tokenizer)


@builder
def muse_glimmer() -> Any:
    marks = ("patch", "image_start", "image_end", "video", "vid_frame_separator", "vid_start", "vid_end")
    images = hf.MuseGlimmerImageProcessor(patch_size=4, max_image_tokens=60)
    videos = hf.MuseGlimmerVideoProcessor(patch_size=4, max_video_frame_tokens=9)
    return hf.MuseGlimmerProcessor(images, videos, tiny_tokenizer(*(f"<|{mark}|>" for mark in marks)))


@builder
def hyperclovax_vision_v2() -> Any:
    size = _area(4 * 28 * 28, 40 * 28 * 28)
    images, videos = hf.Qwen2VLImageProcessor(**size), hf.Qwen2VLVideoProcessor(**size)
    return hf.HyperCLOVAXVisionV2Processor(images, _qwen_tokenizer(), videos)


@builder
def inkling2() -> Any:
    return hf.Inkling2Processor(hf.Inkling2ImageProcessor(), tiny_tokenizer(image_token="<|content_image|>"))


@builder
def hy_v4_vl() -> Any:
    images = hf.HYV4VLImageProcessor(**_area(4 * 32 * 32, 40 * 32 * 32))
    return hf.HYV4VLProcessor(images, _qwen_tokenizer(), hf.HYV4VLVideoProcessor())


def apertus_tokenizer() -> Any:
    marks = ("image_token", "audio_token", "boi_token", "eoi_token", "image_wrapper_token", "eol_token", "boa_token")
    return tiny_tokenizer(**{mark: f"<|{mark}|>" for mark in (*marks, "eoa_token")})


@builder
def apertus1p5() -> Any:
    images = hf.Apertus1p5ImageProcessor(size={"min_pixels": 32 * 32, "max_pixels": 96 * 96})
    return hf.Apertus1p5Processor(images, hf.WavTokenizerFeatureExtractor(normalize_audio=True), apertus_tokenizer())
