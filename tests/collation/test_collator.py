import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.collation.collator import collate_packs
from luthier.records import Address, Pack, Segment

PAD = 99


def segment(ids, target, weight=None, row=1):
    return Segment(
        input_ids=np.array(ids, dtype=np.int32),
        target=np.array(target, dtype=bool),
        weight=None if weight is None else np.array(weight, dtype=np.float32),
        address=Address(file="rows.jsonl", row=row),
    )


FIRST = segment([11, 12, 13], [0, 1, 1])
SECOND = segment([21, 22], [1, 1], row=2)


@st.composite
def segments(draw, max_length=8):
    n = draw(st.integers(1, max_length))
    ids = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    target = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    weight = draw(st.none() | st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=n, max_size=n))
    return segment(ids, target, weight)


def naive_labels(pack, width):
    labels, weights = [], []
    for piece in pack.segments:
        for t in range(len(piece)):
            learned = t + 1 < len(piece) and piece.target[t + 1]
            labels.append(int(piece.input_ids[t + 1]) if learned else -100)
            weights.append(float(piece.weight[t + 1]) if learned and piece.weight is not None else 1.0)
    gap = width - len(labels)
    return labels + [-100] * gap, weights + [1.0] * gap


@settings(deadline=None)
@given(
    st.lists(st.lists(segments(), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_labels_weights_and_counts_equal_the_naive_loop(rows, multiple, varlen):
    packs = [Pack(segments=tuple(row)) for row in rows]
    batch = collate_packs(packs, packed=True, pad_token_id=PAD, varlen=varlen, pad_to_multiple_of=multiple)
    width = batch.labels_BT.shape[1]
    assert width % multiple == 0 and 0 <= width - max(map(len, packs)) < multiple
    labels, weights = zip(*(naive_labels(pack, width) for pack in packs), strict=True)
    assert batch.labels_BT.tolist() == list(labels)
    assert batch.num_targets == sum(label != -100 for row in labels for label in row)
    if all(weight == 1 for row in weights for weight in row):
        assert batch.weights_BT is None
    else:
        assert batch.weights_BT.tolist() == list(weights)


def test_a_padded_batch_is_right_padded_under_a_mask():
    batch = collate_packs([Pack(segments=(FIRST,)), Pack(segments=(SECOND,))], packed=False, pad_token_id=PAD)
    assert batch.model_inputs["input_ids"].tolist() == [[11, 12, 13], [21, 22, PAD]]
    assert batch.model_inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]  # padding makes no row longer
    assert batch.labels_BT.tolist() == [[12, 13, -100], [22, -100, -100]]
    assert batch.num_targets == 3
    assert batch.segment_starts == ((0,), (0,))
    assert [str(address) for address in batch.addresses] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_a_packed_batch_has_restarting_positions_and_no_mask_and_no_cache():
    batch = collate_packs([Pack(segments=(FIRST, SECOND))], packed=True, pad_token_id=PAD)
    assert batch.model_inputs.keys() == {"input_ids", "position_ids", "use_cache"}
    assert batch.model_inputs["use_cache"] is False
    assert batch.model_inputs["input_ids"].tolist() == [[11, 12, 13, 21, 22]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch.labels_BT.tolist() == [[12, 13, -100, 22, -100]]  # 21 is a target, but what precedes it is not its own
    assert batch.segment_starts == ((0, 3),)


def test_the_padding_of_a_packed_row_is_a_segment_of_its_own():
    batch = collate_packs(
        [Pack(segments=(FIRST, SECOND)), Pack(segments=(SECOND,))], packed=True, pad_token_id=PAD, varlen=True
    )
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch.model_inputs["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 10]
    assert batch.model_inputs["cu_seq_lens_k"].dtype == torch.int32
    assert batch.model_inputs["max_length_q"] == batch.model_inputs["max_length_k"] == 3
    assert batch.segment_starts == ((0, 3), (0,))


def test_integer_inputs_are_int64():
    batch = collate_packs([Pack(segments=(FIRST,))], packed=False, pad_token_id=PAD)
    assert {tensor.dtype for tensor in (*batch.model_inputs.values(), batch.labels_BT)} == {torch.int64}


def test_a_dummy_batch_has_no_targets():
    blank = segment([1, 2, 3], [0, 0, 0])
    assert collate_packs([Pack(segments=(blank,))], packed=True, pad_token_id=PAD).num_targets == 0


def test_what_cannot_be_a_batch_is_refused():
    with pytest.raises(AssertionError, match="holds one segment"):
        collate_packs([Pack(segments=(FIRST, SECOND))], packed=False, pad_token_id=PAD)
    with pytest.raises(AssertionError, match="needs packs"):
        collate_packs([], packed=True, pad_token_id=PAD)
    with pytest.raises(AssertionError, match="for packed rows"):
        collate_packs([Pack(segments=(FIRST,))], packed=False, varlen=True, pad_token_id=PAD)
