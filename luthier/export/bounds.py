"""How far apart two models may be that should be the same, by the types that they compute in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far apart two models may be that should be the same. ``tie``: a place where the trained model holds two
    tokens for so nearly equally likely is no evidence for either. ``same``: the share of the other places that
    have the same likeliest token."""

    logprob: float = np.inf
    kl: float = 1e-3
    kl_at_one: float = np.inf
    tie: float = 0.05
    same: float = 0.99


BOUNDS = {
    "exact": Bound(logprob=1e-4, tie=1e-3),
    "llama.cpp": Bound(logprob=1e-3, tie=0.01),  # float32 as well, by other sums
    "cast": Bound(kl_at_one=0.1),
    "8 bits": Bound(kl=5e-3, kl_at_one=0.5, tie=0.1),
    "fp8": Bound(kl=2e-2, kl_at_one=1.0, tie=0.3, same=0.98),  # 3 bits behind the leading one, where int8 has 7
}
EXACT, CAST, EIGHT_BITS = "exact", "cast", "8 bits"


def bound_of(dtypes: Sequence[str], *, rounds_inputs: bool = False) -> str:
    """By which bounds models that compute in these types are compared. ``rounds_inputs``: the trained one also rounds
    what goes into its layers to 8 bits, as LLM.int8 does, and the exported one does not."""
    if rounds_inputs:
        return EIGHT_BITS
    return EXACT if set(dtypes) == {"float32"} else CAST
