"""Nemotron Omni with videos, on whose features transformers' class fails: each is encoded by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import luthier
from luthier.config.choices import ModelPart
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.media.families import SHOWN
from luthier.models.batch_invariance import encode_videos_apart
from luthier.prediction.predicting import PredictOptions, predict
from luthier.records import Sample
from tests.families_matrix.matrix_cases import CASES, chat_template
from tests.families_matrix.tiny_settings import Vocabulary
from tests.media.media_files import image_file, picture, video
from tests.training.tiny_file_runs import trained

FILMS = {"a": (11, (64, 48)), "b": (6, (48, 96)), "c": (7, (96, 48))}  # frames, 10 a second; width and height
ASKED = ["a", "", "pq", "b", "p", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av")
    target = tmp_path_factory.mktemp("tiny-nemotron")
    case = CASES["nemotron_h_omni"]
    processor = case.processor()
    processor.save_pretrained(target)
    media = luthier.media.MediaProcessor.of(processor, model_type=case.name)
    (target / "chat_template.jinja").write_text(chat_template(case, media))
    tokenizer = processor.tokenizer
    case.config(Vocabulary(size=len(tokenizer), number=tokenizer.convert_tokens_to_ids)).save_pretrained(target)
    hf.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(target)
    for name, (frames, size) in FILMS.items():
        video(target / f"{name}.mp4", frames, size=size)
    for name, size in {"p": (40, 60), "q": (70, 30)}.items():
        (target / f"{name}.png").write_bytes(image_file(picture(*size)))
    rows = [row(names) for names in ASKED]
    (target / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return target


@pytest.fixture(autouse=True)
def _beside_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def row(names: str) -> dict[str, Any]:
    parts = [
        {"type": "video", "video": f"{name}.mp4"} if name in FILMS else {"type": "image", "image": f"{name}.png"}
        for name in names
    ]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": names or "none"}]}


def encoded(folder: Path) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    return [luthier.encode(row(names), tokenizer, processor=processor) for names in ASKED]


def made_model(folder: Path) -> Any:
    torch.manual_seed(0)
    return hf.NemotronH_Omni_Reasoning_V3(hf.AutoConfig.from_pretrained(folder)).eval()


def by_hand(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [T, V] of one row, its features put in the places of its slots, in their order."""
    ids = inputs["input_ids"]
    embedded = model.get_input_embeddings()(ids).clone()
    found = []
    if "pixel_values_videos" in inputs:
        videos = model.get_video_features(inputs["pixel_values_videos"], return_dict=True).pooler_output
        found = [each.reshape(-1, each.shape[-1]) for each in videos]
    if "pixel_values" in inputs:
        pictures = model.get_image_features(inputs["pixel_values"], inputs["image_grid_hw"], return_dict=True)
        found = list(pictures.pooler_output)
    if found:
        embedded[ids == model.image_token_id] = torch.cat(found)
    logits: torch.Tensor = model.language_model(inputs_embeds=embedded, use_cache=False).logits[0]
    return logits


def config_of(folder: Path, tmp_path: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "random_init": True},
        "data": {"train": [{"path": str(folder / "rows.jsonl")}], "store": str(tmp_path / "store"), "workers": 0},
        "train": {"max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 0, "per_device_train_batch_size": 1},
        "output": {"dir": str(tmp_path / "out")},
        "tracking": {"progress": False, "logging_steps": 1},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def test_the_class_itself_fails_on_videos(folder: Path) -> None:
    """Where it does not any more, `Family.videos_apart` is not needed: with transformers 5.23 on any video, and as of
    5.24 on several, whose sizes a batch fills up to the largest."""
    media = luthier.media_inputs(folder)
    batch = luthier.collate([encoded(folder)[number] for number in (0, 3)], layout="padded", media=media)
    inputs = {name: value for name, value in batch.model_inputs.items() if name != SHOWN}
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        made_model(folder)(**inputs)


@pytest.mark.parametrize("numbers", [[0], [0, 3, 5], [2, 0, 4], range(6)], ids=str)
def test_a_padded_batch_gives_each_row_what_its_own_features_give_it(folder: Path, numbers: list[int]) -> None:
    model, samples = made_model(folder), encoded(folder)
    media = luthier.media_inputs(folder)
    with torch.no_grad():
        own = [by_hand(model, luthier.collate([samples[number]], media=media).model_inputs) for number in numbers]
    assert encode_videos_apart(model)
    batch = luthier.collate([samples[number] for number in numbers], layout="padded", media=media)
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
    for found, wanted in zip(logits, own, strict=True):
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)


def test_a_batch_of_pictures_has_no_word_of_videos(folder: Path) -> None:
    """So it is what the class takes, hooked or not."""
    samples = encoded(folder)
    batch = luthier.collate([samples[2], samples[4]], layout="padded", media=luthier.media_inputs(folder))
    assert "shown" not in batch.model_inputs
    assert made_model(folder)(**batch.model_inputs).logits.isfinite().all()


def test_a_run_learns_packed_with_and_without_an_adapter_and_its_loss_is_that_by_hand(
    folder: Path, tmp_path: Path
) -> None:
    first = {}
    for kind in ("full", "lora"):
        config = config_of(
            folder, tmp_path, adapter__type=kind, adapter__train_parts=list(ModelPart), output__dir=str(tmp_path / kind)
        )
        losses = [step.loss for step in trained(config).steps]
        assert losses[-1] < losses[0] - 0.3, "it learns"
        first[kind] = losses[0]
    config = config_of(folder, tmp_path, train__learning_rate=1e-12, train__max_steps=1,
                       output__dir=str(tmp_path / "one"))  # fmt: skip
    result = trained(config)
    assert result.model_dir is not None
    model = hf.NemotronH_Omni_Reasoning_V3.from_pretrained(result.path / result.model_dir).eval()
    total, count = 0.0, 0
    for sample in encoded(folder):
        inputs = luthier.collate([sample], media=luthier.media_inputs(folder)).model_inputs
        with torch.no_grad():
            logits = by_hand(model, inputs)[:-1]
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(logits[learned], ids[learned], reduction="sum").item()
        count += len(learned)
    assert [first["full"], first["lora"]] == pytest.approx([total / count] * 2, rel=1e-5)


def test_answers_are_the_greedy_ones_by_hand_for_videos_and_pictures_of_one_batch(folder: Path, tmp_path: Path) -> None:
    result = trained(config_of(folder, tmp_path, generate__max_new_tokens=4, generate__do_sample=False))
    predicted = predict(result.path, PredictOptions(data=str(folder / "rows.jsonl")))
    answers = [json.loads(line)["generated"] for line in predicted.predictions.read_text().splitlines()]
    model = hf.NemotronH_Omni_Reasoning_V3.from_pretrained(result.path / result.model_dir).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for answer, sample in zip(answers, encoded(folder), strict=True):
        inputs = dict(luthier.collate([sample], media=luthier.media_inputs(folder)).model_inputs)
        begin = int(np.flatnonzero(sample.target)[0])
        inputs["input_ids"] = inputs["input_ids"][:, :begin]
        for _ in range(4):
            with torch.no_grad():
                token = by_hand(model, inputs)[-1].argmax()
            if token == tokenizer.eos_token_id:
                break
            inputs["input_ids"] = torch.cat([inputs["input_ids"], token[None, None]], dim=1)
        assert answer == tokenizer.decode(inputs["input_ids"][0, begin:], skip_special_tokens=True)


def test_computed_features_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="takes no computed features"):
        trained(config_of(folder, tmp_path, media__cache="encoder_features", adapter__type="lora"))
