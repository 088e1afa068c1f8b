"""Sound tracks of videos whose tokens stand between those of the frames (Qwen2.5-Omni, Qwen3-Omni).

What stands for a video then depends on its sound, and how a sound counts on the others of its context: all items are
expanded together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from luthier.errors import LuthierError, RowError
from luthier.media.families.family import CountTokens, Measured, MediaKind, Settings
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
