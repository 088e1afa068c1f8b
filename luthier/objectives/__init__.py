"""Batches and logits to losses: always sums, never means; the trainer divides by the whole step's count.

Read in this order: token_loss, table.
"""

from __future__ import annotations

from luthier.objectives.table import OBJECTIVES, Normaliser, Objective, objective_named
from luthier.objectives.token_loss import TokenLoss, token_loss_sum

__all__ = ["OBJECTIVES", "Normaliser", "Objective", "TokenLoss", "objective_named", "token_loss_sum"]
