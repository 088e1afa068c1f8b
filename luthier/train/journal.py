"""``log.jsonl``: one line per logging step and per evaluation, and reading it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from luthier.train.events import Event
from luthier.train.files import FILES
from luthier.train.result import EvalRecord, GenerationRound, StepRecord

_KINDS: dict[str, type[StepRecord] | type[EvalRecord] | type[GenerationRound]] = {
    "train": StepRecord,
    "eval": EvalRecord,
    "generation": GenerationRound,
}


class LogFile:
    """A listener that appends records to ``log.jsonl``, line by line. Raises `CheckpointError` if it cannot.

    Opened at ``step`` of a resumed run it first drops the lines of later steps: they will be written again.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        _truncate(path, step)

    def __call__(self, event: Event) -> None:
        for kind, record_type in _KINDS.items():
            if isinstance(event, record_type):
                told = {name: value for name, value in msgspec.to_builtins(event).items() if value != {}}
                line = msgspec.json.encode({"kind": kind, **told})
                FILES.append(self.path, line + b"\n")


def read_log(path: Path) -> tuple[tuple[StepRecord, ...], tuple[EvalRecord, ...], tuple[GenerationRound, ...]]:
    """The records of ``log.jsonl`` by kind; empty if there is no file. A line cut off by a kill is left out."""
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for line in _whole_lines(path):
        kind = line.pop("kind")
        found[kind].append(msgspec.convert(line, _KINDS[kind]))
    return tuple(found["train"]), tuple(found["eval"]), tuple(found["generation"])


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = (msgspec.json.encode(line) + b"\n" for line in _whole_lines(path) if line["step"] <= step)
    FILES.write(path, b"".join(kept))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # what follows the last newline was cut off
    return [msgspec.json.decode(line) for line in path.read_bytes().split(b"\n")[:-1] if line]
