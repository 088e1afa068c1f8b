"""The loss ``focal``, of single targets."""

from __future__ import annotations

import torch

import luthier


def focal(quantities: luthier.TokenQuantities, settings: luthier.TokenSettings) -> torch.Tensor:
    """``-(1 - p)^gamma log p`` for each target, [C] (Lin et al., arXiv:1708.02002)."""
    missing_C = -torch.expm1(quantities.logps_C.clamp(max=-1e-7))  # 1 - p, above 0: its power has a slope there
    return missing_C.pow(settings.own["focal_gamma"]) * -quantities.logps_C
