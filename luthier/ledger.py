"""What became of every row: read = prepared + dropped + quarantined, always; in a run, prepared = trained + not yet
trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from luthier.errors import BudgetError, RowDropped, RowError
from luthier.writing import counted

MAX_EXAMPLES = 5
"""How many messages, each with its address, are kept for a reason. ``quarantine.jsonl`` has every row that is lost, but
for those whose media are lost in a run: they are in ``lost_media.jsonl``."""

HELD_OUT, SAME_AS_HELD_OUT = "held_out", "same_as_held_out"  # notes of a ledger of training rows
_SHORTER = "raise data.max_length, choose another data.overflow"
_FIX = "fix the rows; docs/errors.md says what this reason means"
# The way out where rows are lost for a reason that is rather one of the run description.
_WAYS = {
    "too_long": "raise data.max_length, or choose another data.overflow",
    "still_too_long": "raise data.max_length",
    "no_target_left": "raise data.max_length, or set data.overflow: split",
    "no_target": "look at template.train_on, and at train: false and weight: 0 in the row",
    "cut_answer": "take out rules of template.targets that leave out a part of an answer, and such flags of the row",
    SAME_AS_HELD_OUT: "the same row is evaluated on: take out the row, or leave it",
    "objective": "choose the objective that these rows are for, or name the rows that this one needs",
    "missing_column": "say which columns of the file are what: columns of the data set, or its format",
    "media_missing": "say where the files are: media_root of the data set",
}

_KEYS = {"too_long": "data.max_length", "objective": "objective"}  # whose values these reasons are about


def way_out(reason: str) -> str:
    """What a user can do about rows that are lost for this reason."""
    return _WAYS.get(reason, _FIX)


def rows_beside(notes: Mapping[str, int]) -> str:
    """The rows that were read and are not among those of a ledger of training rows, which the notes count: ``", and
    6 more are held out"``; "" where there are none."""
    held_out, same = notes.get(HELD_OUT, 0), notes.get(SAME_AS_HELD_OUT, 0)
    told = f", and {counted(held_out, 'more is', 'more are')} held out" if held_out else ""
    return f"{told}; {counted(same, 'more is', 'more are')} left out, as the same row is held out" if same else told


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Counts the fate of rows. Mutable on purpose: it is the account book of one pass over the data.

    ``prepared`` rows can be trained on. ``trained`` is how many of them some finished optimizer step has seen, each row
    counted once; None where no run has been. ``notes`` counts what happened to rows that are still prepared (answers
    truncated, control strings in text …).
    """

    read: int = 0
    prepared: int = 0
    trained: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def keep(self) -> None:
        """A row is read and can be trained on."""
        self.read += 1
        self.prepared += 1

    def lose(self, error: RowError) -> None:
        """A row is read and lost: dropped if the error says so, else quarantined."""
        self.read += 1
        self._book(error)

    def lose_kept(self, error: RowError) -> None:
        """A row that was counted as prepared turns out to be lost (too long for this run, nothing left to train)."""
        self.prepared -= 1
        self._book(error)

    def note(self, what: str, count: int = 1) -> None:
        """Count something worth knowing about rows that stay."""
        self.notes[what] += count

    def _book(self, error: RowError) -> None:
        book = self.dropped if isinstance(error, RowDropped) else self.quarantined
        book[error.reason] += 1
        examples = self.examples.setdefault(error.reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(str(error))

    @property
    def lost(self) -> int:
        """Rows that cannot be trained on."""
        return self.dropped.total() + self.quarantined.total()

    @property
    def not_yet_trained(self) -> int:
        """Prepared rows that no optimizer step has seen."""
        return self.prepared - (self.trained or 0)

    def reasons(self) -> str:
        """Why rows were lost, most of them first, and an example of the first reason on a line of its own."""
        lost = (self.dropped + self.quarantined).most_common()
        counts = ", ".join(f"{count} {reason}" for reason, count in lost)
        examples = [self.examples[reason][0] for reason, _ in lost if self.examples.get(reason)]
        return f"{counts}\n  first: {examples[0]}" if examples else counts

    def add(self, other: Ledger) -> None:
        """Add another ledger's counts to this one; what a run did is not added up."""
        self.read += other.read
        self.prepared += other.prepared
        self.dropped.update(other.dropped)
        self.quarantined.update(other.quarantined)
        self.notes.update(other.notes)
        for reason, examples in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine.extend(examples[: MAX_EXAMPLES - len(mine)])

    def check(self, *, max_drop: float) -> None:
        """Assert the identity, and raise `BudgetError` if more than ``max_drop`` was lost.

        ``max_drop`` below 1 is a share of the rows read, from 1 on a number of rows.
        """
        assert self.read == self.prepared + self.lost, f"ledger: {self.read} read != {self.prepared} + {self.lost}"
        trained = 0 if self.trained is None else self.trained
        assert 0 <= trained <= self.prepared, f"ledger: {trained} trained of {self.prepared} prepared"
        allowed = max_drop * self.read if max_drop < 1 else max_drop
        if self.lost > allowed and not self.prepared:
            raise self._nothing_left()
        if self.lost > allowed:
            other_cut = f", {_SHORTER}" if self.dropped["too_long"] else ""
            raise BudgetError(
                f"{self.lost} of {counted(self.read, 'row is', 'rows are')} lost, and data.max_drop={max_drop:g} "
                f"allows {math.floor(allowed):,}: {self.reasons()}",
                hint=f"fix the rows{other_cut}, or raise data.max_drop",
            )

    def _nothing_left(self) -> BudgetError:
        """The error for rows of which none is left: what they lack, not how many may be lost."""
        (reason, _), *others = (self.dropped + self.quarantined).most_common()
        rows = "the only row is" if self.read == 1 else f"all {counted(self.read, 'row is', 'rows are')}"
        key = _KEYS.get(reason, "data")
        if others:
            hint = f"of most of them: {way_out(reason)}"
            return BudgetError(f"{rows} lost: {self.reasons()}", hint=hint, key=key)
        first = next(iter(self.examples.get(reason, ())), reason)
        return BudgetError(f"{rows} lost for one reason: {first}", hint=way_out(reason), key=key)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for reports; `from_json` reads it back."""
        return {
            "read": self.read,
            "prepared": self.prepared,
            **({} if self.trained is None else {"trained": self.trained, "not_yet_trained": self.not_yet_trained}),
            "dropped": dict(self.dropped),
            "quarantined": dict(self.quarantined),
            "notes": dict(self.notes),
            "examples": self.examples,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ledger:
        """Read what `to_json` wrote."""
        return cls(
            read=data["read"],
            prepared=data["prepared"],
            trained=data.get("trained"),
            dropped=Counter(data["dropped"]),
            quarantined=Counter(data["quarantined"]),
            notes=Counter(data.get("notes", {})),
            examples={reason: list(examples) for reason, examples in data.get("examples", {}).items()},
        )
