"""Batches: does each hold what its rows' samples say, where the model reads and learns it?

A batch is taken apart again: of each of its segments the tokens, what is learned of them and their positions are looked
for in the samples of its row. Nothing here knows how segments are cut, packed and laid out, but the rules that a user
reads of it. B rows, T tokens a row, A axes of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify import Check, Violation
from luthier.packing import UnitKind
from luthier.records import IGNORE_INDEX, Address, Batch, Ints, MediaItem, Sample, Segment
from luthier.writing import counted

CLOSE = 1e-5  # between two ways to the same pixels and sounds
PART = np.dtype([("source", "<i4"), ("file", "<i4"), ("row", "<i8"), ("leaf", "<i4"), ("tokens", "<i8")])
_NAMES = ["source", "file", "row", "leaf"]
BY_LAYOUT = "input_ids", "position_ids", "attention_mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRules:
    """How a run lays its segments out, as its description says.

    units       what of a row is compared
    cut_freely  rows are cut wherever a pack is full (``train.packing: split``)
    by_axes     the model counts positions on several axes
    """

    packed: bool
    pad_token_id: int
    max_length: int
    units: UnitKind
    cut_freely: bool
    by_axes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _SegmentMeant:
    """A segment as it should be: n tokens of a run, bool[n] what is learned of them, their weights, and which of them
    stand for media."""

    ids: Ints
    target: NDArray[np.bool_]
    weight: NDArray[np.float32]
    of_media: NDArray[np.bool_]
    media: tuple[tuple[int, MediaItem], ...] = ()
    leaf: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _SegmentPlaced:
    """A segment as it is in a batch: in row ``row`` the tokens at ``columns``, int64[n], and the number of its tree."""

    address: Address
    row: int
    columns: Ints
    tree: int


class BatchJudge:
    """Compares batches with the samples of their rows.

    ``samples_of`` gives those at an address: several, where a file is read twice. ``features_of`` gives what the model
    is to see of some media; None: that is not compared.
    """

    def __init__(
        self,
        rules: BatchRules,
        samples_of: Callable[[Address], Sequence[Sample]],
        features_of: Callable[[Sequence[MediaItem]], Mapping[str, NDArray[np.generic]]] | None = None,
    ) -> None:
        self.rules, self._samples_of, self._features_of = rules, samples_of, features_of
        self._last: tuple[Address, list[tuple[int, Segment]]] | None = None

    def faults(self, batch: Batch) -> Iterator[Violation]:
        """What is not as the rows' samples say; nothing of a segment whose media were lost."""
        inputs = {name: np.asarray(batch.model_inputs[name]) for name in BY_LAYOUT if name in batch.model_inputs}
        found = list(_segments_of(batch))
        lost = {address for address, _ in batch.lost}
        expected: list[_SegmentMeant | None] = []
        width = inputs["input_ids"].shape[1]
        for number, segment in enumerate(found):
            if segment.address in lost:
                expected.append(None)
                continue
            ids_n = inputs["input_ids"][segment.row, segment.columns]
            targets, own = _targets_of(batch, number), expected[-1] if number % 2 else None
            fits = self._as_in_its_row(segment, ids_n, targets, own, width)
            wrongs = [_wrong_targets(one, segment, targets, width) for one in fits]
            if fits and None not in wrongs:
                yield _fault(segment.address, f"{_place(segment)}: {wrongs[0]}")
            elif not fits:
                yield _fault(segment.address, f"{_place(segment)}: these {len(ids_n)} tokens are not those of the row")
            expected.append(fits[wrongs.index(None) if None in wrongs else 0] if fits else None)
        whole = [(one, learned) for one, learned in zip(found, expected, strict=True) if learned is not None]
        for one, learned in whole:
            if (wrong := self._wrong_positions(inputs["position_ids"], one, learned)) is not None:
                yield _fault(one.address, f"{_place(one)}: {wrong}")
        yield from self._layout_faults(batch, inputs, found)
        if len(whole) == len(found):
            yield from self._label_faults(batch, whole)
            yield from self._unit_faults(batch, found, [learned for _, learned in whole])
            yield from self._feature_faults(batch, whole)

    def _as_in_its_row(
        self, segment: _SegmentPlaced, ids_n: Ints, learned: _TargetList, own: _SegmentMeant | None, width: int
    ) -> list[_SegmentMeant]:
        """What of the row's samples these tokens may be. ``own``: the row's answer, of another answer to its prompt."""
        if len(ids_n) > self.rules.max_length:
            return []
        if self.rules.units is UnitKind.FEEDBACK_KL and own is not None:
            return _with_drawn_answer(own, segment, ids_n, learned, width)
        return [
            self._learned(run, window_n, leaf)
            for leaf, run in self._runs_of(segment.address)
            for window_n in self._windows(run, ids_n)
        ]

    def _runs_of(self, address: Address) -> list[tuple[int, Segment]]:
        """The runs of a row's samples, each with the number of its leaf; those of the row asked about last are kept."""
        if self._last is None or self._last[0] != address:
            runs = [run for sample in self._samples_of(address) for run in enumerate(sample.segments())]
            self._last = address, runs
        return self._last[1]

    def _windows(self, run: Segment, ids_n: Ints) -> Iterator[Ints]:
        """Where in a run these tokens are, int64[n]: all of it or, of one that is too long, the part that is kept."""
        own_T, size, count = run.input_ids, len(ids_n), len(run)
        if count == size and np.array_equal(own_T, ids_n):
            yield np.arange(size)
        if count <= size or (count <= self.rules.max_length and not self.rules.cut_freely):
            return
        if not self.rules.units.are_compared:
            starts = np.arange(count - size + 1)
            for place in range(min(size, 32)):
                starts = starts[own_T[starts + place] == ids_n[place]]
            yield from (
                np.arange(start, start + size)
                for start in starts.tolist()
                if np.array_equal(own_T[start : start + size], ids_n)
            )
            return
        ends = {count, int(np.max(np.flatnonzero(run.target), initial=-1)) + 1}  # what is compared keeps its end
        alike = int(np.argmin(np.append(own_T[:size] == ids_n, False)))
        for stop in sorted(ends):
            for head in range(min(alike, size - 1) + 1):
                start = stop - (size - head)
                if start >= head and np.array_equal(own_T[start:stop], ids_n[head:]):
                    yield np.concatenate([np.arange(head), np.arange(start, stop)])

    def _learned(self, run: Segment, window_n: Ints, leaf: int) -> _SegmentMeant:
        target = run.target[window_n]
        target[0] = False  # nothing before it predicts it
        stop = int(window_n[-1]) + 1
        parts_answer = stop < len(run) and bool(run.target[stop - 1] and run.target[stop])
        if parts_answer and not self.rules.cut_freely and not run.target[1:].all():
            target[-1] = False  # an answer without its end; a text goes on in the next window
        starts = {int(place): number for number, place in enumerate(window_n)}
        of_media = np.zeros(len(run), dtype=np.bool_)
        for item in run.media:
            of_media[item.start : item.start + item.length] = True
        return _SegmentMeant(
            ids=run.input_ids[window_n].astype(np.int64),
            target=target,
            weight=np.ones(len(target), np.float32) if run.weight is None else run.weight[window_n],
            of_media=of_media[window_n],
            media=tuple((starts[item.start], item) for item in run.media if item.start in starts),
            leaf=leaf,
        )

    def _wrong_positions(
        self, positions: NDArray[np.int64], segment: _SegmentPlaced, learned: _SegmentMeant
    ) -> str | None:
        """What is wrong with a segment's positions, [B, T] or [A, B, T]: they begin anew, and text counts on by one."""
        axes = positions[None] if positions.ndim == 2 else positions
        axes_An = axes[:, segment.row, segment.columns]
        plain = np.arange(len(segment.columns))
        steps = np.diff(axes_An, axis=1)
        text = ~learned.of_media[1:] & ~learned.of_media[:-1]
        if (axes_An[:, 0] != 0).any() or (steps[:, text] != 1).any():
            return "its positions do not count from 0, one by one"
        if (positions.ndim == 2 or self.rules.packed) and not np.array_equal(axes_An[0], plain):
            return "its positions are not those of its tokens"
        return None

    def _layout_faults(
        self, batch: Batch, inputs: Mapping[str, NDArray[np.int64]], found: Sequence[_SegmentPlaced]
    ) -> Iterator[Violation]:
        """Padding, and what keeps segments apart from each other and from it."""
        ids_BT = inputs["input_ids"]
        of_segment_BT = np.zeros(ids_BT.shape, dtype=np.bool_)
        if self.rules.by_axes != (inputs["position_ids"].ndim == 3):
            yield _fault(found[0].address, "its batch counts positions on other axes than the model does")
        for segment in found:
            of_segment_BT[segment.row, segment.columns] = True
        first = {segment.row: segment.address for segment in reversed(found)}
        sizes = of_segment_BT.sum(axis=1)
        for row, (ids_T, filled_T) in enumerate(zip(ids_BT, of_segment_BT, strict=True)):
            where = f"row {row + 1} of its batch"
            if (ids_T[~filled_T] != self.rules.pad_token_id).any() or not filled_T[: sizes[row]].all():
                yield _fault(first[row], f"{where}: there are tokens that belong to no segment")
            if self.rules.packed and sizes[row] < len(ids_T):
                tail = inputs["position_ids"][..., row, sizes[row] :]
                if (tail != np.arange(tail.shape[-1])).any():
                    yield _fault(first[row], f"{where}: its padding is not kept apart from its last segment")
            mask_BT = inputs.get("attention_mask")
            if self.rules.packed == (mask_BT is not None):
                yield _fault(first[row], f"{where}: an attention mask is for padded rows, and for these alone")
            elif mask_BT is not None and not np.array_equal(mask_BT[row] != 0, filled_T):
                yield _fault(first[row], f"{where}: its attention mask is not that of its tokens")
        if "cu_seq_lens_q" in batch.model_inputs:
            width = ids_BT.shape[1]
            ends = [segment.row * width + int(segment.columns[-1]) + 1 for segment in found]
            bounds = sorted({0, *ends, *(width * (row + 1) for row in range(len(ids_BT)))})
            told = {name: batch.model_inputs[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
            if any(given != bounds for given in told.values()):
                yield _fault(first[0], "the boundaries that kernels take are not those of the batch's segments")

    def _label_faults(self, batch: Batch, whole: Sequence[tuple[_SegmentPlaced, _SegmentMeant]]) -> Iterator[Violation]:
        """Whether labels, where a batch has them, are the ids that follow; and how many there are to learn."""
        count = sum(int(learned.target.sum()) for _, learned in whole)
        if batch.num_targets != count or len(batch.targets.ids_K) != count:
            what = f"its batch has {counted(batch.num_targets, 'target')}, and its rows have {count:,}"
            yield _fault(whole[0][0].address, what)
        is_tree = any(branch.parent >= 0 for row in batch.branches for branch in row)
        if batch.labels_BT.numel() == 0:
            if not is_tree:
                yield _fault(whole[0][0].address, "its batch has no labels")
            return
        labels_BT = np.full(batch.labels_BT.shape, IGNORE_INDEX)
        weights_BT = np.ones(labels_BT.shape, dtype=np.float32)
        for segment, learned in whole:
            before = segment.columns[:-1][learned.target[1:]]
            labels_BT[segment.row, before] = learned.ids[learned.target]
            weights_BT[segment.row, before] = learned.weight[learned.target]
        given_BT = np.ones_like(weights_BT) if batch.weights_BT is None else np.asarray(batch.weights_BT)
        for segment, _ in whole:
            row, columns = segment.row, segment.columns
            if not np.array_equal(labels_BT[row, columns], np.asarray(batch.labels_BT)[row, columns]):
                yield _fault(segment.address, f"{_place(segment)}: its labels are not the tokens that follow")
            elif not np.allclose(weights_BT[row, columns], given_BT[row, columns]):
                yield _fault(segment.address, f"{_place(segment)}: the weights of its labels are not the row's")
        if int((np.asarray(batch.labels_BT) != IGNORE_INDEX).sum()) != count:
            yield _fault(whole[0][0].address, "its batch has labels that are no segment's")

    def _unit_faults(
        self, batch: Batch, found: Sequence[_SegmentPlaced], learned: Sequence[_SegmentMeant]
    ) -> Iterator[Violation]:
        """Whether what is compared stands together, the chosen answer before the rejected, with the row's verdict."""
        units, size = self.rules.units, self.rules.units.size
        if not units.are_compared:
            return
        if sorted(number for unit in batch.units for number in unit.segments) != list(range(len(found))):
            yield _fault(found[0].address, "its batch compares other segments than it has")
        for unit in batch.units:
            addresses = {found[number].address for number in unit.segments}
            own = [learned[number] for number in unit.segments]
            address = found[unit.segments[0]].address
            if len(addresses) != 1 or len(unit.segments) != size:
                yield _fault(
                    address, f"it is compared with {', '.join(map(str, sorted(addresses - {address}, key=str)))}"
                )
            elif units.are_pairs and own[0].leaf >= own[1].leaf and own[0].ids.tolist() != own[1].ids.tolist():
                yield _fault(address, "its chosen and rejected answers have changed places")
            elif unit.verdict not in {sample.verdict for sample in self._samples_of(address)}:
                yield _fault(address, f"its verdict is {unit.verdict} in the batch")

    def _feature_faults(
        self, batch: Batch, whole: Sequence[tuple[_SegmentPlaced, _SegmentMeant]]
    ) -> Iterator[Violation]:
        """Whether the model is given the media of the batch's rows, in their order.

        Of processors that fill items up to a common size the numbers cannot be told apart, and are not compared.
        """
        trees: dict[int, dict[int, MediaItem]] = {}  # of each tree its items, by where they stand
        address = {segment.tree: segment.address for segment, _ in reversed(whole)}
        for segment, learned in whole:
            of_tree = trees.setdefault(segment.tree, {})
            of_tree.update({int(segment.columns[place]): item for place, item in learned.media})
        if self._features_of is None or not any(trees.values()):
            return
        made = {tree: self._features_of([items[at] for at in sorted(items)]) for tree, items in trees.items() if items}
        for name in sorted({name for features in made.values() for name in features} & batch.model_inputs.keys()):
            given = np.asarray(batch.model_inputs[name])
            wanted = {tree: features[name] for tree, features in made.items() if name in features}
            joined = [one for one in _joined(list(wanted.values())) if one.shape == given.shape]
            if joined and not any(np.allclose(one, given, rtol=0, atol=CLOSE) for one in joined):
                yield _fault(address[next(iter(wanted))], f"its batch has other {name} than those of its media")


def _joined(parts: Sequence[NDArray[np.generic]]) -> Iterator[NDArray[np.generic]]:
    """Parts side by side along each axis on which they can be."""
    for axis in range(parts[0].ndim):
        if len({(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}) == 1:
            yield np.concatenate(parts, axis=axis)


def _segments_of(batch: Batch) -> Iterator[_SegmentPlaced]:
    """The segments of a batch, in order; of trees the paths from a root to each end."""
    addresses, tree = iter(batch.addresses), -1
    for row, branches in enumerate(batch.branches):
        ends = np.cumsum([branch.length for branch in branches])
        continued = {branch.parent for branch in branches}
        for node, branch in enumerate(branches):
            tree += branch.parent < 0
            if node in continued:
                continue
            path = [node]
            while (parent := branches[path[0]].parent) >= 0:
                path.insert(0, parent)
            columns = np.concatenate([np.arange(ends[each] - branches[each].length, ends[each]) for each in path])
            yield _SegmentPlaced(address=next(addresses), row=row, columns=columns, tree=tree)


_TargetList = tuple[list[int], list[int], list[float]]  # positions, ids and weights


def _targets_of(batch: Batch, number: int) -> _TargetList:
    targets, own = batch.targets, batch.targets.segments_K == number
    ids = targets.ids_K[own].tolist()
    weights = [1.0] * len(ids) if targets.weights_K is None else targets.weights_K[own].tolist()
    return targets.positions_K[own].tolist(), ids, weights


def _wrong_targets(learned: _SegmentMeant, segment: _SegmentPlaced, found: _TargetList, width: int) -> str | None:
    """What is wrong with the targets of a segment; None: they are the row's, each learned where its token is next."""
    places = np.flatnonzero(learned.target)
    positions, ids, weights = found
    if len(ids) != len(places):
        return f"{counted(len(ids), 'token is', 'tokens are')} learned of it, and the row has {len(places)}"
    if ids != learned.ids[places].tolist():
        return "other tokens are learned of it than the row says"
    if positions != (segment.row * width + segment.columns[places - 1]).tolist():
        return "its tokens are learned at other places than before them"
    return None if np.allclose(weights, learned.weight[places]) else "the weights of its tokens are not the row's"


def _with_drawn_answer(
    own: _SegmentMeant, segment: _SegmentPlaced, ids_n: Ints, found: _TargetList, width: int
) -> list[_SegmentMeant]:
    """The prompt of a row with another row's answer, of which the batch alone says what is measured: its beginning."""
    prompt = int(np.argmax(own.target))
    following = {segment.row * width + int(column): place + 1 for place, column in enumerate(segment.columns)}
    places = [following.get(position, 0) for position in found[0]]
    if places[:1] != [prompt] or not np.array_equal(ids_n[:prompt], own.ids[:prompt]):
        return []
    target, rest = np.zeros(len(ids_n), dtype=np.bool_), len(ids_n) - prompt
    weight = np.ones(len(ids_n), dtype=np.float32)
    target[places], weight[places] = True, found[2]
    return [
        _SegmentMeant(
            ids=ids_n,
            target=target,
            weight=weight,
            of_media=np.append(own.of_media[:prompt], np.zeros(rest, np.bool_)),
            media=tuple((place, item) for place, item in own.media if place < prompt),
        )
    ]


def cut_faults(
    meant: NDArray[np.void], leaves: NDArray[np.void], stays: NDArray[np.bool_], address: Callable[[np.void], Address]
) -> Iterator[Violation]:
    """Whether of the leaves of rows those that ``stay`` are there whole, and none has more tokens than it had.

    ``meant`` (see `plan_faults`) is what is left of them.
    """
    keys, (kept, whole) = _tokens_of(meant, leaves)
    at = np.zeros(len(keys), dtype=np.bool_)
    at[np.searchsorted(keys, leaves[_NAMES])] = stays
    for place in np.flatnonzero((kept > whole) | (at & (kept < whole))).tolist():
        what = f"{kept[place]} of the {whole[place]} tokens of its sequence {int(keys[place]['leaf']) + 1} are left"
        yield _fault(address(keys[place]), f"{what} to train on")


def plan_faults(
    planned: NDArray[np.void],
    meant: NDArray[np.void],
    address: Callable[[np.void], Address],
    *,
    once: bool,
    epoch: int = 0,
) -> Iterator[Violation]:
    """Whether an epoch takes every token of every segment ``once``, or those of a row equally often.

    Both have the fields of `PART`, one record for each segment, or piece of one.
    """
    keys, (taken, there) = _tokens_of(planned, meant)
    times = taken / np.maximum(there, 1)
    _, rows = np.unique(keys[_NAMES[:3]], return_inverse=True)
    most = np.zeros(rows.max(initial=-1) + 1)
    np.maximum.at(most, rows, times)
    wrong = (times != 1) if once else (times != most[rows]) | (times != np.floor(times))
    for key, count in zip(keys[wrong], times[wrong].tolist(), strict=True):
        how_often = ("never" if count == 0 else f"{count:g} times") + (", and should once" if once else "")
        yield _fault(address(key), f"epoch {epoch + 1} takes its sequence {int(key['leaf']) + 1} {how_often}")


def _tokens_of(*parts: NDArray[np.void]) -> tuple[NDArray[np.void], list[Ints]]:
    """All segments that occur, sorted, and of each how many tokens each of these has of it."""
    keys, inverse = np.unique(np.concatenate([each[_NAMES] for each in parts]), return_inverse=True)
    columns = np.split(inverse, np.cumsum([len(each) for each in parts])[:-1])
    found = [np.zeros(len(keys), dtype=np.int64) for _ in parts]
    for tokens, column, each in zip(found, columns, parts, strict=True):
        np.add.at(tokens, column, each["tokens"])
    return keys, found


def _place(segment: _SegmentPlaced) -> str:
    return f"row {segment.row + 1} of its batch, token {int(segment.columns[0])}"


def _fault(address: Address, what: str) -> Violation:
    return Violation(check=Check.BATCHES, address=str(address), what=what)
