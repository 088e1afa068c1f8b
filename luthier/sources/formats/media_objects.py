"""Media that rows in Python hold as objects, PIL images and numpy arrays: written as the bytes of a lossless file.

So a record holds nothing but references, can be sent to a worker, and its content can be told by a digest.
"""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError


def image_bytes(item: Any) -> bytes | None:
    """A PIL image (turned as its EXIF says) or a uint8 array ``[H, W]`` or ``[H, W, 3 or 4]`` as TIFF.

    None if it is neither. Raises `RowError` (``bad_media``) for an array of another type or shape.
    """
    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or item.ndim not in (2, 3) or (item.ndim == 3 and item.shape[2] not in (3, 4)):
            detail = f"an array is an image if it is uint8[H, W, 3], not {item.dtype}{list(item.shape)}"
            raise RowError("bad_media", detail)
        from PIL import Image

        return _tiff(Image.fromarray(item))
    imaging = sys.modules.get("PIL.Image")  # who never imported it has no such image
    if imaging is None or not isinstance(item, imaging.Image):
        return None
    from PIL import ImageOps

    return _tiff(ImageOps.exif_transpose(item))


def sound_bytes(samples: Any, sampling_rate: Any) -> bytes:
    """Samples of one channel, from -1 to 1, as a WAV of float32.

    Raises `RowError` (``bad_media``) for anything but a list or array of numbers, and without a sampling rate.
    """
    if type(sampling_rate) is not int or sampling_rate < 1:
        raise RowError("bad_media", f"an array of samples needs a sampling_rate, not {sampling_rate!r}")
    try:
        array: NDArray[Any] = np.asarray(samples)
    except ValueError as error:
        raise RowError("bad_media", f"no array of samples: {error}") from None
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iuf":
        detail = f"samples are numbers of one channel, [n], not {array.dtype}{list(array.shape)}"
        raise RowError("bad_media", detail)
    if array.dtype.kind == "f":
        data = array.astype("<f4").tobytes()
    elif array.dtype == np.int16:
        data = (array.astype("<f4") / 32768).tobytes()
    else:
        raise RowError("bad_media", f"samples are floats from -1 to 1 or int16, not {array.dtype}")
    # a RIFF file: its size, the chunk of the format (3 is float, one channel), the chunk of the samples
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, sampling_rate, 4 * sampling_rate, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def _tiff(image: Any) -> bytes:
    out = io.BytesIO()
    try:
        image.save(out, format="TIFF")
    except OSError as error:
        raise RowError("bad_media", f"an image of the mode {image.mode} cannot be kept: {error}") from None
    return out.getvalue()
