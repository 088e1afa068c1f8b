"""What a run's ``max_length`` makes of the leaves in the store: which stay, and which of their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luthier.config.schema import Overflow
from luthier.encoding.leaves import joined
from luthier.encoding.prepared import PreparedSet
from luthier.errors import UserError
from luthier.layout import Window, cut_prompt, leaf_segment, plan_windows
from luthier.packing import Units

Ints = NDArray[np.int64]

READ_AT_A_TIME = 128  # samples, before the pages that they were read from are let go of
PROMPT_TRUNCATED = "prompt_truncated"  # a note: rows whose prompt lost messages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaves:
    """All leaves of all rows: the row, the leaf's number in its sample, its tokens and targets, what encoders run
    through for its media, and how many of its first tokens are those of the leaf before it in its sample."""

    row: Ints
    number: Ints
    lengths: Ints
    num_targets: Ints
    encoders: Ints
    held: Ints

    @classmethod
    def of_rows(cls, prepared: PreparedSet) -> Leaves:
        """Those of a prepared set, in the order of its rows."""
        bounds = prepared.store.leaf_bounds
        first = bounds[prepared.sample_ids]
        counts = bounds[prepared.sample_ids + 1] - first
        row = np.repeat(np.arange(len(prepared), dtype=np.int64), counts)
        number = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        stored = first[row] + number
        return cls(
            row=row,
            number=number,
            lengths=prepared.store.leaf_lengths[stored],
            num_targets=prepared.store.leaf_targets[stored],
            encoders=joined([shard.index.leaf_encoders for shard in prepared.store.shards])[stored],
            held=prepared.store.leaf_held(prepared.sample_ids),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cuts:
    """What stays: ``whole`` leaves, int64[…], and of those that are too long windows with targets, each of ``leaf[i]``.

    ``dropped``: a leaf of which nothing stays is lost because it is too long, not for want of targets.
    """

    whole: Ints
    dropped: bool
    leaf: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def cut_leaves(prepared: PreparedSet, leaves: Leaves, *, max_length: int, overflow: Overflow) -> Cuts:
    """Each leaf on its own. Raises `UserError` under ``Overflow.ERROR`` for the first that is too long."""
    fits = leaves.lengths <= max_length
    cuts = Cuts(whole=np.flatnonzero(fits & (leaves.num_targets > 0)), dropped=overflow is Overflow.DROP)
    for count, leaf in enumerate([] if cuts.dropped else np.flatnonzero(~fits).tolist(), start=1):
        if count % READ_AT_A_TIME == 0:
            prepared.store.release()
        segment = leaf_segment(prepared[int(leaves.row[leaf])], int(leaves.number[leaf]))
        windows = plan_windows(segment, max_length=max_length, overflow=overflow)
        useful = [window for window in windows if window.num_targets]
        cuts.leaf.extend([leaf] * len(useful))
        cuts.windows.extend(useful)
        if useful:
            cuts.notes["truncated" if overflow is Overflow.TRUNCATE else "split"] += 1
            cuts.notes["window_without_target"] += len(windows) - len(useful)
    prepared.store.release()
    return cuts


def cut_units(prepared: PreparedSet, leaves: Leaves, *, max_length: int, overflow: Overflow, units: Units) -> Cuts:
    """A row's leaves together: all of them stay, or none, and all lose the same tokens of the prompt that they share.

    Raises `UserError` under ``Overflow.ERROR`` for the first row that is too long, under ``Overflow.SPLIT``, and for a
    row that has not as many continuations as ``units`` says.
    """
    _check_rows(prepared, leaves, units)
    too_long = _any_of_row(leaves, leaves.lengths > max_length, len(prepared))
    stays = ~too_long & ~_any_of_row(leaves, leaves.num_targets == 0, len(prepared))
    cuts = Cuts(whole=np.flatnonzero(stays[leaves.row]), dropped=True)
    match overflow:
        case Overflow.ERROR:
            if too_long.any():
                row = int(np.argmax(too_long))
                longest = int(leaves.lengths[leaves.row == row].max())
                raise UserError(
                    f"{prepared.address(row)}: prompt and continuation have {longest} tokens, data.max_length is "
                    f"{max_length}",
                    hint="raise data.max_length, or set data.overflow to drop or truncate",
                )
        case Overflow.DROP:
            pass
        case Overflow.TRUNCATE:
            for count, row in enumerate(np.flatnonzero(too_long).tolist(), start=1):
                if count % READ_AT_A_TIME == 0:
                    prepared.store.release()
                _cut_prompt_of(prepared, row, leaves, cuts, max_length)
        case Overflow.SPLIT:
            raise UserError(
                "data.overflow: split cuts answers, and continuations that are compared are never cut",
                hint="set data.overflow: truncate, which shortens prompts, or drop",
            )
        case _:
            raise AssertionError(f"unknown overflow policy {overflow!r}")
    return cuts


def _cut_prompt_of(prepared: PreparedSet, row: int, leaves: Leaves, cuts: Cuts, max_length: int) -> None:
    own = list(range(*np.searchsorted(leaves.row, [row, row + 1]).tolist()))
    sample = prepared[row]
    prompt = sample.branches[0].length
    room = max_length - (int(leaves.lengths[own].max()) - prompt)
    kept = cut_prompt(sample.prompt_turns, prompt, room=room)
    if kept is None or not leaves.num_targets[own].all():
        return
    head, start = kept
    cuts.leaf.extend(own)
    for leaf in own:
        stop, num_targets = int(leaves.lengths[leaf]), int(leaves.num_targets[leaf])
        cuts.windows.append(Window(head=head, start=start, stop=stop, open_end=False, num_targets=num_targets))
    cuts.notes[PROMPT_TRUNCATED] += 1


def _check_rows(prepared: PreparedSet, leaves: Leaves, units: Units) -> None:
    wanted = 2 if units is Units.PAIRS else 1
    counts = np.bincount(leaves.row, minlength=len(prepared))
    verdicts = prepared.store.verdicts[prepared.sample_ids]
    wrong = (counts != wanted) | np.isnan(verdicts)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "no verdict" if np.isnan(verdicts[row]) else f"{counts[row]} continuations"
        raise UserError(
            f"{prepared.address(row)}: units are {units.value}, so a row has {wanted} and a verdict; this has {what}",
            hint="prepare the rows for an objective that compares: dpo or rm (pairs), kto (feedback)",
        )


def _any_of_row(leaves: Leaves, true: NDArray[np.bool_], num_rows: int) -> NDArray[np.bool_]:
    found = np.zeros(num_rows, dtype=np.bool_)
    found[leaves.row[true]] = True
    return found
