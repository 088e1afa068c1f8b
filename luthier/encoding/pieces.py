"""Blueprints become ids: the texts of many rows are encoded in one call and put between what never changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.text_encoders import BadTexts, Flat, unflatten
from luthier.encoding.tokenizer import Behind, Tokenizer
from luthier.errors import ModelError, RowError
from luthier.layout.cutting import marks_around
from luthier.records import NOWHERE, Address, Branch, ControlPiece, MediaItem, MediaPiece, Sample
from luthier.rendering import ControlTokens
from luthier.rendering.blueprint import DIFFERING_TOKENS, Blueprint, BlueprintRun, Filled, TextRun

# --------------------------------------------------------------------------------------------------------------------
# Branches of tokens folded into one token tree.
#
# Branches that stand side by side and begin with the same ids become one as far as they agree:
#
#     [1 2 3 4]         branch 0: [1 2], parent -1
#     [1 2 5]     ->    branch 1: [3 4], parent 0
#                       branch 2: [5],   parent 0
#
# A target belongs to one branch. Where two branches agree on an id that is a target in both, they part nevertheless:
# two continuations of one prompt stay two branches even if they begin alike.


def fold(
    ids: NDArray[np.int32], weights: NDArray[np.float32], branches: Sequence[Branch], address: Address = NOWHERE
) -> Sample:
    """The `Sample` of some branches, whose tokens stand one after the other in ``ids``, int32[T].

    ``weights``, float32[T], are 0.0 where a token is no target. Parents come before their children. The sample's
    branches are stored depth first, leaves in the order in which they came.
    """
    folding = _Folding(ids=ids, weights=weights)
    roots: list[_TokenNode] = []
    nodes: list[_TokenNode] = []
    start = 0
    for branch in branches:
        nodes.append(_TokenNode([(start, start + branch.length)]))
        (nodes[branch.parent].children if branch.parent >= 0 else roots).append(nodes[-1])
        start += branch.length
    stored: list[tuple[int, _TokenNode]] = []
    for root in folding.merged(roots):
        _flatten(root, -1, stored)
    spans = [slice(*span) for _, node in stored for span in node.spans]
    target, weight = _targets_of(np.concatenate([folding.weights[span] for span in spans]))
    return Sample(
        input_ids=np.concatenate([ids[span] for span in spans]),
        target=target,
        weight=weight,
        branches=tuple(
            Branch(parent=parent, length=sum(end - start for start, end in node.spans)) for parent, node in stored
        ),
        address=address,
    )


def _targets_of(weights: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float32] | None]:
    """Which tokens are learned, and what each counts; None where that is 1 for all of them."""
    target = weights > 0
    return target, None if (weights == target).all() else np.where(target, weights, 1).astype(np.float32)


NEAR = 6  # most runs part within so many tokens, which is quicker to see one by one


@dataclass(slots=True, eq=False)
class _TokenNode:
    """A run of tokens, as spans of the whole, and what may follow it. Only leaves of the input have several spans."""

    spans: list[tuple[int, int]]
    children: list[_TokenNode] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Folding:
    """Folding one tree."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]

    def merged(self, nodes: Sequence[_TokenNode]) -> list[_TokenNode]:
        """Nodes that stand side by side, none of which begins like another any more."""
        siblings: list[_TokenNode] = []
        for node in nodes:
            self._graft(siblings, node)
        return siblings

    def _graft(self, siblings: list[_TokenNode], node: _TokenNode) -> None:
        """Add a node beside others, or into the one that it begins like."""
        ((start, end),) = node.spans
        if start == end:
            for child in node.children:
                self._graft(siblings, child)
            return
        match, common = self._best_match(siblings, start, end)
        if match is None:
            node.children = self.merged(node.children)
            siblings.append(node)
            return
        ((match_start, match_end),) = match.spans
        if match_start + common < match_end:
            match.children = [_TokenNode([(match_start + common, match_end)], match.children)]
            match.spans = [(match_start, match_start + common)]
        self._share(match_start, start, common)
        self._graft(match.children, _TokenNode([(start + common, end)], node.children))

    def _best_match(self, siblings: list[_TokenNode], start: int, end: int) -> tuple[_TokenNode | None, int]:
        best: tuple[_TokenNode | None, int] = (None, 0)
        for other in siblings:
            ((other_start, other_end),) = other.spans
            common = self._common(other_start, start, min(end - start, other_end - other_start))
            if common > best[1]:
                best = (other, common)
        return best

    def _common(self, one: int, other: int, most: int) -> int:
        token, weight = self.ids.item, self.weights.item
        for index in range(min(most, NEAR)):
            if token(one + index) != token(other + index) or (weight(one + index) > 0 and weight(other + index) > 0):
                return index
        mine, theirs = slice(one, one + most), slice(other, other + most)
        differs = self.ids[mine] != self.ids[theirs]
        differs |= (self.weights[mine] > 0) & (self.weights[theirs] > 0)
        return int(differs.argmax()) if differs.any() else most

    def _share(self, kept: int, left: int, length: int) -> None:
        """Tokens that are kept in place of others are learned if those were."""
        theirs = self.weights[left : left + length]
        if theirs.any():
            self.weights = self.weights.copy()
            self.weights[kept : kept + length] = np.maximum(self.weights[kept : kept + length], theirs)


def _flatten(node: _TokenNode, parent: int, stored: list[tuple[int, _TokenNode]]) -> None:
    while len(node.children) == 1:  # what was a fork before its children turned out to begin alike
        (child,) = node.children
        node = _TokenNode([*node.spans, *child.spans], child.children)
    number = len(stored)
    stored.append((parent, node))
    for child in node.children:
        _flatten(child, number, stored)


MOST_ASSEMBLIES = 5_000
MOST_WITH_MEDIA = 500  # these hold the ids of all slots


class Assembler:
    """Encodes filled blueprints under one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # each is kept as long as its blueprint is: those of long rows take much memory, and no other row has them
        self._assemblies: WeakKeyDictionary[Blueprint, dict[tuple[str, ...], _Assembly]] = WeakKeyDictionary()
        self._num_kept = 0  # at most: some may have gone with their blueprints

    @cached_property
    def control_ids(self) -> NDArray[np.int32]:
        """Those of all control tokens."""
        return np.array(sorted(self.tokenizer.control_ids), dtype=np.int32)

    def assemble(self, rows: Sequence[Filled]) -> list[Sample | RowError]:
        """One outcome per row, in order. Text that occurs several times is encoded once."""
        numbers: dict[tuple[str, bool], int] = {}  # of the texts to encode
        drafts: list[_PendingSample] = []
        for row in rows:
            assembly = self._assembly(row.blueprint, tuple(expansion.text for expansion in row.expansions))
            texts = [(run.text(row.values), bare) for run, bare in assembly.texts]
            own = [] if row.allowed else [numbers.setdefault(text, len(numbers)) for text in texts]
            drafts.append(_PendingSample(row=row, assembly=assembly, texts=texts, numbers=own))
        try:
            flat = self.tokenizer.encode_flat([text for text, _ in numbers], [bare for _, bare in numbers])
        except BadTexts as error:
            return self._without_bad(drafts, error.errors)
        encoded = unflatten(*flat)
        return [self._sample(draft, encoded) for draft in drafts]

    def _assembly(self, blueprint: Blueprint, expansions: tuple[str, ...]) -> _Assembly:
        """The assembly of a blueprint with these texts for its media."""
        known = self._assemblies.get(blueprint, {}).get(expansions)
        if known is None:
            if self._num_kept >= (MOST_WITH_MEDIA if expansions else MOST_ASSEMBLIES):
                self._assemblies.clear()
                self._num_kept = 0
            known = _Assembly(blueprint, expansions, self.tokenizer)
            self._assemblies.setdefault(blueprint, {})[expansions] = known
            self._num_kept += 1
        return known

    def _without_bad(self, drafts: Sequence[_PendingSample], errors: Mapping[int, RowError]) -> list[Sample | RowError]:
        blame = [next((errors[number] for number in draft.numbers if number in errors), None) for draft in drafts]
        good = iter(self.assemble([draft.row for draft, error in zip(drafts, blame, strict=True) if error is None]))
        return [
            next(good) if error is None else error.at(draft.row.address)
            for draft, error in zip(drafts, blame, strict=True)
        ]

    def _sample(self, draft: _PendingSample, encoded: Sequence[NDArray[np.int32]]) -> Sample | RowError:
        row, assembly = draft.row, draft.assembly
        try:
            texts = iter(
                [self._with_control(text, row.allowed, bare=bare)[0] for text, bare in draft.texts]
                if row.allowed
                else [encoded[number] for number in draft.numbers]
            )
        except RowError as error:
            return error.at(row.address)
        arrays = [next(texts) if constant is None else constant for constant in assembly.constants]
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        ids = np.concatenate(arrays)
        if not len(ids):
            return RowError("empty", "the row renders to nothing", address=row.address)
        is_path = len(assembly.parents) == 1
        sizes = [len(ids)] if is_path else np.add.reduceat(lengths, assembly.first_item).tolist()
        branches = [Branch(parent=parent, length=size) for parent, size in zip(assembly.parents, sizes, strict=True)]
        notes = self._notes(row, assembly, lengths)
        if row.expansions:
            return replace(self._with_media(draft, ids, lengths, branches), notes=notes)
        if assembly.is_weighted or assembly.mixed or _some_begin_alike(assembly, ids, sizes):
            sample = fold(ids, self._weights(row, assembly, lengths), branches, row.address)
            return replace(sample, notes=notes) if notes else sample
        return Sample(
            input_ids=ids,
            target=np.repeat(assembly.is_target, lengths),
            branches=tuple(branches),
            notes=notes,
            address=row.address,
        )

    def _with_media(
        self, draft: _PendingSample, ids: NDArray[np.int32], lengths: NDArray[np.int64], branches: Sequence[Branch]
    ) -> Sample:
        """Its branches are as the blueprint has them: places in them stay what they are."""
        row, assembly = draft.row, draft.assembly
        target, weight = _targets_of(self._weights(row, assembly, lengths))
        starts = np.cumsum(lengths) - lengths
        spans = [(int(starts[first]), int(starts[last] + lengths[last])) for _, first, last in assembly.media]
        ends = np.cumsum([branch.length for branch in branches])
        marks = marks_around(spans, np.isin(ids, self.control_ids) & ~target, ends)
        media = tuple(
            MediaItem(
                media=row.expansions[number].media,
                header=row.expansions[number].header,
                start=start,
                length=stop - start,
                encoder_length=(stop - start) * row.expansions[number].fold,
                opening=opening,
                closing=closing,
                counts_together=row.expansions[number].counts_together,
            )
            for (number, _, _), (start, stop), (opening, closing) in zip(assembly.media, spans, marks, strict=True)
        )
        return Sample(
            input_ids=ids,
            target=target,
            weight=weight,
            branches=tuple(branches),
            media=media,
            address=row.address,
        )

    def _notes(self, row: Filled, assembly: _Assembly, lengths: NDArray[np.int64]) -> tuple[tuple[str, int], ...]:
        """The row's own, and how many of its targets inference would show another context."""
        if not row.blueprint.differing:
            return row.notes
        differs = np.repeat(assembly.differs, lengths) & (self._weights(row, assembly, lengths) > 0)
        return (*row.notes, (DIFFERING_TOKENS, int(np.count_nonzero(differs))))

    def _weights(self, row: Filled, assembly: _Assembly, lengths: NDArray[np.int64]) -> NDArray[np.float32]:
        weights = np.repeat(assembly.weights, lengths)
        ends = np.cumsum(lengths)
        for item, run, bare in assembly.mixed:
            texts = run.fill(row.values)
            _, last = self._with_control("".join(texts), row.allowed, bare=bare)
            # a token that reaches over two pieces (" the") counts as the one it ends in
            starts = np.cumsum([0, *map(len, texts[:-1])])
            piece = np.searchsorted(starts, last, side="right") - 1
            weights[ends[item] - lengths[item] : ends[item]] = np.array(run.weights, np.float32)[piece]
        return weights

    def _with_control(self, text: str, allowed: frozenset[str], *, bare: bool) -> Flat:
        """Ids of a text in which some control strings are control tokens, and the last character each id covers."""
        ids, last = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        position = 0
        found = [match for match in self.tokenizer.control.find(text) if match[2] in allowed]
        for start, end, token in [*found, (len(text), len(text), None)]:
            own_ids, own_last = self.tokenizer.encode_with_last(text[position:start], bare=bare)
            bare = self.tokenizer.is_bare("control token")
            ids.append(own_ids)
            last.append(own_last + position)
            if token is not None:
                ids.append(np.array([self.tokenizer.control_id(token)], np.int32))
                last.append(np.array([end - 1]))
            position = end
        return np.concatenate(ids), np.concatenate(last)


def _some_begin_alike(assembly: _Assembly, ids: NDArray[np.int32], sizes: Sequence[int]) -> bool:
    """Whether branches side by side begin with the same token, or have none, so that the tree can be smaller."""
    if not assembly.siblings:
        return False
    if not all(sizes):
        return True
    starts = list(accumulate(sizes, initial=0))
    return any(len({ids.item(starts[branch]) for branch in siblings}) < len(siblings) for siblings in assembly.siblings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingSample:
    """A row on its way: its runs' texts with what `Tokenizer.is_bare` says, and their numbers among all of a batch."""

    row: Filled
    assembly: _Assembly
    texts: list[tuple[str, bool]]
    numbers: list[int]


class _Assembly:
    """A blueprint for one tokenizer, with the texts of its media: the runs of all branches one after the other.

    ``constants[i]`` are the ids of item i if they are the same in every row, else None; ``weights[i]`` is what each
    token of item i counts, unless it is one of ``mixed``. ``first_item`` is the first item of each branch. ``media``
    are the media items, by number, each with the first and the last of the items that stand for it. ``differs`` says
    of each item whether it is learned in another context than inference shows.
    """

    def __init__(self, blueprint: Blueprint, expansions: Sequence[str], tokenizer: Tokenizer) -> None:
        self.media: list[tuple[int, int, int]] = []
        self.differing = blueprint.differing
        self.differs: list[bool] = []
        self.constants: list[NDArray[np.int32] | None] = []
        self.texts: list[tuple[TextRun, bool]] = []
        self.mixed: list[tuple[int, TextRun, bool]] = []
        ends: list[Behind] = []
        weights: list[float] = []
        first_item = []
        for branch in blueprint.branches:
            first_item.append(len(self.constants))
            runs = expand_runs(branch.runs, expansions, blueprint.control) if expansions else branch.runs
            behind: Behind = "nothing" if branch.parent < 0 else ends[branch.parent]
            for run in runs:
                self._add(run, tokenizer, weights, first_item[-1], bare=tokenizer.is_bare(behind))
                behind = "text" if isinstance(run, TextRun | SlotText) else "control token"
                message = run.message if isinstance(run, TextRun | ControlPiece) else None
                self.differs += [message in self.differing] * (len(self.constants) - len(self.differs))
            ends.append(behind)
        self.parents = [branch.parent for branch in blueprint.branches]
        children: dict[int, list[int]] = {}
        for number, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(number)
        self.siblings = [group for _, group in sorted(children.items()) if len(group) > 1]
        self.first_item = np.array(first_item)
        self.weights = np.array(weights, np.float32)
        self.is_target = self.weights > 0
        self.is_weighted = bool((self.weights[self.is_target] != 1).any())

    def _add(
        self, run: BlueprintRun | ExpandedRun, tokenizer: Tokenizer, weights: list[float], start: int, *, bare: bool
    ) -> None:
        match run:
            case ControlPiece():
                self._add_constant(np.array([tokenizer.control_id(run.token)], np.int32), run.weight, weights, start)
            case TextRun() if run.is_constant and run.is_uniform:
                (ids,) = tokenizer.encode_runs([run.text(())], bare=bare)
                self._add_constant(ids, run.weights[0], weights, start)
            case TextRun():
                if not run.is_uniform:
                    self.mixed.append((len(self.constants), run, bare))
                self.constants.append(None)
                self.texts.append((run, bare))
                weights.append(run.weights[0])
            case ControlRun():
                self._add_slot(run.number, np.full(run.count, _slot_id(tokenizer, run.token), np.int32), weights)
            case SlotText():
                self._add_slot(run.number, tokenizer.encode_runs([run.text], bare=bare)[0], weights)
            case MediaPiece():
                raise AssertionError(f"media item {run.number} was not expanded")

    def _add_slot(self, number: int, ids: NDArray[np.int32], weights: list[float]) -> None:
        place = len(self.constants)
        self.constants.append(ids)
        weights.append(0.0)
        if self.media and self.media[-1][0] == number and self.media[-1][2] == place - 1:
            self.media[-1] = number, self.media[-1][1], place
        else:
            self.media.append((number, place, place))

    def _add_constant(self, ids: NDArray[np.int32], weight: float, weights: list[float], branch_start: int) -> None:
        is_slot = bool(self.media) and self.media[-1][2] == len(self.constants) - 1
        last = self.constants[-1] if len(self.constants) > branch_start and not is_slot else None
        if last is not None and weights[-1] == weight and not self.differing:
            self.constants[-1] = np.concatenate([last, ids])
        else:
            self.constants.append(ids)
            weights.append(weight)


def _slot_id(tokenizer: Tokenizer, token: str) -> int:
    if token not in tokenizer.control.tokens:
        raise ModelError(
            f"the model's processor writes {token} for its media, which its tokenizer does not have",
            hint="the folder's processor_config.json and tokenizer.json do not belong together",
        )
    return tokenizer.control_id(token)


# --------------------------------------------------------------------------------------------------------------------
# Runs with media: what the processor writes in an item's place is put between them, and its text joins theirs.
#
#     Look: [video]          Look: <0.0 seconds>            one text, as inference encodes it
#                     ->     <|vision_start|> slots <|vision_end|>
#     What?                  What?
#
# An expansion that begins or ends with text has it encoded together with the text beside it, as the model's tokenizer
# does when it is given the whole prompt.


@dataclass(frozen=True, slots=True)
class ControlRun:
    """One control token, ``count`` times; ``number`` is the media item that it belongs to."""

    token: str
    count: int
    number: int


@dataclass(frozen=True, slots=True)
class SlotText:
    """Text inside an expansion, between its control tokens."""

    text: str
    number: int


ExpandedRun = TextRun | ControlPiece | ControlRun | SlotText


def expand_runs(runs: Sequence[BlueprintRun], texts: Sequence[str], control: ControlTokens) -> list[ExpandedRun]:
    """The runs of a branch with media item ``n`` replaced by ``texts[n]``, which hold a control token at least."""
    found: list[ExpandedRun] = []
    leading = ""  # text at an expansion's end, which goes on in what follows
    for run in runs:
        if isinstance(run, MediaPiece):
            parts = split_expansion(texts[run.number], control)
            first = next(index for index, part in enumerate(parts) if not isinstance(part, str))
            last = max(index for index, part in enumerate(parts) if not isinstance(part, str))
            before = leading + "".join(part for part in parts[:first] if isinstance(part, str))
            _append_text(found, before)
            for part in parts[first : last + 1]:
                found.append(SlotText(part, run.number) if isinstance(part, str) else ControlRun(*part, run.number))
            leading = "".join(part for part in parts[last + 1 :] if isinstance(part, str))
            continue
        if leading and isinstance(run, TextRun) and not run.by_model:
            found.append(replace(run, texts=((leading,), *run.texts), weights=(0.0, *run.weights)))
        else:
            _append_text(found, leading)
            found.append(run)
        leading = ""
    _append_text(found, leading)
    return found


@lru_cache(maxsize=4_000)
def split_expansion(text: str, control: ControlTokens) -> tuple[str | tuple[str, int], ...]:
    """``"<img><pad><pad></img>\n"`` -> ``("<img>", 1), ("<pad>", 2), ("</img>", 1), "\n"``"""
    parts: list[str | tuple[str, int]] = []
    position = 0
    for start, end, token in control.find(text):
        if position < start:
            parts.append(text[position:start])
        last = parts[-1] if parts else None
        if isinstance(last, tuple) and last[0] == token:
            parts[-1] = token, last[1] + 1
        else:
            parts.append((token, 1))
        position = end
    if position < len(text):
        parts.append(text[position:])
    return tuple(parts)


def _append_text(found: list[ExpandedRun], text: str) -> None:
    """Text of the template's side behind what there is: in one run with the text before it, if that is no answer."""
    if not text:
        return
    last = found[-1] if found else None
    if isinstance(last, TextRun) and not last.by_model:
        found[-1] = replace(last, texts=(*last.texts, (text,)), weights=(*last.weights, 0.0))
    else:
        found.append(TextRun(texts=((text,),), weights=(0.0,)))
