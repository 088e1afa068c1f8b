"""Rows whose media cannot be had any more when their turn comes: told, kept in a file, and counted as lost.

The file changed since it was prepared, or only decoding showed that it is damaged. Padding stands in its place:
the plan is as it was, nothing is learned there, and no other row is put in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from luthier.errors import RowError
from luthier.ledger import Ledger
from luthier.records import Address, Batch
from luthier.train.events import Listener, Note
from luthier.train.files import FILES

LOST_FILE = "lost_media.jsonl"
MAX_TOLD = 10  # of a run; the file has them all


class LostRows:
    """Those of one run, of all that it went on from too. Every rank adds its own to one file, a line at a time."""

    def __init__(self, folder: Path, ledger: dict[str, Any], *, max_drop: float, tell: Listener) -> None:
        """``ledger`` is that of the training rows, as JSON, ``max_drop`` as in `Ledger.check`."""
        self.path = folder / LOST_FILE
        self._ledger = Ledger.from_json(ledger) if ledger else None  # segments from memory have none
        self._max_drop = max_drop
        self._tell = tell
        self._known: set[Address] = set()
        for error, counted in _entries(self.path):
            self._count(error, counted=counted)

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
        entry = {"file": error.address.file, "row": error.address.row, "counted": counted}
        line = json.dumps({**entry, "reason": error.reason, "detail": error.detail}) + "\n"
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")  # by a process that was killed
        FILES.append(self.path, ("\n" * torn + line).encode())
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


def ledger_of_run(ledger: dict[str, Any], folder: Path, trained: Collection[Address]) -> dict[str, Any]:
    """What became of the rows when the run ended: rows that any rank lost on the way are quarantined, and of the others
    those in ``trained`` (the rows that finished steps took) are trained. Asserts the ledger's identity."""
    if not ledger:
        return ledger
    found = Ledger.from_json(ledger)
    lost = {error.address: error for error, counted in _entries(folder / LOST_FILE) if counted}
    for error in lost.values():
        found.lose_kept(error)
    found.trained = len(set(trained) - lost.keys())
    found.check(max_drop=found.read)
    return found.to_json()


def _entries(path: Path) -> Iterator[tuple[RowError, bool]]:
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:  # torn: the row will be lost again, and told
            continue
        address = Address(file=entry["file"], row=entry["row"])
        yield RowError(entry["reason"], entry["detail"], address=address), entry["counted"]
