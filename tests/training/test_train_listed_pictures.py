"""MiniCPM-V up to 4.5: a class that takes a batch as one mapping, with pictures in lists, from rows to answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import luthier
from luthier.check.verify.run import verify
from luthier.config.choices import ModelPart
from luthier.errors import ModelError
from luthier.models import find_parts
from luthier.models.adapted_code import list_pictures
from luthier.models.model import reward_class
from luthier.prediction.predicting import PredictOptions, predict
from luthier.records import Sample
from tests.media.media_files import image_file, picture
from tests.training.tiny_file_runs import config_of, made_model, trained
from tests.training.tiny_minicpmv import SLOTS, MiniCPMV, write_folder

SIZES = [(30, 50), (90, 40), (30, 90), (60, 60)]  # one slice, 2 beside each other, 2 below each other, one
STAND_IN = "(<image>./</image>)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-minicpmv"))


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.png").write_bytes(image_file(picture(*size)))
    monkeypatch.chdir(tmp_path)


def row(answer: str, *pictures: int, asked: str = "What is it?") -> dict[str, Any]:
    parts = [{"type": "image", "image": f"{number}.png"} for number in pictures]
    content = [*parts, {"type": "text", "text": asked}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


GIVEN = [row("a rug", 0), row("a cup and a tree", 1, 2), row("nothing"), row("three", 3, 1, 0), row("x" * 30, 2)]


def encoded(folder: Path, *rows: dict[str, Any]) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    return [luthier.encode(each, tokenizer, processor=processor) for each in rows]


def own_inputs(folder: Path, numbers: list[int], answer: str) -> dict[str, Any]:
    """What the class's own processor makes of a row that `row` describes."""
    text = f"<|im_start|>user\n{STAND_IN * len(numbers)}What is it?<|im_end|>\n<|im_start|>assistant\n{answer}"
    pictures = [picture(*SIZES[number]) for number in numbers]
    made = hf.AutoProcessor.from_pretrained(folder)(text=[f"{text}<|im_end|>\n"], images=[pictures])
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1])[None]}


@pytest.mark.parametrize("numbers", [[0], [1, 2], [3, 1, 0], []], ids=str)
def test_ids_and_pixels_are_those_of_the_class_s_own_processor(folder: Path, numbers: list[int]) -> None:
    wanted = own_inputs(folder, numbers, "yes")
    (sample,) = encoded(folder, row("yes", *numbers))
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    slices = [1, 3, 3, 1]
    assert [item.length for item in sample.media] == [
        wanted_length for n in numbers for wanted_length in [slices[n] * (SLOTS + 2) + 3 + (n == 2)]
    ]
    if numbers:
        batch = luthier.collate([sample], media=luthier.media_inputs(folder))
        together = torch.cat(wanted["pixel_values"][0], dim=-1)
        assert torch.equal(batch.model_inputs["pixel_values"], together)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_batch_gives_the_logits_of_the_class_s_own_call_for_each_row(folder: Path, layout: Any) -> None:
    model = made_model(folder)
    pictures = {"a rug": [0], "a cup and a tree": [1, 2], "nothing": [], "three": [3, 1, 0], "x" * 30: [2]}
    with torch.no_grad():
        own = [model(own_inputs(folder, numbers, answer)).logits[0] for answer, numbers in pictures.items()]
    samples = encoded(folder, *GIVEN)
    batch = luthier.collate(samples, layout=layout, media=luthier.media_inputs(folder))
    assert list_pictures(model)
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
        other = model(**{**batch.model_inputs, "pixel_values": batch.model_inputs["pixel_values"].flip(-1)}).logits
    rows = logits if layout == "padded" else logits[0].split([len(sample.input_ids) for sample in samples])
    for found, wanted in zip(rows, own, strict=True):
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)
    assert not torch.allclose(logits, other, atol=1e-3), "pictures are looked at"


def test_a_run_learns_packed_with_and_without_an_adapter_and_its_loss_is_the_class_s_own(
    folder: Path, tmp_path: Path
) -> None:
    losses = {}
    for kind in ("full", "lora"):
        parts = list(ModelPart)
        config = config_of(
            folder, tmp_path, GIVEN, adapter__type=kind, adapter__train_parts=parts, output__dir=str(tmp_path / kind)
        )
        result = trained(config)
        losses[kind] = [step.loss for step in result.steps]
        assert losses[kind][-1] < losses[kind][0] - 0.3, "it learns"
    assert losses["full"][0] == pytest.approx(losses["lora"][0], rel=1e-5)
    config = config_of(folder, tmp_path, GIVEN, train__learning_rate=1e-12, train__max_steps=1, train__packing="none",
                       train__per_device_train_batch_size=len(GIVEN), output__dir=str(tmp_path / "one"))  # fmt: skip
    result = trained(config)
    assert result.model_dir is not None
    model = MiniCPMV.from_pretrained(result.path / result.model_dir).eval()
    total, count = 0.0, 0
    for sample, one in zip(encoded(folder, *GIVEN), GIVEN, strict=True):
        answer = one["messages"][1]["content"]
        numbers = [int(part["image"][0]) for part in one["messages"][0]["content"][:-1]]
        with torch.no_grad():
            logits = model(own_inputs(folder, numbers, answer)).logits[0, :-1]
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(logits[learned], ids[learned], reduction="sum").item()
        count += len(learned)
    assert result.steps[0].loss == pytest.approx(total / count, rel=1e-5)


def test_answers_are_the_language_model_s_greedy_ones(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path, GIVEN, generate__max_new_tokens=6, generate__do_sample=False)
    result = trained(config)
    predicted = predict(config.output.dir, PredictOptions(data=str(tmp_path / "rows.jsonl")))
    answers = [json.loads(line)["generated"] for line in predicted.predictions.read_text().splitlines()]
    model = MiniCPMV.from_pretrained(result.path / result.model_dir).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for answer, one in zip(answers, GIVEN, strict=True):
        numbers = [int(part["image"][0]) for part in one["messages"][0]["content"][:-1]]
        inputs = own_inputs(folder, numbers, "")
        inputs["input_ids"] = inputs["input_ids"][:, :-2]  # without the stop and the line break
        embedded, _ = model.get_vllm_embedding(inputs)
        ids = model.llm.generate(inputs_embeds=embedded, do_sample=False, max_new_tokens=6)[0]
        assert answer == tokenizer.decode(ids, skip_special_tokens=True)


def test_verify_renders_and_expands_each_row_again(folder: Path, tmp_path: Path) -> None:
    report = verify(config_of(folder, tmp_path, [*GIVEN, row("a <image> and <unk>", 1, asked="(<image>./</image>)?")]))
    assert report.ok and report.ledger.prepared == len(GIVEN) + 1


def test_its_parts_are_tower_resampler_and_language_model(folder: Path, tmp_path: Path) -> None:
    model = made_model(folder)
    parts = find_parts(model)
    assert (parts.tower, parts.projector) == (("vpm",), ("resampler",))
    with pytest.raises(ModelError, match="no reward model"):
        reward_class(model.config)


def test_pairs_and_answers_during_training_work_and_what_needs_another_class_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    pair = {
        "prompt": row("", 1, 0)["messages"][:1],
        "chosen": [{"role": "assistant", "content": "right"}],
        "rejected": [{"role": "assistant", "content": "wrong"}],
    }
    losses = [step.loss for step in trained(config_of(folder, tmp_path, [pair] * 4, objective__name="dpo")).steps]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-4) and losses[-1] < losses[0]
    saving = {"output__save_strategy": "no"}
    evaluated = {**saving, "data__eval_split": 0.4, "eval__generate_rows": 2, "generate__max_new_tokens": 3}
    result = trained(config_of(folder, tmp_path, GIVEN, output__dir=str(tmp_path / "evaluated"), **evaluated))
    assert len(result.generations[-1].records) == 2
    cached = config_of(folder, tmp_path, GIVEN, media__cache="encoder_features", output__dir=str(tmp_path / "cached"))
    with pytest.raises(ModelError, match="features"):
        trained(cached)
