"""A tiny model that sees, and pictures and a video for it: made once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from media_encoders import encoder_of
from PIL import Image as Pillow

from luthier.encoding.encoder import Encoder
from tests.media.media_files import image_file, picture, tone, video, wav
from tests.media.tiny_folder import TEMPLATE, TOKENS, write_folder
from tests.media.tiny_processors import tiny_tokenizer

SIZES = {"wide.png": (90, 40), "tall.png": (40, 90), "square.png": (64, 64)}


@pytest.fixture(scope="session")
def vl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL, whose videos are slots and nothing else."""
    return write_folder(tmp_path_factory.mktemp("tiny-vl"))


@pytest.fixture(scope="session")
def timed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL, whose processor writes the time before each frame of a video."""
    folder = tmp_path_factory.mktemp("tiny-vl-3")
    tokenizer = tiny_tokenizer(*TOKENS)
    tokenizer.eos_token = "<|im_end|>"
    size = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 40 * 32 * 32}}
    images = hf.Qwen2VLImageProcessor(patch_size=16, **size)
    videos = hf.Qwen3VLVideoProcessor(**size)
    hf.Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def media_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures, one of them a third time in blue, a video of 3 s and a sound of 2 s."""
    folder = tmp_path_factory.mktemp("media")
    for name, size in SIZES.items():
        (folder / name).write_bytes(image_file(picture(*size)))
    (folder / "blue.png").write_bytes(image_file(Pillow.new("RGB", (640, 320), (0, 0, 255))))
    video(folder / "film.mp4", 30)
    quiet, loud = 0.1 * tone(1.0), tone(1.0)
    (folder / "sound.wav").write_bytes(wav(np.concatenate([quiet, loud])))
    return folder


@pytest.fixture(scope="session")
def vl_encoder(vl_folder: Path, media_folder: Path) -> Encoder:
    return encoder_of(vl_folder, media_folder)


@pytest.fixture(scope="session")
def timed_encoder(timed_folder: Path, media_folder: Path) -> Encoder:
    return encoder_of(timed_folder, media_folder)
