"""Answers that are drawn while the steps before theirs are learned, by one thread, in the order of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from luthier.errors import UserError
from luthier.training.rollouts.trajectories import Trajectory

DrawingNotes = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnStep:
    """What was drawn for a step, by the number of the question and of the answer, and by which weights.

    notes    what could not be done, and how often
    refused  why a question was not answered, by its number
    seconds  that drawing took, and bringing the weights before it
    """

    answers: dict[tuple[int, int], Trajectory]
    version: int
    notes: DrawingNotes = field(default_factory=list)
    refused: Mapping[int, str] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)


class DrawingAhead:
    """The steps that are being drawn, or wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="luthier-ahead")
        self._steps: dict[int, Future[DrawnStep]] = {}

    def begin(self, step: int, draw: Callable[[], DrawnStep]) -> None:
        """Draw the answers of a step behind those that wait."""
        self._steps[step] = self._thread.submit(draw)

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def take(self, step: int) -> DrawnStep:
        """What was drawn for a step; waits for it. Raises what drawing it has raised, and then draws nothing more."""
        try:
            return self._steps.pop(step).result()
        except BaseException:
            self._thread.shutdown(wait=False, cancel_futures=True)
            raise

    def finished(self) -> list[int]:
        """The steps whose answers are there, in their order: waits for all of them up to the first that has failed."""
        found = []
        for step, future in sorted(self._steps.items()):
            if isinstance(future.exception(), UserError):
                break
            found.append(step)
        return found
