"""Losses of single tokens, as a table: what fine-tuning and pretraining minimise. C targets of a chunk, V vocabulary.

Each is a function of a few numbers a target, so adding one is a function and a row; `hidden_loss` and its chunks know
none of them. Sums over targets, divided by the number of targets of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from luthier.errors import UserError

EAFT_CANDIDATES = 20  # the entropy of so many likeliest tokens stands for that of all; at most log 20 = 3.0 nats
EAFT_SCALE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenQuantities:
    """What a token's loss may depend on; all float32[C], differentiable unless said otherwise.

    logps_C        log-probability of the target
    lse_C          log of the sum of exp(logits)
    mean_logits_C  mean of the logits over the vocabulary
    kl_C           KL(reference || policy) over the vocabulary; zeros without a reference
    entropy_C      of the `EAFT_CANDIDATES` likeliest tokens, renormalised; not differentiable, zeros where not needed
    """

    logps_C: torch.Tensor
    lse_C: torch.Tensor
    mean_logits_C: torch.Tensor
    kl_C: torch.Tensor
    entropy_C: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSettings:
    """Which token loss, and its numbers.

    label_smoothing  share of the target's probability that is spread over the vocabulary (arXiv:1512.00567)
    z_loss           weight of ``lse^2``, which keeps logits from drifting (arXiv:2204.02311)
    alpha            of ``eaft`` the power of the entropy; of ``asft`` the weight of the KL to the reference
    """

    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenObjective:
    """A row of the table. ``function(quantities, settings)`` gives the loss of each target, [C].

    needs_entropy, needs_reference   whether `TokenQuantities.entropy_C`, `kl_C` must be filled
    is_plain                         cross-entropy as it is, which kernels of other libraries know
    formula, paper, says             for docs/objectives.md
    """

    name: str
    function: Callable[[TokenQuantities, TokenSettings], torch.Tensor]
    needs_entropy: bool = False
    needs_reference: bool = False
    is_plain: bool = False
    formula: str
    paper: str
    says: str


def token_losses(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    """The loss of each target, [C], with the z-loss."""
    losses_C = token_objective(settings.loss).function(quantities, settings)
    if settings.z_loss:
        losses_C = losses_C + settings.z_loss * quantities.lse_C.square()
    return losses_C


def token_objective(name: str) -> TokenObjective:
    """The row, or `UserError` with the names there are."""
    if name not in TOKEN_OBJECTIVES:
        raise UserError(f"there is no token loss {name!r}", hint=f"choose one of: {', '.join(TOKEN_OBJECTIVES)}")
    return TOKEN_OBJECTIVES[name]


def _cross_entropy(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    smoothing = settings.label_smoothing
    if not smoothing:
        return -quantities.logps_C
    # against (1 - e) onehot + e / V:  (1 - e) (-log p) + e (lse - mean logit)
    spread_C = quantities.lse_C - quantities.mean_logits_C
    return (1 - smoothing) * -quantities.logps_C + smoothing * spread_C


def _dft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = _cross_entropy(quantities, settings)
    return quantities.logps_C.detach().exp() * nll_C


def _eaft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = _cross_entropy(quantities, settings)
    return (quantities.entropy_C / EAFT_SCALE) ** settings.alpha * nll_C


def _asft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    return _dft(quantities, settings) + settings.alpha * quantities.kl_C


TOKEN_OBJECTIVES: dict[str, TokenObjective] = {
    row.name: row
    for row in (
        TokenObjective(
            name="cross_entropy",
            function=_cross_entropy,
            is_plain=True,
            formula="-log p",
            paper="",
            says="maximum likelihood",
        ),
        TokenObjective(
            name="dft",
            function=_dft,
            formula="-sg(p) log p",
            paper="2508.05629",
            says="DFT: unlikely targets count less",
        ),
        TokenObjective(
            name="eaft",
            function=_eaft,
            needs_entropy=True,
            formula="-sg(H20 / 3)^alpha log p, H20 the entropy of the 20 likeliest tokens",
            paper="2601.02151",
            says="EAFT: targets count by how open the choice was",
        ),
        TokenObjective(
            name="asft",
            function=_asft,
            needs_reference=True,
            formula="-sg(p) log p + alpha KL(ref, policy)",
            paper="2509.23753",
            says="ASFT: DFT held to the reference",
        ),
    )
}
