"""Runs on rows with pictures, from files to the saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import BudgetError
from luthier.models.model import reward_class
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from luthier.training.folder.run_folder import LOST_FILE
from luthier.training.report import RunResult
from tests.families_matrix.matrix_cases import CASES
from tests.families_matrix.tiny_settings import Vocabulary
from tests.media.media_files import image_file, picture
from tests.media.tiny_folder import write_folder

NUM_ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-vl"))


def write_rows(folder: Path) -> Path:
    rows = []
    for number in range(NUM_ROWS):
        parts: list[dict[str, str]] = [{"type": "text", "text": f"What is number {number}?"}]
        for copy in range(number % 3):
            name = f"{number}-{copy}.png"
            (folder / name).write_bytes(image_file(picture(56 + 28 * copy, 56)))
            parts.insert(copy, {"type": "image", "image": name})
        rows.append(
            {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": f"It is {number}."}]}
        )
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config_of(folder: Path, rows: Path, out: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "random_init": True},
        "data": {"train": [{"path": str(rows)}], "store": str(rows.parent / "store"), "max_length": 256, "workers": 0},
        "train": {"max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "gradient_accumulation_steps": 2},
        "output": {"dir": str(out), "save_strategy": "no"},
        "tracking": {"progress": False, "logging_steps": 1},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def run(config: RunConfig) -> RunResult:
    encoder = Encoder.from_config(config)
    return fit(config, encoder, prepare(config, encoder))


def losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]


def test_packed_and_padded_rows_and_workers_train_alike(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    whole = {"train__gradient_accumulation_steps": 1, "train__max_steps": 2}
    packed = run(config_of(folder, rows, tmp_path / "packed", **whole, data__max_length=1024))
    padded = run(
        config_of(
            folder, rows, tmp_path / "padded", **whole, train__packing="none", train__per_device_train_batch_size=8
        )
    )
    workers = run(
        config_of(folder, rows, tmp_path / "workers", **whole, data__max_length=1024, runtime__dataloader_num_workers=1)
    )
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-4)
    assert losses(packed) == losses(workers)
    assert losses(packed)[1] < losses(packed)[0]


def test_the_saved_model_loads_with_its_processor(folder: Path, tmp_path: Path) -> None:
    result = run(config_of(folder, write_rows(tmp_path), tmp_path / "out"))
    assert result.model_dir is not None
    saved = result.path / result.model_dir
    model = hf.AutoModelForImageTextToText.from_pretrained(saved)
    assert not hasattr(model.config, "use_cache") and model.config.text_config.use_cache, "as before training"
    processor = hf.AutoProcessor.from_pretrained(saved)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
        add_generation_prompt=True,
    )
    inputs = processor(text=[text], images=[picture(56, 56)], return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


def test_a_picture_that_breaks_after_preparation_costs_its_row_and_no_other(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    config = config_of(folder, rows, tmp_path / "out", train__max_steps=4, data__max_drop=0.2)
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    (tmp_path / "1-0.png").write_bytes(b"<html>not a picture</html>")
    result = fit(config, encoder, prepared)
    (told,) = (json.loads(line) for line in (tmp_path / "out" / LOST_FILE).read_text().splitlines())
    assert (told["row"], told["reason"]) == (2, "media_changed")
    assert result.ledger["quarantined"] == {"media_changed": 1}
    assert result.ledger["read"] == result.ledger["trained"] + 1


def test_what_a_run_lost_is_its_own_and_stays_with_it_when_it_goes_on(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    changes = {"data__max_drop": 0.2, "output__save_strategy": "steps", "output__save_steps": 2}
    config = config_of(folder, rows, tmp_path / "out", train__max_steps=4, **changes)
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    whole = (tmp_path / "1-0.png").read_bytes()
    (tmp_path / "1-0.png").write_bytes(b"<html>not a picture</html>")
    fit(config, encoder, prepared)
    with (tmp_path / "out" / LOST_FILE).open("ab") as file:
        file.write(b'{"file": "a process that was ki')
    longer = {**changes, "train__max_steps": 6, "output__resume": str(tmp_path / "out" / "checkpoint-4")}
    gone_on = fit(config_of(folder, rows, tmp_path / "out", **longer), encoder, prepared)
    assert gone_on.resumed_from is not None
    assert gone_on.ledger["quarantined"] == {"media_changed": 1}
    (tmp_path / "1-0.png").write_bytes(whole)
    anew = config_of(folder, rows, tmp_path / "out", train__max_steps=4, output__overwrite=True, **changes)
    result = fit(anew, encoder, prepare(anew, encoder))
    assert result.ledger["quarantined"] == {} and not (tmp_path / "out" / LOST_FILE).exists()


@pytest.mark.parametrize("adapter", [{}, {"adapter__type": "lora", "adapter__r": 4, "adapter__lora_dropout": 0.3}])
def test_a_run_with_pictures_goes_on_where_it_was(folder: Path, tmp_path: Path, adapter: dict[str, Any]) -> None:
    rows, parts = write_rows(tmp_path), tmp_path / "parts"
    saving = {"output__save_strategy": "steps", "output__save_steps": 1, "data__max_length": 128}
    alike = {**saving, **adapter, "train__lr_scheduler_type": "constant"}
    whole = run(config_of(folder, rows, tmp_path / "whole", **alike, train__max_steps=5))
    run(config_of(folder, rows, parts, **alike, train__max_steps=2))
    resume = str(parts / "checkpoint-2")
    gone_on = run(config_of(folder, rows, parts, **alike, train__max_steps=5, output__resume=resume))
    assert gone_on.resumed_from == "checkpoint-2"
    assert losses(gone_on)[-3:] == losses(whole)[-3:] and len(set(losses(whole))) == 5


def test_too_many_such_rows_stop_the_run(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    config = config_of(folder, rows, tmp_path / "out", train__max_steps=8)
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    for path in tmp_path.glob("*-0.png"):
        path.unlink()
    with pytest.raises(BudgetError, match="media_missing"):
        fit(config, encoder, prepared)


@pytest.mark.parametrize("objective", ["dpo", "kto", "rm"])
def test_every_objective_takes_rows_with_pictures(objective: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_file(picture(56, 56)))
    lines = []
    for number in range(4):
        parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": f"What is {number}?"}]
        prompt = [{"role": "user", "content": parts}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (f"It is {number}.", "No idea."))
        pair = {"prompt": prompt, "chosen": good, "rejected": bad}
        lines.append({"prompt": prompt, "completion": good, "label": number % 2 == 0} if objective == "kto" else pair)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, lines)))
    adapter = {} if objective == "rm" else {"adapter__type": "lora", "adapter__r": 2}
    same = {"objective__name": objective, **adapter, "train__gradient_accumulation_steps": 1}
    result = run(config_of(folder, rows, tmp_path / "out", **same, data__max_length=1024))
    padded = run(
        config_of(
            folder, rows, tmp_path / "padded", **same, train__packing="none", train__per_device_train_batch_size=8
        )
    )
    assert len(result.steps) == 2 and all(loss > 0 for loss in losses(result))
    assert losses(result) == pytest.approx(losses(padded), rel=1e-4)
    if objective == "rm":
        assert result.model_dir is not None
        saved = result.path / result.model_dir
        model = reward_class(hf.AutoConfig.from_pretrained(saved)).from_pretrained(saved)
        assert model.score.out_features == 1 and type(model).__name__ == "Qwen2_5_VLForSequenceClassification"


@pytest.mark.parametrize("name", ["paddleocr_vl", "hunyuan_vl", "step3p7", "hyperclovax_vision_v2", "inkling2"])
def test_a_reward_model_has_the_weights_whose_names_in_files_go_by_the_kind_of_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tokenizer = case.processor().tokenizer
    words = Vocabulary(size=len(tokenizer), number=tokenizer.convert_tokens_to_ids)
    generating: Any = hf.AutoModelForImageTextToText.from_config(case.config(words))
    generating.save_pretrained(tmp_path)
    rewarding = reward_class(generating.config).from_pretrained(tmp_path)
    found, expected = rewarding.state_dict(), generating.state_dict()
    assert found.keys() - expected.keys() == {"score.weight"}
    assert all(torch.equal(weight, expected[key]) for key, weight in found.items() if key in expected)
