"""What is known of a media item without decoding it, within the caps of the section ``media``."""

from __future__ import annotations

import hashlib

from luthier.errors import RowError
from luthier.media.access import Content, MediaAccess
from luthier.media.containers import probe_audio, probe_video
from luthier.media.image_headers import read_stored_size
from luthier.media.limits import check_audio, check_image, check_image_bytes, check_video
from luthier.media.waves import read_wave
from luthier.records import Audio, AudioHeader, Image, ImageHeader, Media, MediaHeader, Video, VideoHeader

DEFAULT_LIST_FPS = 2.0  # frames of a list that says no fps, and so does ``media.fps``


def probe(media: Media, access: MediaAccess) -> MediaHeader:
    """The header of an item: of images and WAV files from a few bytes, of others by PyAV.

    Raises `RowError` and its kind `RowForbidden` as `MediaAccess.open`; ``media_format`` for a file of another type,
    ``media_broken`` for a header that is cut off or cannot be, ``media_limit`` for what is over a cap; `SourceError`
    where PyAV is needed and not installed.
    """
    match media:
        case Image():
            with access.open(media.source, media.root) as content:
                return _image(content, access)
        case Audio():
            with access.open(media.source, media.root) as content:
                return _audio(content, access)
        case Video() if isinstance(media.source, tuple):
            return _frame_list(media, media.source, access)
        case Video():
            with access.open(media.source, media.root) as content:
                video = probe_video(content)
                check_video(video, access.config, content.name)
                return video
        case _:
            raise AssertionError(f"no media: {media!r}")


def _image(content: Content, access: MediaAccess) -> ImageHeader:
    stored = read_stored_size(content)
    width, height = stored.shown
    header = ImageHeader(width=width, height=height, version=content.version)
    check_image(header, access.config, content.name)
    check_image_bytes(stored.decoded_bytes, access.config, f"{content.name}: {width} x {height}")
    return header


def _audio(content: Content, access: MediaAccess) -> AudioHeader:
    wave = read_wave(content)
    if wave is None:
        header = probe_audio(content)
    else:
        header = AudioHeader(num_samples=wave.num_samples, sampling_rate=wave.sampling_rate, version=content.version)
    check_audio(header, access.config, content.name)
    return header


def _frame_list(media: Video, sources: tuple[str | bytes, ...], access: MediaAccess) -> VideoHeader:
    """A video of images, which all have one size."""
    digest = hashlib.blake2b(digest_size=16)
    first: ImageHeader | None = None
    for number, source in enumerate(sources):
        with access.open(source, media.root) as content:
            header = _image(content, access)
            digest.update(header.version.encode())
            first = first or header
            if (header.width, header.height) != (first.width, first.height):
                sizes = f"{header.width} x {header.height}, the first has {first.width} x {first.height}"
                raise RowError("media_broken", f"frame {number} ({content.name}) has {sizes}")
    if first is None:
        raise RowError("media_broken", "a video of no frames")
    video = VideoHeader(
        width=first.width,
        height=first.height,
        num_frames=len(sources),
        fps=media.fps or access.config.fps or DEFAULT_LIST_FPS,
        extracted=True,
        version=digest.hexdigest(),
    )
    check_video(video, access.config, f"a list of {len(sources)} frames")
    return video
