"""A kernel compared with the chunks, on hidden states of the run itself. K targets, V vocabulary, D hidden size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from subprocess import SubprocessError

import torch

from luthier.objectives.fused_head import unfit
from luthier.objectives.head import Head
from luthier.objectives.hidden_loss import hidden_loss_sum
from luthier.objectives.token_losses import TokenSettings
from luthier.objectives.token_scores import TokenScores, token_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far two ways to the same numbers may lie apart, with some dozens of targets.

    nats      of one target's log-probability
    share     of a mean loss, or of the length of a gradient: what all targets have in common, so rounding averages out
    distance  between two gradients, as a share of their length
    flags     share of targets that only one of them ranks first: near ties, after rounding
    """

    nats: float
    share: float
    distance: float
    flags: float


LIMITS = {
    torch.float32: Limits(nats=1e-3, share=1e-4, distance=1e-3, flags=0.0),
    torch.float16: Limits(nats=5e-2, share=2e-3, distance=2e-2, flags=0.1),
    torch.bfloat16: Limits(nats=2e-1, share=5e-3, distance=5e-2, flags=0.1),  # a logit of 30 is rounded to 1/8
}

# What kernels raise that a device, a version or a shape does not suit: Triton's own errors are made `RuntimeError`. The
# last two come from machines on which Triton cannot build its launcher: a compiler that finds no Python.h, a cache
# folder that cannot be written.
KERNEL_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, SubprocessError, OSError)


def kernel_problem(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor, *, settings: TokenSettings) -> str | None:
    """What ``head.kernel`` computes otherwise than the chunks, in numbers, or why it does not run; None: nothing.

    Looks at sums of losses under ``settings``, plain and weighted, at log-probabilities of single targets and at which
    rank first, and at the gradients of the hidden states and of what is trained of the head, for both kinds of loss.
    """
    assert head.kernel is not None and len(ids_K) > 0
    if (reason := unfit(head)) is not None:
        return reason
    limits = LIMITS[head.compute_dtype]
    # every other target counts half
    weights_K = 1 - 0.5 * (torch.arange(len(ids_K), device=ids_K.device) % 2)
    ways: tuple[_Way, ...] = (
        partial(_loss_sum, settings=settings, weights_K=None),
        partial(_loss_sum, settings=settings, weights_K=weights_K),
        _scores,
    )
    for way in ways:
        expected = way(hidden_KD, replace(head, kernel=None), ids_K)
        try:
            found = way(hidden_KD, head, ids_K)
        except KERNEL_REFUSALS as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        problem = next(_differences(found, expected, limits), None)
        if problem is not None:
            return problem
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Seen:
    """``scores`` where it is that of single targets; gradients by what they are of."""

    mean_loss: float
    scores: TokenScores | None = None
    gradients: dict[str, torch.Tensor]


_Way = Callable[[torch.Tensor, Head, torch.Tensor], _Seen]


def _loss_sum(
    hidden_KD: torch.Tensor,
    head: Head,
    ids_K: torch.Tensor,
    *,
    settings: TokenSettings,
    weights_K: torch.Tensor | None,
) -> _Seen:
    hidden_KD, head, leaves = _as_leaves(hidden_KD, head)
    with torch.enable_grad():
        loss_sum = hidden_loss_sum(hidden_KD, head, ids_K, weights_K, settings=settings).loss_sum
    return _Seen(mean_loss=loss_sum.item() / len(ids_K), gradients=_gradients(loss_sum, leaves))


def _scores(hidden_KD: torch.Tensor, head: Head, ids_K: torch.Tensor) -> _Seen:
    """Some targets are made likelier, some less likely, some are left alone."""
    hidden_KD, head, leaves = _as_leaves(hidden_KD, head)
    counts_K = torch.arange(len(ids_K), device=ids_K.device) % 3 - 1.0
    with torch.enable_grad():
        scores = token_scores(hidden_KD, head, ids_K)
        weighted = scores.logps_K @ counts_K
    mean_loss = -scores.logps_K.detach().mean().item()
    return _Seen(mean_loss=mean_loss, scores=scores, gradients=_gradients(weighted, leaves))


def _as_leaves(hidden_KD: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head, dict[str, torch.Tensor]]:
    """The same numbers apart from the model's graph; of the head what is trained needs a gradient here too."""
    hidden_KD = hidden_KD.detach().requires_grad_()
    weight_VD = head.weight_VD.detach().requires_grad_(head.weight_VD.requires_grad)
    bias_V = None if head.bias_V is None else head.bias_V.detach().requires_grad_(head.bias_V.requires_grad)
    leaves = {"the hidden states": hidden_KD, "the weight": weight_VD, "the bias": bias_V}
    return (
        hidden_KD,
        replace(head, weight_VD=weight_VD, bias_V=bias_V),
        {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad},
    )


def _gradients(value: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def _differences(found: _Seen, expected: _Seen, limits: Limits) -> Iterator[str]:
    """What is too far apart; comparisons are such that what is no number is."""
    apart = abs(found.mean_loss - expected.mean_loss)
    if not apart <= limits.share * (1 + expected.mean_loss):
        yield f"a mean loss of {found.mean_loss:.6g} in place of {expected.mean_loss:.6g}"
    if found.scores is not None and expected.scores is not None:
        worst = float((found.scores.logps_K - expected.scores.logps_K).detach().abs().max())
        if not worst <= limits.nats:
            yield f"log-probabilities differ by {worst:.2g} (allowed {limits.nats:.2g})"
        flags = float((found.scores.correct_K != expected.scores.correct_K).float().mean())
        if not flags <= limits.flags:
            yield f"of {flags:.0%} of the targets it is told otherwise whether they rank first"
    for name, gradient in expected.gradients.items():
        length, along, distance = _apart(found.gradients[name], gradient)
        if not (along <= limits.share * length and distance <= limits.distance * length):
            shares = f"{along / length:.2g} in length, {distance / length:.2g} in all" if length else f"{distance:.2g}"
            yield f"the gradient of {name} differs by {shares} (allowed {limits.share:.2g}, {limits.distance:.2g})"


def _apart(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """The length of a gradient, how much longer or shorter the other is along it, and how far away."""
    away, expected = (found.float() - expected.float()).flatten(), expected.float().flatten()
    length = float(expected.norm())
    along = abs(float(away @ expected)) / length if length else 0.0
    return length, along, float(away.norm())
