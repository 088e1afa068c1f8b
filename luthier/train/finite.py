"""A step whose loss or gradient is no number ends the run before it spoils the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from luthier.errors import TrainingError
from luthier.records import Address

MAX_ROWS_NAMED = 8


def check_finite(
    losses: Sequence[tuple[torch.Tensor, tuple[Address, ...]]], norm: torch.Tensor | float | None, *, step: int
) -> None:
    """Raise `TrainingError`, with the rows, if the loss of one of a step's micro-batches, or the ``norm`` of the step's
    gradient (None: not to be looked at), is not finite."""
    values = [loss for loss, _ in losses]
    if norm is not None:
        values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
    if torch.isfinite(torch.stack(values)).all():  # one look at the device a step
        return
    guilty = [addresses for loss, addresses in losses if not torch.isfinite(loss)]
    rows = [str(row) for addresses in guilty or [a for _, a in losses] for row in addresses]
    named = ", ".join(rows[:MAX_ROWS_NAMED]) + (
        f" and {len(rows) - MAX_ROWS_NAMED} more" if len(rows) > MAX_ROWS_NAMED else ""
    )
    what = "the loss" if guilty else f"the gradient's norm ({norm if norm is None else float(norm)})"
    raise TrainingError(
        f"step {step}: {what} is not a finite number; the weights are those of step {step - 1}\n"
        f"  rows of the batch: {named}",
        hint="lower train.learning_rate, raise train.warmup_steps, use train.precision bf16 or fp32, or look at "
        "those rows",
    )
