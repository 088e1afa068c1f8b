import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.layout import cu_seqlens, position_ids, segment_ids, segment_starts


def test_positions_restart_in_each_segment():
    assert position_ids([3, 2]).tolist() == [0, 1, 2, 0, 1]
    assert segment_ids([3, 2]).tolist() == [0, 0, 0, 1, 1]
    assert segment_starts([3, 2]).tolist() == [0, 3]
    assert cu_seqlens([3, 2]).tolist() == [0, 3, 5]


def test_dtypes_are_what_kernels_and_embeddings_take():
    assert position_ids([2]).dtype == np.int64
    assert cu_seqlens([2]).dtype == np.int32


def test_no_segments_give_empty_arrays():
    assert position_ids([]).tolist() == []
    assert cu_seqlens([]).tolist() == [0]


def test_negative_lengths_are_refused():
    with pytest.raises(AssertionError, match="counts"):
        position_ids([3, -1])


@given(st.lists(st.integers(0, 20), max_size=20))
def test_positions_equal_the_naive_loop(lengths):
    assert position_ids(lengths).tolist() == [p for n in lengths for p in range(n)]
    assert segment_ids(lengths).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert cu_seqlens(np.array(lengths, dtype=np.int32)).tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
