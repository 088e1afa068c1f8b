"""A place in a stream of batches, as JSON of at most 4 kB: enough to go on there, or to refuse to and say why.

The number of ranks and of workers is absent on purpose: what a step holds does not depend on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from luthier.errors import CheckpointError
from luthier.writing import counted, write_text

STATE_VERSION = 3  # 2: rows were ordered by other rules
STATE_FILE = "loader_state.json"
MAX_STATE_BYTES = 16_384  # of a run; a loader's own is a quarter of it
MAX_MARKS = 32
MARK_DIGITS = 12

StateScalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTrail:
    """A digest of what the steps so far were made of, with marks on the way, which tell where two trails part.

    marks  ``(steps, beginning of the digest after so many)``, at multiples of ``stride``; at most `MAX_MARKS`
    """

    digest: str = ""
    num_steps: int = 0
    stride: int = 1
    marks: tuple[tuple[int, str], ...] = ()

    def after(self, content: bytes) -> RowTrail:
        """The trail one step on; ``content`` is a digest of the step's rows, or their keys."""
        digest = hashlib.blake2b(bytes.fromhex(self.digest) + content, digest_size=16).hexdigest()
        num_steps, stride, marks = self.num_steps + 1, self.stride, self.marks
        if num_steps % stride == 0:
            marks = (*marks, (num_steps, digest[:MARK_DIGITS]))
            if len(marks) > MAX_MARKS:
                stride *= 2
                marks = tuple(mark for mark in marks if mark[0] % stride == 0)
        return RowTrail(digest=digest, num_steps=num_steps, stride=stride, marks=marks)

    def cut_back(self, num_steps: int, digest: str) -> RowTrail:
        """The trail after fewer steps, whose digest is known. Gone on with, it becomes this one again."""
        return RowTrail(
            digest=digest,
            num_steps=num_steps,
            stride=self.stride,
            marks=tuple(mark for mark in self.marks if mark[0] <= num_steps),
        )

    def parts_from(self, other: RowTrail) -> tuple[int, int] | None:
        """``(a, b)``: after ``a`` steps both trails are the same, after ``b`` they are not; None if they never part.

        Both must have the same number of steps.
        """
        assert self.num_steps == other.num_steps, f"{counted(self.num_steps, 'step')} and {other.num_steps}"
        if self.digest == other.digest:
            return None
        same = 0
        for (steps, mine), (_, theirs) in zip(self.marks, other.marks, strict=True):
            if mine != theirs:
                return same, steps
            same = steps
        return same, self.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """Where a run is in its stream of batches, and what must be the same for the rest of the stream to be the same.

    step      optimizer steps done, over all epochs
    epoch     the epoch that goes on, from 0
    cursor    how far it is, in the unit of the plan: micro-batches of all ranks, or rows of the epoch's order
    waiting   of a run: where its plan goes on (`StreamPlan.state_after`)
    trail     of the rows that were used
    settings  everything else that decides the stream, by the names that users know
    data      identity of the data
    """

    version: int = STATE_VERSION
    seed: int
    epoch: int
    step: int
    cursor: int
    waiting: dict[str, Any] = field(default_factory=dict)
    trail: RowTrail = field(default_factory=RowTrail)
    settings: dict[str, StateScalar]
    data: str

    def to_json(self) -> dict[str, object]:
        """The state as a JSON object with a checksum."""
        content: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return {**content, "checksum": _checksum(content)}

    @classmethod
    def from_json(cls, content: object, *, where: str = "the loader's state") -> Self:
        """What `to_json` gave. Raises `CheckpointError` if it is damaged, or of another version."""
        if not isinstance(content, dict):
            raise CheckpointError(f"{where} is damaged: a JSON object is needed, this is {type(content).__name__}")
        version = content.get("version")
        if version != STATE_VERSION:
            raise CheckpointError(
                f"{where} is of version {version}, this Luthier reads {STATE_VERSION} and orders rows by other "
                "rules: the rest of the run would repeat some rows and leave out others",
                hint="go on with the Luthier that wrote it, or start anew with output.overwrite: true or another "
                "output.dir",
            )
        body = {name: value for name, value in content.items() if name != "checksum"}
        if content.get("checksum") != (found := _checksum(body)):
            raise CheckpointError(
                f"{where} is damaged: its checksum should be {content.get('checksum')}, but is {found}",
                hint="go on from another checkpoint",
            )
        try:
            return msgspec.convert(body, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{where} is damaged: {error}", hint="go on from another checkpoint") from error

    def save(self, folder: Path) -> None:
        """Write `STATE_FILE`, whole or not at all."""
        text = json.dumps(self.to_json(), indent=1)
        assert len(text) <= MAX_STATE_BYTES, f"a loader's state of {counted(len(text), 'byte')}: {text[:200]} …"
        write_text(folder / STATE_FILE, text)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote. Raises `CheckpointError`."""
        path = folder / STATE_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", hint="go on from another checkpoint") from error
        return cls.from_json(content, where=str(path))

    def check(self, run: LoaderState, *, where: str = "the loader's state") -> None:
        """Raise `CheckpointError` that names all settings in which ``run``, which wants to go on here, differs."""
        there, here = self._decisive(), run._decisive()
        differing = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
        if differing:
            lines = "\n".join(f"  {name}: {_value(there, name)} there, {_value(here, name)} here" for name in differing)
            raise CheckpointError(
                f"{where} was written by a run with another stream of batches:\n{lines}",
                hint="restore those settings and that data, or start anew",
            )

    def _decisive(self) -> Mapping[str, StateScalar]:
        return {**self.settings, "seed": self.seed, "identity of the data": self.data}


def _value(settings: Mapping[str, StateScalar], name: str) -> str:
    return str(settings[name]) if name in settings else "not set"


def _checksum(content: dict[str, object]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
