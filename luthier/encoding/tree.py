"""Paths of tokens folded into one token tree.

Paths that begin with the same ids share a branch as far as they agree:

    [1 2 3 4]         branch 0: [1 2], parent -1
    [1 2 5]     ->    branch 1: [3 4], parent 0
                      branch 2: [5],   parent 0

A target belongs to one path. Where two paths agree on an id that is a target in both, they part nevertheless: two
continuations of one prompt stay two branches even if they begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from luthier.records import NOWHERE, Address, Branch, Sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPath:
    """One root-to-leaf sequence: ``ids`` int32[T]; ``weights`` float32[T], 0.0 where a token is no target."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


def fold(paths: Sequence[TokenPath], address: Address = NOWHERE) -> Sample:
    """Fold paths into one `Sample`; branches are stored depth first, leaves in the order of their paths."""
    roots: list[_Node] = []
    for path in paths:
        _insert(roots, path)
    nodes: list[tuple[int, _Node]] = []
    for root in roots:
        _flatten(root, -1, nodes)
    weights = np.concatenate([node.weights for _, node in nodes])
    target = weights > 0
    return Sample(
        input_ids=np.concatenate([node.ids for _, node in nodes]),
        target=target,
        weight=None if (weights[target] == 1).all() else np.where(target, weights, 1).astype(np.float32),
        branches=tuple(Branch(parent=parent, length=len(node.ids)) for parent, node in nodes),
        address=address,
    )


@dataclass(slots=True, eq=False)
class _Node:
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    children: list[_Node] = field(default_factory=list)


def _insert(siblings: list[_Node], path: TokenPath) -> None:
    ids, weights = path.ids, path.weights
    while len(ids):
        node, common = _best_match(siblings, ids, weights)
        if node is None:
            siblings.append(_Node(ids, weights))
            return
        if common < len(node.ids):
            node.children = [_Node(node.ids[common:], node.weights[common:], node.children)]
            node.ids, node.weights = node.ids[:common], node.weights[:common]
        node.weights = np.maximum(node.weights, weights[:common])
        siblings, ids, weights = node.children, ids[common:], weights[common:]


def _best_match(
    siblings: list[_Node], ids: NDArray[np.int32], weights: NDArray[np.float32]
) -> tuple[_Node | None, int]:
    best: tuple[_Node | None, int] = (None, 0)
    for node in siblings:
        length = min(len(ids), len(node.ids))
        differs = (node.ids[:length] != ids[:length]) | ((node.weights[:length] > 0) & (weights[:length] > 0))
        common = int(differs.argmax()) if differs.any() else length
        if common > best[1]:
            best = (node, common)
    return best


def _flatten(node: _Node, parent: int, nodes: list[tuple[int, _Node]]) -> None:
    number = len(nodes)
    nodes.append((parent, node))
    for child in node.children:
        _flatten(child, number, nodes)
