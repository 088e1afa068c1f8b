"""What a row of token trees means, against loops that follow each path token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.layout import ancestors, join_trees, leaves, tree_follows, tree_leaves, tree_mask, tree_positions
from luthier.records import Branch, Sample

PAIR = (Branch(parent=-1, length=3), Branch(parent=0, length=2), Branch(parent=0, length=2))


@st.composite
def forests(draw):
    count = draw(st.integers(1, 6))
    return tuple(
        Branch(parent=draw(st.integers(-1, node - 1)), length=draw(st.integers(0, 4))) for node in range(count)
    )


def paths(branches):
    """For each token of the row the tokens of its path, itself last."""
    found, ends = [], {-1: []}
    for node, branch in enumerate(branches):
        path = list(ends[branch.parent])
        for _ in range(branch.length):
            path = [*path, len(found)]
            found.append(path)
        ends[node] = path
    return found


def test_a_pair_that_shares_its_prompt():
    assert tree_positions(PAIR).tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert tree_follows(PAIR).tolist() == [-1, 0, 1, 2, 3, 2, 5]
    ends, leaf_T = tree_leaves(PAIR)
    assert ends == [1, 2] and leaf_T.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert tree_mask(PAIR, width=8).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


@given(forests(), st.integers(0, 2), st.none() | st.integers(1, 5))
def test_masks_positions_and_predecessors_are_those_of_each_tokens_path(branches, tail, window):
    of_tokens = paths(branches)
    width = len(of_tokens) + tail
    assert tree_positions(branches).tolist() == [len(path) - 1 for path in of_tokens]
    assert tree_follows(branches).tolist() == [path[-2] if len(path) > 1 else -1 for path in of_tokens]
    expected = np.eye(width, dtype=bool)
    for token, path in enumerate(of_tokens):
        expected[token, path if window is None else path[-window:]] = True
    assert (tree_mask(branches, width=width, window=window) == expected).all()


@given(forests())
def test_targets_belong_to_the_leaf_that_counts_them_when_the_tree_is_unrolled(branches):
    num_tokens = sum(branch.length for branch in branches)
    sample = Sample(
        input_ids=np.arange(num_tokens, dtype=np.int32), target=np.ones(num_tokens, dtype=bool), branches=branches
    )
    ends, leaf_T = tree_leaves(branches)
    assert ends == leaves(branches)
    counted = {int(i): n for n, s in enumerate(sample.segments()) for i in s.input_ids[s.target]}
    assert [counted[token] for token in range(num_tokens)] == leaf_T.tolist()


def test_what_continues_a_branch_without_tokens_follows_what_that_continues():
    branches = (*PAIR, Branch(parent=0, length=0), Branch(parent=3, length=2))
    assert tree_follows(branches).tolist() == [-1, 0, 1, 2, 3, 2, 5, 2, 7]


def test_trees_of_a_row_keep_their_own_parents():
    row = join_trees([PAIR, (Branch(parent=-1, length=5),), PAIR])
    assert [branch.parent for branch in row] == [-1, 0, 0, -1, -1, 4, 4]
    assert ancestors(row) == [(), (0,), (0,), (), (), (4,), (4,)]


def test_control_a_parent_behind_its_child_is_refused():
    with pytest.raises(AssertionError, match="branch 0 continues branch 1"):
        ancestors((Branch(parent=1, length=1), Branch(parent=-1, length=1)))
