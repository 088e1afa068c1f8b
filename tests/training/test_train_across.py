"""MOSS-VL: pictures on one token each, in a class that is told which belong to which row, from rows to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torchvision.transforms.v2.functional import InterpolationMode, pil_to_tensor, resize
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

import luthier
from luthier.check.verify.run import verify
from luthier.config.choices import ModelPart
from luthier.config.inputs import MediaConfig
from luthier.errors import ConfigError, ModelError, RowError, UserError
from luthier.media.processors.processor import MediaProcessor
from luthier.models import find_parts
from luthier.models.batch_invariance import hook
from luthier.models.model import reward_class
from luthier.prediction.predicting import PredictOptions, predict
from luthier.records import Sample
from tests.conftest import reason_is
from tests.media.media_files import image_file, picture, tone, wav
from tests.training.tiny_file_runs import config_of, made_model, trained
from tests.training.tiny_moss_vl import MARK, PATCH, MossVL, write_folder, write_published

SIZES = {"a": (30, 50), "b": (20, 20), "c": (90, 40)}
ASKED = ["a", "", "bc", "cab", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-moss-vl"))


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        (tmp_path / f"{name}.png").write_bytes(image_file(picture(*size)))
    monkeypatch.chdir(tmp_path)


def row(names: str, asked: str = "What is it?") -> dict[str, Any]:
    """Each picture behind a word."""
    parts: list[dict[str, Any]] = []
    for name in names:
        parts += [{"type": "text", "text": "see "}, {"type": "image", "image": f"{name}.png"}]
    content = [*parts, {"type": "text", "text": asked}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": names or "none"}]}


def encoded(folder: Path) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    return [luthier.encode(row(names), tokenizer, processor=processor) for names in ASKED]


def own_inputs(folder: Path, names: str) -> dict[str, Any]:
    """What the class's own processor makes of a row that `row` describes."""
    asked = "".join(f"see {MARK}" for _ in names) + "What is it?"
    text = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{names or 'none'}<|im_end|>\n"
    pictures = [picture(*SIZES[name]) for name in names]
    return dict(hf.AutoProcessor.from_pretrained(folder)(text=[text], images=pictures or None))


@pytest.mark.parametrize("names", ASKED)
def test_ids_and_pixels_are_those_of_the_class_s_own_processor(folder: Path, names: str) -> None:
    wanted, sample = own_inputs(folder, names), encoded(folder)[ASKED.index(names)]
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    assert [item.length for item in sample.media] == [1] * len(names)
    inputs = luthier.collate([sample], layout="padded", media=luthier.media_inputs(folder)).model_inputs
    assert ("pixel_values" in inputs) == bool(names)
    if names:
        assert torch.equal(inputs["pixel_values"], wanted["pixel_values"])
        assert torch.equal(inputs["grid_thw"], wanted["grid_thw"])


@pytest.mark.parametrize("numbers", [[0], [1], [0, 1], [1, 2, 3, 4, 0]], ids=str)
def test_a_padded_batch_gives_the_logits_of_the_class_s_own_call_for_each_row(folder: Path, numbers: list[int]) -> None:
    model = made_model(folder)
    with torch.no_grad():
        own = []
        for number in numbers:
            inputs = own_inputs(folder, ASKED[number])
            own.append(model(**inputs).logits[0])
    hook(model)
    samples = encoded(folder)
    batch = luthier.collate(
        [samples[number] for number in numbers], layout="padded", media=luthier.media_inputs(folder)
    )
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
    for found, wanted in zip(logits, own, strict=True):
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)
    if "pixel_values" in batch.model_inputs:
        darker = {**batch.model_inputs, "pixel_values": batch.model_inputs["pixel_values"] / 2}
        with torch.no_grad():
            assert not torch.allclose(model(**darker).logits, logits, atol=1e-3), "pictures are looked at"


def test_a_run_learns_with_and_without_an_adapter_and_its_loss_is_the_class_s_own(folder: Path, tmp_path: Path) -> None:
    rows, first = [row(names) for names in ASKED], {}
    for kind in ("full", "lora"):
        config = config_of(
            folder, tmp_path, rows, adapter__type=kind, adapter__train_parts=list(ModelPart),
            train__per_device_train_batch_size=len(rows), output__dir=str(tmp_path / kind),
        )  # fmt: skip
        result = trained(config)
        losses = [step.loss for step in result.steps]
        assert losses[-1] < losses[0] - 0.3, "it learns"
        first[kind] = losses[0]
    once = {"train__learning_rate": 1e-12, "train__max_steps": 1, "train__per_device_train_batch_size": len(rows)}
    kept = trained(config_of(folder, tmp_path, rows, **once, output__dir=str(tmp_path / "one")))
    model = MossVL.from_pretrained(kept.path / kept.model_dir).eval()
    total, count = 0.0, 0
    for sample, names in zip(encoded(folder), ASKED, strict=True):
        with torch.no_grad():
            logits = model(**own_inputs(folder, names)).logits[0, :-1]
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(logits[learned], ids[learned], reduction="sum").item()
        count += len(learned)
    assert [first["full"], first["lora"]] == pytest.approx([total / count] * 2, rel=1e-5)


def test_verify_renders_and_expands_each_row_again(folder: Path, tmp_path: Path) -> None:
    # of which the class replaces the second, and has no token for it
    own_text = [row("a", asked="an <|image_pad|>?"), row("bc", asked="an <|image|>?"), row("", asked="<|image|>")]
    rows = [*map(row, ASKED), *own_text, {"messages": [*row("a")["messages"], *row("b", "a <|image|>")["messages"]]}]
    report = verify(config_of(folder, tmp_path, rows))
    assert report.ok and report.ledger.prepared == len(rows)


def test_what_the_class_cannot_do_here_is_refused(folder: Path, tmp_path: Path) -> None:
    rows = [row(names) for names in ASKED]
    with pytest.raises(ModelError, match="no reward model"):
        reward_class(made_model(folder).config)
    trained(config_of(folder, tmp_path, rows, train__max_steps=1))
    with pytest.raises(UserError, match="answers of moss_vl are not generated"):
        predict(str(tmp_path / "out"), PredictOptions(data=str(tmp_path / "rows.jsonl")))
    answering = {"eval__generate_rows": 1, "data__eval_split": 0.4, "output__dir": str(tmp_path / "other")}
    with pytest.raises((ConfigError, UserError), match="answers of moss_vl are not generated"):
        trained(config_of(folder, tmp_path, rows, **answering))
    (tmp_path / "s.wav").write_bytes(wav(tone(0.5)))
    heard = {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "s.wav"}]},
                          {"role": "assistant", "content": "hm"}]}  # fmt: skip
    with pytest.raises(RowError, check=reason_is("media_kind")):
        luthier.encode(heard, luthier.load_tokenizer(folder), processor=hf.AutoProcessor.from_pretrained(folder))


def test_its_parts_are_the_tower_its_merger_and_the_rest(folder: Path) -> None:
    parts = find_parts(made_model(folder))
    assert (parts.tower, parts.projector) == (("model.visual",), ("model.visual.merger",))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, of a kind of model that transformers does not know."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "moss_vl")
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, PROCESSOR_MAPPING, IMAGE_PROCESSOR_MAPPING):
        known = [kind for kind in mapping._extra_content if kind.__name__ == "MossVLConfig"]
        for kind in known:
            monkeypatch.delitem(mapping._extra_content, kind)
    return write_published(tmp_path / "published")


def test_a_picture_is_resized_as_its_published_code_says(published: Path) -> None:
    media = MediaProcessor.load(str(published), MediaConfig(), trust_remote_code=True, model_type="moss_vl")
    assert media is not None and type(media.processor).__module__.startswith("transformers_modules.")
    found = media.processor.image_processor([picture(30, 20)], return_tensors="pt")["pixel_values"]
    wanted = resize(pil_to_tensor(picture(30, 20)), [2 * PATCH, 3 * PATCH], InterpolationMode.BICUBIC) / 255
    wanted = wanted.reshape(3, 2, PATCH, 3, PATCH).permute(1, 3, 0, 2, 4).reshape(6, -1)
    assert torch.equal(found, wanted)


def test_a_model_of_its_published_code_is_trained_and_written(published: Path, tmp_path: Path) -> None:
    rows, batch = [row(names) for names in ASKED], {"train__per_device_train_batch_size": len(ASKED)}
    own = {"model__trust_remote_code": True}
    first = trained(config_of(published, tmp_path, rows, **own, **batch, output__dir=str(tmp_path / "first")))
    assert first.steps[-1].loss < first.steps[0].loss - 0.3, "it learns"
    again = config_of(
        first.path / first.model_dir, tmp_path, rows, **own, **batch, model__random_init=False,
        output__dir=str(tmp_path / "second"),
    )  # fmt: skip
    assert trained(again).steps[0].loss < first.steps[-1].loss, "and what it learned was written"
