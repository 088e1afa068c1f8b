"""Fixtures of the training tests: one thread, the preset tokenizer, and a whole run as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.training.data import RunData
from luthier.training.fit import fit_data
from luthier.training.report import RunResult


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3")


@pytest.fixture
def train(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., RunResult]:
    """``train(data, folder="run", **changes) -> RunResult``."""

    def run(data: RunData, *, folder: str = "run", on_event: Any = None, **changes: Any) -> RunResult:
        return fit_data(make_config(tmp_path / folder, **changes), tokenizer, data, on_event=on_event)

    return run


def _few_tokens(folder: Path, tokenizer: Tokenizer, step: int) -> Path:
    segments = make_segments(48)
    for segment in segments:
        kept = (segment.input_ids == 2034) | ((step > 1) & ~segment.target)
        segment.input_ids[:] = np.where(kept, segment.input_ids, 10 + step * (segment.input_ids % (20 // step)))
    changes = {"train__max_steps": 60, "train__learning_rate": 1e-2, "train__per_device_train_batch_size": 16}
    fit_data(make_config(folder, **changes), tokenizer, make_data(segments))
    return folder / "model"


@pytest.fixture(scope="session")
def knows_few(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model that answers with any of twenty tokens, and then stops or goes on."""
    return _few_tokens(tmp_path_factory.mktemp("few"), tokenizer, 1)


@pytest.fixture(scope="session")
def knows_half(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model that answers with every second of these tokens."""
    return _few_tokens(tmp_path_factory.mktemp("half"), tokenizer, 2)
