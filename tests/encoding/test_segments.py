import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.choices import Overflow, Packing
from luthier.encoding.shortening import END_LEFT_OUT
from luthier.errors import RowDropped, UserError
from luthier.layout.cutting import cut_segment
from luthier.ledger import Ledger
from luthier.packing import PlanSettings
from luthier.packing.epoch import plan_epoch
from luthier.preparation import PreparedSet, SourceInfo
from luthier.preparation.segments import SegmentIndex
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key
from tests.conftest import examples, refused

FINGERPRINT = "ab" * 32
ONE = SourceInfo(name="one", weight=1.0)


def sample(pattern, *branches):
    """``sample("..AA", (-1, 2), (0, 2))``: four tokens, A is a target, in two branches."""
    parts = branches or ((-1, len(pattern)),)
    return Sample(
        input_ids=np.arange(len(pattern), dtype=np.int32),
        target=np.array([mark == "A" for mark in pattern], dtype=bool),
        branches=tuple(Branch(parent=parent, length=length) for parent, length in parts),
    )


def prepared_of(folder, samples, *, source_ids=None, sources=(ONE,)):
    writer = StoreWriter(folder, fingerprint=FINGERPRINT)
    for number, one in enumerate(samples):
        writer.add(row_key(str(number).encode(), fingerprint=FINGERPRINT, conversion=""), freeze_sample(one))
    writer.commit()
    n = len(samples)
    return PreparedSet(
        store=SampleStore.open(folder, fingerprint=FINGERPRINT),
        sample_ids=np.arange(n, dtype=np.int64),
        source_ids=np.zeros(n, np.int64) if source_ids is None else np.array(source_ids),
        file_ids=np.zeros(n, np.int64),
        row_numbers=np.arange(1, n + 1, dtype=np.int64),
        files=("rows.jsonl",),
        sources=sources,
        ledger=Ledger(read=n, prepared=n),
    )


def patterns(index):
    return ["".join("A" if mark else "." for mark in index[i].target) for i in range(len(index))]


def test_segments_that_fit_come_in_the_order_of_their_rows(tmp_path):
    index = SegmentIndex(prepared_of(tmp_path, [sample("..AA"), sample(".A")]), max_length=4, overflow=Overflow.DROP)
    assert patterns(index) == ["..AA", ".A"]
    assert index.lengths.tolist() == [4, 2]
    assert index.num_targets.tolist() == [2, 1]
    assert str(index[1].address) == "rows.jsonl:2"
    assert index.ledger.prepared == 2


def test_dropped_rows_are_lost_in_the_ledger_of_the_index_alone(tmp_path):
    prepared = prepared_of(tmp_path, [sample("..AA"), sample(".AAAAA")])
    index = SegmentIndex(prepared, max_length=4, overflow=Overflow.DROP)
    assert index.ledger.dropped == {"too_long": 1}
    assert index.ledger.examples["too_long"] == ["rows.jsonl:2 too_long: 6 tokens, data.max_length is 4"]
    assert (index.ledger.read, index.ledger.prepared) == (2, 1)
    assert index.lost_rows.tolist() == [1]
    assert prepared.ledger.prepared == 2  # so that a second index does not count twice
    assert SegmentIndex(prepared, max_length=6, overflow=Overflow.DROP).ledger.prepared == 2


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.KEEP_ANSWER, Overflow.ERROR])
def test_what_stands_behind_the_last_target_makes_nothing_too_long(tmp_path, overflow):
    index = SegmentIndex(prepared_of(tmp_path, [sample("..AA."), sample(".A.A....")]), max_length=4, overflow=overflow)
    assert patterns(index) == ["..AA", ".A.A"] and index.lengths.tolist() == [4, 4]
    assert index.num_targets.tolist() == [2, 2] and not index.ledger.dropped
    assert index.ledger.notes == {END_LEFT_OUT: 2}


def test_error_stops_with_the_address(tmp_path):
    with refused(UserError, "rows.jsonl:2", "6"):
        SegmentIndex(prepared_of(tmp_path, [sample("..AA"), sample(".AAAAA")]), max_length=4, overflow=Overflow.ERROR)


def test_truncated_and_split_rows_are_noted(tmp_path):
    prepared = prepared_of(tmp_path, [sample("..AA"), sample("..A....A.AA")])
    truncated = SegmentIndex(prepared, max_length=4, overflow=Overflow.TRUNCATE)
    assert patterns(truncated) == ["..AA", "..A."]
    assert truncated.ledger.notes == {"truncated": 1}
    split = SegmentIndex(prepared, max_length=4, overflow=Overflow.SPLIT)
    assert patterns(split) == ["..AA", "..A", "..AA"]
    assert split.ledger.notes == {"split": 1, "window_without_target": 1}


def test_a_row_of_which_a_cut_leaves_nothing_is_lost(tmp_path):
    index = SegmentIndex(prepared_of(tmp_path, [sample("....AA")]), max_length=4, overflow=Overflow.TRUNCATE)
    assert index.ledger.dropped == {"no_target_left": 1}
    assert len(index) == 0


def test_a_row_stays_while_one_of_its_leaves_does(tmp_path):
    tree = sample("..AAAAA", (-1, 2), (0, 4), (0, 1))  # leaves of 6 and of 3 tokens
    index = SegmentIndex(prepared_of(tmp_path, [tree]), max_length=3, overflow=Overflow.DROP)
    assert patterns(index) == ["..A"]
    assert index.ledger.prepared == 1
    assert index.ledger.notes == {"leaf_too_long": 1}
    lost = SegmentIndex(prepared_of(tmp_path, [tree]), max_length=2, overflow=Overflow.DROP)
    assert lost.ledger.examples["too_long"] == ["rows.jsonl:1 too_long: 6 tokens, data.max_length is 2"]
    assert lost.ledger.notes == {}


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.TRUNCATE, Overflow.SPLIT])
def test_a_row_that_is_asked_has_one_segment_with_its_last_answer(tmp_path, overflow):
    rewritten = sample("..AA.A", (-1, 2), (0, 2), (0, 2))  # the template shows the first turn otherwise in the second
    cut = sample("..A...AA")  # its last answer is beyond the limit
    prepared = prepared_of(tmp_path, [rewritten, sample("..A.A"), cut])
    index = SegmentIndex(prepared, max_length=5, overflow=overflow, asked=True)
    asked = {Overflow.DROP: [], Overflow.TRUNCATE: [], Overflow.SPLIT: ["...AA"]}[overflow]
    assert patterns(index) == ["...A", "..A.A", *asked]
    assert index.place(0)[0] == 1 and "window_without_target" not in index.ledger.notes
    assert index.ledger.lost == 1 - len(asked)


def test_a_leaf_without_targets_is_noted(tmp_path):
    tree = sample(".A.", (-1, 1), (0, 1), (0, 1))
    index = SegmentIndex(prepared_of(tmp_path, [tree]), max_length=8, overflow=Overflow.DROP)
    assert patterns(index) == [".A"]
    assert index.ledger.notes == {"leaf_without_target": 1}


def test_the_table_carries_rows_sources_and_weights_into_the_plan(tmp_path):
    sources = (ONE, SourceInfo(name="two", weight=2.0))
    prepared = prepared_of(tmp_path, [sample(".A"), sample("..A")], source_ids=[0, 1], sources=sources)
    index = SegmentIndex(prepared, max_length=8, overflow=Overflow.DROP)
    plan = plan_epoch(index.table(), PlanSettings(packing=Packing.BEST_FIT, capacity=8), epoch=0)
    assert sorted(plan.planned.segment_ids.tolist()) == [0, 1, 1]


def test_numbers_outside_the_index_are_refused(tmp_path):
    index = SegmentIndex(prepared_of(tmp_path, [sample(".A")]), max_length=8, overflow=Overflow.DROP)
    with pytest.raises(IndexError):
        index[1]


def test_no_rows_give_an_empty_index(tmp_path):
    assert len(SegmentIndex(prepared_of(tmp_path, []), max_length=8, overflow=Overflow.DROP)) == 0


@st.composite
def trees(draw):
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    parts = tuple((draw(st.integers(-1, node - 1)), length) for node, length in enumerate(lengths))
    pattern = draw(st.text("A.", min_size=sum(lengths), max_size=sum(lengths)))
    return sample(pattern, *parts)


@settings(deadline=None, max_examples=examples(80))
@given(
    st.lists(trees(), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from([Overflow.DROP, Overflow.TRUNCATE, Overflow.SPLIT]),
)
def test_the_index_equals_cutting_every_segment_and_accounts_for_every_row(
    tmp_path_factory, samples, max_length, overflow
):
    prepared = prepared_of(tmp_path_factory.mktemp("store"), samples)
    index = SegmentIndex(prepared, max_length=max_length, overflow=overflow)
    expected, rows = [], []
    for row, one in enumerate(samples):
        for segment in one.segments():
            try:
                pieces = cut_segment(segment, max_length=max_length, overflow=overflow)
            except RowDropped:
                continue
            expected.extend(pieces)
            rows.extend([row] * len(pieces))
    found = [index[i] for i in range(len(index))]
    assert [segment.input_ids.tolist() for segment in found] == [piece.input_ids.tolist() for piece in expected]
    assert [segment.target.tolist() for segment in found] == [piece.target.tolist() for piece in expected]
    assert index.lengths.tolist() == [len(segment) for segment in found]
    assert index.num_targets.tolist() == [int(segment.target.sum()) for segment in found]
    assert index.row_ids.tolist() == rows
    index.ledger.check(max_drop=len(samples))
    assert index.ledger.prepared == len(set(rows))
    assert index.lost_rows.tolist() == sorted(set(range(len(samples))) - set(rows))


def grown(rng):
    """A tree of up to nine branches, depth first as they are stored; each token has an id of its own."""
    parts, path = [], [-1]
    for node in range(rng.integers(1, 10)):
        path = [*path[: rng.integers(1, len(path) + 1)], node]
        parts.append((path[-2], int(rng.integers(1, 5))))
    learned = rng.random(sum(length for _, length in parts)) < rng.choice([0.2, 0.8])
    return sample("".join(np.where(learned, "A", ".")), *parts)


def shared_beginnings(index, max_length):
    """How many tokens each segment shares with the one before it, in trees of at most ``max_length``."""
    held, size = [], 0
    for number in range(len(index)):
        ids, shared = index[number].input_ids, 0
        if number and index.row_ids[number - 1] == index.row_ids[number]:
            before = index[number - 1].input_ids
            begin = index.place(number - 1)[1] == index.place(number)[1] == 0
            shared = sum(itertools.accumulate(map(int.__eq__, before.tolist(), ids.tolist()), int.__mul__)) * begin
            shared *= shared < min(len(before), len(ids)) and size + len(ids) - shared <= max_length
        size = len(ids) - shared + (size if shared else 0)
        held.append(shared)
    return held


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.TRUNCATE, Overflow.SPLIT])
@pytest.mark.parametrize("max_length", [7, 9, 16, 30])
def test_segments_hold_what_they_begin_with_together_whatever_was_cut_or_lost_between_them(
    tmp_path, overflow, max_length
):
    rng = np.random.default_rng(max_length)
    index = SegmentIndex(
        prepared_of(tmp_path, [grown(rng) for _ in range(300)]), max_length=max_length, overflow=overflow
    )
    assert index.held.tolist() == shared_beginnings(index, max_length)
    assert np.count_nonzero(index.held) > 10


def test_a_segment_that_was_cut_within_what_it_shares_holds_nothing_for_the_next(tmp_path):
    tree = sample("..AA.......A", (-1, 6), (0, 5), (0, 1))  # nothing is learned behind token 3 of the first leaf
    index = SegmentIndex(prepared_of(tmp_path, [tree]), max_length=7, overflow=Overflow.DROP)
    assert patterns(index) == ["..AA", "......A"] and index.held.tolist() == [0, 0]
