"""Processors whose own call takes no media: how their parts are called instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luthier.media.geometry_audio import FRAMES_A_TOKEN


def transcribed(processor: Any, text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
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
