"""The run description alone decides how numbers are computed, and what is told of a run is what was in force."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DynamoBackend
from tiny_runs import make_config, make_data, make_segments
from transformers.utils import logging as transformers_logging

from luthier.config.choices import Precision
from luthier.errors import UserError
from luthier.training.fit import idle_gpus
from luthier.training.folder.artifacts import model_card
from luthier.training.processes import check_in_force, own_numerics
from luthier.training.report import RunResult
from luthier.training.report.events import Note

Train = Callable[..., RunResult]
DATA = make_data(make_segments(12))
ASKED = {
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_TORCH_DEVICE": "meta", "ACCELERATE_DOWNCAST_BF16": "1",
}  # fmt: skip


def test_the_environment_changes_no_number_and_is_told(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"train__precision": "fp32", "train__gradient_accumulation_steps": 2}
    plain = train(DATA, folder="plain", **settings)
    for name, value in ASKED.items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    asked = train(
        DATA, folder="asked", on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None, **settings
    )
    assert [step.loss for step in asked.steps] == [step.loss for step in plain.steps]
    assert asked.model.precision == "fp32"
    assert any("ACCELERATE_MIXED_PRECISION=bf16" in note and "ignored" in note for note in notes)
    assert {name: os.environ[name] for name in ASKED} == ASKED, "it is given back"


@pytest.mark.parametrize("processes, gpus, told", [(1, 4, 1), (1, 1, 0), (1, 0, 0), (4, 4, 0), (2, 4, 0)])
def test_a_run_says_that_gpus_are_idle(processes: int, gpus: int, told: int) -> None:
    notes = list(idle_gpus(processes, gpus))
    assert len(notes) == told and all(f"--nproc-per-node {gpus} " in note for note in notes)


def test_control_another_precision_does_change_numbers_and_is_told(train: Train) -> None:
    one, other = (train(DATA, folder=name, train__precision=name) for name in ("fp32", "bf16"))
    assert [step.loss for step in one.steps] != [step.loss for step in other.steps]
    assert (one.model.precision, other.model.precision) == ("fp32", "bf16")


def test_switches_of_torch_are_ours_during_a_run_and_given_back() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with own_numerics({}):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_programs_random_numbers_threads_and_messages_are_its_own_again_after_a_run(train: Train) -> None:
    drawn: list[tuple[float, ...]] = []
    verbosity, threads = transformers_logging.get_verbosity(), torch.get_num_threads()
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        expected = (random.Random(seed).random(), np.random.RandomState(seed).rand())
        train(DATA, folder=f"run-{seed}", runtime__threads=2)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        assert drawn[-1][:2] == expected
    assert drawn[0][2] != drawn[1][2]
    assert (transformers_logging.get_verbosity(), torch.get_num_threads()) == (verbosity, threads)


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_what_cannot_be_undone_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=name), own_numerics({name: "BF16"}):
        pass
    with own_numerics({name: "STRICT"}) as told:
        assert told == []


@pytest.mark.parametrize(("precision", "backend"), [("bf16", DynamoBackend.NO), ("no", DynamoBackend.INDUCTOR)])
def test_control_a_trainer_that_computes_otherwise_is_found(precision: str, backend: DynamoBackend) -> None:
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend))
    accelerator: Any = SimpleNamespace(mixed_precision=precision, state=state)
    with pytest.raises(UserError, match="accelerate's"):
        check_in_force(accelerator, Precision.FP32)


def test_the_card_tells_the_adapter_that_was_loaded(train: Train, tmp_path: Path) -> None:
    base = train(DATA, folder="base", train__max_steps=1)
    model = {"name_or_path": str(base.path / "model")}
    first = train(
        DATA, folder="first", model=model, train__max_steps=1, train__optim="adafactor",
        adapter={"type": "lora", "r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj"]},
    )  # fmt: skip
    adapter = {"type": "lora", "name_or_path": str(first.path / "model")}
    second = train(DATA, folder="second", model=model, adapter=adapter, train__max_steps=1)
    for result in (first, second):
        facts = result.model.adapter
        assert (facts["r"], facts["lora_alpha"], facts["use_rslora"], facts["target_modules"]) == (
            3,
            5,
            True,
            ["q_proj"],
        )
    card = model_card(second, make_config(tmp_path / "second", model=model, adapter=adapter))
    assert "LORA: r 3, lora_alpha 5, target_modules q_proj, use_rslora True" in card
    assert "| optimizer | torch.AdamW, weight decay 0" in card
    assert "transformers.Adafactor" in (first.path / "model" / "README.md").read_text()


def test_weights_of_16_bits_without_autocast_are_told_as_that(train: Train) -> None:
    result = train(DATA, train__max_steps=1, train__precision="fp32", model={**_tiny(), "dtype": "bfloat16"})
    assert (result.model.dtype, result.model.precision) == ("bfloat16", "bf16")


def _tiny() -> dict[str, Any]:
    return make_config(Path("run")).model.model_dump(include={"name_or_path", "config_overrides"})
