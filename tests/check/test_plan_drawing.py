"""What ``luthier plan`` says of a run that learns from answers of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig

import luthier
from luthier import library
from luthier.check.plan.terminal import plan_table

PACKAGE = Path(luthier.__file__).parent


@pytest.mark.parametrize(("batch_size", "at_once"), [(64, 24), (8, 8)])
def test_a_plan_says_what_a_step_draws_and_what_its_cache_takes(batch_size: int, at_once: int, tmp_path: Path) -> None:
    found = library.plan(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": "preset:skills", "max_length": 256, "store": str(tmp_path / "store")},
            "objective": "rl",
            "rollout": {"prompts_per_step": 6, "answers": 4, "max_new_tokens": 50, "batch_size": batch_size},
            "train": {"max_steps": 3, "per_device_train_batch_size": 4, "precision": "fp32"},
            "output": {"dir": str(tmp_path / "run")},
            "runtime": {"device": "cpu"},
        }
    )
    drawing = found.drawing
    assert drawing is not None
    assert (drawing.prompts, drawing.answers, drawing.most_tokens, drawing.micro_batches) == (6, 4, 1200, 2)
    config = AutoConfig.from_pretrained(PACKAGE / "presets" / "models" / "tiny-qwen3")
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert drawing.cache_bytes == at_once * (drawing.longest_prompt + 50) * each
    console = Console(width=200)
    with console.capture() as captured:
        console.print(plan_table(found))
    assert "6 prompts × 4 answers" in captured.get() and "1,200 tokens" in captured.get()


def test_other_runs_draw_nothing(tmp_path: Path) -> None:
    found = library.plan(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": "preset:skills", "store": str(tmp_path / "store")},
            "output": {"dir": str(tmp_path / "run")},
        }
    )
    assert found.drawing is None
