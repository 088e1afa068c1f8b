"""Small media files, sound and broken, made on the spot."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from luthier.config.inputs import MediaConfig
from luthier.media.files import MediaAccess

OPEN = MediaAccess(MediaConfig())
RATE = 16_000
ORIENTATION = 0x0112


def access(**config: Any) -> MediaAccess:
    """Access under some settings of the section ``media``."""
    return MediaAccess(MediaConfig(**config))


def picture(width: int, height: int, mode: str = "RGB") -> Pillow.Image:
    """A picture in which no two corners look the same."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([red, green, np.full_like(red, 90)], axis=-1).astype(np.uint8)
    return Pillow.fromarray(pixels).convert(mode)


def image_file(image: Pillow.Image, kind: str = "PNG", *, orientation: int | None = None, **options: Any) -> bytes:
    """The bytes of a picture as a file, with an EXIF orientation or none."""
    if orientation is not None:
        exif = Pillow.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header says this size; what follows is one pixel's data."""
    whole = image_file(picture(1, 1))
    return whole[:16] + struct.pack(">ii", width, height) + whole[24:]


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> NDArray[np.float32]:
    """A sine from -0.5 to 0.5."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(
    samples: NDArray[Any], *, rate: int = RATE, coding: int = 1, bits: int = 16, promised: int | None = None
) -> bytes:
    """A WAV of samples [n] or [n, channels]; ``promised`` is what the header says of its bytes."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    match coding, bits:
        case 1, 8:
            data = np.round(samples * 127 + 128).astype("u1").tobytes()
        case 1, 16:
            data = np.round(samples * 32767).astype("<i2").tobytes()
        case 1, 24:
            wide = np.round(samples * 8388607).astype("<i4").reshape(-1, 1)
            data = wide.view("u1")[:, :3].tobytes()
        case 1, 32:
            data = np.round(samples.astype(np.float64) * 2147483647).astype("<i4").tobytes()
        case _:
            data = samples.astype(f"<f{bits // 8}").tobytes()
    block = channels * bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, coding, channels, rate, rate * block, block, bits)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data) if promised is None else promised) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def sound(path: Path, samples: NDArray[np.float32], *, codec: str, rate: int = RATE) -> Path:
    """A compressed sound of one channel, written by PyAV; the suffix of the path is the container."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        stream.format = stream.codec.audio_formats[0]
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path


def gray_of_frame(number: int) -> int:
    """How bright the frames of `video` are: each as no other of the same half second."""
    return 20 + number * 37 % 200


def video(
    path: Path, num_frames: int, *, codec: str = "mpeg4", size: tuple[int, int] = (64, 48), fps: int = 10
) -> Path:
    """A video whose frames are gray, with a white left upper corner and a keyframe each second."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = *size, "yuv420p", fps
        for number in range(num_frames):
            pixels = np.full((size[1], size[0], 3), gray_of_frame(number), dtype=np.uint8)
            pixels[: size[1] // 4, : size[0] // 4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path
