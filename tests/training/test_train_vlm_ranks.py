"""Two ranks of which one has no pictures: with a blank one in their place the gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_vlm_ranks import loss_of, rank_batch, trained_vlm

NAME = "qwen3_vl"  # whose tower gives features to several layers
PROGRAM = Path(__file__).with_name("tiny_vlm_ranks.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Where the gradients are, and the exit codes of both ranks, which train with the blank first and then without."""
    folder = tmp_path_factory.mktemp("ranks")
    codes = run_ranks(PROGRAM, str(folder), NAME, "blank", "bare", errors=folder / "stderr")
    return folder, codes


def test_both_ranks_get_the_mean_gradient_of_a_batch_with_pictures_and_one_without(
    ended: tuple[Path, list[int]],
) -> None:
    folder, _ = ended
    files = [folder / f"blank-{rank}.pt" for rank in range(2)]
    assert all(file.is_file() for file in files), (folder / "stderr").read_text()
    first, second = (torch.load(file, weights_only=True) for file in files)
    model, forward = trained_vlm(NAME, with_blanks=False)
    for rank in range(2):
        loss_of(model, forward, rank_batch(NAME, rank)).backward()
    tower = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert torch.equal(first[name], second[name]) and parameter.grad is not None
        assert torch.allclose(first[name], parameter.grad / 2, rtol=1e-4, atol=1e-6), name
        tower += name.startswith("model.visual.") and bool(parameter.grad.any())
    assert tower > 10


def test_without_the_blank_the_ranks_cannot_go_on(ended: tuple[Path, list[int]]) -> None:
    folder, codes = ended
    assert all(codes) and (folder / "bare.store").exists(), "both began without it, and failed"
    assert not list(folder.glob("bare-*.pt"))


def test_the_blank_changes_no_number_of_a_batch_of_words() -> None:
    batch = rank_batch(NAME, 1)
    bare, blank = (trained_vlm(NAME, with_blanks=each) for each in (False, True))
    losses = [loss_of(model, forward, batch) for model, forward in (bare, blank)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, one), (_, other) in zip(bare[0].named_parameters(), blank[0].named_parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None or not other.grad.any(), name
        else:
            assert torch.equal(one.grad, other.grad), name
