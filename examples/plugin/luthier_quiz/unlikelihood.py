"""The objective ``unlikelihood``: rows with a verdict, target by target (Welleck et al., arXiv:1908.04319).

K targets, S segments, U rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import luthier

MEASURED = ("logps/chosen", "logps/rejected")


def token_unlikelihood(logps_K: torch.Tensor, good_K: torch.Tensor, numbers: Mapping[str, float]) -> torch.Tensor:
    """``-log p`` of targets of good answers, ``-log(1 - p)`` of those of bad ones, [K]."""
    bad_K = -torch.log(-torch.expm1(logps_K.clamp(max=-1e-6)))
    return torch.where(good_K, -logps_K, numbers["bad_weight"] * bad_K)


def make_losses(
    parts: luthier.ObjectiveParts, forward: luthier.ModelPass, tell: Callable[[str], None]
) -> tuple[luthier.StepLosses, luthier.StepLosses]:
    """What training minimises, and what is measured on held-out rows: the same."""
    losses = UnlikelihoodLosses(
        forward=forward, numbers=parts.config.objective.numbers, num_sources=max(parts.num_sources)
    )
    return losses, losses


@dataclass(kw_only=True, slots=True, eq=False)
class UnlikelihoodLosses(luthier.Stateless):
    """Of each row the mean over its targets; a step's loss is divided by its rows."""

    forward: luthier.ModelPass
    numbers: Mapping[str, float]
    num_sources: int = 1

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what `loss` measures."""
        return MEASURED

    def num_units(self, batch: luthier.Batch) -> int:
        """Rows with a verdict."""
        return len(batch.units)

    def loss(self, model: nn.Module, batch: luthier.Batch) -> luthier.MicroLoss:
        """The sum over the rows of a micro-batch."""
        scored, targets = self.forward.token_scores(model, batch)
        logps_K, segments_K = scored.scores.logps_K, targets.segments_K
        own_U = torch.tensor([unit.segments[0] for unit in batch.units], dtype=torch.int64, device=logps_K.device)
        good_U = torch.tensor([unit.verdict > 0 for unit in batch.units], dtype=torch.bool, device=logps_K.device)
        good_S = torch.zeros(batch.num_segments, dtype=torch.bool, device=logps_K.device).index_fill(
            0, own_U[good_U], True
        )
        losses_K = token_unlikelihood(logps_K, good_S[segments_K], self.numbers)
        if targets.weights_K is not None:  # those that rows bring
            losses_K = losses_K * targets.weights_K
        lengths_S = torch.bincount(segments_K, minlength=batch.num_segments).clamp(min=1)
        zeros_S = torch.zeros(batch.num_segments, dtype=losses_K.dtype, device=losses_K.device)
        losses_U = (zeros_S.index_add(0, segments_K, losses_K) / lengths_S)[own_U]
        logps_U = zeros_S.index_add(0, segments_K, logps_K.detach())[own_U]
        found = luthier.SequenceLoss(
            loss_sum=losses_U.sum(),
            losses_U=losses_U.detach(),
            measures=dict(
                zip(MEASURED, (luthier.measure(logps_U, good_U), luthier.measure(logps_U, ~good_U)), strict=True)
            ),
        )
        return luthier.micro_loss(found, scored.anchor, batch, self.num_sources)
