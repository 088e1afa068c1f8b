"""Folding paths into a tree loses nothing: unrolling gives the paths back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from luthier.encoding.pieces import ControlRun, ExpandedRun, SlotText, expand_runs
from luthier.encoding.pieces import fold as fold_branches
from luthier.records import Branch, MediaPiece, Sample
from luthier.rendering import ControlTokens
from luthier.rendering.blueprint import TextRun

Path = tuple[list[int], list[float]]


def path(ids: list[int], targets: list[int] | None = None) -> Path:
    return ids, [float(index in (targets or [])) for index in range(len(ids))]


def fold(paths: list[Path]) -> Sample:
    return fold_branches(
        np.array([token for ids, _ in paths for token in ids], dtype=np.int32),
        np.array([weight for _, weights in paths for weight in weights], dtype=np.float32),
        [Branch(parent=-1, length=len(ids)) for ids, _ in paths],
    )


def test_paths_share_their_common_prefix_once() -> None:
    sample = fold([path([1, 2, 3, 4], [3]), path([1, 2, 5], [2])])
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.branches == (Branch(parent=-1, length=2), Branch(parent=0, length=2), Branch(parent=0, length=1))
    assert sample.target.tolist() == [False, False, False, True, True]


def test_a_turn_whose_context_is_a_prefix_of_another_path_adds_no_branch() -> None:
    sample = fold([path([1, 2, 3], [2]), path([1, 2, 3, 4, 5], [4])])
    assert sample.branches == (Branch(parent=-1, length=5),)
    [(ids, target)] = sample.unroll()
    assert (ids.tolist(), target.tolist()) == ([1, 2, 3, 4, 5], [False, False, True, False, True])


def test_two_continuations_that_begin_alike_stay_two_branches() -> None:
    sample = fold([path([1, 7, 8], [1, 2]), path([1, 7, 9], [1, 2])])
    assert sample.branches == (Branch(parent=-1, length=1), Branch(parent=0, length=2), Branch(parent=0, length=2))


def test_a_target_shared_by_two_leaves_counts_once() -> None:
    sample = fold([path([1, 2, 3], [1]), path([1, 2, 4], [2])])
    assert sum(int(target.sum()) for _, target in sample.unroll()) == 2


def test_weights_are_kept_and_left_out_where_they_are_all_one() -> None:
    weight = fold([([1, 2], [0, 0.5])]).weight
    assert weight is not None
    assert weight.tolist() == [1.0, 0.5]
    assert fold([path([1, 2], [1])]).weight is None


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(paths=st.lists(st.tuples(IDS, st.sets(st.integers(0, 7))), min_size=1, max_size=5))
def test_every_path_and_every_target_is_found_again(paths: list[tuple[list[int], set[int]]]) -> None:
    given_paths = [path(ids, sorted(t for t in targets if t < len(ids))) for ids, targets in paths]
    num_targets = sum(sum(weights) for _, weights in given_paths)
    sample = fold(given_paths)
    assert sum(branch.length for branch in sample.branches) == len(sample.input_ids)
    leaves = [tuple(ids.tolist()) for ids, _ in sample.unroll()]
    for ids in map(tuple, [ids for ids, _ in paths]):
        assert any(leaf[: len(ids)] == ids for leaf in leaves)
    trained = sum(int(target.sum()) for _, target in sample.unroll())
    assert trained == int(sample.target.sum()) == num_targets


# ------------------------------------------------------------------------------------ what is written for media items


def written(run: ExpandedRun) -> tuple[str, int | None]:
    """A run's text, and the item that it belongs to."""
    match run:
        case ControlRun():
            return run.token * run.count, run.number
        case SlotText():
            return run.text, run.number
        case _:
            assert isinstance(run, TextRun)
            return run.text(()), None


def test_text_at_the_ends_of_what_stands_for_an_item_joins_the_text_beside_it() -> None:
    control = ControlTokens(tokens=frozenset({"<s>", "<p>", "<e>"}))
    texts = ["<0 s><s><p><p> and <p><e> end", "<p><p>", "at<s><p><e>"]
    question = TextRun(texts=(("See: ",),), weights=(0.0,))
    answer = TextRun(texts=(("Yes",),), weights=(1.0,), by_model=True)
    items = [MediaPiece(token="<p>", number=number) for number in range(3)]
    found = expand_runs([question, items[0], question, items[1], items[2], answer], texts, control)
    assert [written(run) for run in found] == [
        ("See: <0 s>", None),
        ("<s>", 0), ("<p><p>", 0), (" and ", 0), ("<p>", 0), ("<e>", 0),
        (" endSee: ", None),
        ("<p><p>", 1),
        ("at", None),
        ("<s>", 2), ("<p>", 2), ("<e>", 2),
        ("Yes", None),
    ]  # fmt: skip
    behind = [written(run) for run in expand_runs([items[0], answer, items[0]], texts, control)]
    assert behind[6:9] == [(" end", None), ("Yes", None), ("<0 s>", None)], "an answer is encoded by itself"
