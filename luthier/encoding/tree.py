"""Branches of tokens folded into one token tree.

Branches that stand side by side and begin with the same ids become one as far as they agree:

    [1 2 3 4]         branch 0: [1 2], parent -1
    [1 2 5]     ->    branch 1: [3 4], parent 0
                      branch 2: [5],   parent 0

A target belongs to one branch. Where two branches agree on an id that is a target in both, they part nevertheless: two
continuations of one prompt stay two branches even if they begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luthier.records import NOWHERE, Address, Branch, Sample


def fold(
    ids: NDArray[np.int32], weights: NDArray[np.float32], branches: Sequence[Branch], address: Address = NOWHERE
) -> Sample:
    """The `Sample` of some branches, whose tokens stand one after the other in ``ids``, int32[T].

    ``weights``, float32[T], are 0.0 where a token is no target. Parents come before their children. The sample's
    branches are stored depth first, leaves in the order in which they came.
    """
    folding = _Folding(ids=ids, weights=weights)
    roots: list[_Node] = []
    nodes: list[_Node] = []
    start = 0
    for branch in branches:
        nodes.append(_Node([(start, start + branch.length)]))
        (nodes[branch.parent].children if branch.parent >= 0 else roots).append(nodes[-1])
        start += branch.length
    stored: list[tuple[int, _Node]] = []
    for root in folding.merged(roots):
        _flatten(root, -1, stored)
    spans = [slice(*span) for _, node in stored for span in node.spans]
    weights = np.concatenate([folding.weights[span] for span in spans])
    target = weights > 0
    return Sample(
        input_ids=np.concatenate([ids[span] for span in spans]),
        target=target,
        weight=None if (weights == target).all() else np.where(target, weights, 1).astype(np.float32),
        branches=tuple(
            Branch(parent=parent, length=sum(end - start for start, end in node.spans)) for parent, node in stored
        ),
        address=address,
    )


NEAR = 6  # most runs part within so many tokens, which is quicker to see one by one


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens, as spans of the whole, and what may follow it. Only leaves of the input have several spans."""

    spans: list[tuple[int, int]]
    children: list[_Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Folding:
    """Folding one tree."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]

    def merged(self, nodes: Sequence[_Node]) -> list[_Node]:
        """Nodes that stand side by side, none of which begins like another any more."""
        siblings: list[_Node] = []
        for node in nodes:
            self._graft(siblings, node)
        return siblings

    def _graft(self, siblings: list[_Node], node: _Node) -> None:
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
            match.children = [_Node([(match_start + common, match_end)], match.children)]
            match.spans = [(match_start, match_start + common)]
        self._share(match_start, start, common)
        self._graft(match.children, _Node([(start + common, end)], node.children))

    def _best_match(self, siblings: list[_Node], start: int, end: int) -> tuple[_Node | None, int]:
        best: tuple[_Node | None, int] = (None, 0)
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


def _flatten(node: _Node, parent: int, stored: list[tuple[int, _Node]]) -> None:
    while len(node.children) == 1:  # what was a fork before its children turned out to begin alike
        (child,) = node.children
        node = _Node([*node.spans, *child.spans], child.children)
    number = len(stored)
    stored.append((parent, node))
    for child in node.children:
        _flatten(child, number, stored)
