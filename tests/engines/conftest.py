"""The model that the tests of engines ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from luthier.presets import model_folder


@pytest.fixture(scope="session")
def model() -> Any:
    """A tiny model with random weights of a size that makes its probabilities differ."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        model_folder("tiny-qwen3"), hidden_size=32, num_hidden_layers=2, vocab_size=2048
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return made
