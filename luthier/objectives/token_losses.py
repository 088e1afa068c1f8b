"""Losses of single tokens: what fine-tuning and pretraining minimise. C targets of a chunk, V vocabulary.

Each is a function of a few numbers a target, and a row of `config.loss_rows`; `hidden_loss` and its chunks know none of
them. Sums over targets, divided by the number of targets of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from luthier.config.objective import LOSSES

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
    own              numbers of a plugin's loss, by their keys
    """

    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    alpha: float = 1.0
    own: Mapping[str, float] = field(default_factory=dict)


def token_losses(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    """The loss of each target, [C], with the z-loss."""
    losses_C: torch.Tensor = LOSSES.named(settings.loss).compute(quantities, settings)
    if settings.z_loss:
        losses_C = losses_C + settings.z_loss * quantities.lse_C.square()
    return losses_C


def cross_entropy(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    smoothing = settings.label_smoothing
    if not smoothing:
        return -quantities.logps_C
    # against (1 - e) onehot + e / V:  (1 - e) (-log p) + e (lse - mean logit)
    spread_C = quantities.lse_C - quantities.mean_logits_C
    return (1 - smoothing) * -quantities.logps_C + smoothing * spread_C


def dft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = cross_entropy(quantities, settings)
    return quantities.logps_C.detach().exp() * nll_C


def eaft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    nll_C = cross_entropy(quantities, settings)
    return (quantities.entropy_C / EAFT_SCALE) ** settings.alpha * nll_C


def asft(quantities: TokenQuantities, settings: TokenSettings) -> torch.Tensor:
    return dft(quantities, settings) + settings.alpha * quantities.kl_C
