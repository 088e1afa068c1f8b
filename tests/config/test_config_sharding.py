"""What ``runtime.sharding: fsdp`` cannot be combined with is said before anything is loaded."""

from __future__ import annotations

import pytest

from luthier.config.loading import load_config_text
from luthier.errors import ConfigError

GOOD = "model: preset:tiny-qwen3\ndata:\n  train: preset:skills\n"


def told(lines: str, sharding: str = "fsdp") -> list[str]:
    try:
        load_config_text(f"{GOOD}runtime: {{sharding: {sharding}}}\n{lines}\n", "run.yaml", check_paths=False)
    except ConfigError as error:
        assert all(problem.hint for problem in error.problems)
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("train: {torch_compile: true}", "train.torch_compile"),
        ("train: {precision: fp16}", "train.precision"),
        ("train: {optim: adafactor}", "train.optim"),
        ("adapter: {type: lora, merge: true}", "adapter.merge"),
        ("adapter: {type: lora, init_lora_weights: pissa}", "adapter.init_lora_weights"),
        ("adapter: {type: lora, init_lora_weights: olora}", "adapter.init_lora_weights"),
    ],
)
def test_both_keys_are_named(lines: str, key: str) -> None:
    (problem,) = told(lines)
    assert problem.startswith(f"run.yaml:5 {key}: ") and "runtime.sharding (line 4) is fsdp" in problem
    assert told(lines, sharding="none") == []


@pytest.mark.parametrize(
    "lines",
    ["", "objective: dpo", "adapter: {type: lora, loraplus_lr_ratio: 4}", "train: {optim: sgd, precision: bf16}"],
)
def test_the_rest_is_not(lines: str) -> None:
    assert told(lines) == []
    assert "none, fsdp" in told(lines, sharding="zero3")[0]
