"""By which bounds two models are compared that should be the same, and what the proof of an exported folder says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    "coarse": Bound(kl=5e-2, kl_at_one=2.0, tie=0.7, same=0.95),  # 4 bits, or fp8 for what goes into layers, too
}
EXACT, CAST, EIGHT_BITS = "exact", "cast", "8 bits"


def bound_of(dtypes: Sequence[str], *, rounds_inputs: bool = False) -> str:
    """By which bounds models that compute in these types are compared. ``rounds_inputs``: the trained one also rounds
    what goes into its layers to 8 bits, as LLM.int8 does, and the exported one does not."""
    if rounds_inputs:
        return EIGHT_BITS
    return EXACT if set(dtypes) == {"float32"} else CAST


# --------------------------------------------------------------------------------------------------------------------
# What the proof of an exported folder says: its checks, and what each of them found.


MAX_SHOWN = 5  # findings of a check that are told one by one


class ExportCheck(StrEnum):
    """What is proven of an exported folder."""

    FILES = "files"
    TEMPLATE = "template"
    STOPS = "stops"
    SPECIAL_IDS = "special_ids"
    TOKENS = "tokens"
    DTYPE = "dtype"
    LOADS = "loads"
    WEIGHTS = "weights"
    MERGED = "merged"
    DIFFERS = "differs"
    PICTURES = "pictures"
    LOGPROBS = "logprobs"
    ANSWERS = "answers"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFinding:
    """Something that does not hold: where, and the numbers that disagree."""

    where: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """One check: ``told`` is what was compared, with its numbers."""

    check: ExportCheck
    told: str
    findings: tuple[ExportFinding, ...] = ()
    num_findings: int = 0

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return not self.num_findings


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportProof:
    """All checks of a folder."""

    results: tuple[ExportResult, ...]

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return all(result.ok for result in self.results)

    def to_json(self) -> dict[str, object]:
        """For programs: the checks by name."""
        return {
            "ok": self.ok,
            "checks": {
                result.check.value: {
                    "ok": result.ok,
                    "told": result.told,
                    "findings": [{"where": one.where, "what": one.what} for one in result.findings],
                    "num_findings": result.num_findings,
                }
                for result in self.results
            },
        }


def check_result(check: ExportCheck, told: str, faults: Sequence[tuple[str, str]]) -> ExportResult:
    """A check with the faults that it found, of which the first are told: where, what."""
    shown = tuple(ExportFinding(where=where, what=what) for where, what in faults[:MAX_SHOWN])
    return ExportResult(check=check, told=told, findings=shown, num_findings=len(faults))
