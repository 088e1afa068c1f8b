"""Sounds of several samples in one call of a processor: what fills up the shorter ones is then as its class makes it.

Only for classes by which a sound's own frames are the same in company as alone (`Rule.in_company`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from luthier.errors import RowError
from luthier.media.decoding import DecodedAudio
from luthier.media.families import Rule, Settings
from luthier.media.outputs import refused_rows
from luthier.records import MediaHeader

if TYPE_CHECKING:
    from luthier.media.decoding import Decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What a processor makes of the sounds of one sample.

    outputs  as it names them, each with the N sounds first; those of all samples are of one size
    strings  what stands for each sound
    """

    outputs: dict[str, Any]
    strings: list[str]


def heard_together(
    settings: Settings | None, rule: Rule | None, samples: Sequence[Sequence[tuple[MediaHeader, Decoded]]]
) -> Sequence[Heard | None]:
    """Of each sample; None for those without sounds, and for all where this does not apply or one of them breaks it."""
    sounds = [[item.samples for _, item in items if isinstance(item, DecodedAudio)] for items in samples]
    unknown = [None] * len(samples)
    together = [sound for group in sounds for sound in group]
    if settings is None or rule is None or not rule.in_company or not together:
        return unknown
    processor = settings.processor
    try:
        with refused_rows():
            made, strings = processor._process_audio(together, **{**settings.kwargs, "return_tensors": "pt"})
    except RowError:  # whose fault it is will be found one by one
        return unknown
    outputs = {name: value for name, value in made.items() if name not in processor.unused_input_names}
    found: list[Heard | None] = []
    start = 0
    for group in sounds:
        end = start + len(group)
        own = {name: value[start:end] for name, value in outputs.items()}
        found.append(Heard(outputs=own, strings=strings[start:end]) if group else None)
        start = end
    return found
