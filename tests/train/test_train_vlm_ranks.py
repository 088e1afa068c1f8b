"""Two ranks of which one has no pictures: with a blank one in their place the gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import exit_codes, start_ranks
from tiny_vlm_ranks import loss_of, rank_batch, trained_vlm

NAME = "qwen3_vl"  # whose tower gives features to several layers
PROGRAM = Path(__file__).with_name("tiny_vlm_ranks.py")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Where the gradients are, and the exit codes of both ranks by mode."""
    folder = tmp_path_factory.mktemp("ranks")
    started = {
        mode: start_ranks(PROGRAM, str(folder), NAME, mode, size=2, errors=folder / f"{mode}.stderr")
        for mode in ("blank", "bare")
    }
    return folder, {mode: exit_codes(processes) for mode, processes in started.items()}


def test_both_ranks_get_the_mean_gradient_of_a_batch_with_pictures_and_one_without(
    ended: tuple[Path, dict[str, list[int]]],
) -> None:
    folder, codes = ended
    assert codes["blank"] == [0, 0], (folder / "blank.stderr").read_text()
    first, second = (torch.load(folder / f"blank-{rank}.pt", weights_only=True) for rank in range(2))
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


def test_without_the_blank_the_ranks_cannot_go_on(ended: tuple[Path, dict[str, list[int]]]) -> None:
    assert all(ended[1]["bare"])


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
