"""Plain text in full rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.choices import Packing
from luthier.errors import UserError
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import describe, plan_epoch
from luthier.packing.packer import split_segments


def rows_of(pieces):
    members = list(zip(pieces.segments.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), strict=True))
    return [members[a:b] for a, b in zip(pieces.bounds[:-1], pieces.bounds[1:], strict=True)]


def test_the_example_of_the_docstring():
    assert rows_of(split_segments([5, 2, 4], 4)) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 2), (2, 0, 1)], [(2, 1, 4)]]


@given(lengths=st.lists(st.integers(1, 40), max_size=40), capacity=st.integers(1, 30), data=st.data())
def test_every_token_comes_once_and_in_order_in_rows_that_are_full(lengths, capacity, data):
    skip = data.draw(st.integers(0, sum(lengths)))
    rows = rows_of(split_segments(lengths, capacity, skip=skip))
    tokens = [(segment, token) for row in rows for segment, start, stop in row for token in range(start, stop)]
    assert tokens == [(s, token) for s, length in enumerate(lengths) for token in range(length)][skip:]
    sizes = [sum(stop - start for _, start, stop in row) for row in rows]
    assert all(size == capacity for size in sizes[:-1]) and all(0 < size <= capacity for size in sizes)
    assert all(start < stop for row in rows for _, start, stop in row)


def test_an_empty_segment_is_refused():
    with pytest.raises(UserError, match="number 1 has 0 tokens"):
        split_segments([3, 0], 4)


def plan_of(lengths, **changes):
    settings = PlanSettings(**{"packing": Packing.SPLIT, "capacity": 64, "window": 50, **changes})
    table = SegmentTable.of_lengths(lengths)
    return table, plan_epoch(table, settings, epoch=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_all_rows_of_a_plan_but_the_last_are_full_and_hold_every_token_once(rows):
    lengths = np.random.default_rng(0).integers(1, 300, 1000)  # most are longer than a row
    table, plan = plan_of(lengths, rows_per_micro_batch=rows)
    sizes = [sum(b - a for a, b in spans) for batch in plan for spans in batch.spans]
    assert sorted(sizes)[1:] == [64] * (len(sizes) - 1)
    seen = np.zeros(int(lengths.sum()), dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    for batch in plan:
        for pack, spans in zip(batch.packs, batch.spans, strict=True):
            for segment, (start, stop) in zip(pack, spans, strict=True):
                seen[first[segment] + start : first[segment] + stop] += 1
    assert (seen == 1).all()
    assert describe(plan, table).fill > 0.999


def test_a_piece_after_a_cut_has_one_target_less():
    table, plan = plan_of([100])
    assert describe(plan, table).targets == 63 + 35
    assert describe(plan, table).tokens == 100


def test_documents_come_in_another_order_in_another_epoch():
    table = SegmentTable.of_lengths(np.random.default_rng(0).integers(1, 300, 200))
    settings = PlanSettings(packing=Packing.SPLIT, capacity=64)
    one, same, other = (list(plan_epoch(table, settings, epoch=epoch)) for epoch in (0, 0, 1))
    assert one == same != other
