"""Two ranks of which one has no pictures: their gradients are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_vlm_ranks import loss_of, rank_batch, trained_vlm

import luthier
from tests.families_matrix.matrix_cases import CASES
from tests.families_matrix.matrix_product import make_product

NAME = "qwen3_vl"  # whose tower gives features to several layers
PROGRAM = Path(__file__).with_name("tiny_vlm_ranks.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Where the gradients are, and the exit codes of both ranks, which train with our average first and then by DDP."""
    folder = tmp_path_factory.mktemp("ranks")
    make_product(CASES["mllama"], folder)
    (folder / "run.json").write_text(json.dumps(run_of(folder, "two", accumulated=1)))
    codes = run_ranks(PROGRAM, str(folder), NAME, "averaged", "run", "ddp", errors=folder / "stderr")
    return folder, codes


def run_of(folder: Path, name: str, *, accumulated: int) -> dict[str, Any]:
    """All parts of Llama 3.2 Vision are trained; some of its layers run only where a row has pictures."""
    return {
        "model": {"name_or_path": str(folder), "random_init": True},
        "data": {"train": str(folder / "rows.jsonl"), "store": str(folder / "store"), "workers": 0},
        "adapter": {"type": "full", "train_parts": ["language_model", "projector", "tower"]},
        "train": {
            "max_steps": 3, "gradient_accumulation_steps": accumulated, "learning_rate": 0.05, "optim": "sgd",
            "weight_decay": 0.1,
        },
        "output": {"dir": str(folder / name), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "seed": 3, "threads": 1},
    }  # fmt: skip


def test_a_run_on_two_ranks_leaves_the_weights_of_one_process(ended: tuple[Path, list[int]]) -> None:
    folder, _ = ended
    luthier.train(run_of(folder, "one", accumulated=2))
    two, one = (load_file(folder / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert two.keys() == one.keys()
    for name, weight in one.items():
        assert torch.allclose(two[name], weight, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(("kind", "batches"), [("", (0, 1)), ("words-", (1, 1))])
def test_both_ranks_get_the_mean_gradient_that_one_process_has(
    kind: str, batches: tuple[int, int], ended: tuple[Path, list[int]]
) -> None:
    """Of a batch with pictures and one without, and of two without, which leave a tower without any gradient."""
    folder, _ = ended
    files = [folder / f"averaged-{kind}{rank}.pt" for rank in range(2)]
    assert all(file.is_file() for file in files), (folder / "stderr").read_text()
    first, second = (torch.load(file, weights_only=True) for file in files)
    model, forward = trained_vlm(NAME)
    for number in batches:
        loss_of(model, forward, rank_batch(NAME, number)).backward()
    tower = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert first[name] is second[name] is None, name
            continue
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], parameter.grad / 2, rtol=1e-4, atol=1e-6), name
        tower += name.startswith("model.visual.") and bool(parameter.grad.any())
    assert tower > 10 if not kind else tower == 0


def test_by_ddp_the_ranks_cannot_go_on(ended: tuple[Path, list[int]]) -> None:
    folder, codes = ended
    assert all(codes) and (folder / "ddp.store").exists(), "both began, and failed"
    assert not (folder / "ddp-words-0.pt").exists()
