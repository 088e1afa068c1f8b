"""What a family's own processor makes of conversations, in one call: what the product's batches are compared with."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from tests.families_matrix.matrix_rows import Row

PADDED = {"padding": True, "padding_side": "right"}
# Outputs by which a processor talks to itself; no model takes them.
PRIVATE = ("video_metadata", "rows", "cols", "num_patches", "num_crops")


def own_batch(processor: Any, template: str, rows: Sequence[Row], **options: Any) -> dict[str, torch.Tensor]:
    """The processor's call on what its template prints, on pictures row by row, and on whole videos of which it takes
    frames itself. ``options`` go with the text.
    """
    pictures = [pictures_of(row) for row in rows]
    videos, told = videos_of(rows)
    arguments: dict[str, Any] = {}
    if any(pictures):
        arguments |= {"images": pictures, "images_kwargs": {"return_tensors": "pt"}}
    if videos:
        told_of = {"video_metadata": told, "return_metadata": True, "return_tensors": "pt"}
        arguments |= {"videos": videos, "videos_kwargs": told_of}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some classes put tensors into numpy's functions
        output = processor(
            text=texts_of(processor, template, rows),
            text_kwargs={**PADDED, **options, "return_tensors": None},
            **arguments,
        )
    return as_tensors(output)


def as_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Outputs that models take. Some classes give lists of arrays of one shape."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value).tolist())
        for name, value in dict(output).items()
        if name not in PRIVATE
    }


def pictures_of(row: Row) -> list[Image.Image]:
    """Its pictures, opened."""
    return [Image.open(io.BytesIO(path.read_bytes())) for path in row.files if path.suffix == ".png"]


def videos_of(rows: Sequence[Row]) -> tuple[list[Any], list[dict[str, Any]]]:
    """All frames of the rows' videos uint8[F, H, W, 3], and what a processor is told of each."""
    frames = [_frames(path) for row in rows for path in row.files if path.suffix == ".mp4"]
    told = [
        {
            "total_num_frames": len(video),
            "fps": fps,
            "width": video.shape[2],
            "height": video.shape[1],
            "duration": len(video) / fps,
            "frames_indices": list(range(len(video))),
        }
        for video, fps in frames
    ]
    return [video for video, _ in frames], told


def texts_of(processor: Any, template: str, rows: Sequence[Row]) -> list[str]:
    """What the chat template prints."""
    conversations = [_conversation(row) for row in rows]
    return list(processor.apply_chat_template(conversations, chat_template=template, tokenize=False))


def _conversation(row: Row) -> list[dict[str, Any]]:
    """The messages with whole paths, as transformers wants them."""
    files = iter(row.files)
    messages = copy.deepcopy(row.messages)
    for message in messages:
        for part in message["content"]:
            if part["type"] in ("image", "video"):
                del part[part["type"]]
                part["path"] = str(next(files))
    return messages


@lru_cache(maxsize=64)
def _frames(path: Path) -> tuple[Any, float]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]), float(
            stream.average_rate
        )
