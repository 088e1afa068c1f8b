"""Which segments share a pack, and which packs share a step: best fit, and balance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Packing
from luthier.errors import UserError
from luthier.packing import Planned, PlanSettings, bounds_of, every, segment_costs, sums
from luthier.records import Ints
from luthier.writing import counted

# ----------------------------------------------------------------------------------------------------------------------
# Exact best-fit decreasing: each segment, longest first, goes into the fullest pack that still has room for it.
#
# A counting sort orders the segments, packs are kept in buckets by the room they have left, and a bitmap of the buckets
# that are not empty finds the best one without a search. The cost hardly depends on how many packs are open.


# Loading numba and the kernel takes a second, and saves half a second per million; both ways give the same packs.
# What is loaded already pays for far less.
MIN_TO_LOAD, MIN_COMPILED = 1_000_000, 1000
KERNEL = "luthier.kernels"


def pack_in_order(lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> tuple[Ints, Ints]:
    """Packs as one flat array of indices into ``lengths``: pack ``i`` is ``order[bounds[i]:bounds[i + 1]]``.

    Equal lengths are placed in the order in which they come, so shuffling them changes who shares a pack with whom.
    Raises `UserError` where a length is over ``capacity`` or not positive.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    check_lengths(sizes, capacity)
    longest_first = np.argsort(_sort_key(capacity - sizes, capacity), kind="stable").astype(np.int64)
    fill = _compiled() if len(sizes) >= (MIN_COMPILED if KERNEL in sys.modules else MIN_TO_LOAD) else _fill_packs
    pack_of, num_packs = fill(sizes[longest_first], capacity)
    bounds = bounds_of(np.bincount(pack_of, minlength=num_packs))
    return longest_first[np.argsort(_sort_key(pack_of, num_packs), kind="stable")], bounds


def check_lengths(sizes: Ints, capacity: int) -> None:
    """Raise `UserError` where a length is over ``capacity`` or not positive."""
    wrong = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{counted(len(wrong), 'segment does', 'segments do')} not fit a pack of {counted(capacity, 'token')}: "
            f"number {first} has {sizes[first]}",
            hint="cut them first (luthier.layout.cutting.cut_segment), or raise the capacity",
        )


def _sort_key(values: Ints, limit: int) -> NDArray[np.integer]:
    # numpy's stable sort of 16-bit integers is a counting (radix) sort
    return values.astype(np.uint16) if limit < 2**16 else values


def _fill_packs(sizes: Ints, capacity: int) -> tuple[Ints, int]:
    """The pack of each size (longest first), and how many packs there are."""
    room: dict[int, list[int]] = {}  # room left -> open packs, the newest last
    open_rooms = 0  # bit r is set: a pack has r tokens of room
    pack_of = []
    num_packs = 0
    for size in sizes.tolist():
        fitting = open_rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            packs = room[left]
            pack = packs.pop()
            if not packs:
                open_rooms ^= 1 << left
        else:
            left, pack = capacity, num_packs
            num_packs += 1
        left -= size
        packs = room.setdefault(left, [])
        if not packs:
            open_rooms |= 1 << left
        packs.append(pack)
        pack_of.append(pack)
    return np.array(pack_of, dtype=np.int64), num_packs


def _compiled() -> Callable[[Ints, int], tuple[Ints, int]]:
    try:
        from luthier.kernels import fill_packs
    except (ImportError, RuntimeError):  # no numba, or no folder in which it may keep what it compiled
        return _fill_packs
    compiled: Callable[[Ints, int], tuple[Ints, int]] = fill_packs
    return compiled


# ----------------------------------------------------------------------------------------------------------------------
# Steps of micro-batches that cost about the same, so that no rank waits for another.
#
# G micro-batches are a group; ranks run W of them at the same time, W a divisor of G. Random micro-batches are taken, a
# bounded number at once, sorted by cost and cut into groups, and the groups are shuffled. Within a group the costs
# ascend, so any W neighbours are alike: the order is good for every number of ranks, and knows of none.
#
# A step is one group, or, with ``tokens_per_step``, as many as it takes to reach that many tokens.


# Groups whose micro-batches are sorted together: more would balance better, and make the members of a step more alike.
# Packs cost much the same by themselves; padded rows of a micro-batch are all short or all long.
GROUPS_OF_PACKS, GROUPS_PADDED = 16, 96
PORTIONS = 4  # an epoch is sorted in so many at least
MANY, FEWEST_GROUPS = 64, 4  # larger groups are even by themselves, and as many of them would be much to wait for


def groups_sorted(settings: PlanSettings) -> int:
    """How many groups are sorted at once."""
    groups = GROUPS_PADDED if settings.packing is Packing.NONE else GROUPS_OF_PACKS
    return max(FEWEST_GROUPS, min(groups, groups * MANY // settings.micro_batches_per_step))


class Balancer:
    """Orders micro-batches as they come, portion by portion. What it remembers is four integers."""

    def __init__(self, settings: PlanSettings) -> None:
        self.group_size = settings.micro_batches_per_step
        self.groups_sorted = groups_sorted(settings)
        self.tokens_per_step = settings.tokens_per_step
        self.num_open = 0  # micro-batches of the group that the last portion left incomplete
        self.open_cost = 0  # and what they cost together
        self.open_tokens = 0
        self.step_tokens = 0  # tokens in complete groups of the step that is not complete

    def order(self, costs: Ints, tokens: Ints, rng: np.random.Generator, *, whole: bool = False) -> tuple[Ints, Ints]:
        """Where each place's micro-batch was (int64[M]), and the places before which a step ends.

        ``whole``: these are all there are in the epoch. Few are sorted less then, lest every epoch have the same steps.
        """
        shuffled = rng.permutation(len(costs)).astype(np.int64)
        head, rest = self._completing(shuffled, costs)
        tail, rest = _tail(rest, costs, len(rest) % self.group_size, None if whole else rng)
        num_groups = len(rest) // self.group_size
        at_once = min(self.groups_sorted, max(1, num_groups // PORTIONS)) if whole else self.groups_sorted
        order = np.concatenate([head, self._groups(rest, costs, at_once, rng), tail])
        return order, self._count(order, costs, tokens)

    def state(self) -> dict[str, int]:
        names = ("num_open", "open_cost", "open_tokens", "step_tokens")
        return {name: int(vars(self)[name]) for name in names}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken."""
        self.num_open, self.open_cost = state["num_open"], state["open_cost"]
        self.open_tokens, self.step_tokens = state["open_tokens"], state["step_tokens"]

    def _completing(self, shuffled: Ints, costs: Ints) -> tuple[Ints, Ints]:
        """What the open group still lacks, as near as possible to what it has."""
        if not self.num_open:
            return shuffled[:0], shuffled
        size = min(self.group_size - self.num_open, len(shuffled))
        by_cost = shuffled[np.argsort(costs[shuffled], kind="stable")]
        starts = np.arange(len(by_cost) - size + 1, dtype=np.int64)
        upto = np.concatenate([[0], np.cumsum(costs[by_cost])])
        totals = upto[starts + size] - upto[starts]
        start = int(np.argmin(np.abs(totals * self.num_open - self.open_cost * size)))
        return _without(shuffled, by_cost[start : start + size])

    def _groups(self, chosen: Ints, costs: Ints, at_once: int, rng: np.random.Generator) -> Ints:
        """Groups of similar cost, ascending within, in random order."""
        size = self.group_size
        num_groups = len(chosen) // size
        if size == 1 or not num_groups:
            return chosen
        num_portions = round(num_groups / at_once)
        portion = np.repeat(np.arange(num_groups, dtype=np.int64) * num_portions // num_groups, size)
        by_cost = chosen[np.lexsort((costs[chosen], portion))]
        return by_cost.reshape(num_groups, size)[rng.permutation(num_groups)].reshape(-1)

    def _count(self, order: Ints, costs: Ints, tokens: Ints) -> Ints:
        num_groups, left = divmod(self.num_open + len(order), self.group_size)
        ends = np.arange(1, num_groups + 1, dtype=np.int64) * self.group_size - self.num_open
        upto = np.concatenate([[0], np.cumsum(tokens[order])])
        at_ends = upto[ends] + self.open_tokens
        last = int(ends[-1]) if num_groups else 0
        carried = 0 if num_groups else 1
        self.num_open = left
        self.open_cost = self.open_cost * carried + int(costs[order[last:]].sum())
        self.open_tokens = self.open_tokens * carried + int(upto[-1] - upto[last])
        if self.tokens_per_step is None:
            return ends
        chosen, self.step_tokens = _reaching(self.tokens_per_step, at_ends + self.step_tokens, self.step_tokens)
        return ends[chosen]


def micro_batch_costs(
    planned: Planned, lengths: Ints, settings: PlanSettings, *, extra_costs: Ints | None = None
) -> Ints:
    """int64[M]. ``lengths`` and ``extra_costs`` are those of the members, int64[S].

    Packed segments cost what they cost alone; a padded micro-batch costs all of its rectangle.
    """
    members = planned.pack_bounds[planned.batch_bounds]
    if settings.packing is not Packing.NONE:
        return sums(segment_costs(lengths, settings, extra_costs), members)
    longest = np.maximum.reduceat(lengths, planned.batch_bounds[:-1]) if len(planned) else lengths
    costs = segment_costs(longest, settings) * np.diff(planned.batch_bounds)
    return costs if extra_costs is None else costs + sums(extra_costs, members)


def mean_straggler(costs: Ints, step_bounds: Ints, num_ranks: int) -> float:
    """Mean of the highest over the mean cost, over all synchronisations in which each rank has a micro-batch.

    ``mean_straggler([3, 5, 2, 2, 9], [0, 4, 5], num_ranks=2) -> mean of 5/4 and 2/2 = 1.125``
    """
    steps = zip(step_bounds[:-1].tolist(), step_bounds[1:].tolist(), strict=True)
    full = [np.arange(first, stop - (stop - first) % num_ranks) for first, stop in steps]
    together = costs[np.concatenate([*full, np.zeros(0, dtype=np.int64)]).astype(np.int64)].reshape(-1, num_ranks)
    return float(np.mean(together.max(axis=1) / together.mean(axis=1))) if len(together) else 1.0


def _tail(chosen: Ints, costs: Ints, size: int, rng: np.random.Generator | None) -> tuple[Ints, Ints]:
    """``size`` neighbours in the order of costs, from a random place on, or any, without ``rng``; and the others."""
    if not size:
        return chosen[:0], chosen
    candidates, start = (chosen[:size], 0) if rng is None else (chosen, int(rng.integers(len(chosen) - size + 1)))
    by_cost = candidates[np.argsort(costs[candidates], kind="stable")]
    return _without(chosen, by_cost[start : start + size])


def _without(chosen: Ints, taken: Ints) -> tuple[Ints, Ints]:
    return taken, chosen[np.isin(chosen, taken, invert=True)]


def _reaching(budget: int, upto: Ints, carried: int) -> tuple[Ints, int]:
    """The first places at which ``upto`` has grown by ``budget`` since the last; and what has come since the last.

    ``carried`` tokens of the first step came before, and are in ``upto``.
    """
    chosen: list[int] = []
    before = 0
    while (place := int(np.searchsorted(upto, before + budget))) < len(upto):
        chosen.append(place)
        before = int(upto[place])
    rest = int(upto[-1]) - before if len(upto) else carried
    return np.array(chosen, dtype=np.int64), rest


# --------------------------------------------------------------------------------------------- rows of one segment each


SORTING_WINDOW = 50  # micro-batches whose rows are sorted by length together, if there are many: little padding


def pad_rows(chosen: Ints, lengths: Ints, settings: PlanSettings) -> Planned:
    """Micro-batches of rows of similar length: ``chosen`` are segment ids in random order, ``lengths`` those of all.

    With ``tokens_per_step`` a micro-batch has as many rows as stay, padded, within its share of the step, and within
    ``rows_per_micro_batch`` rows of full length; at least one.
    """
    group = settings.micro_batches_per_step
    num_batches = len(chosen) // settings.rows_per_micro_batch
    sorted_together = min(max(SORTING_WINDOW, groups_sorted(settings) * group), max(1, num_batches // PORTIONS))
    window = settings.rows_per_micro_batch * sorted_together
    # lexsort's last key is the first to count: by window, then longest first, then as shuffled
    by_length = chosen[np.lexsort((-lengths[chosen], np.arange(len(chosen)) // window))]
    if settings.tokens_per_step is None:
        bounds = every(len(chosen), settings.rows_per_micro_batch)
    else:
        slots = min(settings.rows_per_micro_batch * settings.capacity, settings.tokens_per_step // group)
        bounds = _within(lengths[by_length], slots)
    return Planned(
        segment_ids=by_length,
        pack_bounds=np.arange(len(by_length) + 1, dtype=np.int64),
        batch_bounds=bounds,
        step_ends=bounds[:0],
    )


def _within(lengths: Ints, slots: int) -> Ints:
    """Bounds of groups of neighbours whose longest times their number is at most ``slots``."""
    bounds = [0]
    longest = 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if longest * (place - bounds[-1] + 1) > slots and place > bounds[-1]:
            bounds.append(place)
            longest = length
    if len(lengths):
        bounds.append(len(lengths))
    return np.array(bounds, dtype=np.int64)
