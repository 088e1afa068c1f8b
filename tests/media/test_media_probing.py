"""Headers of images and WAV files: right for every way of writing them, and refused where they cannot be true."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_files import OPEN, RATE, access, image_file, picture, png_header, tone, wav
from PIL import Image as Pillow
from PIL import ImageOps

from luthier.errors import RowError
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import decode, probe
from luthier.records import Audio, AudioHeader, Image, ImageHeader, Video, VideoHeader

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def image_header(data: bytes, **config: Any) -> ImageHeader:
    header = probe(Image(source=data), access(**config))
    assert isinstance(header, ImageHeader)
    return header


def refusal(media: Image | Audio | Video, using: MediaAccess = OPEN) -> RowError:
    with pytest.raises(RowError) as found:
        probe(media, using)
    return found.value


# ------------------------------------------------------------------------------------------------------- image sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", [None, *range(10)])
def test_sizes_and_orientation_are_those_that_pil_finds(kind: str, orientation: int | None) -> None:
    rng = random.Random(f"{kind}{orientation}")
    for mode in ("RGB", "L"):
        image = picture(rng.randint(4, 90), rng.randint(4, 90), mode)
        turned = orientation if kind in ("JPEG", "PNG", "WEBP", "TIFF") else None
        data = image_file(image, kind, orientation=turned)
        with Pillow.open(io.BytesIO(data)) as opened:
            expected = ImageOps.exif_transpose(opened).size
        header = image_header(data)
        assert (header.width, header.height) == expected


def test_the_forms_that_a_kind_of_file_has() -> None:
    animation = {"save_all": True, "append_images": [picture(30, 20), picture(30, 20, "L").convert("RGB")]}
    for data in [
        image_file(picture(30, 20), "JPEG", progressive=True),
        image_file(picture(30, 20, "CMYK"), "JPEG"),
        image_file(picture(30, 20), "JPEG", icc_profile=b"x" * 200_000),  # the size stands far behind
        image_file(picture(30, 20), "WEBP", lossless=True),
        image_file(picture(30, 20, "RGBA"), "WEBP"),
        image_file(picture(30, 20), "WEBP", **animation),
        image_file(picture(30, 20), "GIF", **animation),
        image_file(picture(30, 20), "PNG", **animation),
        image_file(picture(30, 20, "I;16"), "PNG"),
        image_file(picture(30, 20), "TIFF", compression="tiff_lzw"),
    ]:
        header = image_header(data)
        assert (header.width, header.height) == (30, 20)


def test_xmp_turns_a_picture_where_exif_says_nothing() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for kind in ("JPEG", "WEBP"):
        data = image_file(picture(30, 20), kind, xmp=xmp)
        with Pillow.open(io.BytesIO(data)) as opened:
            assert ImageOps.exif_transpose(opened).size == (20, 30)
        assert image_header(data).width == 20
        assert image_header(image_file(picture(30, 20), kind, xmp=xmp, orientation=1)).width == 30


def test_damaged_tags_do_not_cost_the_picture() -> None:
    exif = b"Exif\0\0II*\0\xff\xff\xff\xff"
    assert image_header(image_file(picture(30, 20), "JPEG", exif=exif)).width == 30


def test_a_header_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = image_file(picture(30, 20), "JPEG", orientation=6)
    (tmp_path / "a.png").write_bytes(data)  # the name promises something else, and is not asked
    header = probe(Image(source=str(tmp_path / "a.png"), root=str(tmp_path)), OPEN)
    assert isinstance(header, ImageHeader)
    assert (header.width, header.height) == (20, 30)
    assert header.version and image_header(data).version


# ----------------------------------------------------------------------------------------------------- images refused


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (image_file(picture(60, 40))[:8], "media_broken", "cut off"),
        (image_file(picture(60, 40))[: len(image_file(picture(60, 40))) // 2], "media_broken", "cut off"),
        (image_file(picture(60, 40))[:-12], "media_broken", "cut off"),  # no IEND: nobody knows what else is missing
        (image_file(picture(60, 40), "JPEG")[:30], "media_broken", "cut off"),
        (image_file(picture(60, 40), "WEBP")[:20], "media_broken", "cut off"),
        (image_file(picture(60, 40), "GIF")[:7], "media_broken", "cut off"),
        (image_file(picture(60, 40), "TIFF")[:9], "media_broken", "cut off"),
        (b"\xff\xd8\xff\xe0\0\x04xx" + b"nonsense", "media_broken", "no JPEG segment at byte 8"),
        (b"<!DOCTYPE html><html>404</html>", "media_format", "is HTML"),
        (SVG, "media_format", "an SVG drawing"),
        (b"8BPS\0\1" + b"\0" * 20, "media_format", "Photoshop"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "media_format", "PostScript"),
        (b"SIMPLE  =                    T", "media_format", "FITS"),
        (b"version https://git-lfs.github.com/spec/v1\n", "media_format", "LFS pointer"),
        (b"just words", "media_format", "text ('just words')"),
        (b"\x01\x02\x03\x04\x05", "media_format", "01 02 03 04 05"),
        (png_header(0, 9), "media_broken", "0 x 9"),
        (png_header(9, 0), "media_broken", "9 x 0"),
        (png_header(-1, 9), "media_limit", "4294967295 x 9"),
        (image_file(picture(1, 1)), "media_limit", "min_image_side"),
        (image_file(picture(1, 5000)), "media_limit", "min_image_side"),
        (image_file(picture(10, 5000)), "media_limit", "500 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_that_cannot_be_used_say_why(data: bytes, reason: str, words: str) -> None:
    error = refusal(Image(source=data))
    assert (error.reason, type(error)) == (reason, RowError)
    assert words in error.detail


def test_the_caps_on_images_are_those_of_the_run() -> None:
    data = image_file(picture(40, 20))
    assert image_header(data, max_image_pixels=800).width == 40
    assert (
        "800 pixels, media.max_image_pixels is 799" in refusal(Image(source=data), access(max_image_pixels=799)).detail
    )
    assert refusal(Image(source=data), access(max_side_ratio=1.9)).reason == "media_limit"
    assert image_header(image_file(picture(1, 1)), min_image_side=1).height == 1


def wide(mode: str) -> Pillow.Image:
    return Pillow.fromarray(np.full((300, 200), 999, np.uint16)) if mode == "I;16" else Pillow.new(mode, (200, 300))


@pytest.mark.parametrize(
    ("kind", "mode", "options", "bytes_a_pixel"),
    [
        ("PNG", "RGB", {}, 4), ("PNG", "RGBA", {}, 8), ("PNG", "LA", {}, 8), ("PNG", "P", {}, 5), ("PNG", "L", {}, 5),
        ("PNG", "I;16", {}, 10), ("JPEG", "RGB", {}, 4), ("JPEG", "RGB", {"progressive": True}, 10),
        ("JPEG", "CMYK", {}, 8), ("JPEG", "L", {}, 5), ("WEBP", "RGB", {}, 17), ("WEBP", "RGBA", {}, 17),
        ("WEBP", "RGB", {"lossless": True}, 17), ("GIF", "P", {}, 8), ("BMP", "RGB", {}, 8), ("TIFF", "RGB", {}, 10),
        ("TIFF", "CMYK", {}, 12), ("TIFF", "I;16", {}, 10),
    ],
)  # fmt: skip
def test_the_memory_of_an_image_is_told_by_its_format_and_mode(
    kind: str, mode: str, options: dict[str, Any], bytes_a_pixel: int
) -> None:
    data = image_file(wide(mode), kind, **options)
    num_bytes = bytes_a_pixel * 200 * 300
    assert image_header(data, max_image_bytes=num_bytes).height == 300
    error = refusal(Image(source=data), access(max_image_bytes=num_bytes - 1))
    assert error.reason == "media_limit"
    assert f"{num_bytes:,}" in error.detail


def test_a_turned_image_stands_in_memory_twice() -> None:
    data = image_file(wide("RGB"), "JPEG", orientation=6)
    assert refusal(Image(source=data), access(max_image_bytes=8 * 200 * 300 - 1)).reason == "media_limit"
    assert image_header(data, max_image_bytes=8 * 200 * 300).width == 300


@pytest.mark.parametrize(("kind", "reason"), [(4, "media_limit"), (1, "media_broken")])
def test_a_tile_of_a_tiff_counts_whole_where_it_is_larger_than_the_image(kind: int, reason: str) -> None:
    data = image_file(wide("RGB"), "TIFF")
    for tag, value, tile_tag, side in ((278, 300, 322, 600), (284, 1, 323, 500)):  # in the place of others
        plain = struct.pack("<HHII", tag, 4 if value == 300 else 3, 1, value)
        assert plain in data
        data = data.replace(plain, struct.pack("<HHII", tile_tag, kind, 1, side))
    assert refusal(Image(source=data), access(max_image_bytes=10 * 600 * 500 - 1)).reason == reason
    if reason == "media_limit":
        assert image_header(data, max_image_bytes=10 * 600 * 500).width == 200


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [("WEBP", "RGB", {}), ("PNG", "I;16", {}), ("JPEG", "RGB", {"progressive": True}), ("PNG", "RGBA", {})],
)
def test_decoding_takes_no_more_memory_than_the_header_promised(kind: str, mode: str, options: dict[str, Any]) -> None:
    """Measured in a process of its own, as the most memory that it ever had."""
    big = Pillow.fromarray(np.full((3000, 3000), 999, np.uint16)) if mode == "I;16" else Pillow.new(mode, (3000, 3000))
    script = (
        "import sys\n"
        "from luthier.media.files import decoding\n"
        "from luthier.media.files import Content\n"
        "from PIL import Image; Image.init()\n"
        "def most(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "data = sys.stdin.buffer.read(); content = Content(name='x', size=len(data), version='', data=data)\n"
        "promised = decoding.read_stored_size(content); before = most()\n"
        "decoding._decode_image(content, promised.shown)\n"
        "print(most() - before, promised.decoded_bytes)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], input=image_file(big, kind, **options), capture_output=True, check=True
    )
    taken, promised = map(int, told.stdout.split())
    assert promised / 2 < taken < promised + (4 << 20)


def test_a_gif_whose_frame_is_larger_than_itself_is_refused_before_it_is_decoded() -> None:
    data = bytearray(image_file(Pillow.new("P", (40, 30)), "GIF"))
    data[6:10] = (8).to_bytes(2, "little") * 2  # the screen; the frame keeps its size
    header = image_header(bytes(data))
    assert header.width == 8
    with pytest.raises(RowError) as broken:
        decode(Image(source=bytes(data)), header, OPEN)
    assert broken.value.reason == "media_broken"


def test_a_bomb_is_refused_by_its_header_in_little_memory() -> None:
    bomb = image_file(Pillow.new("1", (13_000, 13_000)))
    assert len(bomb) < 500_000
    tracemalloc.start()
    try:
        error = refusal(Image(source=bomb))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert error.reason == "media_limit"
    assert "169,000,000 pixels" in error.detail


# ---------------------------------------------------------------------------------------------------------- WAV files


@pytest.mark.parametrize(("coding", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("channels", [1, 2, 8])
def test_the_length_of_a_wav_is_in_its_header(coding: int, bits: int, channels: int) -> None:
    samples = np.repeat(tone(0.1)[:, None], channels, axis=1)
    header = probe(Audio(source=wav(samples, coding=coding, bits=bits)), OPEN)
    assert isinstance(header, AudioHeader)
    assert (header.num_samples, header.sampling_rate, header.seconds) == (1600, RATE, 0.1)


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (
            wav(tone(1), promised=4_000_000_000),
            "media_broken",
            "promises 4,000,000,000 bytes of samples but has 32,000",
        ),
        (wav(tone(1))[:20_000], "media_broken", "promises 32,000 bytes of samples but has 19,956"),
        (wav(tone(1))[:36], "media_broken", "holds no samples"),
        (wav(tone(1))[:20], "media_broken", "holds no samples"),
        (wav(tone(1)[:1]), "media_limit", "1 sample at 16,000 a second are less than media.min_audio_seconds"),
        (wav(tone(1)[:0]), "media_limit", "0 samples"),
        (wav(tone(1), rate=1), "media_broken", "1 sample a second"),
        (wav(tone(1), rate=2_000_000_000 // 2), "media_broken", "1,000,000,000 samples a second"),
        (b"<html>", "media_format", "is HTML"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sounds_that_cannot_be_used_say_why(data: bytes, reason: str, words: str) -> None:
    error = refusal(Audio(source=data))
    assert (error.reason, type(error)) == (reason, RowError)
    assert words in error.detail


def test_seconds_of_sound_are_capped_before_decoding() -> None:
    error = refusal(Audio(source=wav(tone(2))), access(max_audio_seconds=1))
    assert (error.reason, "2 s, media.max_audio_seconds is 1" in error.detail) == ("media_limit", True)


# -------------------------------------------------------------------------------------------------------- frame lists


def test_a_list_of_pictures_is_a_video(tmp_path: Path) -> None:
    names = []
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image_file(picture(30, 20)))
        names.append(str(tmp_path / f"{number}.png"))
    listed = Video(source=tuple(names), root=str(tmp_path))
    header = probe(listed, OPEN)
    assert isinstance(header, VideoHeader)
    assert (header.width, header.height, header.num_frames, header.fps, header.extracted) == (30, 20, 4, 2.0, True)
    assert header.version != probe(Video(source=tuple(names[:3]), root=str(tmp_path)), OPEN).version
    assert probe(listed, access(fps=4.0)) == VideoHeader(
        width=30, height=20, num_frames=4, fps=4.0, extracted=True, version=header.version
    )
    own = probe(Video(source=tuple(names), root=str(tmp_path), fps=1.0), access(fps=4.0))
    assert isinstance(own, VideoHeader)
    assert own.seconds == 4.0


def test_frames_of_a_list_have_one_size_and_a_cap() -> None:
    small, large = image_file(picture(30, 20)), image_file(picture(20, 30))
    error = refusal(Video(source=(small, small, large)))
    assert (error.reason, "frame 2" in error.detail, "20 x 30" in error.detail) == ("media_broken", True, True)
    assert refusal(Video(source=(small,) * 3), access(max_video_frames=2)).reason == "media_limit"
    assert refusal(Video(source=(small, b"<html>"))).reason == "media_format"


# --------------------------------------------------------------------------------------------------------------- fuzz


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_in_words_or_read(kind: str) -> None:
    rng = random.Random(kind)
    whole = image_file(picture(30, 20), kind)
    refused = 0
    for _ in range(300):
        data = bytearray(whole[: rng.randint(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randint(0, 6)):
            data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
        try:
            probe(Image(source=bytes(data)), OPEN)
        except RowError as error:
            refused += 1
            assert error.detail and error.reason.startswith("media_")
    assert refused > 30
