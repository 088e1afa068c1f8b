"""The store seen through `layout`: every segment of a prepared set, cut to a run's ``max_length``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Overflow
from luthier.encoding.shortening import END_LEFT_OUT
from luthier.errors import RowDropped, UserError
from luthier.layout import cut_prompt, leaf_segment, spans_of, splice
from luthier.layout.cutting import SegmentCut, cut_segment, learned_length, plan_windows, take_window
from luthier.ledger import Ledger
from luthier.packing import PATCH_COST, SegmentTable, UnitKind, completion_room
from luthier.preparation import PreparedSet
from luthier.records import Address, Ints, Sample, Segment
from luthier.store.format import QUESTION, joined
from luthier.writing import counted


class SegmentIndex:
    """N segments by number, in the order of their rows, then leaves, then windows.

    lengths         int64[N], tokens
    num_targets     int64[N], as collation will count them; at least 1, but for another row's completion, which is
                    measured, not learned: 0
    encoder_lengths int64[N], positions (patches, frames) that encoders run through for its media; of a cut segment the
                    share that it has of the tokens
    prompt_lengths  int64[N], tokens of the prompt that are left, where ``units`` are compared; else 0
    held            int64[N], how many of its first tokens are those of the segment before it, where the two can be laid
                    out as one tree of at most ``max_length`` tokens with those before them; else 0
    row_ids         int64[N], the row of ``prepared`` each belongs to
    sample_ids      int64[N], its sample in the store
    source_ids      int64[N], index into ``prepared.sources``
    lost_rows       int64[…], rows of ``prepared`` of which nothing is left
    ledger          the prepared set's, with this run's losses and notes in it; the set's own is left as it is

    A row is lost only if all of its segments are; segments lost from a row that stays are notes. What is compared
    (``units``) stays or is lost together. Under ``UnitKind.FEEDBACK_KL`` each row has a second segment, its prompt with
    another row's completion. Which one changes with the epoch and is the plan's to say; here it is that of the row
    after it, so that there is something to look at.
    """

    lengths: Ints
    num_targets: Ints
    encoder_lengths: Ints
    prompt_lengths: Ints
    held: Ints
    row_ids: Ints
    sample_ids: Ints
    source_ids: Ints
    lost_rows: Ints

    def __init__(
        self,
        prepared: PreparedSet,
        *,
        max_length: int,
        overflow: Overflow,
        units: UnitKind = UnitKind.NONE,
        asked: bool = False,
    ) -> None:
        """Plan all cuts; tokens are read only of segments that have to be cut. ``asked``: rows are questions, so each
        has one segment, with its last answer.

        Raises `UserError` under ``Overflow.ERROR`` for the first segment that is too long, and as `cut_units`.
        """
        self.prepared, self.units, self._max_length = prepared, units, max_length
        self.ledger = Ledger.from_json(prepared.ledger.to_json())
        leaves = Leaves.of_rows(prepared).asked() if asked else Leaves.of_rows(prepared)
        if units is UnitKind.NONE:
            cuts = cut_leaves(prepared, leaves, max_length=max_length, overflow=overflow, asked=asked)
        else:
            cuts = cut_units(prepared, leaves, max_length=max_length, overflow=overflow, units=units)
        self._take(leaves, cuts)
        self.row_ids = leaves.row[self._leaf]
        self.sample_ids = prepared.sample_ids[self.row_ids]
        self.source_ids = prepared.source_ids[self.row_ids].astype(np.int64)
        self.prompt_lengths = np.zeros_like(self.lengths)
        if units is not UnitKind.NONE:
            self.prompt_lengths = prepared.store.root_lengths[self.sample_ids] - (self._start - self._head)
        self.held = self._find_held(leaves, max_length)
        self.lost_rows, self._lengths_of_lost = self._find_lost(leaves, cuts)
        self._account(leaves, cuts)
        if units is UnitKind.FEEDBACK_KL:
            self._add_drawn(max_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Segment:
        """The segment, its first token no target. Raises `StoreError` if its bytes are damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"segment {index} of {len(self)}")
        if self.units is UnitKind.FEEDBACK_KL and index % 2:
            own, other = self[index - 1], self[(index + 1) % len(self)]
            prompt, theirs = int(self.prompt_lengths[index]), int(self.prompt_lengths[(index + 1) % len(self)])
            room = int(self.lengths[index]) - prompt
            return splice(spans_of(own, slice(0, prompt)), spans_of(other, slice(theirs, theirs + room)))
        segment = leaf_segment(self.prepared[int(self.row_ids[index])], int(self._leaf_number[self._leaf[index]]))
        window = SegmentCut(
            head=int(self._head[index]),
            start=int(self._start[index]),
            stop=int(self._stop[index]),
            open_end=bool(self._open_end[index]),
            num_targets=int(self.num_targets[index]),
        )
        return take_window(segment, window)

    def place(self, index: int) -> tuple[int, int, int]:
        """Which part of its row a segment is: the leaf's number in its sample, and ``start:stop`` of that run."""
        return int(self._leaf_number[self._leaf[index]]), int(self._start[index]), int(self._stop[index])

    def head(self, index: int) -> int:
        """How many tokens of the run's beginning come before ``start``, where a prompt was cut."""
        return int(self._head[index])

    def cuts(self) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_]]:
        """``(leaf, head, start, stop, open_end)`` of every segment: `place` and `cutting.SegmentCut` as columns."""
        return self._leaf_number[self._leaf], self._head, self._start, self._stop, self._open_end

    def table(self) -> SegmentTable:
        """What `packing.epoch.plan_epoch` needs to know.

        Raises `UserError` where other rows' completions are to be drawn and there is no other row.
        """
        if self.units is UnitKind.FEEDBACK_KL and len(self) == self.units.size:
            where = self.prepared.address(int(self.row_ids[0]))
            raise UserError(
                f"{where}: the only row of its side of the data, and the loss estimates a KL from others' answers",
                hint="add rows there, or set objective.loss: apo_zero_unpaired, which estimates none",
                key="objective.loss",
            )
        return SegmentTable(
            lengths=self.lengths,
            num_targets=self.num_targets,
            row_ids=self.row_ids,
            source_ids=self.source_ids,
            source_weights=tuple(source.weight for source in self.prepared.sources),
            extra_costs=PATCH_COST * self.encoder_lengths if self.encoder_lengths.any() else None,
            prompt_lengths=None if self.units is UnitKind.NONE else self.prompt_lengths,
            held=self.held if self.units is UnitKind.NONE and self.held.any() else None,
        )

    def losses(self) -> Iterator[RowDropped]:
        """Why each of ``lost_rows`` is lost, with its address; one at a time, for there may be millions."""
        max_length = self._max_length
        for row, length in zip(self.lost_rows.tolist(), self._lengths_of_lost.tolist(), strict=True):
            address = self.prepared.address(row)
            if length:
                detail = f"{counted(length, 'token')}, data.max_length is {max_length}"
                yield RowDropped("too_long", detail, address=address)
            else:
                detail = f"no target within data.max_length={max_length} tokens"
                yield RowDropped("no_target_left", detail, address=address)

    def _take(self, leaves: Leaves, cuts: Cuts) -> None:
        whole, windows = cuts.whole, cuts.windows
        zeros = np.zeros_like(whole)
        columns = {
            "_head": (zeros, [w.head for w in windows]),
            "_start": (zeros, [w.start for w in windows]),
            "_stop": (leaves.lengths[whole], [w.stop for w in windows]),
            "_leaf": (whole, cuts.leaf),
            "num_targets": (leaves.num_targets[whole], [w.num_targets for w in windows]),
        }
        joined = {
            name: np.concatenate([of_whole, np.array(of_cut, dtype=np.int64)])
            for name, (of_whole, of_cut) in columns.items()
        }
        order = np.lexsort((joined["_start"], joined["_leaf"]))
        self._head, self._start, self._stop = joined["_head"][order], joined["_start"][order], joined["_stop"][order]
        self._leaf, self.num_targets = joined["_leaf"][order], joined["num_targets"][order]
        self._open_end = np.array([False] * len(whole) + [w.open_end for w in windows], dtype=np.bool_)[order]
        self._leaf_number = leaves.number
        self.lengths = self._head + self._stop - self._start
        whole = np.maximum(leaves.lengths[self._leaf], 1)
        self.encoder_lengths = leaves.encoders[self._leaf] * self.lengths // whole

    def _find_held(self, leaves: Leaves, max_length: int) -> Ints:
        held = np.zeros_like(self.lengths)
        if self.units is not UnitKind.NONE:
            held[1::2] = self.prompt_lengths[1::2] if self.units.are_pairs else 0
            return held
        if not leaves.held.any():
            return held
        begins = (self._start == 0) & (self._head == 0)  # whole, or cut at the end
        # a leaf of which nothing stays is passed over: what its neighbours share is the least of what each step shares
        upto, stays = leaves.held.copy(), np.zeros(len(leaves.held), dtype=np.bool_)
        stays[self._leaf] = True
        for leaf in np.flatnonzero(~stays[:-1]).tolist():
            upto[leaf + 1] = min(upto[leaf], upto[leaf + 1])
        held[1:] = np.where(begins[1:] & begins[:-1], upto[self._leaf[1:]], 0)
        held[1:][held[1:] >= np.minimum(self.lengths[1:], self.lengths[:-1])] = 0  # a cut left no branch of its own
        return _in_trees_within(held, self.lengths, max_length)

    def _add_drawn(self, max_length: int) -> None:
        """A second segment behind each one, about which only the plan of an epoch knows all."""
        columns = (
            "_head", "_start", "_stop", "_leaf", "_open_end", "num_targets", "lengths", "encoder_lengths",
            "prompt_lengths", "held", "row_ids", "sample_ids", "source_ids",
        )  # fmt: skip
        completions = self.lengths - self.prompt_lengths
        room = completion_room(self.prompt_lengths, np.roll(completions, -1), max_length)
        for name in columns:
            setattr(self, name, np.repeat(getattr(self, name), 2))
        self.lengths[1::2] = self.prompt_lengths[1::2] + room
        self.num_targets[1::2] = 0
        self.held[1::2] = self.prompt_lengths[1::2]

    def _find_lost(self, leaves: Leaves, cuts: Cuts) -> tuple[Ints, Ints]:
        """The rows of which nothing is left, and of each the longest leaf that is too long; 0: it lacks a target."""
        stays = np.zeros(len(self.prepared), dtype=np.bool_)
        stays[self.row_ids] = True
        longest_dropped = np.zeros(len(self.prepared), dtype=np.int64)
        too_long = (leaves.lengths > self._max_length) & (cuts.dropped | leaves.is_question)
        np.maximum.at(longest_dropped, leaves.row[too_long], leaves.lengths[too_long])
        lost = np.flatnonzero(~stays)
        return lost, longest_dropped[lost]

    def _account(self, leaves: Leaves, cuts: Cuts) -> None:
        for error in self.losses():
            self.ledger.lose_kept(error)
        fits = leaves.lengths <= self._max_length
        used = np.zeros(len(leaves.row), dtype=np.bool_)
        used[self._leaf] = True
        lost_leaves = ~np.isin(leaves.row, self.lost_rows) & ~used
        notes = Counter(cuts.notes)
        notes["leaf_too_long"] = int((lost_leaves & ~fits).sum())
        notes["leaf_without_target"] = int((lost_leaves & fits).sum())
        for what, count in notes.items():
            if count:
                self.ledger.note(what, count)


def _in_trees_within(held: Ints, lengths: Ints, max_length: int) -> Ints:
    """The same with a new tree begun wherever one would be longer than ``max_length`` tokens.

    ``_in_trees_within([0, 4, 4], [5, 6, 7], 8) -> [0, 4, 0]``: trees of 5 + 2 and 7 tokens
    """
    own = lengths - held
    upto = np.cumsum(own)
    first = np.flatnonzero(held == 0)
    sizes = np.add.reduceat(own, first)
    bounds = np.append(first, len(held))
    for tree in np.flatnonzero(sizes > max_length).tolist():
        before = int(upto[bounds[tree]] - own[bounds[tree]])  # tokens of all trees before
        for segment in range(int(bounds[tree]), int(bounds[tree + 1])):
            if upto[segment] - before > max_length:
                held[segment] = 0
                before = int(upto[segment] - lengths[segment])
    return held


# --------------------------------------------------------------------------------------------------------------------
# What a run's ``max_length`` makes of the leaves in the store: which stay, and which of their tokens.


_NOTE_OF = {Overflow.TRUNCATE: "truncated", Overflow.SPLIT: "split", Overflow.ERROR: END_LEFT_OUT}
READ_AT_A_TIME = 128  # samples, before the pages that they were read from are let go of
PROMPT_TRUNCATED = "prompt_truncated"  # a note: rows whose prompt lost messages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaves:
    """All leaves of all rows: the row, the leaf's number in its sample, its tokens and targets, whether it is a
    question that needs none, what encoders run through for its media, and how many of its first tokens are those
    of the leaf before it in its sample."""

    row: Ints
    number: Ints
    lengths: Ints
    num_targets: Ints
    is_question: NDArray[np.bool_]
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
        targets = prepared.store.leaf_targets[stored]
        return cls(
            row=row,
            number=number,
            lengths=prepared.store.leaf_lengths[stored],
            num_targets=np.maximum(targets, 0),
            is_question=targets == QUESTION,
            encoders=joined([shard.index.leaf_encoders for shard in prepared.store.shards])[stored],
            held=prepared.store.leaf_held(prepared.sample_ids),
        )

    def asked(self) -> Leaves:
        """Of each row the one with its last answer, or the question that needs none."""
        places = np.flatnonzero((self.num_targets > 0) | self.is_question)
        last = places[np.diff(self.row[places], append=-1) != 0]
        columns = {each.name: getattr(self, each.name)[last] for each in fields(self)}
        return Leaves(**columns | {"held": np.zeros(len(last), dtype=np.int64)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cuts:
    """What stays: ``whole`` leaves, int64[…], and of those that are too long windows with targets, each of ``leaf[i]``.

    ``dropped``: a leaf of which nothing stays is lost because it is too long, not for want of targets.
    """

    whole: Ints
    dropped: bool
    leaf: list[int] = field(default_factory=list)
    windows: list[SegmentCut] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def cut_leaves(prepared: PreparedSet, leaves: Leaves, *, max_length: int, overflow: Overflow, asked: bool) -> Cuts:
    """Each leaf on its own; ``asked``: only windows that the last answer ends in. Raises `UserError` under
    ``Overflow.ERROR`` for the first that is too long."""
    fits = leaves.lengths <= max_length
    needed = (leaves.num_targets > 0) | leaves.is_question
    cuts = Cuts(whole=np.flatnonzero(fits & needed), dropped=overflow in (Overflow.DROP, Overflow.KEEP_ANSWER))
    if cuts.dropped:
        ends = learned_ends(prepared, leaves, max_length)
        for leaf in np.flatnonzero(~fits & (ends <= max_length)).tolist():
            _cut_end(leaves, leaf, int(ends[leaf]), cuts)
        return cuts
    for count, leaf in enumerate(np.flatnonzero(~fits).tolist(), start=1):
        if count % READ_AT_A_TIME == 0:
            prepared.store.release()
        segment = leaf_segment(prepared[int(leaves.row[leaf])], int(leaves.number[leaf]))
        windows = plan_windows(segment, max_length=max_length, overflow=overflow)
        end = learned_length(segment.target) if asked else 0
        useful = [window for window in windows if window.num_targets and window.stop >= end]
        cuts.leaf.extend([leaf] * len(useful))
        cuts.windows.extend(useful)
        if useful:
            cuts.notes[_NOTE_OF[overflow]] += 1
            cuts.notes["window_without_target"] += sum(not window.num_targets for window in windows)
    prepared.store.release()
    return cuts


def learned_ends(prepared: PreparedSet, leaves: Leaves, max_length: int) -> Ints:
    """int64: the lengths of all leaves; of those that are too long up to the last target, for which they are read."""
    ends = leaves.lengths.copy()
    for count, leaf in enumerate(np.flatnonzero((ends > max_length) & (leaves.num_targets > 0)).tolist(), start=1):
        if count % READ_AT_A_TIME == 0:
            prepared.store.release()
        ends[leaf] = learned_length(leaf_segment(prepared[int(leaves.row[leaf])], int(leaves.number[leaf])).target)
    prepared.store.release()
    return ends


def _cut_end(leaves: Leaves, leaf: int, end: int, cuts: Cuts) -> None:
    """All of a leaf up to its last target."""
    num_targets = int(leaves.num_targets[leaf])
    cuts.leaf.append(leaf)
    cuts.windows.append(SegmentCut(start=0, stop=end, open_end=False, num_targets=num_targets))
    cuts.notes[END_LEFT_OUT] += 1


def cut_units(prepared: PreparedSet, leaves: Leaves, *, max_length: int, overflow: Overflow, units: UnitKind) -> Cuts:
    """A row's leaves together: all of them stay, or none, and all lose the same tokens of the prompt that they share.

    Raises `UserError` under ``Overflow.ERROR`` for the first row that is too long, under ``Overflow.SPLIT``, and for a
    row that has not as many continuations as ``units`` says.
    """
    _check_rows(prepared, leaves, units)
    ends = leaves.lengths if units is UnitKind.REWARDS else learned_ends(prepared, leaves, max_length)
    too_long = _any_of_row(leaves, ends > max_length, len(prepared))
    stays = (~too_long & ~_any_of_row(leaves, leaves.num_targets == 0, len(prepared)))[leaves.row]
    cuts = Cuts(whole=np.flatnonzero(stays & (ends == leaves.lengths)), dropped=True)
    for leaf in np.flatnonzero(stays & (ends < leaves.lengths)).tolist():
        _cut_end(leaves, leaf, int(ends[leaf]), cuts)
    match overflow:
        case Overflow.ERROR:
            if too_long.any():
                row = int(np.argmax(too_long))
                raise _too_long(prepared.address(row), int(ends[leaves.row == row].max()), max_length)
        case Overflow.DROP | Overflow.KEEP_ANSWER if not cuts_prompts(overflow, units):
            pass
        case Overflow.TRUNCATE | Overflow.KEEP_ANSWER:
            for count, row in enumerate(np.flatnonzero(too_long).tolist(), start=1):
                if count % READ_AT_A_TIME == 0:
                    prepared.store.release()
                _cut_prompt_of(prepared, row, leaves, ends, cuts, max_length)
        case Overflow.SPLIT:
            raise UserError(
                "data.overflow: split cuts answers, and continuations that are compared are never cut",
                hint="set data.overflow: truncate, which shortens prompts, or drop",
            )
        case _:
            raise AssertionError(f"unknown overflow policy {overflow!r}")
    return cuts


def cut_sample(sample: Sample, *, max_length: int, overflow: Overflow, units: UnitKind) -> list[Segment]:
    """The segments of one row, as a `SegmentIndex` has them. Raises `RowDropped` if nothing is left, `UserError` as it
    does."""
    kept: list[Segment] = []
    lost: RowDropped | None = None
    leaves, prompt = list(sample.segments()), sample.branches[0].length
    if units is UnitKind.NONE:
        for leaf in leaves:
            try:
                kept += cut_segment(leaf, max_length=max_length, overflow=overflow)
            except RowDropped as error:
                lost = lost or error
        if lost is not None and not kept:
            raise lost
        return kept
    to_end = units is UnitKind.REWARDS
    ends = [len(leaf) if to_end or len(leaf) <= max_length else learned_length(leaf.target) for leaf in leaves]
    head, start, room = 0, 0, max_length - (max(ends) - prompt)
    if room < prompt:
        left = cut_prompt(sample.prompt_turns, prompt, room=room) if cuts_prompts(overflow, units) else None
        if overflow is Overflow.ERROR:
            raise _too_long(sample.address, max(ends), max_length)
        if left is None:
            detail = f"{counted(max(ends), 'token')}, data.max_length is {max_length}"
            raise RowDropped("too_long", detail, address=sample.address)
        head, start = left
    return [
        take_window(
            leaf, SegmentCut(head=head, start=start, stop=end, open_end=False, num_targets=int(leaf.target.sum()))
        )
        for leaf, end in zip(leaves, ends, strict=True)
    ]


def _too_long(address: Address, longest: int, max_length: int) -> UserError:
    return UserError(
        f"{address}: prompt and continuation have {counted(longest, 'token')}, data.max_length is {max_length}",
        hint="raise data.max_length, or set data.overflow to drop or truncate",
    )


def cuts_prompts(overflow: Overflow, units: UnitKind) -> bool:
    """Whether a prompt that is too long loses messages here. Under ``KEEP_ANSWER`` it has done so when it was encoded,
    but for the end behind the last target."""
    return overflow is Overflow.TRUNCATE or (overflow is Overflow.KEEP_ANSWER and units is UnitKind.REWARDS)


def _cut_prompt_of(prepared: PreparedSet, row: int, leaves: Leaves, ends: Ints, cuts: Cuts, max_length: int) -> None:
    own = list(range(*np.searchsorted(leaves.row, [row, row + 1]).tolist()))
    sample = prepared[row]
    prompt = sample.branches[0].length
    room = max_length - (int(ends[own].max()) - prompt)
    company = [item.start for item in sample.media if item.counts_together]
    head, *turns = sample.prompt_turns or (0,)
    turns = [turn for turn in turns if len({head <= start < turn for start in company}) < 2]
    kept = cut_prompt((head, *turns), prompt, room=room)
    if kept is None or not leaves.num_targets[own].all():
        return
    head, start = kept
    cuts.leaf.extend(own)
    for leaf in own:
        stop, num_targets = int(ends[leaf]), int(leaves.num_targets[leaf])
        cuts.windows.append(SegmentCut(head=head, start=start, stop=stop, open_end=False, num_targets=num_targets))
    cuts.notes[PROMPT_TRUNCATED] += 1


def _check_rows(prepared: PreparedSet, leaves: Leaves, units: UnitKind) -> None:
    wanted = 2 if units.are_pairs else 1
    counts = np.bincount(leaves.row, minlength=len(prepared))
    verdicts = prepared.store.verdicts[prepared.sample_ids]
    wrong = (counts != wanted) | np.isnan(verdicts)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "no verdict" if np.isnan(verdicts[row]) else counted(counts[row], "continuation")
        raise UserError(
            f"{prepared.address(row)}: units are {units.value}, so a row has {wanted} and a verdict; this has {what}",
            hint="prepare the rows for an objective that compares: dpo or rm (pairs), kto (feedback)",
        )


def _any_of_row(leaves: Leaves, true: NDArray[np.bool_], num_rows: int) -> NDArray[np.bool_]:
    found = np.zeros(num_rows, dtype=np.bool_)
    found[leaves.row[true]] = True
    return found
