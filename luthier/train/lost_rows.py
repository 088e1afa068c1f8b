"""Rows whose media cannot be had any more when their turn comes: told, kept in a file, and counted as lost.

The file changed since it was prepared, or only decoding showed that it is damaged. Padding stands in its place:
the plan is as it was, nothing is learned there, and no other row is put in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from luthier.errors import RowError
from luthier.ledger import Ledger
from luthier.records import Address, Batch
from luthier.train.events import Listener, Note

LOST_FILE = "lost_media.jsonl"
MAX_TOLD = 10  # of a run; the file has them all


class LostRows:
    """Those of one run. Every rank adds its own to one file; lines are short, so that none is torn."""

    def __init__(self, folder: Path, ledger: dict[str, Any], *, max_drop: float, tell: Listener) -> None:
        """``ledger`` is that of the training rows, as JSON, ``max_drop`` as in `Ledger.check`."""
        self.path = folder / LOST_FILE
        self._ledger = Ledger.from_json(ledger) if ledger else None  # segments from memory have none
        self._max_drop = max_drop
        self._tell = tell
        self._known: set[Address] = set()

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
        self._known.add(error.address)
        with self.path.open("a", encoding="utf-8") as file:
            entry = {"file": error.address.file, "row": error.address.row, "counted": counted}
            file.write(json.dumps({**entry, "reason": error.reason, "detail": error.detail}) + "\n")
        if len(self._known) <= MAX_TOLD:
            self._tell(Note(text=f"lost: {error}; padding stands in its place"))
        if counted and self._ledger is not None:
            self._ledger.lose_kept(error)
            self._ledger.check(max_drop=self._max_drop)


def with_lost(ledger: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run's ledger with the rows that any rank lost on the way."""
    path = folder / LOST_FILE
    if not path.is_file() or not ledger:
        return ledger
    found = Ledger.from_json(ledger)
    seen: set[Address] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        address = Address(file=entry["file"], row=entry["row"])
        if entry["counted"] and address not in seen:
            seen.add(address)
            found.lose_kept(RowError(entry["reason"], entry["detail"], address=address))
    return found.to_json()
