"""Items decoded to what a processor takes of them."""

from __future__ import annotations

from luthier.media.access import MediaAccess
from luthier.media.decoding import Decoded, decode
from luthier.media.families import MediaKind
from luthier.media.processor import MediaProcessor
from luthier.media.sampling import sampled_frames
from luthier.records import AudioHeader, Media, MediaHeader, VideoHeader


def decode_for(processor: MediaProcessor, media: Media, header: MediaHeader, access: MediaAccess) -> Decoded:
    """Of a video the frames that the processor would choose, and its sound if the run wants it; sound at its own rate.

    Raises `RowError` as `decode` does.
    """
    frames, hears = None, False
    if isinstance(header, VideoHeader):
        frames = sampled_frames(processor.settings(MediaKind.VIDEO), header)
        hears = bool(access.config.use_audio_in_video) and header.audio is not None
    heard = hears or isinstance(header, AudioHeader)
    rate = int(processor.settings(MediaKind.AUDIO)["sampling_rate"]) if heard else None
    return decode(media, header, access, frame_indices=frames, sampling_rate=rate, with_audio=hears)
