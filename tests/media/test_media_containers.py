"""Videos and compressed sounds, by PyAV: exactly the frames that are wanted, and no file that opens another."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_files import OPEN, RATE, access, gray_of_frame, image_file, picture, sound, tone, video, wav

from luthier.errors import RowError, SourceError
from luthier.media.files import MediaAccess
from luthier.media.files.containers import read_audio
from luthier.media.files.decoding import DecodedAudio, DecodedVideo, decode, probe
from luthier.records import Audio, AudioHeader, Video, VideoHeader
from tests.conftest import refused

CONTAINERS = [("a.mp4", "mpeg4"), ("a.mov", "mpeg4"), ("a.mkv", "mpeg4"), ("a.avi", "mpeg4"), ("a.ts", "mpeg2video"),
              ("a.mp4", "libx264"), ("a.webm", "libvpx"), ("a.mpg", "mpeg2video"), ("a.flv", "flv")]  # fmt: skip
SOUNDS = [("a.flac", "flac"), ("a.mp3", "libmp3lame"), ("a.ogg", "flac"), ("a.opus", "libopus"), ("a.m4a", "aac"),
          ("a.aac", "aac"), ("a.aiff", "pcm_s16be"), ("a.mkv", "pcm_s16le")]  # fmt: skip


def needs_av() -> Any:
    return pytest.importorskip("av", reason="PyAV is not installed")


def video_header(path: Path, using: MediaAccess = OPEN) -> VideoHeader:
    header = probe(Video(source=str(path), root=str(path.parent)), using)
    assert isinstance(header, VideoHeader)
    return header


def audio_header(path: Path, using: MediaAccess = OPEN) -> AudioHeader:
    header = probe(Audio(source=str(path), root=str(path.parent)), using)
    assert isinstance(header, AudioHeader)
    return header


def frames_of(path: Path, indices: list[int] | None = None, **options: Any) -> DecodedVideo:
    media = Video(source=str(path), root=str(path.parent))
    decoded = decode(media, probe(media, OPEN), OPEN, frame_indices=indices, **options)
    assert isinstance(decoded, DecodedVideo)
    return decoded


def refusal(media: Audio | Video, using: MediaAccess = OPEN) -> RowError:
    with pytest.raises(RowError) as found:
        probe(media, using)
    return found.value


# ------------------------------------------------------------------------------------------------------------- videos


@pytest.mark.parametrize(("name", "codec"), CONTAINERS)
def test_each_frame_is_the_one_that_was_asked_for(name: str, codec: str, tmp_path: Path) -> None:
    needs_av()
    path = video(tmp_path / name, 45, codec=codec, fps=25)
    header = video_header(path)
    assert (header.width, header.height, header.num_frames, header.audio) == (64, 48, 45, None)
    assert header.fps == pytest.approx(25, rel=0.01)
    rng = random.Random(name)
    for indices in [[0], [44], [24, 25, 26], [3, 40], sorted(rng.sample(range(45), 12)), list(range(45)), [7, 7, 7]]:
        decoded = frames_of(path, indices)
        assert decoded.frame_indices == tuple(indices)
        assert decoded.frames.shape == (len(indices), 48, 64, 3)
        grays = decoded.frames[:, 40, 50].mean(axis=1)
        assert np.abs(grays - [gray_of_frame(index) for index in indices]).max() < 10
        assert decoded.frames[:, 4, 4].min() > 200  # the left upper corner is white


def test_a_gif_is_a_video_where_a_video_is_expected() -> None:
    needs_av()
    later = [picture(32, 24).rotate(90 * number) for number in range(1, 6)]
    data = image_file(picture(32, 24), "GIF", save_all=True, append_images=later, duration=100)
    header = probe(Video(source=data), OPEN)
    assert isinstance(header, VideoHeader)
    assert (header.width, header.height, header.num_frames, header.fps) == (32, 24, 6, 10.0)


@pytest.mark.parametrize(
    ("matrix", "corner"), [((0, 1, -1, 0), "right"), ((-1, 0, 0, -1), "below"), ((0, -1, 1, 0), "left")]
)
def test_a_video_is_turned_as_its_container_says(matrix: tuple[int, ...], corner: str, tmp_path: Path) -> None:
    needs_av()
    path = video(tmp_path / "a.mp4", 5)
    data = path.read_bytes()
    straight = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(straight, data.index(b"tkhd"))
    path.write_bytes(data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :])
    # (0, 1, -1, 0) is a phone held upright: its picture is turned by 90 degrees clockwise, left above to right above
    upright = corner != "below"
    header = video_header(path)
    assert (header.width, header.height) == ((48, 64) if upright else (64, 48))
    frame = frames_of(path, [0]).frames[0]
    assert frame.shape == (header.height, header.width, 3)
    white = {"right": frame[4, -4], "below": frame[-4, -4], "left": frame[-4, 4]}
    assert min(white, key=lambda name: 255 - int(white[name].min())) == corner
    assert white[corner].min() > 200


def test_the_sound_of_a_video_comes_with_it(tmp_path: Path) -> None:
    av = needs_av()
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        track = container.add_stream("aac", rate=RATE, layout="mono")
        for _ in range(20):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), dtype=np.uint8), format="rgb24")
            container.mux(pictures.encode(frame))
        frame = av.AudioFrame.from_ndarray(tone(2)[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE, frame_size=1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(track.encode(part))
        container.mux(pictures.encode(None))
        container.mux(track.encode(None))
    header = video_header(path)
    assert header.audio is not None
    assert (header.audio.sampling_rate, header.audio.seconds) == (RATE, pytest.approx(2, abs=0.1))
    with_sound = frames_of(path, [0], with_audio=True, sampling_rate=8000)
    assert with_sound.audio is not None
    assert len(with_sound.audio.samples) == -(-header.audio.num_samples // 2)
    assert frames_of(path, [0]).audio is None
    media = Video(source=str(path), root=str(tmp_path))
    with refused(RowError, "samples", "media.max_decoded_bytes is 100,000"):
        decode(media, header, access(max_decoded_bytes=100_000), frame_indices=[0], with_audio=True)


def test_the_caps_on_videos_are_those_of_the_run(tmp_path: Path) -> None:
    needs_av()
    path = video(tmp_path / "a.mp4", 30)
    media = Video(source=str(path), root=str(tmp_path))
    for caps in ({"max_video_frames": 29}, {"max_video_seconds": 2.9}, {"max_image_pixels": 3000}):
        assert refusal(media, access(**caps)).reason == "media_limit"
    with refused(RowError, "media_limit", "10", "64", "48", "92,160"):
        decode(media, video_header(path), access(max_decoded_bytes=92_159), frame_indices=range(10))


# ----------------------------------------------------------------------------------------------------- videos refused


def test_videos_that_are_none_say_why(tmp_path: Path) -> None:
    needs_av()
    whole = video(tmp_path / "a.mp4", 30).read_bytes()
    assert whole.rindex(b"moov") > len(whole) // 2  # the index stands behind the pictures
    only_sound = sound(tmp_path / "a.m4a", tone(1), codec="aac").read_bytes()
    cases = [
        (whole[: len(whole) // 2], "media_broken", "Invalid data"),
        (whole[:40], "media_broken", ""),
        (only_sound, "media_broken", "no video in it"),
        (wav(tone(1)), "media_format", "a WAV file"),
        (image_file(picture(30, 20)), "media_format", "a PNG image"),
        (b"<html>", "media_format", "HTML"),
    ]
    for data, reason, words in cases:
        error = refusal(Video(source=data))
        assert (error.reason, words in error.detail) == (reason, True), error


def test_frames_that_the_index_promises_and_the_file_lacks_are_missed(tmp_path: Path) -> None:
    needs_av()
    path = video(tmp_path / "a.mkv", 60)
    media = Video(source=str(path), root=str(tmp_path))
    header = replace(video_header(path), num_frames=100)
    with refused(RowError, "media_broken", "100", "60"):
        decode(media, header, OPEN, frame_indices=[5])


def test_a_playlist_named_like_a_video_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_av()
    secret = video(tmp_path / "secret.mp4", 5)
    lists = {
        "a.mp4": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{secret}\n#EXT-X-ENDLIST\n",
        "b.mp4": f"ffconcat version 1.0\nfile {secret}\n",
        "c.mp4": "#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x\n",
        "d.mp4": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>',
    }
    opened: list[Any] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **rest: (opened.append(path), real(path, *more, **rest))[1])
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        error = refusal(Video(source=str(tmp_path / name), root=str(tmp_path)))
        assert error.reason == "media_format"
    assert str(secret) not in map(str, opened)


def test_damaged_containers_are_refused_in_words_or_read(tmp_path: Path) -> None:
    needs_av()
    files = [video(tmp_path / "a.mp4", 20).read_bytes(), video(tmp_path / "a.mkv", 20).read_bytes()]
    sounds = [sound(tmp_path / "a.flac", tone(1), codec="flac").read_bytes(), wav(tone(0.05))]
    rng = random.Random(0)
    refused = 0
    for data, kind in [(data, Video) for data in files] + [(data, Audio) for data in sounds]:
        for _ in range(40):
            bad = bytearray(data[: rng.randint(1, len(data))] if rng.random() < 0.5 else data)
            for _ in range(rng.randint(0, 8)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            media = kind(source=bytes(bad))
            try:
                decode(media, probe(media, OPEN), OPEN)
            except RowError as error:
                refused += 1
                assert error.detail and error.reason.startswith("media_")
    assert 40 < refused < 160


# ------------------------------------------------------------------------------------------------------------- sounds


@pytest.mark.parametrize(("name", "codec"), SOUNDS)
@pytest.mark.parametrize("seconds", [0.5, 1.234])
def test_a_sound_has_as_many_samples_as_its_header_says(name: str, codec: str, seconds: float, tmp_path: Path) -> None:
    needs_av()
    rate = 48_000 if codec == "libopus" else RATE
    path = sound(tmp_path / name, tone(seconds, rate), codec=codec, rate=rate)
    header = audio_header(path)
    assert header.sampling_rate == rate
    assert header.seconds == pytest.approx(seconds, abs=0.13)  # AAC adds two of its blocks
    media = Audio(source=str(path), root=str(tmp_path))
    decoded = decode(media, header, OPEN)
    assert isinstance(decoded, DecodedAudio)
    assert decoded.samples.shape == (header.num_samples,)
    assert np.sqrt(2 * np.mean(decoded.samples**2)) == pytest.approx(0.5, rel=0.1)  # the tone, and not something else
    resampled = decode(media, header, OPEN, sampling_rate=8000)
    assert isinstance(resampled, DecodedAudio)
    assert len(resampled.samples) == -(-header.num_samples * 8000 // rate)


@pytest.mark.parametrize("rate", [8000, 11025, 16_000, 24_000, 44_100])
def test_an_mp3_of_any_rate_is_as_long_as_what_was_encoded(rate: int, tmp_path: Path) -> None:
    """Its padding, some thousand samples, lasts more than a tenth of a second at low rates."""
    needs_av()
    path = sound(tmp_path / "a.mp3", tone(1.7, rate), codec="libmp3lame", rate=rate)
    header = audio_header(path)
    assert header.num_samples == round(1.7 * rate)
    decoded = decode(Audio(source=str(path), root=str(tmp_path)), header, OPEN)
    assert isinstance(decoded, DecodedAudio)
    assert np.abs(decoded.samples[-rate // 10 :]).max() > 0.3


def test_lossless_sound_is_exact(tmp_path: Path) -> None:
    needs_av()
    samples = tone(0.7)
    path = sound(tmp_path / "a.flac", samples, codec="flac")
    decoded = decode(Audio(source=str(path), root=str(tmp_path)), audio_header(path), OPEN)
    assert isinstance(decoded, DecodedAudio)
    assert np.abs(decoded.samples - samples).max() < 4e-5  # 16 bits


def test_long_silence_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    needs_av()
    path = sound(tmp_path / "a.flac", np.zeros(4000 * 2700, dtype=np.float32), codec="flac", rate=4000)
    assert path.stat().st_size < 800_000
    error = refusal(Audio(source=str(path), root=str(tmp_path)))
    assert error.reason == "media_limit"
    assert "2,700 s, media.max_audio_seconds is 2400" in error.detail
    # what its header says of the samples (36 bits behind the rate, 8 + 13 bytes into the file), made to say three hours
    whole = sound(tmp_path / "b.flac", tone(1), codec="flac").read_bytes()
    hours = bytearray(whole)
    hours[21:26] = (int.from_bytes(whole[21:26], "big") // (1 << 36) * (1 << 36) + 3 * 3600 * RATE).to_bytes(5, "big")
    assert "10,800 s" in refusal(Audio(source=bytes(hours))).detail
    assert refusal(Audio(source=whole), access(max_decoded_bytes=4 * RATE - 1)).reason == "media_limit"
    assert probe(Audio(source=whole), access(max_decoded_bytes=4 * RATE)).version


def test_compressed_sound_takes_no_more_memory_than_its_samples(tmp_path: Path) -> None:
    needs_av()
    media = Audio(source=sound(tmp_path / "a.flac", tone(60), codec="flac").read_bytes())
    header = probe(media, OPEN)
    tracemalloc.start()
    decode(media, header, OPEN)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4 * 60 * RATE <= most < 1.5 * 4 * 60 * RATE


def test_decoding_stops_where_a_header_says_the_end_is(tmp_path: Path) -> None:
    needs_av()
    path = sound(tmp_path / "a.flac", tone(60), codec="flac")
    with OPEN.open(str(path), str(tmp_path)) as content:
        with pytest.raises(RowError, match=r"promises 16,000 samples and has at least \d\d,\d\d\d$"):
            read_audio(content, AudioHeader(num_samples=16_000, sampling_rate=RATE))
        with refused(RowError, "9,600,000", "960,000"):
            read_audio(content, AudioHeader(num_samples=9_600_000, sampling_rate=RATE))


def test_without_pyav_the_run_stops_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(SourceError, match="pip install av"):
        probe(Audio(source=b"fLaC" + bytes(100)), OPEN)
    assert probe(Audio(source=wav(tone(1))), OPEN).version  # WAV files need no library


def test_the_demo_files_are_read_whole(shared: Path) -> None:
    needs_av()
    folder = shared / "data" / "demo" / "mllm_demo_data"
    facts = {"1.mp4": (640, 360, 243), "2.avi": (320, 240, 270), "3.mp4": (640, 360, 146), "4.mp4": (224, 224, 150)}
    for name, (width, height, num_frames) in facts.items():
        header = video_header(folder / name)
        assert (header.width, header.height, header.num_frames) == (width, height, num_frames)
        assert frames_of(folder / name, [0, num_frames // 2, num_frames - 1]).frames.any()
    for name, seconds in {"1.mp3": 4.032, "2.wav": 2.9013, "3.flac": 5.855, "4.mp3": 5.0}.items():
        header = audio_header(folder / name)
        assert header.seconds == pytest.approx(seconds, abs=1e-3)
        decoded = decode(Audio(source=str(folder / name), root=str(folder)), header, OPEN, sampling_rate=RATE)
        assert isinstance(decoded, DecodedAudio) and decoded.samples.any()
