"""Held-out rows of `sft` are scored with their entropy; their loss is the one that is trained all the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from luthier.models.passes import Scored
from luthier.objectives import Head
from luthier.records import Targets
from luthier.training.losses import ACCURACY, MicroLoss
from luthier.training.losses.tokens import TokenLosses
from luthier.training.report import ENTROPY

HIDDEN_KD, WEIGHT_VD = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((6, 8), (50, 8)))
LIKELIEST = int((WEIGHT_VD @ HIDDEN_KD[0]).argmax())
WEIGHTS_K = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.25, 1.0])


class _Pass:
    """A model whose hidden states at the targets are given."""

    def __init__(self, weights_K: torch.Tensor | None) -> None:
        self.weights_K = weights_K

    def scored(self, model: object, batch: object, score: Callable[..., Any]) -> tuple[Scored[Any], Targets]:
        targets = Targets(
            positions_K=torch.arange(6),
            ids_K=torch.tensor([LIKELIEST, 0, 49, 7, 7, 1]),
            segments_K=torch.tensor([0, 0, 0, 1, 1, 2]),
            weights_K=self.weights_K,
        )
        scores = score(HIDDEN_KD.clone().requires_grad_(), Head(weight_VD=WEIGHT_VD), targets)
        return Scored(scores=scores, anchor=torch.zeros(())), targets


@pytest.mark.parametrize("weights_K", [None, WEIGHTS_K], ids=["plain", "weighted"])
@pytest.mark.parametrize("num_sources", [1, 2])
def test_the_loss_of_held_out_rows_is_that_of_training(weights_K: torch.Tensor | None, num_sources: int) -> None:
    batch: Any = SimpleNamespace(sources=(1, 0, 1), num_segments=3)

    def found(*, trains: bool) -> MicroLoss:
        losses = TokenLosses(forward=cast(Any, _Pass(weights_K)), num_sources=num_sources)
        with torch.set_grad_enabled(trains):
            return losses.loss(torch.nn.Identity(), batch)

    trained, held_out = found(trains=True), found(trains=False)
    torch.testing.assert_close(held_out.loss_sum, trained.loss_sum.detach())
    assert held_out.num_units == trained.num_units == 6
    accuracies = [float(each.measures[ACCURACY].total) for each in (trained, held_out)]
    assert accuracies[0] == accuracies[1] == 1
    assert (held_out.by_source is None) == (trained.by_source is None) == (num_sources == 1)
    if held_out.by_source is not None:
        torch.testing.assert_close(held_out.by_source, trained.by_source)
    assert held_out.measures[ENTROPY].count == 6 and trained.measures[ENTROPY].count == 0
