"""What a run says while it runs: small records, sent to every listener (log file, progress view, the caller)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from luthier.training.folder.staging import FILES
from luthier.training.report.result import EvalRecord, GenerationRound, StepRecord
from luthier.writing import counted


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
