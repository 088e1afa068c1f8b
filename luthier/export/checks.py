"""What the proof of an exported folder says: its checks, and what each of them found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

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
