"""The parts of a transformers processor: what handles each kind of media, and a digest of how it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from luthier.media.families import Family, MediaKind

# Where a processor keeps what handles one kind of media, and how a call addresses it.
PARTS = {
    MediaKind.IMAGE: (("image_processor",), "images_kwargs"),
    MediaKind.VIDEO: (("video_processor",), "videos_kwargs"),
    MediaKind.AUDIO: (("feature_extractor", "audio_processor"), "audio_kwargs"),
}


def part_of(processor: Any, names: tuple[str, ...]) -> Any:
    """The first part of these names that the processor has; None: it has none."""
    return next((getattr(processor, name) for name in names if getattr(processor, name, None) is not None), None)


def fingerprint_of(processor: Any, family: Family, call: Mapping[str, Any]) -> str:
    """Of all that decides expansions and features: classes, settings, options."""
    plain = {
        name: value
        for name, value in vars(processor).items()
        if isinstance(value, (str, int, float, bool, list, tuple, dict, type(None))) and name != "chat_template"
    }
    parts = {
        name: part.to_dict()
        for names, _ in PARTS.values()
        if (part := part_of(processor, names)) is not None and (name := type(part).__name__)
    }
    told = {"class": type(processor).__name__, "family": family.name, "plain": plain, "parts": parts, "call": call}
    return blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
