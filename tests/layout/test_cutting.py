import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.choices import Overflow
from luthier.errors import RowDropped, RowError, UserError
from luthier.layout.cutting import cut_segment, marks_around, plan_windows
from luthier.records import Address, Segment

ROW = Address(file="rows.jsonl", row=812)


def segment(pattern, weight=None):
    """``"..AA."`` is a segment whose tokens 2 and 3 are targets."""
    target = np.array([mark == "A" for mark in pattern], dtype=bool)
    return Segment(input_ids=np.arange(len(pattern), dtype=np.int32), target=target, weight=weight, address=ROW)


def patterns(pieces):
    return ["".join("A" if mark else "." for mark in piece.target) for piece in pieces]


def test_a_segment_that_fits_is_returned_as_it_is():
    whole = segment("..AA.")
    for overflow in Overflow:
        assert cut_segment(whole, max_length=5, overflow=overflow) == [whole]


def test_the_first_token_is_never_a_target():
    assert patterns(cut_segment(segment("AAA"), max_length=3, overflow=Overflow.ERROR)) == [".AA"]


def test_error_names_the_row_the_two_numbers_and_the_ways_out():
    with pytest.raises(UserError) as caught:
        cut_segment(segment("..AAA"), max_length=4, overflow=Overflow.ERROR)
    text = str(caught.value)
    assert all(part in text for part in ("rows.jsonl:812", "5 tokens", "max_length is 4", "drop, truncate or split"))
    assert not isinstance(caught.value, RowError)  # it stops the run; a RowError would only be counted


def test_drop_is_counted_as_too_long():
    with pytest.raises(RowDropped) as caught:
        cut_segment(segment("..AAA"), max_length=4, overflow=Overflow.DROP)
    assert caught.value.reason == "too_long"
    assert caught.value.address == ROW


def test_truncate_inside_an_answer_does_not_train_its_last_kept_token():
    assert patterns(cut_segment(segment("..AAAA"), max_length=4, overflow=Overflow.TRUNCATE)) == ["..A."]


def test_truncate_right_after_an_answer_keeps_its_last_target():
    assert patterns(cut_segment(segment("..AA.A"), max_length=4, overflow=Overflow.TRUNCATE)) == ["..AA"]


def test_truncate_of_what_is_learned_whole_cuts_through_no_answer():
    assert patterns(cut_segment(segment("AAAAAA"), max_length=4, overflow=Overflow.TRUNCATE)) == [".AAA"]


def test_truncate_that_leaves_no_target_drops_the_row():
    with pytest.raises(RowDropped) as caught:
        cut_segment(segment("...AA"), max_length=4, overflow=Overflow.TRUNCATE)
    assert caught.value.reason == "no_target_left"
    assert "5 tokens" in caught.value.detail


def test_split_prefers_the_end_of_an_answer():
    pieces = cut_segment(segment("..AA..AA"), max_length=5, overflow=Overflow.SPLIT)
    assert patterns(pieces) == ["..AA", "..AA"]
    assert [piece.input_ids.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_split_of_a_long_answer_opens_each_end_but_the_last():
    assert patterns(cut_segment(segment(".AAAAAA"), max_length=3, overflow=Overflow.SPLIT)) != []
    pieces = cut_segment(segment("..AAAAAA"), max_length=4, overflow=Overflow.SPLIT)
    assert patterns(pieces) == ["..A.", ".AAA"]


@pytest.mark.parametrize("document", ["AAAAAAA", ".AAAAAA"])  # without and with a token that begins it
def test_split_of_a_document_is_consecutive_windows(document):
    pieces = cut_segment(segment(document), max_length=3, overflow=Overflow.SPLIT)
    assert patterns(pieces) == [".AA", ".AA"]  # the third window is one token, with nothing before it to predict it
    assert [piece.input_ids.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]


def test_windows_without_targets_are_planned_but_not_returned():
    long_question = segment(".A......A")
    windows = plan_windows(long_question, max_length=3, overflow=Overflow.SPLIT)
    assert [(w.start, w.stop, w.num_targets) for w in windows] == [(0, 2, 1), (2, 5, 0), (5, 8, 0), (8, 9, 0)]
    assert patterns(cut_segment(long_question, max_length=3, overflow=Overflow.SPLIT)) == [".A"]


def test_weights_are_cut_with_the_tokens():
    weight = np.arange(6, dtype=np.float32)
    pieces = cut_segment(segment(".AA.AA", weight), max_length=3, overflow=Overflow.SPLIT)
    assert [piece.weight.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ("<X>", [(1, 1)]),
        ("a<<X>>b", [(2, 2)]),
        ("<<X>b", [(2, 1)]),
        ("a<X>>b", [(1, 1)]),  # what closes an item is no more than what opens it
        ("aX>", [(0, 0)]),
        ("<<X>>a<<X>>", [(2, 2), (2, 2)]),
        ("<X><X><X>", [(1, 1), (1, 1), (1, 1)]),  # what stands between two items is shared out
        ("XX", [(0, 0), (0, 0)]),
        ("a<|<X|>", [(1, 0)]),  # marks are of the item's own branch
        ("a|b<|<X>", [(1, 1)]),
        ("aX<<|<X", [(0, 0), (1, 0)]),
    ],
)
def test_marks_of_media_are_the_control_tokens_at_their_sides(branches, expected):
    tokens = branches.replace("|", "")
    spans = [(place, place + 1) for place, token in enumerate(tokens) if token == "X"]
    is_control = np.array([token in "<>" for token in tokens])
    assert marks_around(spans, is_control, np.cumsum([len(branch) for branch in branches.split("|")])) == expected


def test_cutting_does_not_write_into_the_original():
    original = segment("AAAAAA")
    cut_segment(original, max_length=3, overflow=Overflow.SPLIT)
    assert original.target.all()


@given(st.text("A.", min_size=1, max_size=60), st.integers(1, 12), st.sampled_from([Overflow.TRUNCATE, Overflow.SPLIT]))
def test_windows_tile_the_segment_and_pieces_obey_both_rules(pattern, max_length, overflow):
    whole = segment(pattern)
    windows = plan_windows(whole, max_length=max_length, overflow=overflow)
    assert all(1 <= len(window) <= max_length for window in windows)
    covered = [token for window in windows for token in range(window.start, window.stop)]
    expected = range(len(whole)) if overflow is Overflow.SPLIT else range(min(len(whole), max_length))
    assert covered == list(expected)
    try:
        pieces = cut_segment(whole, max_length=max_length, overflow=overflow)
    except RowDropped as dropped:
        assert dropped.reason == "no_target_left"
        assert sum(window.num_targets for window in windows) == 0
        return
    assert [int(piece.target.sum()) for piece in pieces] == [w.num_targets for w in windows if w.num_targets]
    document = whole.target[1:].all()
    for piece in pieces:
        assert not piece.target[0]
        assert (whole.target[piece.input_ids] | ~piece.target).all()  # a cut makes no new targets
        last = int(piece.input_ids[-1])
        cut_open = last + 1 < len(whole) and whole.target[last] and whole.target[last + 1]
        if cut_open and not (document and overflow is Overflow.SPLIT):
            assert not piece.target[-1]
