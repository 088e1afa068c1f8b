"""Which frames of a video are taken: those that the family's processor would take itself, found without decoding.

Decoding then reads these frames only, and the processor is called on them with ``do_sample_frames=False`` and the
metadata of the whole video, so that timestamps and seconds per grid are those of a video that it sampled itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from luthier.media.families.family import Settings
from luthier.records import VideoHeader

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata


def sampled_frames(settings: Settings, header: VideoHeader) -> list[int]:
    """The frames that are taken of a video: their numbers in it, in order of time; a number may come twice.

    How many there are is up to the processor's class and its settings ``fps``, ``num_frames``, ``min_frames`` …, and to
    the options of the call: ``fps`` is the rate, ``num_frames`` or ``max_frames`` the most that may be left. A video
    with fewer frames than the class wants is taken whole, and so is one whose frames are ``extracted``. Where a batch
    holds its videos as one array (``Rule.stacked``), the most frames are how many each video gets.
    """
    return [int(index) for index in _indices(settings, header)]


def video_metadata(settings: Settings, header: VideoHeader) -> VideoMetadata:
    """What a video processor keeps of a video of which it took `sampled_frames`.

    ``frames_indices`` is of the class's own type: with a float32 tensor timestamps round differently than with a list.
    """
    from transformers.video_utils import VideoMetadata

    indices: object = _indices(settings, header)
    return VideoMetadata(
        total_num_frames=header.num_frames,
        fps=header.fps,
        width=header.width,
        height=header.height,
        duration=header.seconds,
        frames_indices=indices,
    )


def _indices(settings: Settings, header: VideoHeader) -> Any:
    rate, options = settings.kwargs.get("fps"), settings.kwargs
    indices: Any = list(range(header.num_frames))
    if not header.extracted and (rate is not None or settings["do_sample_frames"]):
        indices = _sample(settings, header, rate)
    limit = options.get("num_frames") or options.get("max_frames")
    if limit is None or len(indices) == limit or (len(indices) < limit and not settings.stacked):
        return indices
    spread = _spread(len(indices), limit)
    return [indices[place] for place in spread] if isinstance(indices, list) else indices[spread]


def _sample(settings: Settings, header: VideoHeader, rate: float | None) -> object:
    """The indices that the class's ``sample_frames`` gives, called as its ``preprocess`` calls it."""
    from transformers.video_processing_utils import BaseVideoProcessor
    from transformers.video_utils import VideoMetadata

    part, total = settings.part, header.num_frames
    arguments = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
    arguments |= {name: value for name, value in settings.kwargs.items() if name != "num_frames"}
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_OF_SAMPLING}
    if rate is not None:  # most classes take a rate or a number; the number is that of their files
        arguments["num_frames"] = None
    if type(part).sample_frames is BaseVideoProcessor.sample_frames and arguments["num_frames"] is None:
        # The base class prefers the number in its files to the rate of a call, and refuses a rate above the video's.
        rate, arguments["fps"] = arguments["fps"], None
        arguments["num_frames"] = total if rate is None else max(1, int(total / header.fps * rate))
    if (wanted := arguments.get("num_frames")) is not None and wanted > total:
        arguments["num_frames"] = total
    metadata = VideoMetadata(
        total_num_frames=total, fps=header.fps, width=header.width, height=header.height, duration=header.seconds
    )
    try:
        indices = part.sample_frames(metadata=metadata, **arguments)
    except ZeroDivisionError:
        indices = ()
    if len(indices):
        return indices
    # too short for one frame at this rate, or for one pair of frames: the middle, as often as a patch is deep
    return [total // 2] * (arguments.get("temporal_patch_size") or 1)


def _spread(length: int, limit: int) -> NDArray[np.int64]:
    """``limit`` of ``length`` positions, evenly: 5 of 9 -> 0, 2, 4, 6, 8; 4 of 2 -> 0, 0, 1, 1."""
    return np.linspace(0, length - 1, limit).round().astype(np.int64)


_NOT_OF_SAMPLING = frozenset({"do_sample_frames", "video_metadata", "return_metadata", "return_tensors", "device"})
