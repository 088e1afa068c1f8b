"""How decoded media are handed to a processor: its arguments for images, videos and sounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from luthier.errors import RowError
from luthier.media.area_limits import AreaLimits
from luthier.media.call_options import Call
from luthier.media.decoding import DecodedAudio, DecodedImage, DecodedVideo
from luthier.media.families import MediaKind, Settings
from luthier.media.interleaving import sounds_of
from luthier.media.sampling import video_metadata
from luthier.records import MediaHeader, VideoHeader

if TYPE_CHECKING:
    from luthier.media.decoding import Decoded

# Named by kind and not for all, since some classes cannot read their own ids as tensors.
AS_TENSORS = {"images_kwargs": "pt", "videos_kwargs": "pt", "audio_kwargs": "pt"}


def media_arguments(
    items: Sequence[tuple[MediaHeader, Decoded]], settings: Mapping[MediaKind, Settings], call: Call
) -> dict[str, Any]:
    """The arguments of a processor but its text, for the items of one text in the order of their placeholders.

    ``call`` are the run's options. Frames are those that decoding has taken: the processor is told not to choose any,
    and where they stand in their video, which is what timestamps are made from.

    Raises `RowError` under ``media_mismatch`` for frames that are not those that were planned.
    """
    kwargs: Call = {name: {**call.get(name, {}), "return_tensors": tensors} for name, tensors in AS_TENSORS.items()}
    arguments: dict[str, Any] = {}
    if images := [item.pixels for _, item in items if isinstance(item, DecodedImage)]:
        arguments["images"] = [images]
    videos = [(header, item) for header, item in items if isinstance(item, DecodedVideo)]
    if videos:
        arguments["videos"] = [video.frames for _, video in videos]
        metadata = [_metadata(settings[MediaKind.VIDEO], header, video) for header, video in videos]
        # of one video not as a list, since one class (Nemotron Omni) reads it as it is given
        alone = metadata[0] if len(metadata) == 1 else metadata
        # whose return one class (Cosmos 3 Edge) does not ask for, and then misses
        told = {"video_metadata": alone, "return_metadata": True}
        kwargs["videos_kwargs"] |= {"do_sample_frames": False, **told}
    sounds = [item for _, item in items if isinstance(item, DecodedAudio)]
    if videos and kwargs["videos_kwargs"].get("use_audio_in_video"):
        _, owners = sounds_of([header for header, _ in items], with_tracks=True)
        sounds = [sound for _, item in items if (sound := _sound(item)) is not None]
        arguments["audio_from_video_indices"] = owners
    if sounds:
        arguments["audio"] = [sound.samples for sound in sounds]
    used = {
        name: kwargs[name]
        for name, given in zip(AS_TENSORS, ("images", "videos", "audio"), strict=True)
        if given in arguments
    }
    return {**arguments, **used}


def limited(item: Decoded, limits: AreaLimits) -> Decoded:
    """A picture within limits; anything else as it is."""
    return DecodedImage(pixels=limits.picture(item.pixels)) if isinstance(item, DecodedImage) else item


def _metadata(settings: Settings, header: MediaHeader, video: DecodedVideo) -> Any:
    assert isinstance(header, VideoHeader), "a video is planned by the header of a video"
    metadata = video_metadata(settings, header)
    planned, taken = [int(index) for index in metadata.frames_indices], list(video.frame_indices)
    if planned != taken:
        raise RowError(
            "media_mismatch", f"{len(planned)} frames of the video were planned, {len(taken)} are there, or others"
        )
    return metadata


def _sound(item: Decoded) -> DecodedAudio | None:
    match item:
        case DecodedAudio():
            return item
        case DecodedVideo():
            return item.audio
        case _:
            return None
