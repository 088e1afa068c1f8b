"""Strings for media items that a processor does not write item by item: numbered ones, and ones of constant length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from luthier.media.families.family import Measured, MediaKind, Processor, Rule, Settings
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader

PICTURE_MARK = "<|picture|>"  # what is written for a picture where a tokenizer has no token for one


def kind_of(header: MediaHeader) -> MediaKind:
    """The modality of what a header describes."""
    match header:
        case ImageHeader():
            return MediaKind.IMAGE
        case VideoHeader():
            return MediaKind.VIDEO
        case AudioHeader():
            return MediaKind.AUDIO
        case _:
            raise TypeError(f"{type(header).__name__} is no header of a media item")


def write(rule: Rule, kind: MediaKind, settings: Settings, headers: Sequence[MediaHeader]) -> list[str]:
    """The string for each item of one kind in one context, as the processor writes it."""
    measured = rule.measure(settings, headers)
    if rule.replace is not None:
        return [rule.replace(settings, measured, index) for index in range(len(headers))]
    replace = getattr(settings.processor, f"replace_{kind}_token")
    return [replace(measured, index, **settings.kwargs) for index in range(len(headers))]


def numbered(strings: Sequence[str], kinds: Sequence[MediaKind], settings: Mapping[MediaKind, Settings]) -> list[str]:
    """Each string behind the number of its item among those of its kind in the context (MiniCPM-V)."""
    processor: Processor = next(iter(settings.values())).processor
    wanted = processor.use_image_id if processor.use_image_id is not None else processor.default_use_image_id
    if not wanted:
        return list(strings)
    count: Counter[MediaKind] = Counter()
    numbers = []
    for string, kind in zip(strings, kinds, strict=True):
        numbers.append(f"{processor.image_id_start_token}{count[kind]}{processor.image_id_end_token}{string}")
        count[kind] += 1
    return numbers


def numbered_pictures(
    strings: Sequence[str], kinds: Sequence[MediaKind], settings: Mapping[MediaKind, Settings]
) -> list[str]:
    """The same where videos get no number (MiniCPM-V 4.7)."""
    pairs = zip(strings, numbered(strings, kinds, settings), kinds, strict=True)
    return [with_number if kind is MediaKind.IMAGE else string for string, with_number, kind in pairs]


def framed(settings: Settings, measured: Measured, index: int) -> str:
    """Idefics2: as many slots for every picture, between two marks; five times if pictures are split."""
    processor = settings.processor
    mark, slots = processor.fake_image_token, processor.image_token * processor.image_seq_len
    # neighbours share a mark: mark slots mark mark slots mark -> mark slots mark slots mark
    string: str = mark + (slots + mark) * (5 if settings["do_image_splitting"] else 1)
    return string


def framed_seam(settings: Settings, string: str, before: bool, after: str) -> str:
    """Idefics2: a picture right behind another shares its mark; a word right behind a picture gets a space."""
    mark = str(settings.processor.fake_image_token)
    string = string.removeprefix(mark) if before else string
    return string + " " if after and not after[0].isspace() and after[0] != "<" else string


def sliced(settings: Settings, measured: Measured, index: int) -> str:
    """MiniCPM-V, whose processor hands its own rule one number more than the settings it was called with."""
    divisor = 4 if settings["downsample_mode"] == "4x" else 16
    string: str = settings.processor.replace_image_token(measured, index, image_token_divisor=divisor)
    return string


def marked(settings: Settings, measured: Measured, index: int) -> str:
    """LFM2-VL, whose processor hands its own rule one of its own settings besides those of the call."""
    processor = settings.processor
    marks = processor.use_image_special_tokens
    string: str = processor.replace_image_token(measured, index, use_image_special_tokens=marks, **settings.kwargs)
    return string


def paged(settings: Settings, measured: Measured, index: int) -> str:
    """GOT-OCR 2, whose processor hands its own rule what counts the pages of each picture."""
    processor = settings.processor
    counts = {name: measured[name] for name in ("num_pages_per_batch", "patch_indices")}
    string: str = processor.replace_image_token(measured, index, num_image_tokens=processor.num_image_tokens, **counts)
    return string


def lined(settings: Settings, measured: Measured, index: int) -> str:
    """Fuyu, whose processor hands its own rule the rows of patches, each of which ends in a token of its own."""
    rows, columns = measured["rows"][index], measured["columns"][index]
    return str(settings.processor.replace_image_token({}, index, num_patches=rows * columns, row_width=columns))


def merged_slots(settings: Settings, measured: Measured, index: int) -> str:
    """Kimi-VL, whose class writes into the text and has no rule for one string: a slot for each merged patch."""
    merged = math.prod(settings["merge_kernel_size"])
    return str(settings.processor.image_token) * int(measured["image_grid_hws"][index].prod() // merged)


def decoder_start(settings: Settings, measured: Measured, index: int) -> str:
    """Nemotron-Parse, whose text has no place for its picture: the token that its decoder begins with stands for it."""
    return str(settings.processor.tokenizer.eos_token)
