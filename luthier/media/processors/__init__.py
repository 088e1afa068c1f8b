"""Transformers' processors, called as each of them must be, and what comes out as arrays.

Here are strings that stand for media items, where a processor does not write them item by item.

Those of sound tracks stand between those of the frames of a video (Qwen2.5-Omni, Qwen3-Omni). What stands for a video
then depends on its sound, and how a sound counts on the others of its context: all items are expanded together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from luthier.errors import LuthierError, RowError
from luthier.media.families import CountTokens, Measured, MediaKind, Processor, Rule, Settings
from luthier.records import AudioHeader, ImageHeader, MediaHeader, VideoHeader


def expand_with_sound_tracks(
    settings: Mapping[MediaKind, Settings],
    items: Sequence[MediaHeader],
    *,
    measures: Mapping[MediaKind, CountTokens],
    nominal_rate: float,
) -> list[str]:
    """The strings of all items of a context, in their order; a video with a sound track takes that in if it is wanted.

    The classes tell frames apart by seconds that are nominal: of the rate that was asked for, or else of
    ``nominal_rate``. So these are used here too.
    """
    hears = bool(settings[MediaKind.VIDEO].kwargs.get("use_audio_in_video"))
    sounds, owners = sounds_of(items, with_tracks=hears)
    measured = _measured(settings, items, sounds, measures)
    if MediaKind.VIDEO in measured:
        video = settings[MediaKind.VIDEO]
        rate = video.kwargs.get("fps") or nominal_rate
        seconds = [video["temporal_patch_size"] / rate] * len(measured[MediaKind.VIDEO]["video_grid_thw"])
        measured[MediaKind.VIDEO] |= {"video_second_per_grid": seconds}
    alone = [slot for slot, owner in enumerate(owners) if owner is None]
    tracks = [owners.index(video) if video in owners else None for video in range(len(items))]
    strings = []
    for item, number in zip(items, _numbers(items), strict=True):
        match item:
            case ImageHeader():
                part = settings[MediaKind.IMAGE]
                strings.append(part.processor.replace_image_token(measured[MediaKind.IMAGE], number, **part.kwargs))
            case AudioHeader():
                part = settings[MediaKind.AUDIO]
                strings.append(part.processor.replace_audio_token(measured[MediaKind.AUDIO], alone[number]))
            case VideoHeader():
                strings.append(_video(settings[MediaKind.VIDEO], measured, number, tracks, hears=hears))
            case _:
                raise TypeError(type(item))
    return strings


def sounds_of(items: Sequence[MediaHeader], *, with_tracks: bool) -> tuple[list[AudioHeader], list[int | None]]:
    """All sounds of a context in their order, and the number of the video whose track each is (None: of none)."""
    sounds: list[AudioHeader] = []
    owners: list[int | None] = []
    videos = 0
    for item in items:
        if isinstance(item, AudioHeader):
            sounds.append(item)
            owners.append(None)
        elif isinstance(item, VideoHeader):
            if with_tracks and item.audio is not None:
                sounds.append(item.audio)
                owners.append(videos)
            videos += 1
    return sounds, owners


def _measured(
    settings: Mapping[MediaKind, Settings],
    items: Sequence[MediaHeader],
    sounds: Sequence[AudioHeader],
    measures: Mapping[MediaKind, CountTokens],
) -> dict[MediaKind, Measured]:
    headers: dict[MediaKind, Sequence[MediaHeader]] = {
        MediaKind.IMAGE: [item for item in items if isinstance(item, ImageHeader)],
        MediaKind.VIDEO: [item for item in items if isinstance(item, VideoHeader)],
        MediaKind.AUDIO: sounds,
    }
    try:
        return {kind: measures[kind](settings[kind], headers[kind]) for kind in MediaKind if headers[kind]}
    except LuthierError:
        raise
    except ValueError as error:
        raise RowError("media_size", str(error)) from error


def _numbers(items: Sequence[MediaHeader]) -> list[int]:
    """The how manyth of its kind each item is: image, sound, image -> 0, 0, 1."""
    seen: dict[type, int] = {}
    numbers = []
    for item in items:
        numbers.append(seen.setdefault(type(item), 0))
        seen[type(item)] += 1
    return numbers


def _video(
    settings: Settings,
    measured: Mapping[MediaKind, Measured],
    number: int,
    tracks: Sequence[int | None],
    *,
    hears: bool,
) -> str:
    processor = settings.processor
    return str(
        processor.replace_video_token(
            measured[MediaKind.VIDEO],
            number,
            processed_audio=measured.get(MediaKind.AUDIO),
            video_to_audio_indices=tracks,
            load_audio_from_video=hears,
            position_id_per_seconds=processor.position_id_per_seconds,
            seconds_per_chunk=processor.seconds_per_chunk,
        )
    )


# ------------------------------------------------------------------- numbered strings, and strings of constant length


PICTURE_MARK = "<|picture|>"  # what is written for a picture where a tokenizer has no token for one
BOUNDED_MARK = "(<image>./</image>)"  # what MiniCPM-V up to 4.5 replaces in a text
SOUND_MARK = "(<audio>./</audio>)"  # what MiniCPM-o replaces; 4.5 replaces both without the parentheses


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


def four_a_slot(settings: Settings, measured: Measured, index: int) -> str:
    """Youtu-VL, whose class writes into the text: a slot for four patches, as its code has it and no setting."""
    return str(settings.processor.image_token) * int(measured["spatial_shapes"][index].prod() // 4)


def decoder_start(settings: Settings, measured: Measured, index: int) -> str:
    """Nemotron-Parse, whose text has no place for its picture: the token that its decoder begins with stands for it."""
    return str(settings.processor.tokenizer.eos_token)


def one_slot(settings: Settings, measured: Measured, index: int) -> str:
    """MOSS-VL, whose text has one token for a picture of any size."""
    return str(settings.processor.image_token)


def bounded(settings: Settings, measured: Measured, index: int) -> str:
    """MiniCPM-V up to 4.5 and MiniCPM-o: the same slots for the picture and each of its slices, each between marks."""
    string: str = settings.part.get_slice_image_placeholder(measured["sizes"][index], index)
    return string


def spoken(settings: Settings, measured: Measured, index: int) -> str:
    """MiniCPM-o: slots for a sound between two marks, by 4.5's own rule. 2.6 writes them by the second, as its ``chat``
    does: 60 slots, 25 a second, are three times marks around 25, 25 and 10.
    """
    processor = settings.processor
    if writes_sounds(processor):
        return str(processor.get_audio_placeholder(measured["num_samples"][index], chunk_input=False))
    total, tokenizer = measured["num_audio_tokens"][index], processor.tokenizer
    lengths = [min(SLOTS_A_SECOND, total - start) for start in range(0, total, SLOTS_A_SECOND)]
    return "".join(f"{tokenizer.audio_start}{'<unk>' * length}{tokenizer.audio_end}" for length in lengths)


def writes_sounds(processor: Processor) -> bool:
    """Whether a class of MiniCPM-o has a rule of its own for the string of a sound, as from 4.5 on."""
    return hasattr(processor, "get_audio_placeholder")


SLOTS_A_SECOND = 25  # of MiniCPM-o 2.6: 100 frames, halved twice
