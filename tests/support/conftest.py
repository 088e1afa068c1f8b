"""Fixtures of the support matrix: one thread, the tiny models of the training tests, and everything tried once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from luthier.encoding.tokenizer import Tokenizer, load_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "training"))  # tiny_models, tiny_rows, tiny_runs

if TYPE_CHECKING:
    from support_matrix import Cell, Outcome


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("support")


@pytest.fixture(scope="session")
def outcomes(root: Path, tokenizer: Tokenizer) -> dict[Cell, Outcome]:
    from support_matrix import support_matrix

    return support_matrix(root, tokenizer)
