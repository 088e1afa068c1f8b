"""Packs while segments are still on their way, best fit or filled to the end: `WindowPacker`, `plan_packs`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Packing
from luthier.errors import CheckpointError, UserError
from luthier.packing import Planned, PlanSettings, SegmentTable, bounds_of, every, join, sums, take_groups
from luthier.packing.balance import Balancer, check_lengths, groups_sorted, micro_batch_costs, pack_in_order
from luthier.records import Ints
from luthier.writing import JsonObject, counted

STATE_VERSION = 2
SHARE_AT_ONCE = 4  # an epoch of at most so great a part of a window is packed at once: it is there soon enough

# what must be the same for a plan to go on as it began; the number of ranks is absent on purpose
_FIXED = (
    "capacity", "rows_per_micro_batch", "micro_batches_per_step", "seed", "tokens_per_step", "window", "linear_cost",
)  # fmt: skip


class WindowPacker:
    """Takes segments in their order and gives micro-batches as they are decided.

    The plan depends on the segments and the settings alone, not on how they are divided among calls of `add`. With
    ``Packing.SPLIT`` segments may be of any length and are cut; with all other packings a segment has to fit the
    capacity. `Packing.NONE` cannot be planned this way.
    """

    def __init__(self, settings: PlanSettings, *, epoch: int, total: int | None = None) -> None:
        """``total`` rows will come, if that is known: few of them are packed at once (`is_at_once`)."""
        assert settings.packing in (Packing.WINDOW, Packing.BEST_FIT, Packing.SPLIT), settings.packing
        self.settings = settings
        self.epoch = epoch
        self.at_once = is_at_once(settings, total)
        self.num_windows = 0
        self.num_taken = 0  # segments, in the order of `add`, that are decided or carried
        self.num_planned = 0  # micro-batches
        self._balancer = Balancer(settings)
        group = settings.micro_batches_per_step * settings.rows_per_micro_batch * settings.capacity
        self._window_tokens = groups_sorted(settings) * group
        self._carried = _Waiting.of([], [], None)
        self._coming = [_Waiting.of([], [], None)]
        self._num_coming = self._num_coming_tokens = 0
        # Packing.SPLIT: coming segments that the last window saw and left, and tokens of the first that are decided
        self._num_left = self._skip = 0

    def add(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        lengths: Sequence[int] | NDArray[np.integer],
        extra_costs: Ints | None = None,
    ) -> Planned:
        """What these segments, the next ones, decide; ``extra_costs`` as in `SegmentTable`.

        Raises `UserError` where a length does not fit the capacity.
        """
        self.push(ids, lengths, extra_costs)
        decided = []
        while (window := self.decide()) is not None:
            decided.append(window)
        return join(decided) if decided else self._nothing()

    def push(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        lengths: Sequence[int] | NDArray[np.integer],
        extra_costs: Ints | None = None,
    ) -> None:
        """The next segments, of which `decide` makes windows. Raises as `add`."""
        new = _Waiting.of(ids, lengths, extra_costs)
        if self.settings.packing is not Packing.SPLIT:
            check_lengths(new.lengths, self.settings.capacity)
        self._coming.append(new)
        self._num_coming_tokens += int(new.lengths.sum())
        self._num_coming += len(new.ids)

    def decide(self) -> Planned | None:
        """The next window, where enough segments for it have come."""
        if self.at_once or (size := self._next_size()) is None:
            return None
        return self._decide(size, last=False)

    @property
    def carried_ids(self) -> Ints:
        """Segments that wait for the next window; they were pushed in this order."""
        return self._carried.ids

    @property
    def next_id(self) -> int | None:
        """The first segment that no window has taken; None where all that came are taken."""
        return next((int(part.ids[0]) for part in self._coming if len(part.ids)), None)

    def finish(self) -> Planned:
        """What is left. The last step may be smaller; its end is not among ``step_ends`` then."""
        return self._decide(self._num_coming, last=True)

    def state(self) -> JsonObject:
        """The place after the last window that is decided, as JSON, but for `carried_ids`.

        Segments that came since then are not in it: go on by adding from segment ``taken`` on.
        """
        return {
            "version": STATE_VERSION,
            "packing": self.settings.packing.value,
            **{name: getattr(self.settings, name) for name in _FIXED},
            "epoch": self.epoch,
            "at_once": self.at_once,
            "windows": self.num_windows,
            "taken": self.num_taken,
            "left": self._num_left,
            "skip": self._skip,
            "micro_batches": self.num_planned,
            "balance": self._balancer.state(),
        }

    @classmethod
    def resume(
        cls, settings: PlanSettings, state: Mapping[str, Any], carried: Ints, units: SegmentTable
    ) -> WindowPacker:
        """A packer that goes on from `state`; ``carried`` are the segments that it names, ``units`` their lines.

        Raises `CheckpointError` where the state is another version's, or another plan's.
        """
        _check_state(settings, state)
        packer = cls(settings, epoch=state["epoch"])
        packer.at_once = state["at_once"]
        packer.num_windows, packer.num_taken = state["windows"], state["taken"]
        packer.num_planned, packer._num_left, packer._skip = state["micro_batches"], state["left"], state["skip"]
        packer._balancer.restore(state["balance"])
        packer._carried = _Waiting.of(carried, units.lengths, units.extra_costs)
        return packer

    def _next_size(self) -> int | None:
        """How many coming segments the next window takes; None while more have to come."""
        most = window_size(self.num_windows, self.settings.window)
        tokens = window_size(self.num_windows, self._window_tokens)
        size, tokens = self._num_left + most, tokens + self._skip
        if self._num_coming < size or self._num_coming_tokens < tokens:
            return None
        self._coming = [_Waiting.join(self._coming)]
        upto = np.cumsum(self._coming[0].lengths[:size])
        while upto[-1] < tokens:
            upto = np.cumsum(self._coming[0].lengths[: 2 * len(upto)])
        return max(size, int(np.searchsorted(upto, tokens)) + 1)

    def _nothing(self) -> Planned:
        empty = np.zeros(0, dtype=np.int64)
        cut = empty if self.settings.packing is Packing.SPLIT else None
        bounds = bounds_of(empty)
        return Planned(
            segment_ids=empty, pack_bounds=bounds, batch_bounds=bounds, step_ends=empty, starts=cut, stops=cut
        )

    def _decide(self, size: int, *, last: bool) -> Planned:
        """One window, of the first ``size`` coming segments and the carried ones."""
        rng = np.random.Generator(np.random.PCG64([self.settings.seed, self.epoch, self.num_windows + 1]))
        coming = _Waiting.join(self._coming)
        take = self._split if self.settings.packing is Packing.SPLIT else self._pack
        planned, members, num_used = take(coming.at(slice(size)), rng, last)
        self._coming = [coming.at(slice(num_used, None))]
        self._num_coming -= num_used
        self._num_coming_tokens -= int(coming.lengths[:num_used].sum())
        self._num_left = size - num_used
        self.num_taken += num_used
        self.num_windows += 1
        self.num_planned += len(planned)
        costs = micro_batch_costs(planned, members.lengths, self.settings, extra_costs=members.extra_costs)
        tokens = sums(members.lengths, planned.pack_bounds[planned.batch_bounds])
        return planned.with_batches_in(*self._balancer.order(costs, tokens, rng, whole=self.at_once))

    def _pack(self, fresh: _Waiting, rng: np.random.Generator, last: bool) -> tuple[Planned, _Waiting, int]:
        capacity, rows = self.settings.capacity, self.settings.rows_per_micro_batch
        pool = _Waiting.join([self._carried, fresh])
        window = pack_window(pool.lengths, capacity, rng)
        if not last:
            # best that no step lies across two windows, else at least no micro-batch
            multiples = (rows * self.settings.micro_batches_per_step, rows)
            window = without_worst(
                window, pool.lengths, capacity, multiples=multiples, ahead=rows * self._balancer.num_open
            )
        self._carried = pool.at(window.carried)
        members = pool.at(window.members)
        planned = Planned(
            segment_ids=members.ids,
            pack_bounds=window.bounds,
            batch_bounds=every(len(window.bounds) - 1, rows),
            step_ends=window.carried[:0],
        )
        return planned, members, len(fresh.ids)

    def _split(self, seen: _Waiting, rng: np.random.Generator, last: bool) -> tuple[Planned, _Waiting, int]:
        capacity, rows = self.settings.capacity, self.settings.rows_per_micro_batch
        pieces = split_segments(seen.lengths, capacity, skip=self._skip)
        num_packs = len(pieces.bounds) - 1
        if not last:  # whole micro-batches of full rows; the rest is cut again, with what follows it
            num_full = (int(seen.lengths.sum()) - self._skip) // capacity
            num_packs = num_full - num_full % rows
        left = int(pieces.bounds[num_packs])
        if left < len(pieces.segments):
            num_used, self._skip = int(pieces.segments[left]), int(pieces.starts[left])
        else:
            num_used, self._skip = len(seen.ids), 0
        order, pack_bounds = take_groups(pieces.bounds, rng.permutation(num_packs))
        starts, stops = pieces.starts[order], pieces.stops[order]
        segment_ids = seen.ids[pieces.segments[order]]
        planned = Planned(
            segment_ids=segment_ids,
            pack_bounds=pack_bounds,
            batch_bounds=every(num_packs, rows),
            step_ends=order[:0],
            starts=starts,
            stops=stops,
        )
        return planned, _Waiting.of(segment_ids, stops - starts, None), num_used


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Segments, in order."""

    ids: Ints
    lengths: Ints
    extra_costs: Ints

    @classmethod
    def of(
        cls,
        ids: Sequence[int] | NDArray[np.integer],
        lengths: Sequence[int] | NDArray[np.integer],
        extra_costs: Ints | None,
    ) -> _Waiting:
        numbers, sizes = np.asarray(ids, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        extra = np.zeros_like(sizes) if extra_costs is None else np.asarray(extra_costs, dtype=np.int64)
        assert len(numbers) == len(sizes) == len(extra), (
            f"{counted(len(numbers), 'id')}, {counted(len(sizes), 'length')}, {len(extra)} costs"
        )
        return cls(numbers, sizes, extra)

    @classmethod
    def join(cls, parts: Sequence[_Waiting]) -> _Waiting:
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.ids, part.lengths, part.extra_costs) for part in parts), strict=True)
        ids, lengths, extra_costs = (np.concatenate(column) for column in columns)
        return cls(ids, lengths, extra_costs)

    def at(self, places: Ints | slice) -> _Waiting:
        return _Waiting(self.ids[places], self.lengths[places], self.extra_costs[places])


def is_at_once(settings: PlanSettings, num_rows: int | None) -> bool:
    """Whether an epoch of so many rows is planned when all of them are here, and not window by window."""
    if settings.packing in (Packing.BEST_FIT, Packing.NONE):
        return True
    return num_rows is not None and num_rows <= max(1, settings.window // SHARE_AT_ONCE)


def _check_state(settings: PlanSettings, state: Mapping[str, object]) -> None:
    if state.get("version") != STATE_VERSION:
        raise CheckpointError(
            f"a plan's state is of version {state.get('version')}, this Luthier reads {STATE_VERSION}",
            hint="start anew with output.overwrite: true or another output.dir",
        )
    here = {"packing": settings.packing.value, **{name: getattr(settings, name) for name in _FIXED}}
    differing = [
        f"{name}: {state.get(name)} there, {value} here" for name, value in here.items() if state.get(name) != value
    ]
    if differing:
        raise CheckpointError(
            f"a plan was begun under other settings: {'; '.join(differing)}",
            hint="restore those settings, or start anew with output.overwrite: true or another output.dir",
        )


# ---------------------------------------------------------------------------------------------- plain text in full rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """N pieces: tokens ``starts[i]:stops[i]`` of segment ``segments[i]``; row ``r`` is ``bounds[r]:bounds[r + 1]``."""

    segments: Ints
    starts: Ints
    stops: Ints
    bounds: Ints


def split_segments(lengths: Sequence[int] | NDArray[np.integer], capacity: int, *, skip: int = 0) -> Pieces:
    """Rows of exactly ``capacity`` tokens, but for the last; segments are taken in order, from token ``skip`` on.

    ``split_segments([5, 2, 4], 4)`` gives the rows ``[0: 0:4], [0: 4:5, 1: 0:2, 2: 0:1], [2: 1:4]``.

    Each piece is a segment of its own: positions start anew, and its first token is no target. Raises `UserError`
    where a length is not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.min() < 1:
        first = int(np.argmax(sizes < 1))
        raise UserError(f"segment number {first} has {counted(sizes[first], 'token')}", hint="leave empty segments out")
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    assert 0 <= skip <= total, f"{skip} of {counted(total, 'token')}"
    full = np.arange(skip + capacity, total, capacity, dtype=np.int64)  # where a row ends and another follows
    stops = np.union1d(ends[ends > skip], full)
    starts = np.concatenate([[skip], stops[:-1]]) if len(stops) else stops
    owner = np.searchsorted(ends, starts, side="right")
    first_token = ends[owner] - sizes[owner]
    return Pieces(
        segments=owner,
        starts=starts - first_token,
        stops=stops - first_token,
        bounds=np.concatenate([[0], np.searchsorted(stops, full) + 1, [len(stops)] if len(stops) else []]).astype(
            np.int64
        ),
    )


# -------------------------------------------------------------------------------------------------- packs of one window


RAMP = 4  # windows are smaller until then, by half each
MAX_CARRIED = 224  # segments: their ids, five bytes each, stay under 2 kB with all else that a state holds
SHARE_CARRIED = 8  # and at most an eighth of a window: a small one is there to begin soon
GOOD_FILL = 0.995  # packs filled so well are only taken apart to make the number of packs even


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """The packs of one window, in random order: places of segments, ``members[bounds[p]:bounds[p + 1]]``.

    ``carried`` are the places of the segments that wait for the next window.
    """

    members: Ints
    bounds: Ints
    carried: Ints


def plan_packs(
    lengths: Sequence[int] | NDArray[np.integer], capacity: int, *, window: int | None = None, seed: int | None = None
) -> list[Ints]:
    """Indices into ``lengths``, pack by pack; every index is in exactly one.

    ``plan_packs([700, 300, 900], capacity=1024) -> [[2], [0, 1]]``

    All lengths are packed together, longest first, or, with ``window``, so many at a time in the order in which they
    come. ``seed`` shuffles which of equally long segments share packs, and the order of the packs; with ``window``
    both happen within a window.
    Raises `UserError` where a length is no whole number, over ``capacity`` or not positive.
    """
    given = np.asarray(lengths)
    if len(given) and given.dtype.kind not in "iu":
        raise UserError(f"lengths are whole numbers of tokens, and these are {given.dtype}", hint="give integers")
    sizes = given.astype(np.int64)
    check_lengths(sizes, capacity)
    assert window is None or window >= 1, f"a window of {counted(window, 'segment')}"
    rng = None if seed is None else np.random.Generator(np.random.PCG64(seed))
    members, bounds = pack_windows(sizes, capacity, window or max(1, len(sizes)), rng)
    stops = bounds.tolist()
    return [members[start:stop] for start, stop in itertools.pairwise(stops)]


def window_size(number: int, largest: int) -> int:
    """The ``number``-th window is decided when ``largest`` has come, of segments or of tokens; the first ones earlier.

    ``[window_size(n, 4096) for n in range(6)] -> [256, 512, 1024, 2048, 4096, 4096]``
    """
    return max(1, largest >> max(0, RAMP - number))


def pack_window(lengths: Ints, capacity: int, rng: np.random.Generator | None) -> Window:
    """All segments in packs, best fit, none carried; without ``rng`` in the order in which they were opened."""
    order, bounds = pack_in_order(lengths, capacity)
    if rng is not None:
        places, bounds = take_groups(bounds, rng.permutation(len(bounds) - 1))
        order = order[places]
    return Window(members=order, bounds=bounds, carried=order[:0])


def without_worst(
    window: Window, lengths: Ints, capacity: int, *, multiples: tuple[int, ...], ahead: int = 0
) -> Window:
    """Carry the packs that are filled worst, at most `MAX_CARRIED` segments and an eighth of all.

    So many that the packs left, ``ahead`` counted with them, are a multiple of the first of ``multiples`` for which
    that can be.
    """
    tokens = sums(lengths[window.members], window.bounds)
    worst_first = np.argsort(tokens, kind="stable").astype(np.int64)
    max_carried = min(MAX_CARRIED, len(lengths) // SHARE_CARRIED)
    num_most = int(np.searchsorted(np.cumsum(np.diff(window.bounds)[worst_first]), max_carried, side="right"))
    num_bad = int(np.searchsorted(tokens[worst_first], GOOD_FILL * capacity))
    count = _num_carried(min(num_bad, num_most), num_most, len(tokens) + ahead, multiples)
    kept = np.sort(worst_first[count:])
    members, bounds = take_groups(window.bounds, kept)
    carried, _ = take_groups(window.bounds, np.sort(worst_first[:count]))
    return Window(members=window.members[members], bounds=bounds, carried=np.sort(window.members[carried]))


def pack_windows(lengths: Ints, capacity: int, window: int, rng: np.random.Generator | None) -> tuple[Ints, Ints]:
    """All of ``lengths`` in their order, ``window`` new ones at once: flat packs, as of `balance.pack_in_order`."""
    waiting = np.zeros(0, dtype=np.int64)
    members, counts = [waiting], [waiting]
    for start in range(0, len(lengths), window):
        stop = min(start + window, len(lengths))
        ids = np.concatenate([waiting, np.arange(start, stop, dtype=np.int64)])
        ids = ids if rng is None else rng.permutation(ids)
        packed = pack_window(lengths[ids], capacity, rng)
        if stop < len(lengths):
            packed = without_worst(packed, lengths[ids], capacity, multiples=(1,))
        waiting = ids[packed.carried]
        members.append(ids[packed.members])
        counts.append(np.diff(packed.bounds))
    return np.concatenate(members), bounds_of(np.concatenate(counts))


def _num_carried(wanted: int, most: int, num_packs: int, multiples: tuple[int, ...]) -> int:
    for multiple in multiples:
        count = wanted + (num_packs - wanted) % multiple
        if count <= most:
            return count
        if count - multiple >= wanted // 2:
            return count - multiple
    return wanted
