"""Pixels and samples: what other tools decode, the size that was planned with, and never a guess at what is missing."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_files import OPEN, RATE, access, image_file, picture, png_header, tone, wav
from numpy.typing import NDArray
from PIL import Image as Pillow

from luthier.errors import RowError
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import (
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    decode,
    probe,
    resample,
    resampled_length,
)
from luthier.records import Audio, Image, ImageHeader, Video
from tests.conftest import reason_is, refused

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decoded_image(data: bytes, using: MediaAccess = OPEN) -> Pillow.Image:
    media = Image(source=data)
    decoded = decode(media, probe(media, using), using)
    assert isinstance(decoded, DecodedImage)
    assert decoded.pixels.mode == "RGB"
    return decoded.pixels


def decoded_sound(data: bytes, rate: int | None = None) -> NDArray[np.float32]:
    media = Audio(source=data)
    decoded = decode(media, probe(media, OPEN), OPEN, sampling_rate=rate)
    assert isinstance(decoded, DecodedAudio)
    assert decoded.samples.dtype == np.float32
    return decoded.samples


def refusal(media: Image | Audio, using: MediaAccess = OPEN) -> RowError:
    header = probe(media, using)  # the header is in order, what follows is not
    with pytest.raises(RowError) as found:
        decode(media, header, using)
    return found.value


# ------------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_pixels_are_those_of_transformers(kind: str, orientation: int | None) -> None:
    from transformers.image_utils import load_image

    turned = orientation if kind in ("JPEG", "PNG", "WEBP", "TIFF") else None
    for mode in ("RGB", "L", "RGBA", "P", "CMYK", "1"):
        if (mode == "CMYK" and kind not in ("JPEG", "TIFF")) or (mode == "RGBA" and kind == "JPEG"):
            continue
        if kind == "JPEG" and mode in ("P", "1"):
            continue
        data = image_file(picture(31, 22, mode), kind, orientation=turned)
        with Pillow.open(io.BytesIO(data)) as opened:
            assert np.array_equal(decoded_image(data), load_image(opened)), mode


def corners(image: Pillow.Image) -> list[tuple[int, ...]]:
    width, height = image.size
    points = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
    return [image.getpixel(point) for point in points]  # type: ignore[misc]


def test_golden_pixels() -> None:
    left_top, right_top, left_bottom, right_bottom = (0, 0, 90), (255, 0, 90), (0, 255, 90), (255, 255, 90)
    assert corners(decoded_image(image_file(picture(8, 6)))) == [left_top, right_top, left_bottom, right_bottom]
    # 6: the first row of the file is the right side of the picture
    turned = decoded_image(image_file(picture(8, 6), orientation=6))
    assert turned.size == (6, 8)
    assert corners(turned) == [left_bottom, left_top, right_bottom, right_top]
    mirrored = decoded_image(image_file(picture(8, 6), orientation=2))
    assert corners(mirrored) == [right_top, left_top, right_bottom, left_bottom]


def test_deep_gray_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]] * 4, dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(decoded_image(image_file(Pillow.fromarray(values), kind)))
        assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]
        assert (pixels == pixels[:, :, :1]).all()


def test_transparency_is_dropped_and_palettes_are_looked_up() -> None:
    clear = Pillow.new("RGBA", (5, 4), (200, 10, 20, 0))
    assert corners(decoded_image(image_file(clear))) == [(200, 10, 20)] * 4
    palette = Pillow.new("P", (5, 4), 1)
    palette.putpalette([0, 0, 0, 7, 8, 9])
    assert corners(decoded_image(image_file(palette, "PNG", transparency=1))) == [(7, 8, 9)] * 4
    assert corners(decoded_image(image_file(Pillow.new("CMYK", (5, 4), (0, 255, 255, 0)), "TIFF"))) == [(255, 0, 0)] * 4
    for opaque, colour in ((palette, 1), (Pillow.new("L", (5, 4), 7), 7), (Pillow.new("RGB", (5, 4), 7), (7, 0, 0))):
        assert not decoded_image(image_file(opaque, "PNG", transparency=colour)).has_transparency_data


def test_of_an_animation_the_first_frame_is_taken() -> None:
    later = [Pillow.new("RGB", (8, 6), (number % 256, 9, 9)) for number in range(299)]
    data = image_file(Pillow.new("RGB", (8, 6), (255, 0, 0)), "GIF", save_all=True, append_images=later)
    assert corners(decoded_image(data)) == [(255, 0, 0)] * 4


def test_gray_of_no_known_range_is_refused() -> None:
    data = image_file(Pillow.new("F", (8, 6), 0.5), "TIFF")
    assert refusal(Image(source=data)).reason == "media_format"


# ----------------------------------------------------------------------------------------------------- damaged images


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_half_a_picture_is_refused_and_never_grey(kind: str) -> None:
    whole = image_file(Pillow.effect_noise((64, 64), 80).convert("RGB"), kind)
    error = refusal(Image(source=whole[: len(whole) // 2]))
    assert error.reason == "media_broken"
    assert decoded_image(whole).size == (64, 64)


def test_pixels_damaged_on_the_way_are_refused() -> None:
    whole = bytearray(image_file(Pillow.effect_noise((64, 64), 80)))
    whole[len(whole) // 2] ^= 0xFF
    assert refusal(Image(source=bytes(whole))).reason == "media_broken"
    assert refusal(Image(source=png_header(40, 30))).reason == "media_broken"  # the data of one pixel


def test_a_file_that_changed_since_it_was_planned_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    media = Image(source=str(path), root=str(tmp_path))
    path.write_bytes(image_file(picture(30, 20)))
    header = probe(media, OPEN)
    assert isinstance(decode(media, header, OPEN), DecodedImage)
    path.write_bytes(image_file(picture(30, 21)))
    with pytest.raises(RowError, check=reason_is("media_changed")):
        decode(media, header, OPEN)
    # the same version and another size: whatever was planned with, these are not its pixels
    assert isinstance(header, ImageHeader)
    data = image_file(picture(30, 20))
    with pytest.raises(RowError, check=reason_is("media_changed")):
        decode(Image(source=data), ImageHeader(width=20, height=30, version=OPEN.open(data).version), OPEN)


def test_frames_of_a_list_are_decoded_as_they_are_wanted() -> None:
    frames = tuple(image_file(Pillow.new("RGB", (8, 6), (number, 0, 0))) for number in range(9))
    media = Video(source=frames, fps=3.0)
    header = probe(media, OPEN)
    video = decode(media, header, OPEN, frame_indices=[0, 4, 8])
    assert isinstance(video, DecodedVideo)
    assert video.frames.shape == (3, 6, 8, 3)
    assert video.frames[:, 0, 0, 0].tolist() == [0, 4, 8]
    assert (video.frame_indices, video.fps) == ((0, 4, 8), 3.0)
    with pytest.raises(RowError, check=reason_is("media_changed")):
        decode(Video(source=(*frames[:8], frames[0]), fps=3.0), header, OPEN)
    with refused(RowError, "media_limit", "9", "8", "6", "1,296"):
        decode(media, header, access(max_decoded_bytes=1000))


# -------------------------------------------------------------------------------------------------------------- sound


@pytest.mark.parametrize(("coding", "bits", "error"), [(1, 8, 8e-3), (1, 16, 4e-5), (1, 24, 2e-7), (1, 32, 1e-7)])
def test_samples_of_a_wav_are_what_was_written(coding: int, bits: int, error: float) -> None:
    samples = tone(0.1)
    assert np.abs(decoded_sound(wav(samples, coding=coding, bits=bits)) - samples).max() < error


def test_float_samples_are_exact_and_channels_are_averaged() -> None:
    samples = tone(0.1)
    assert np.array_equal(decoded_sound(wav(samples, coding=3, bits=32)), samples)
    channels = np.stack([samples, np.zeros_like(samples), samples, np.zeros_like(samples)], axis=1)
    assert np.abs(decoded_sound(wav(channels, coding=3, bits=64)) - samples / 2).max() < 1e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_are_numbers(bad: float) -> None:
    samples = tone(0.1).astype(np.float64)
    samples[700] = bad
    error = refusal(Audio(source=wav(samples, coding=3, bits=64)))
    assert error.reason == "media_values"
    assert "sample 700 is" in error.detail


@pytest.mark.parametrize(
    ("rate", "target"), [(44_100, 16_000), (48_000, 16_000), (8_000, 16_000), (96_000, 24_000), (16_001, 16_000)]
)
def test_a_tone_stays_the_same_tone_at_another_rate(rate: int, target: int) -> None:
    samples = tone(0.5, rate)
    resampled = resample(samples, rate, target)
    assert len(resampled) == resampled_length(len(samples), rate, target) == -(-len(samples) * target // rate)
    expected = tone(len(resampled) / target, target)
    assert np.abs(resampled - expected)[100:-100].max() < 1e-3
    too_high = resample(tone(0.5, rate, hertz=0.45 * rate), rate, target)
    if target < rate * 0.8:  # what the lower rate cannot hold does not come back as another tone
        assert np.abs(too_high)[100:-100].max() < 0.01


def test_resampling_is_that_of_torchaudio() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for rate, target in [(44_100, 16_000), (8_000, 16_000), (16_000, 22_050)]:
        samples = rng.standard_normal(rate // 10).astype(np.float32)
        common = np.gcd(rate, target)
        step, phases = int(rate // common), int(target // common)
        base = min(step, phases) * 0.99
        width = int(np.ceil(6 * step / base))
        # the formula of torchaudio.functional.resample (sinc_interp_hann, width 6, rolloff 0.99)
        times = np.arange(0, -phases, -1)[:, None] / phases + np.arange(-width, width + step)[None] / step
        times = np.clip(times * base, -6, 6)
        kernel = np.sinc(times) * np.cos(times * np.pi / 12) ** 2 * base / step
        padded = np.pad(samples.astype(np.float64), (width, width + step))
        convolved = torch.nn.functional.conv1d(
            torch.from_numpy(padded)[None, None], torch.from_numpy(kernel)[:, None], stride=step
        )
        expected = convolved[0].T.reshape(-1).numpy()[: resampled_length(len(samples), rate, target)]
        assert np.abs(resample(samples, rate, target) - expected).max() < 1e-5


def test_resampling_in_pieces_is_resampling(monkeypatch: pytest.MonkeyPatch) -> None:
    from luthier.media.files import decoding

    samples = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    whole = resample(samples, 44_100, 16_000)
    monkeypatch.setattr(decoding, "_SAMPLES_AT_ONCE", 7)
    assert np.array_equal(resample(samples, 44_100, 16_000), whole)


def test_short_and_wide_sounds_follow_the_stated_policy() -> None:
    eight = np.repeat(tone(0.05, 96_000)[:, None], 8, axis=1)  # 8 channels at 96 kHz: their mean, resampled
    samples = decoded_sound(wav(eight, rate=96_000), 16_000)
    assert samples.shape == (800,)
    one = Audio(source=wav(tone(1)[:1]))  # one sample: only where the run allows so short a sound
    assert isinstance(decode(one, probe(one, access(min_audio_seconds=1e-9)), OPEN), DecodedAudio)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(tone(1)))
    media = Audio(source=str(path), root=str(tmp_path))
    header = probe(media, OPEN)
    path.write_bytes(wav(tone(1))[:9000])
    with pytest.raises(RowError, check=reason_is("media_changed")):
        decode(media, header, OPEN)


def test_what_python_rows_hold_is_decoded_to_the_same_values() -> None:
    from luthier.sources.formats.media import read_media

    image = picture(31, 22)
    for item in (image, np.asarray(image), image_file(image), {"bytes": image_file(image), "path": None}):
        media = read_media("image", item, ".")
        assert isinstance(media, Image) and isinstance(media.source, bytes)
        assert np.array_equal(decoded_image(media.source), image)
    deep = Pillow.fromarray(np.full((6, 8), 40_000, dtype=np.uint16))
    media = read_media("image", deep, ".")
    assert isinstance(media, Image) and isinstance(media.source, bytes)
    assert corners(decoded_image(media.source)) == [(156, 156, 156)] * 4
    samples = tone(0.1)
    for array, close in [(samples, 0.0), (samples.tolist(), 0.0), ((samples * 32768).astype(np.int16), 4e-5)]:
        sound = read_media("audio", {"array": array, "sampling_rate": RATE}, ".")
        assert isinstance(sound, Audio) and isinstance(sound.source, bytes)
        assert np.abs(decoded_sound(sound.source) - samples).max() <= close
    frames = read_media("video", {"frames": np.zeros((3, 6, 8, 3), dtype=np.uint8), "fps": 2}, ".")
    header = probe(frames, OPEN)
    assert getattr(decode(frames, header, OPEN), "frames", np.empty(0)).shape == (3, 6, 8, 3)


def test_a_picture_turned_by_exif_is_kept_as_it_is_shown() -> None:
    from luthier.sources.formats.media import read_media

    data = image_file(picture(31, 22), "JPEG", orientation=6)
    with Pillow.open(io.BytesIO(data)) as opened:
        media = read_media("image", opened, ".")
    assert isinstance(media, Image) and isinstance(media.source, bytes)
    assert np.array_equal(decoded_image(media.source), decoded_image(data))


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        ("image", np.zeros((4, 4, 3))), ("image", np.zeros((4, 4, 2), dtype=np.uint8)), ("image", object()),
        ("audio", {"array": [0.0, 1.0]}), ("audio", {"array": [[0.0], [1.0]], "sampling_rate": 9}),
        ("audio", {"array": ["a"], "sampling_rate": 9}), ("audio", {"array": [[0.0], 1.0], "sampling_rate": 9}),
        ("video", {"frames": [], "fps": 2}), ("video", {"frames": ["a.png"], "fps": 0}), ("video", []),
        ("image", "data:image/png;base64"), ("image", "data:image/png,abc"), ("image", "data:;base64,*"),
    ],
)  # fmt: skip
def test_objects_that_are_no_media_are_refused_in_words(kind: str, item: Any) -> None:
    from luthier.sources.formats.media import read_media

    with pytest.raises(RowError, check=reason_is("bad_media")) as found:
        read_media(kind, item, ".")
    assert found.value.detail


def test_a_struct_in_exif_that_pil_stumbles_over_is_that_rows_matter() -> None:
    exif = b"Exif\0\0MM\0*" + struct.pack(">IHHHII", 8, 1, 0x8769, 4, 1, 26) + b"\0\0\0\0\0\xff"
    data = image_file(picture(30, 20), "JPEG", exif=exif)
    try:
        assert decoded_image(data).size == (30, 20)
    except RowError as error:
        assert error.reason == "media_broken"
