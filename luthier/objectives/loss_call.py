"""Calls the function of a loss, which may be a plugin's, and looks at what it gives before anything is made of it.

A mean, or a shape that only broadcasts, would train something else than it says. U units: targets, pairs or rows.
"""

from __future__ import annotations

import torch

from luthier.config.loss_rows import Loss
from luthier.config.objective import LOSSES
from luthier.errors import LuthierError, PluginError
from luthier.plugins import failure_of


def computed_losses(loss: Loss, scores_U: torch.Tensor, unit: str, *arguments: object) -> torch.Tensor:
    """The loss of each unit, [U], from what the function is called with; ``scores_U`` are the scores among it that the
    losses are to have a gradient by, and ``unit`` is what one of them is of: ``"target"``.

    Raises `PluginError` where the function gives something else, or where a plugin's raises. Only the tensor's type and
    shape are looked at, never its values, which a GPU may still be computing.
    """
    try:
        losses_U = loss.compute(*arguments)
    except (LuthierError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if loss.name not in LOSSES.added():
            raise
        raise failure_of(_named(loss), error) from error
    if not isinstance(losses_U, torch.Tensor):
        raise _odd(loss, f"a {type(losses_U).__name__}", scores_U, unit)
    if losses_U.shape != scores_U.shape:
        raise _odd(loss, f"a tensor of shape {list(losses_U.shape)}", scores_U, unit)
    if scores_U.requires_grad and torch.is_grad_enabled() and not losses_U.requires_grad:
        what = f"what {_named(loss)} gives has no gradient, so nothing is learned from it"
        hint = "compute them from what the function is given, without .detach(), .item(), .numpy() or torch.no_grad()"
        raise PluginError(what, hint=hint)
    return losses_U


def _named(loss: Loss) -> str:
    return f"the loss {loss.name!r} of {LOSSES.added_by(loss.name)}"


def _odd(loss: Loss, given: str, scores_U: torch.Tensor, unit: str) -> PluginError:
    what = f"{_named(loss)} gives {given}, where one of shape {list(scores_U.shape)} is needed: a loss for each {unit}"
    hint = (
        f"return one loss for each {unit}, do not take the mean or the sum: luthier adds them up and divides by the "
        f"number of those of the whole step (docs/plugins.md)"
    )
    return PluginError(what, hint=hint)
