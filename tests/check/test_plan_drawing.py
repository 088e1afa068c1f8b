"""What ``luthier plan`` says of a run that learns from answers of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig

import luthier
from luthier import library
from luthier.check.plan.terminal import plan_table
from luthier.errors import ConfigError, UserError

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


def test_a_plan_says_how_many_other_prompts_a_step_may_ask(tmp_path: Path) -> None:
    found = library.plan(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": "preset:skills", "max_length": 256, "store": str(tmp_path / "store")},
            "objective": "rl",
            "rollout": {
                "prompts_per_step": 6,
                "answers": 4,
                "max_new_tokens": 50,
                "dead_groups": "resample",
                "resample_rounds": 2,
            },
            "train": {"max_steps": 3, "precision": "fp32"},
            "output": {"dir": str(tmp_path / "run")},
        }
    )
    assert found.drawing is not None and found.drawing.most_tokens == (6 + 12) * 4 * 50
    console = Console(width=200)
    with console.capture() as captured:
        console.print(plan_table(found))
    assert "6 prompts and at most 12 others × 4 answers" in captured.get()


def test_other_runs_draw_nothing(tmp_path: Path) -> None:
    found = library.plan(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": "preset:skills", "store": str(tmp_path / "store")},
            "output": {"dir": str(tmp_path / "run")},
        }
    )
    assert found.drawing is None


def told_of(command: str, tmp_path: Path, **more: object) -> tuple[str, ...]:
    """The keys of what a command refuses of a run that draws answers, each of which has a way out."""
    run: dict[str, object] = {
        "model": "preset:tiny-qwen3",
        "data": {"train": "preset:skills", "store": str(tmp_path / "store")},
        "objective": "rl",
        "output": {"dir": str(tmp_path / "run")},
        **more,
    }
    with pytest.raises(UserError) as refused:
        getattr(library, command)(run)
    told = refused.value.problems if isinstance(refused.value, ConfigError) else [refused.value]
    assert all(one.hint for one in told)
    return tuple(str(one.key) for one in told)


@pytest.mark.parametrize("command", ["plan", "prepare", "show", "stats", "verify", "train"])
def test_rewards_and_metrics_that_are_none_are_told_before_a_row_is_read(command: str, tmp_path: Path) -> None:
    rewards = {"rewards": [{"metric": "nosuch"}]}
    assert told_of(command, tmp_path, rollout=rewards) == ("rollout.rewards[0].metric",)
    evaluation = {"generate_rows": 2, "metrics": ["nosuch"]}
    data = {"train": "preset:skills", "eval_split": 2}
    assert told_of(command, tmp_path, objective="sft", eval=evaluation, data=data) == ("eval.metrics",)
    assert not (tmp_path / "store").exists()


def test_a_plan_refuses_a_reward_whose_column_no_row_has(tmp_path: Path) -> None:
    rewards = {"rewards": [{"metric": "exact", "column": "nosuch"}]}
    assert told_of("plan", tmp_path, rollout=rewards) == ("rollout.rewards[0].column",)
