"""What a run says while it runs: small records, sent to every listener (log file, progress view, the caller)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luthier.training.report.result import EvalRecord, GenerationRound, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A decision or an incident in words."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins (again, if ``step`` is not 0)."""

    step: int
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """An optimizer step is done; cheap, sent for each."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A whole checkpoint stands. ``name`` is ``checkpoint-N``."""

    step: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Training ended; the progress view closes."""

    step: int


Event = Note | Started | StepDone | StepRecord | EvalRecord | GenerationRound | Saved | Finished
EventListener = Callable[[Event], None]


def silent(event: Event) -> None:
    """A listener that hears nothing."""


def tell_all(listeners: list[EventListener]) -> EventListener:
    """One listener that passes every event on, in order."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
