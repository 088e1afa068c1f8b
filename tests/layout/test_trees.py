import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from luthier.layout import leaf_segment, leaves
from luthier.records import Branch, Sample


@st.composite
def samples(draw):
    num_branches = draw(st.integers(1, 7))
    branches = tuple(
        Branch(parent=draw(st.integers(-1, node - 1)), length=draw(st.integers(1, 5))) for node in range(num_branches)
    )
    total = sum(branch.length for branch in branches)
    target = np.array(draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=bool)
    weight = np.arange(total, dtype=np.float32) if draw(st.booleans()) else None
    return Sample(input_ids=np.arange(total, dtype=np.int32), target=target, weight=weight, branches=branches)


@given(samples())
def test_leaf_segment_equals_the_segment_of_the_whole_tree(sample):
    segments = sample.segments()
    assert len(leaves(sample.branches)) == len(segments)
    for leaf, expected in enumerate(segments):
        segment = leaf_segment(sample, leaf)
        assert segment.input_ids.tolist() == expected.input_ids.tolist()
        assert segment.target.tolist() == expected.target.tolist()
        assert (segment.weight is None) == (expected.weight is None)
        if segment.weight is not None:
            assert segment.weight.tolist() == expected.weight.tolist()


@given(samples())
def test_each_target_of_a_tree_is_in_exactly_one_leaf(sample):
    per_leaf = [leaf_segment(sample, leaf) for leaf in range(len(leaves(sample.branches)))]
    found = sorted(token for segment in per_leaf for token in segment.input_ids[segment.target].tolist())
    assert found == sample.input_ids[sample.target].tolist()  # ids are the token's place, so each shows up once
