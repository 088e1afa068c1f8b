"""Omni models, from files to logits: pictures, films and sounds in one row, the film's sound track heard or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import luthier
from luthier.collation import CollateSettings
from luthier.models import model_needs
from luthier.models.isolation import choose_isolation
from luthier.models.mixers import Isolation
from luthier.records import Sample
from tests.families_matrix.hearing_cases import Heard, Hearing, picture_of, samples_of
from tests.media.media_files import RATE, tone, wav

CPU = torch.device("cpu")
OMNI = ["qwen2_5_omni", "qwen3_omni_moe"]
# Of each row its parts; a film is of so many frames, 10 a second. Of a film of 2.4 s transformers' own Qwen3-Omni
# counts positions in another order than its processor writes tracks in; of sounds under a second see docs/families.md.
ROWS: list[list[tuple[str, int]]] = [
    [("video", 12)],
    [("audio", 16_000), ("video", 16), ("image", 60)],
    [],
    [("image", 60), ("audio", 19_200)],
    [("image", 60), ("video", 12), ("audio", 19_200), ("audio", 16_000)],
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("films")
    for frames in (12, 16):
        film(folder / f"{frames}.mp4", frames)
    for length in (16_000, 19_200):
        (folder / f"{length}.wav").write_bytes(wav(samples_of(length)))
    picture_of((60, 41)).save(folder / "60.png")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


def film(path: Path, num_frames: int) -> None:
    """With a sound track as long as it is."""
    av = pytest.importorskip("av")
    noise = np.random.default_rng(num_frames)
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        track = container.add_stream("aac", rate=RATE, layout="mono")
        for _ in range(num_frames):
            pixels = noise.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        heard = av.AudioFrame.from_ndarray(tone(num_frames / 10)[None], format="fltp", layout="mono")
        heard.sample_rate = RATE
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=RATE, frame_size=1024)
        for part in [*resampler.resample(heard), *resampler.resample(None)]:
            container.mux(track.encode(part))
        container.mux(pictures.encode(None))
        container.mux(track.encode(None))


def samples(case: Hearing, files: Path, options: dict[str, Any]) -> list[Sample]:
    endings = {"video": "mp4", "audio": "wav", "image": "png"}
    marks = {"video": "<|vision_bos|><|VIDEO|><|vision_eos|>", "image": "<|vision_bos|><|IMAGE|><|vision_eos|>"}
    marks["audio"] = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    cases = "".join(f"{{% elif part['type'] == '{kind}' %}}{mark}" for kind, mark in marks.items())
    template = (
        "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{% if 'text' in part %}{{ part['text'] }}" + cases + "{% endif %}{% endfor %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (case.folder / "model" / "chat_template.jinja").write_text(template)
    tokenizer = luthier.load_tokenizer(case.folder / "model")
    found = []
    for row in ROWS:
        parts = [{"type": kind, kind: str(files / f"{number}.{endings[kind]}")} for kind, number in row]
        question = [*parts, {"type": "text", "text": f"what of {len(parts)}?"}]
        answer = [{"type": "text", "text": "it is so"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append(luthier.encode({"messages": messages}, tokenizer, processor=case.processor, media=options))
    return found


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("family", OMNI)
def test_rows_of_pictures_films_and_sounds_are_packed_as_they_are_alone(
    family: str, hears: bool, files: Path, tmp_path: Path
) -> None:
    """Alone, the model counts positions itself."""
    case = Hearing(family, tmp_path)
    model = case.model()
    options = {"roots": [str(files)], "use_audio_in_video": hears, "max_frames": 6}
    rows = samples(case, files, options)
    media = luthier.media_inputs(case.processor, model.config, **options)  # whose limits no file keeps
    how = CollateSettings(packed=True, pad_token_id=case.processor.tokenizer.pad_token_id)
    with torch.no_grad():
        alone = []
        for row in rows:
            inputs = dict(luthier.collate([row], layout="padded", media=media).model_inputs)
            ours, words = inputs.pop("position_ids"), inputs["input_ids"].shape[1]
            alone.append(model(**inputs, use_audio_in_video=hears).logits[0])
            given = model(**inputs, position_ids=ours, use_audio_in_video=hears).logits[0]
            assert alone[-1].shape[0] == words
            check_close(given, alone[-1])
        chosen = choose_isolation(model, case.segments([Heard()] * 2), how, device=CPU, needs=model_needs(model))
        assert chosen.isolation is not Isolation.PADDED
        batch = luthier.collate(rows, layout="packed", media=media)
        assert not batch.lost and batch.model_inputs["position_ids"].shape[0] == 4
        check_close(model(**chosen.inputs(batch, device=CPU)).logits[0], torch.cat(alone))
    track = sum(sample.input_ids.tolist().count(model.config.audio_token_id) for sample in rows[:1])
    assert bool(track) == hears


def check_close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert float((found - right).abs().max()) <= 1e-4 * float(right.abs().max())
