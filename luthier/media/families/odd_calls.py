"""Processors whose own call takes no media, or takes them in another way than the others: how they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from luthier.media.families.family import Options, Outputs, Processor
from luthier.media.geometry.sounds import FRAMES_A_TOKEN
from luthier.media.processors.expansion import PICTURE_MARK


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
