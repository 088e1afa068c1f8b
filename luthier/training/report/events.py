"""What a run says while it runs: small records for every listener, its journal, and its progress on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from luthier.terminal import stderr_terminal
from luthier.training.folder import FILES
from luthier.training.report import ACCURACIES, MARGINS, EvalRecord, GenerationRound, StepRecord
from luthier.writing import counted, printable


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A decision or an incident in words."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins (again, if ``step`` is not 0). ``max_steps``: as many as the run is expected to have."""

    step: int
    max_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """An optimizer step is done; cheap, sent for each. ``max_steps``: how many the run has, as far as it is known by
    now: while rows are still being prepared it is an estimate."""

    step: int
    max_steps: int


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


# ----------------------------------------------------------------------------------------------- the journal: log.jsonl


Record = StepRecord | EvalRecord | GenerationRound
_KINDS: dict[str, type[Record]] = {
    "train": StepRecord,
    "eval": EvalRecord,
    "generation": GenerationRound,
}


class LogFile:
    """A listener that appends records to ``log.jsonl``, line by line. Raises `CheckpointError` if it cannot.

    Opened at ``step`` of a resumed run it first drops the lines of later steps: they will be written again. Lines that
    are damaged (whole lines, but no records) are moved to ``log.jsonl.damaged`` and told.
    """

    def __init__(self, path: Path, *, step: int, tell: EventListener = silent) -> None:
        self.path = path
        _truncate(path, step, tell)

    def __call__(self, event: Event) -> None:
        for kind, record_type in _KINDS.items():
            if isinstance(event, record_type):
                told = {name: value for name, value in msgspec.to_builtins(event).items() if value != {}}
                line = msgspec.json.encode({"kind": kind, **told})
                FILES.append(self.path, line + b"\n")


def read_log(
    path: Path, tell: EventListener = silent
) -> tuple[tuple[StepRecord, ...], tuple[EvalRecord, ...], tuple[GenerationRound, ...]]:
    """The records of ``log.jsonl`` by kind; empty if there is no file. A line cut off by a kill is left out, and so are
    damaged lines, which are told.
    """
    found: dict[type, list[Any]] = {record_type: [] for record_type in _KINDS.values()}
    damaged = []
    for number, _, record in _lines(path):
        if isinstance(record, str):
            damaged.append((number, record))
        else:
            found[type(record)].append(record)
    if damaged:
        tell(Note(text=f"{_told(path, damaged)}; the report leaves out what stood there"))
    return tuple(found[StepRecord]), tuple(found[EvalRecord]), tuple(found[GenerationRound])


def _truncate(path: Path, step: int, tell: EventListener) -> None:
    if not path.exists():
        return
    kept, damaged, set_aside = [], [], []
    for number, line, record in _lines(path):
        if isinstance(record, str):
            damaged.append((number, record))
            set_aside.append(line)
        elif record.step <= step:
            kept.append(line)
    if damaged:
        aside = path.with_name(path.name + ".damaged")
        FILES.append(aside, b"".join(line + b"\n" for line in set_aside))
        tell(Note(text=f"{_told(path, damaged)}; moved to {aside.name}, and the report leaves out what stood there"))
    FILES.write(path, b"".join(line + b"\n" for line in kept))


def _told(path: Path, damaged: list[tuple[int, str]]) -> str:
    number, why = damaged[0]
    count = counted(len(damaged), "line is", "lines are")
    return f"{count} damaged in {path.name}, the first is {path}:{number} ({why})"


def _lines(path: Path) -> Iterator[tuple[int, bytes, Record | str]]:
    """Each whole line with its number and its record, or why it is none. What follows the last newline was cut off."""
    if path.exists():
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            if line:
                yield number, line, _record(line)


def _record(line: bytes) -> Record | str:
    try:
        told = msgspec.json.decode(line)
        kind = told.pop("kind", None) if isinstance(told, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            return "no record of a kind that a log has"
        return msgspec.convert(told, _KINDS[kind])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return str(error)


# ----------------------------------------------------------------------------------------------- what a user sees of it


SECONDS_BETWEEN_LINES = 10.0  # often enough to see that it lives, seldom enough for a log file
WIDE = 130  # columns that all the numbers need beside a bar
SHOWN = {ACCURACIES: "right", MARGINS: "margin", "kl": "kl"}  # of the measures, beside the loss


class PlainLines:
    """A listener that prints lines: notes, evaluations and checkpoints at once, training steps every few seconds."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.max_steps = 0
        self._printed = -float("inf")
        self._first: tuple[int, float] | None = None  # step and time at the start, for the ETA

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self.max_steps = event.max_steps
                self._first = (event.step, self.clock())
            case StepRecord():
                now = self.clock()
                if now - self._printed >= SECONDS_BETWEEN_LINES or event.step == self.max_steps:
                    self._printed = now
                    self._print(
                        f"step {event.step}/{self.max_steps}  {_numbers(event)}  ETA {self._eta(event.step, now)}"
                    )
            case StepDone():
                self.max_steps = event.max_steps
            case Finished():
                pass
            case _:
                self._print(sentence(event))

    def _print(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)

    def _eta(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0]:
            return "?"
        first, begun = self._first
        seconds = round((now - begun) / (step - first) * max(0, self.max_steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class ProgressBar:
    """A listener that draws a bar with the latest numbers; everything else is printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or stderr_terminal()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._open(event)
            case StepDone():
                if self._bar is not None and self._task is not None:
                    self._bar.update(self._task, completed=event.step, total=event.max_steps)
            case StepRecord():
                if self._bar is not None and self._task is not None:
                    self._bar.update(self._task, completed=event.step, numbers=self._words(event))
            case Finished():
                self.close()
            case _:
                self.console.print(sentence(event), highlight=False, markup=False)

    def _words(self, event: StepRecord) -> str:
        width = self.console.width
        return _numbers(event) if width >= WIDE else _short_numbers(event, with_speed=width >= 80)

    def close(self) -> None:
        """Give the terminal back; also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self, event: Started) -> None:
        # The bar takes what the others leave of 80 columns; what is too wide is cut at the end of the numbers.
        self._bar = Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=event.max_steps, completed=event.step, numbers="")
        self._bar.start()


def make_view(*, wanted: bool) -> PlainLines | ProgressBar:
    """A bar where one is wanted and standard error is a terminal, else lines."""
    return ProgressBar() if wanted and sys.stderr.isatty() else PlainLines()


def sentence(event: Event) -> str:
    """An event in words. Raises AssertionError for the ones that views count instead of printing."""
    match event:
        case Note():
            return event.text
        case EvalRecord():
            return f"eval at step {event.step}: loss {event.loss:.4f}, {event.words}" + "".join(
                f"\n  {name}: loss {loss:.4f}" for name, loss in event.loss_by_source.items()
            )
        case GenerationRound():
            right = sum(record.equal for record in event.records)
            return f"answers at step {event.step}: {right} of {len(event.records)} exactly right" + "".join(
                f", {name} {score:.4g}" for name, score in event.scores.items()
            )
        case Saved():
            return f"saved {event.name}"
        case _:
            raise AssertionError(event)


def _short_numbers(event: StepRecord, *, with_speed: bool) -> str:
    """What stands beside a short bar: what one looks at first; the rest is in the log and the report."""
    right = f"  right {event.measures[ACCURACIES]:.2f}" if ACCURACIES in event.measures else ""
    speed = f"  {event.tokens_per_second:,.0f} tok/s" if with_speed else ""
    return f"loss {event.loss:.4f}{right}{speed}"


def _numbers(event: StepRecord) -> str:
    norm = "skipped" if event.grad_norm is None else f"{event.grad_norm:.3f}"
    compared = "".join(
        f"{shown} {event.measures[name]:.3f}  " for name, shown in SHOWN.items() if name in event.measures
    )
    return (
        f"loss {event.loss:.4f}  {compared}lr {event.learning_rate:.1e}  grad norm {norm}  "
        f"{event.tokens_per_second:,.0f} tok/s  {event.target_tokens_per_second:,.0f} target/s"
    )
