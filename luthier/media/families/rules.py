"""What rows of families name: how audio and video become tokens, inputs along the tokens, and calls of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.media import geometry
from luthier.media.families import Features, Measured, Options, Outputs, Processor, Rule, Settings
from luthier.media.geometry import FRAMES_A_TOKEN, videos
from luthier.media.processors import BOUNDED_MARK, PICTURE_MARK, SOUND_MARK, spoken, writes_sounds


def _own_string(settings: Settings, measured: Measured, index: int) -> str:
    """For classes whose ``replace_audio_token`` takes no options."""
    return str(settings.processor.replace_audio_token(measured, index))


def _repeated(settings: Settings, measured: Measured, index: int) -> str:
    """For classes that write nothing themselves."""
    return str(settings.processor.audio_token) * int(measured["num_audio_tokens"][index])


_RATE = {"sampling_rate": "sampling_rate"}

WHOLE_WINDOWS = Rule(  # qwen2_audio, qwen2_5_omni
    measure=geometry.whole_windows, longest=geometry.one_window, options=_RATE, fold=2
)
WINDOW_STEPS = Rule(  # qwen3_omni_moe
    measure=geometry.window_steps, longest=geometry.one_window_if_asked, options=_RATE
)
PADDED_WINDOW_STEPS = Rule(  # qwen3_asr
    measure=geometry.padded_window_steps, longest=geometry.one_window_if_asked, replace=_own_string, options=_RATE
)
POOLED_WINDOWS = Rule(  # audioflamingo3, musicflamingo
    measure=geometry.pooled_windows, longest=geometry.all_windows, options=_RATE, fold=2
)
MERGED_WINDOWS = Rule(measure=geometry.merged_windows, longest=geometry.all_windows, options=_RATE, fold=4)  # glmasr
WHOLE_CHUNKS = Rule(measure=geometry.whole_chunks, replace=_repeated, options=_RATE, fold=4)  # voxtral
FIXED_LENGTH = Rule(measure=geometry.fixed_length, longest=geometry.half_a_minute, options=_RATE)  # gemma3n
VALID_FRAMES = Rule(measure=geometry.valid_frames, longest=geometry.half_a_minute, options=_RATE)  # gemma4
WAVEFORM_FRAMES = Rule(measure=geometry.waveform_frames, options=_RATE)  # gemma4_unified
COMPRESSED_FRAMES = Rule(measure=geometry.compressed_frames, options=_RATE, in_company=True)  # phi4_multimodal
PROJECTED_BLOCKS = Rule(measure=geometry.projected_blocks, options=_RATE, fold=5)  # granite_speech
DMEL_FRAMES = Rule(measure=geometry.dmel_frames, replace=_own_string, options=_RATE, in_company=True)  # inkling
WAVEFORM_BLOCKS = Rule(measure=geometry.waveform_blocks, options=_RATE)  # muse_spark
SAMPLE_CODES = Rule(measure=geometry.sample_codes, options=_RATE)  # apertus1p5
CONVOLVED_FRAMES = Rule(measure=geometry.convolved_frames, options=_RATE)  # omniasr
LONG_CHUNKS = Rule(measure=geometry.long_chunks, options=_RATE, fold=8)  # dots3_note
SUBSAMPLED_FRAMES = Rule(measure=geometry.subsampled_frames, options=_RATE)  # nemotron_h_omni
AVERAGED_FRAMES = Rule(  # minicpmo
    measure=geometry.averaged_frames, replace=spoken, mark=SOUND_MARK, options=_RATE, fold=5
)


# --------------------------------------------------------------------------------------------------------------------
# How videos become tokens, as rules that the rows of families name.
#
# The options say which keys of the run's ``media`` section the class of video processor has a setting for. Where a
# class does not look at ``max_frames``, ``num_frames`` stands for it: `sampling` thins what the class has chosen.


def _write_tubelets(settings: Settings, measured: Measured, index: int) -> str:
    """The class's rule gets the frames and where they stand in arguments of its own."""
    metadata = measured["video_metadata"][index]
    replace = settings.processor.replace_video_token
    return str(replace(measured, index, num_frames=len(metadata.frames_indices), video_metadata=metadata))


_SIZE = {"video_min_pixels": "size.shortest_edge", "video_max_pixels": "size.longest_edge"}
_FRAME_RATE, _MOST = {"fps": "fps"}, {"max_frames": "max_frames"}
_NUMBER = {"max_frames": "num_frames"}

# qwen2_vl, qwen2_5_vl, exaone4_5: do not sample unless they are told a rate
FRAME_GRID = Rule(measure=videos.frame_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=4)
# qwen3_vl, qwen3_5, lfm3_vl: 2 frames a second unless told
VOLUME_GRID = Rule(measure=videos.volume_grid, options=_SIZE | _FRAME_RATE | _NUMBER, fold=4)
# glm4v; glm46v chooses its rate itself, by duration
TIMED_VOLUME_GRID = Rule(measure=videos.volume_grid, options=_SIZE | _FRAME_RATE | _NUMBER, fold=4)
DYNAMIC_VOLUME_GRID = Rule(measure=videos.volume_grid, options=_SIZE | _NUMBER, fold=4)
# hy_v4_vl: frames are never scaled up, so its class reads no least area
ENDED_ROWS_GRID = Rule(
    measure=videos.ended_rows_grid, options={"video_max_pixels": "size.longest_edge"} | _FRAME_RATE | _MOST, fold=4
)
# glm5_next
CANVAS_GRID = Rule(measure=videos.canvas_grid, options=_FRAME_RATE | _MOST, fold=4)
# ernie4_5_vl_moe
PLAIN_FRAME_GRID = Rule(measure=videos.plain_frame_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=8)
# video_llama_3
SHARED_AREA_GRID = Rule(measure=videos.shared_area_grid, options=_SIZE | _FRAME_RATE | _MOST, fold=4)
# kimi_k25
CHUNKED_PATCH_GRID = Rule(measure=videos.chunked_patch_grid, options=_FRAME_RATE | _NUMBER, fold=4)
# muse_glimmer, muse_spark
SHAPED_FRAME_GRID = Rule(measure=videos.shaped_frame_grid, options=_FRAME_RATE | _NUMBER, fold=8)
# minimax_m3_vl
SEGMENTED_GRID = Rule(
    measure=videos.segmented_grid,
    options={"video_min_pixels": "min_pixels", "video_max_pixels": "max_pixels"} | _FRAME_RATE | _NUMBER,
    fold=4,
)
# internvl
FIXED_FRAMES = Rule(measure=videos.fixed_frames, options=_FRAME_RATE | _NUMBER, fold=4)
# llava_next_video, llava_onevision, video_llava
STACKED_FRAMES = Rule(measure=videos.fixed_frames, options=_FRAME_RATE | _NUMBER, stacked=True, fold=4)
# smolvlm
PADDED_FRAMES = Rule(measure=videos.padded_frames, options=_FRAME_RATE | _NUMBER, fold=16)
# gemma4
SOFT_TOKENS = Rule(measure=videos.soft_tokens, options=_FRAME_RATE | _NUMBER, fold=9)
# molmo2
POOLED_GRID = Rule(measure=videos.pooled_grid, options=_FRAME_RATE | _NUMBER, fold=9)
# nemotron_h_omni
TUBELETS = Rule(measure=videos.tubelets, replace=_write_tubelets, options=_FRAME_RATE | _NUMBER, fold=8)
# minicpmv4_6, minicpmv4_7
FRAME_SLICES = Rule(
    measure=videos.frame_slices, replace=videos.write_slices, options={"max_frames": "max_num_frames"}, fold=16
)


# --------------------------------------------------------------------------------------------------------------------
# Model inputs along the tokens: T tokens of one sample, from their ids and the outputs for its media.


TokenIds = NDArray[np.int64]


def kinds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: 0 text, 1 image, 2 video, 3 audio, by the processor's own rule (``mm_token_type_ids``)."""
    return np.asarray(processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int64)


def bounded_kinds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: 1 for what stands for a picture or a slice of it between its two marks (MiniCPM-V up to 4.5)."""
    part, number = processor.image_processor, processor.tokenizer.convert_tokens_to_ids
    opens = np.isin(input_ids, number([part.im_start_token, part.slice_start_token]))
    closes = np.isin(input_ids, number([part.im_end_token, part.slice_end_token]))
    return (np.cumsum(opens) > np.cumsum(closes)).astype(np.int64) * ~opens


def bounded_kinds_and_sounds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: the same, and 3 for what stands for a sound between its two marks (MiniCPM-o)."""
    tokenizer = processor.tokenizer
    opens, closes = input_ids == tokenizer.audio_start_id, input_ids == tokenizer.audio_end_id
    heard = (np.cumsum(opens) > np.cumsum(closes)) & ~opens
    return np.where(heard, 3, bounded_kinds(processor, input_ids, features))


def expert_kinds(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T]: the same with the tokens around an item counted in, by which ERNIE 4.5 VL routes to experts."""
    return np.asarray(processor.create_moe_mm_token_type_ids(input_ids[None].tolist())[0], dtype=np.int64)


def seen_images(processor: Processor, input_ids: TokenIds, features: Features) -> NDArray[np.int64]:
    """int64[T, images, tiles]: which tiles of which pictures a token attends to across (Mllama).

    A picture is seen from its token on up to the next picture's; pictures next to each other are seen together, by what
    the last of them is seen by. ``<image><image>ab<image>c`` -> 1, 1 and 2, 1 and 2, 1 and 2, 3, 3.
    """
    places = np.flatnonzero(input_ids == processor.image_token_id)
    tiles = processor.image_processor.max_image_tiles
    seen = np.zeros((len(input_ids), len(places), tiles), dtype=np.int64)
    if len(places) == 0:
        return seen
    shown = np.asarray(features["aspect_ratio_mask"])[0].sum(axis=-1)
    ends = [*places[1:].tolist(), len(input_ids)]
    for image in range(len(places) - 2, -1, -1):
        if places[image] + 1 == places[image + 1]:
            ends[image] = ends[image + 1]
    for image, (start, end) in enumerate(zip(places, ends, strict=True)):
        seen[start:end, image, : shown[image]] = 1
    return seen


# --------------------------------------------------------------------- processors that are called in a way of their own


def transcribed(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Voxtral leaves text and sounds to mistral-common; here are its extractor and its cutting into chunks.

    The ids are those of the text with every sound's token repeated, and how often depends on what the extractor gave.
    """
    import torch

    options = {**processor.audio_kwargs, **arguments.get("audio_kwargs", {})}
    positions = options.pop("max_source_positions")
    before, *behind = text.split(processor.audio_token)
    features = []
    for samples, part in zip(arguments["audio"], behind, strict=True):
        chunks = processor._retrieve_input_features([samples], positions, **options)
        features.append(chunks)
        before += processor.audio_token * (len(chunks) * positions // FRAMES_A_TOKEN) + part
    ids = processor.tokenizer(before, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, "input_features": torch.cat(features)}


def one_sound_each(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Audio Flamingo, GLM-ASR and Qwen3-ASR, which take one sound for every text of a call.

    A text ends behind the token of a sound; ``"Hear <a>, <a>!"`` are the two texts ``"Hear <a>"`` and ``", <a>!"``.
    """
    import torch

    *texts, rest = re.split(f"(?<={re.escape(processor.audio_token)})", text)
    texts = [*texts[:-1], texts[-1] + rest]
    outputs = dict(processor(text=texts, text_kwargs={"padding": True}, **arguments))
    shown = torch.as_tensor(outputs["attention_mask"]).bool()
    return {**outputs, "input_ids": torch.as_tensor(outputs["input_ids"])[shown][None]}


def flat_pictures(processor: Processor, text: str, arguments: Options) -> Outputs:
    """GOT-OCR 2, which takes pictures that are nested for the pages of one document."""
    flat = {"images": arguments["images"][0]} if "images" in arguments else {}
    called: Outputs = processor(text=[text], **{**arguments, **flat})
    return called


def pictures_in_front(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Fuyu's call puts one picture in front of a text; here pictures stand where the text has them."""
    processed, strings = processor._process_images(
        list(arguments["images"][0]), return_legacy_image_output=False, **arguments["images_kwargs"]
    )
    ids = _ids_with(processor, text, {processor.image_token: strings})
    return {"input_ids": ids, "pixel_values": processed["pixel_values"]}


def beside_text(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Nemotron-Parse, which takes a flat list of pictures beside texts that have no place for them.

    Where the text has one, the token stands that the decoder begins with.
    """
    flat = {"images": arguments["images"][0], "images_kwargs": arguments["images_kwargs"]}
    begun = text.replace(PICTURE_MARK, processor.tokenizer.eos_token, 1)
    called: Outputs = processor(text=[begun], text_kwargs={"add_special_tokens": False}, **flat)
    return called


def in_one_piece(processor: Processor, text: str, arguments: Options) -> Outputs:
    """MiniCPM-V up to 4.5 and MiniCPM-o, which give the slices of a text as a list: here they lie side by side.

    Of N slices of 3 channels, P pixels high, with L patches each: ``pixel_values`` [3, P, sum of L * P] and
    ``target_sizes`` [N, 2], rows and columns of patches. Of M sounds, cut after each half minute: ``audio_features``
    [M, bands, frames] and ``audio_frames`` [M, 2], the frames of the sound and, with what fills it up, of all of them.
    """
    import torch

    given: dict[str, object] = {}
    if "images" in arguments:
        given["images"] = arguments["images"]
    if "audio" in arguments:
        given["audios"] = [list(arguments["audio"])]
        if not writes_sounds(processor):
            given["chunk_input"] = True
    if writes_sounds(processor):
        text = text.replace(BOUNDED_MARK, BOUNDED_MARK[1:-1]).replace(SOUND_MARK, SOUND_MARK[1:-1])
    made = processor(text=[text], **given)
    outputs: dict[str, object] = {"input_ids": made["input_ids"]}
    if "images" in given:
        slices = [torch.as_tensor(one) for one in made["pixel_values"][0]]
        outputs |= {"pixel_values": torch.cat(slices, dim=-1), "target_sizes": torch.as_tensor(made["tgt_sizes"][0])}
    if "audios" in given:
        frames = torch.as_tensor(made["audio_feature_lens"][0]).long()
        whole = torch.full_like(frames, made["audio_features"].shape[-1])
        outputs |= {"audio_features": made["audio_features"], "audio_frames": torch.stack([frames, whole], dim=1)}
    return outputs


def picture_by_picture(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Youtu-VL, whose image processor stacks pictures, and so takes in one call only those of one size.

    A part of the text ends behind each placeholder. Of N pictures with P patches in all: ``pixel_values`` [P, V] and
    ``spatial_shapes`` [N, 2].
    """
    import torch

    *texts, rest = re.split(f"(?<={re.escape(processor.image_token)})", text)
    texts = [*texts[:-1], texts[-1] + rest]
    made = [
        processor(text=[part], images=[picture], return_tensors="pt", add_special_tokens=False)
        for part, picture in zip(texts, arguments["images"][0], strict=True)
    ]
    return {
        "input_ids": torch.cat([one["input_ids"] for one in made], dim=1),
        "pixel_values": torch.cat([one["pixel_values"].flatten(0, 1) for one in made]),
        "spatial_shapes": torch.cat([one["spatial_shapes"] for one in made]),
    }


def one_by_one(processor: Processor, text: str, arguments: Options) -> Outputs:
    """Perception LM gives the tiles of a picture an axis, and fails on pictures that do not have as many.

    The tiles (frames) of all items lie along that axis: those of two pictures, 5 and 3, are [1, 8, 3, S, S].
    """
    import torch

    processed: dict[str, list[object]] = {}
    strings: dict[str, list[str]] = {processor.image_token: [], processor.video_token: []}
    for picture in arguments["images"][0] if "images" in arguments else ():
        outputs, [string] = processor._process_images([picture], **arguments["images_kwargs"])
        processed.setdefault("pixel_values", []).append(outputs["pixel_values"])
        strings[processor.image_token].append(string)
    if "videos" in arguments:
        told = arguments["videos_kwargs"]
        metadata = told["video_metadata"] if isinstance(told["video_metadata"], list) else [told["video_metadata"]]
        for video, one in zip(arguments["videos"], metadata, strict=True):
            outputs, [string] = processor._process_videos([video], **{**told, "video_metadata": [one]})
            processed.setdefault("pixel_values_videos", []).append(outputs["pixel_values_videos"])
            strings[processor.video_token].append(string)
    joined = {key: torch.cat([torch.as_tensor(one) for one in values], dim=1) for key, values in processed.items()}
    return {"input_ids": _ids_with(processor, text, strings), **joined}


def _ids_with(processor: Processor, text: str, strings: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """The ids of a text with a string in the place of each placeholder, token by token of these."""
    left = {token: iter(found) for token, found in strings.items()}
    places = "|".join(map(re.escape, left))
    whole = re.sub(places, lambda found: next(left[found[0]]), text)
    ids: list[int] = processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
    return [ids]
