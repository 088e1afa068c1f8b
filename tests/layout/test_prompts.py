"""Prompts that are cut, and continuations that are put behind them."""

from __future__ import annotations

import numpy as np
import pytest

from luthier.layout import cut_prompt, held_of_leaves, leaf_segment, prompt_tree, spans_of, splice, tree_of_runs
from luthier.layout.cutting import SegmentCut, take_window
from luthier.records import Branch, Sample, Segment


def segment(*ids: int, learned: int, weight: float | None = None) -> Segment:
    target = np.zeros(len(ids), np.bool_)
    target[len(ids) - learned :] = True
    weights = None if weight is None else np.full(len(ids), weight, np.float32)
    return Segment(input_ids=np.array(ids, np.int32), target=target, weight=weights)


@pytest.mark.parametrize(
    ("room", "kept"),
    [(20, (0, 0)), (19, (3, 8)), (15, (3, 8)), (14, (3, 15)), (8, (3, 15)), (7, None), (0, None)],
)
def test_as_few_messages_as_will_do_go_and_the_system_message_and_the_question_stay(room: int, kept: object) -> None:
    found = cut_prompt([3, 8, 15], 20, room=room)
    assert found == kept
    if found is not None:
        head, start = found
        assert head + 20 - start <= room


def test_a_prompt_of_one_question_is_not_cut() -> None:
    assert cut_prompt([1], 20, room=19) is None and cut_prompt([], 20, room=19) is None
    assert cut_prompt([], 20, room=20) == (0, 0)


def test_a_window_with_a_head_keeps_both_ends() -> None:
    whole = segment(*range(10), learned=3)
    window = SegmentCut(head=2, start=5, stop=10, open_end=False, num_targets=3)
    cut = take_window(whole, window)
    assert cut.input_ids.tolist() == [0, 1, 5, 6, 7, 8, 9] and len(window) == 7
    assert np.flatnonzero(cut.target).tolist() == [4, 5, 6]


def test_a_tree_holds_the_prompt_once_and_unrolls_to_its_runs() -> None:
    runs = [segment(1, 2, 3, 4, learned=2, weight=0.5), segment(1, 2, 5, learned=1)]
    tree = prompt_tree(runs, 2)
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert [(branch.parent, branch.length) for branch in tree.branches] == [(-1, 2), (0, 2), (0, 1)]
    for run, back in zip(runs, tree.segments(), strict=True):
        assert np.array_equal(run.input_ids, back.input_ids) and np.array_equal(run.target, back.target)
        assert back.weight is not None
        expected = np.ones(len(run)) if run.weight is None else run.weight
        assert np.array_equal(back.weight[run.target], expected[run.target])


def test_another_rows_answer_keeps_its_targets_and_the_prompt_has_none() -> None:
    prompt = spans_of(segment(1, 2, 3, 4, learned=2), slice(0, 3))
    answer = spans_of(segment(7, 8, 9, learned=2, weight=2), slice(1, 3))
    joined = splice(prompt, answer)
    assert joined.input_ids.tolist() == [1, 2, 3, 8, 9]
    assert joined.target.tolist() == [False, False, False, True, True]
    assert joined.weight is not None and joined.weight.tolist() == [1, 1, 1, 2, 2]


# ------------------------------------------------------------------------------------------------- trees of runs


def random_tree(rng: np.random.Generator, most: int) -> Sample:
    """Depth first; no branch is continued by just one."""
    branches: list[Branch] = []

    def grow(parent: int, depth: int) -> None:
        branches.append(Branch(parent=parent, length=int(rng.integers(1, 5))))
        own = len(branches) - 1
        if depth < 12 and len(branches) < most:
            for _ in range(int(rng.choice([0, 2, 3, 5]))):
                grow(own, depth + 1)

    grow(-1, 0)
    total = sum(branch.length for branch in branches)
    return Sample(
        input_ids=rng.integers(0, 5, total).astype(np.int32), target=rng.random(total) < 0.4, branches=tuple(branches)
    )


@pytest.mark.parametrize("seed", range(30))
def test_leaves_and_what_each_shares_with_the_one_before_it_are_the_tree(seed: int) -> None:
    sample = random_tree(np.random.default_rng(seed), most=50)
    parents, lengths = zip(*((branch.parent, branch.length) for branch in sample.branches), strict=True)
    bounds = np.array([0, len(parents), 2 * len(parents)])
    held = held_of_leaves(np.array(2 * parents), np.array(2 * lengths), bounds)
    half = len(held) // 2
    assert held[:half].tolist() == held[half:].tolist(), "the trees of a store do not know of each other"
    found = tree_of_runs([leaf_segment(sample, n) for n in range(half)], held[:half].tolist())
    assert len(found.input_ids) == len(sample.input_ids), "each token once"
    for mine, own in zip(found.segments(), sample.segments(), strict=True):
        assert mine.input_ids.tolist() == own.input_ids.tolist()
        assert mine.target.tolist() == own.target.tolist()


def test_a_run_that_does_not_begin_as_the_one_before_it_is_refused() -> None:
    one, other = (Segment(input_ids=np.array(ids), target=np.ones(3, np.bool_)) for ids in ([1, 2, 3], [1, 4, 5]))
    assert len(tree_of_runs([one, other], [0, 1]).branches) == 3
    with pytest.raises(AssertionError, match="does not begin with"):
        tree_of_runs([one, other], [0, 2])
