"""A place in a stream of batches, as JSON: enough to go on there, or to refuse to and say why.

The place of a `luthier.Loader` takes at most 4 kB. That of a run also holds where its plan goes on (``waiting``) and
takes at most `MAX_STATE_BYTES`.

The number of ranks and of workers is absent on purpose: what a step holds does not depend on them.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import MixtureBy, Packing
from luthier.errors import CheckpointError, UserError
from luthier.loader.numbered_rows import NumberedRows
from luthier.packing import Planned, PlanSettings, UnitKind
from luthier.packing.epoch import count_by_source
from luthier.packing.order import EpochOrder, MixtureSettings, RowOrder
from luthier.packing.planner import EpochPlanner, PlannerPlace
from luthier.records import Ints
from luthier.writing import JsonObject, counted, write_text

DATA = "identity of the data"
CHANGED = "its rows, their tokenizer or their chat template have changed, or versions of the libraries that read them: "

STATE_VERSION = 3  # 2: rows were ordered by other rules
STATE_FILE = "loader_state.json"
MAX_STATE_BYTES = 16_384  # of a run; the state of a `luthier.Loader` takes at most a quarter of it
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
    cursor    how far the epoch is: for a `luthier.Loader`, which goes on from it, in micro-batches of all ranks; for a
              run, which goes on from ``waiting``, in rows of the epoch's order, and only for whoever reads the file
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
    waiting: JsonObject = field(default_factory=dict)
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
                hint=f"{CHANGED if DATA in differing else ''}restore what was there, or start anew (a run with "
                "output.overwrite: true, or in another output.dir)",
            )

    def _decisive(self) -> Mapping[str, StateScalar]:
        return {**self.settings, "seed": self.seed, DATA: self.data}


def _value(settings: Mapping[str, StateScalar], name: str) -> str:
    value = str(settings.get(name, "not set"))
    return f"{value[:12]}…" if name == DATA and len(value) > 12 else value


def _checksum(content: dict[str, object]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


# -------- Steps as a plan keeps them: the windows of rows that complete them, and the places from which a run can go on


BLOCK = 2**16  # rows that are looked through at once


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """One optimizer step: the packs (arrays of segment numbers) of each of its micro-batches, and its facts.

    epoch       the epoch it belongs to;  ``ends_epoch``: it is the epoch's last
    tokens      of all its micro-batches
    rows_used   rows of the run's orders that this step and those before it have used up
    taken       int64[S, 4], rows, segments, tokens and targets of each source in this step and those before it
    """

    micro_batches: tuple[tuple[Ints, ...], ...]
    epoch: int
    ends_epoch: bool
    tokens: int
    rows_used: int
    taken: Ints


@dataclass(kw_only=True, slots=True, eq=False)
class StreamHistory:
    """What had happened before a window was planned: from some of these a run can go on.

    of_first_epoch  see `StreamPlan.first_epoch`
    trail  of all steps; None: that of the window ``after`` which it comes, not computed yet
    place  of the epoch's planner; None: nothing of the epoch was planned
    """

    epoch: int
    steps: int
    rows_used: int
    taken: Ints
    of_first_epoch: tuple[int, ...]
    trail: RowTrail | None
    place: PlannerPlace | None
    after: StepWindow | None = None

    def to_json(self, trail: RowTrail) -> dict[str, object]:
        taken = zlib.compress(self.taken.astype("<i8").tobytes(), 9)
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "rows_used": self.rows_used,
            "taken": base64.b64encode(taken).decode("ascii"),
            "of_first_epoch": list(self.of_first_epoch),
            "digest": trail.digest,
            "place": None if self.place is None else self.place.to_json(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], trail: RowTrail) -> StreamHistory:
        """``trail`` is a later one of the same run."""
        taken = np.frombuffer(zlib.decompress(base64.b64decode(content["taken"])), "<i8").reshape(-1, 4)
        return cls(
            epoch=content["epoch"],
            steps=content["steps"],
            rows_used=content["rows_used"],
            taken=taken.astype(np.int64),
            of_first_epoch=tuple(content["of_first_epoch"]),
            trail=trail.cut_back(content["steps"], content["digest"]),
            place=None if content["place"] is None else PlannerPlace.from_json(content["place"]),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class StepWindow:
    """The steps that one window of rows completes, and what had happened before.

    planned   their micro-batches, of segments;  ``bounds``: int64[n + 1], of the steps in micro-batches
    used      int64[S], how many rows each member uses up;  ``upto``: int64[n], how many are used up after each step
    waiting   int64[w, 2], position and ordinal of the segments taken from the order that no micro-batch had had before
    position  how many rows of the order are taken with this window
    restart   where a run that goes on from one of these steps begins
    """

    before: StreamHistory
    restart: StreamHistory
    planned: Planned
    bounds: Ints
    used: Ints
    upto: Ints
    tokens: Ints
    waiting: Ints
    position: int
    ends_epoch: bool
    is_whole_epoch: bool
    counted: tuple[int, Ints]  # so many of these steps, and what all steps up to there take
    trail: RowTrail | None = None  # up to the last step that was asked about

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def members(self, first: int, stop: int) -> slice:
        """The members of the steps ``first:stop`` of these."""
        packs = self.planned.batch_bounds[self.bounds[[first, stop]]]
        return slice(*self.planned.pack_bounds[packs].tolist())

    def packs(self, place: int) -> tuple[tuple[Ints, ...], ...]:
        """The packs of each micro-batch of a step."""
        planned = self.planned.part(*self.bounds[place : place + 2].tolist())
        packs = [planned.segment_ids[a:b] for a, b in itertools.pairwise(planned.pack_bounds.tolist())]
        return tuple(tuple(packs[a:b]) for a, b in itertools.pairwise(planned.batch_bounds.tolist()))


def count_taken(rows: NumberedRows, settings: PlanSettings, window: StepWindow, first: int, stop: int) -> Ints:
    """int64[S, 4]: rows, segments, tokens and targets that the steps ``first:stop`` of a window take of each source."""
    members, planned = window.members(first, stop), window.planned
    table = rows.table(planned.segment_ids[members])
    lengths, targets = planned.lengths_given(table.lengths, members), table.num_targets
    heads = window.used[members] > 0
    if planned.starts is not None and settings.packing is Packing.SPLIT:
        begun = planned.starts[members] == 0
        # the first token of what follows a cut is no target any more; exact for plain text
        targets = np.where(targets == table.lengths - 1, lengths - 1, np.where(begun, targets, -1))
    return count_by_source(table.source_ids, len(rows.weights), heads=heads, lengths=lengths, targets=targets)


def waiting_in(planner: EpochPlanner) -> Ints:
    """int64[w, 2]: position and ordinal of the segments that a planner has taken and that are in no micro-batch."""
    table = planner.occurrences[planner.held_back()]
    return np.stack([table["position"], table["ordinal"].astype(np.int64)], axis=1)


def rows_seen_before(rows: NumberedRows, order: RowOrder, window: StepWindow) -> NDArray[np.bool_]:
    """Which rows, by number, the micro-batches before those planned with a window have a segment of. Its first step has
    all of them that no step before has."""
    seen = np.zeros(order.num_rows, dtype=np.bool_)
    for epoch in range(window.before.epoch):
        whole = order.epoch(epoch)
        _mark(seen, whole, len(whole), np.zeros(0, np.int64))
        if int(seen.sum()) == order.num_rows - len(order.held_out):
            break
    place = window.before.place
    if place is None:
        return seen
    waits, begun = window.waiting, order.epoch(window.before.epoch)
    positions, counts = np.unique(waits[:, 0], return_counts=True)
    at = [begun.rows(position, position + 1) for position in positions.tolist()]
    _, all_of_row = rows.segments_of(np.concatenate([*at, np.zeros(0, np.int64)]))
    _mark(seen, begun, place.position, positions[counts >= all_of_row])
    # the next row may have been begun
    taken = place.ordinal + bool(place.packer["skip"]) - int((waits[:, 0] == place.position).sum())
    if taken > 0:
        seen[begun.rows(place.position, place.position + 1)] = True
    return seen


def no_steps(num_segments: int) -> UserError:
    """What to raise where an epoch takes no row."""
    return UserError(
        f"an epoch has no steps: of {counted(num_segments, 'sequence')} it takes none",
        hint="raise the weight of data.train[], which says how often each row is seen in an epoch",
        key="data.train",
    )


def has_constant_steps(settings: PlanSettings, mixture: MixtureSettings) -> bool:
    """Whether all epochs that are planned at once have as many steps as the first one."""
    # whole weights leave the multiset of lengths alone, and with it the number of packs that are planned at once;
    # and so does everything but completions that each epoch draws anew
    drawn_anew = settings.units is UnitKind.FEEDBACK_KL and settings.packing is not Packing.NONE
    whole = mixture.by is MixtureBy.EPOCHS and all(weight == int(weight) for weight in mixture.weights)
    is_cut = settings.packing is Packing.SPLIT
    return whole and not drawn_anew and not is_cut and settings.tokens_per_step is None


def _mark(seen: NDArray[np.bool_], order: EpochOrder, stop: int, without: Ints) -> None:
    """Mark the rows at the first places of an order, but for those at some."""
    for start in range(0, stop, BLOCK):
        end = min(start + BLOCK, stop)
        rows = order.rows(start, end)
        inside = without[(without >= start) & (without < end)] - start
        seen[np.delete(rows, inside) if len(inside) else rows] = True
