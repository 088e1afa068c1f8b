"""Rows whose media cannot be had any more when their turn comes: told, kept in a file, and counted as lost.

The file changed since it was prepared, or only decoding showed that it is damaged. Padding stands in its place:
the plan is as it was, nothing is learned there, and no other row is put in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh32_intdigest

from luthier.errors import RowError
from luthier.ledger import Ledger
from luthier.records import Address, Batch
from luthier.training.folder.staging import FILES
from luthier.training.report.events import EventListener, Note
from luthier.writing import counted

LOST_FILE = "lost_media.jsonl"
MAX_TOLD = 10  # of a run; the file has them all
UNREADABLE = "unreadable line of lost_media.jsonl"  # a note of the ledger: a row was lost, and which is not known


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file. ``check`` is the hash of the others, so that a changed number does not take another row."""

    file: str
    row: int
    counted: bool
    reason: str
    detail: str
    check: int

    @classmethod
    def of(cls, error: RowError, *, counted: bool) -> _Entry:
        assert error.address is not None
        told = (error.address.file, error.address.row, counted, error.reason, error.detail)
        check = xxh32_intdigest(msgspec.json.encode(told))
        return cls(file=told[0], row=told[1], counted=counted, reason=error.reason, detail=error.detail, check=check)


class LostRows:
    """Those of one run, of all that it went on from too. Every rank adds its own to one file, a line at a time."""

    def __init__(self, folder: Path, ledger: dict[str, Any], *, max_drop: float, tell: EventListener) -> None:
        """``ledger`` is that of the training rows, as JSON, ``max_drop`` as in `Ledger.check`."""
        self.path = folder / LOST_FILE
        self._ledger = Ledger.from_json(ledger) if ledger else None  # segments from memory have none
        self._max_drop = max_drop
        self._tell = tell
        self._known: set[Address] = set()
        entries, damaged = _entries(self.path)
        for error, is_counted in entries:
            self._count(error, counted=is_counted)
        if damaged:
            count = counted(len(damaged), "line")
            where = f"{self.path}:{damaged[0]}"
            tell(Note(text=f"{count} cannot be read (the first: {where}), and the ledger notes it as {UNREADABLE!r}"))

    def watch(self, batches: Iterable[Batch], *, counted: bool = True) -> Iterator[Batch]:
        """The batches; what they lost is noted on the way. ``counted`` is for rows of the ledger.

        Raises `BudgetError` when more of them are lost than ``data.max_drop`` allows.
        """
        for batch in batches:
            for address, loss in batch.lost:
                self._add(RowError(loss.reason, loss.detail, address=address), counted=counted)
            yield batch

    def _add(self, error: RowError, *, counted: bool) -> None:
        assert error.address is not None
        if error.address in self._known:
            return
        line = msgspec.json.encode(_Entry.of(error, counted=counted)) + b"\n"
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")  # by a process that was killed
        FILES.append(self.path, b"\n" * torn + line)
        self._count(error, counted=counted)
        if len(self._known) <= MAX_TOLD:
            self._tell(Note(text=f"lost: {error}; padding stands in its place"))
        if counted and self._ledger is not None:
            self._ledger.check(max_drop=self._max_drop)

    def _count(self, error: RowError, *, counted: bool) -> None:
        assert error.address is not None
        if error.address not in self._known and counted and self._ledger is not None:
            self._ledger.lose_kept(error)
        self._known.add(error.address)


def forget_lost(folder: Path) -> None:
    """Delete what a run before this one left in its folder. Raises `CheckpointError`."""
    FILES.remove_file(folder / LOST_FILE)


def ledger_of_run(ledger: dict[str, object], folder: Path, trained: Collection[Address]) -> dict[str, object]:
    """What became of the rows when the run ended: rows that any rank lost on the way are quarantined, and of the others
    those in ``trained`` (the rows that finished steps took) are trained. Asserts the ledger's identity."""
    if not ledger:
        return ledger
    found = Ledger.from_json(ledger)
    entries, damaged = _entries(folder / LOST_FILE)
    lost = {error.address: error for error, counted in entries if counted}
    for error in lost.values():
        found.lose_kept(error)
    found.trained = len(set(trained) - lost.keys())
    if damaged:
        found.note(UNREADABLE, len(damaged))
    found.check(max_drop=found.read)
    return found.to_json()


def _entries(path: Path) -> tuple[list[tuple[RowError, bool]], list[int]]:
    """The lost rows of a file, with whether each is a row of the ledger; and the numbers of lines that say none.

    A last line without a newline was torn by a kill; its row will be lost again, and told. Once another line is written
    behind it, it is a line that says no row, like a damaged one.
    """
    if not path.is_file():
        return [], []
    found, damaged = [], []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            damaged.append(number)
            continue
        error = RowError(entry.reason, entry.detail, address=Address(file=entry.file, row=entry.row))
        if entry == _Entry.of(error, counted=entry.counted):
            found.append((error, entry.counted))
        else:
            damaged.append(number)
    return found, damaged
