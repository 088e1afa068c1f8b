"""The shared layout: each token once, and the same list of targets as for the unrolled segments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.collation import CollateSettings, lay_out_trees
from luthier.collation.collator import collate_packs, collate_trees, only_segments, unpacked
from luthier.records import Branch, Pack, Sample, Unit

PAD = 99


@st.composite
def samples(draw):
    count = draw(st.integers(1, 5))
    branches = tuple(
        Branch(parent=draw(st.integers(-1, node - 1)), length=draw(st.integers(1, 4))) for node in range(count)
    )
    n = sum(branch.length for branch in branches)
    weight = draw(st.none() | st.lists(st.sampled_from([1.0, 0.5]), min_size=n, max_size=n))
    return Sample(
        input_ids=np.array(draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)), dtype=np.int32),
        target=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool),
        weight=None if weight is None else np.array(weight, dtype=np.float32),
        branches=branches,
    )


def pair(prompt, chosen, rejected):
    ids = np.array([*prompt, *chosen, *rejected], dtype=np.int32)
    lengths = (len(prompt), len(chosen), len(rejected))
    return Sample(
        input_ids=ids,
        target=np.arange(len(ids)) >= len(prompt),
        branches=tuple(Branch(parent=0 if node else -1, length=length) for node, length in enumerate(lengths)),
        verdict=0.0,
    )


PAIR = pair([10, 11, 12], [20, 21], [30, 31])


@settings(deadline=None)
@given(st.lists(st.lists(samples(), min_size=1, max_size=3), min_size=1, max_size=3), st.sampled_from([1, 8]))
def test_targets_are_those_of_the_unrolled_segments(rows, multiple):
    shared = collate_trees(rows, pad_token_id=PAD, pad_to_multiple_of=multiple)
    packs = [Pack(segments=tuple(segment for sample in row for segment in sample.segments())) for row in rows]
    unrolled = collate_packs(packs, packed=True, pad_token_id=PAD)
    assert shared.num_targets == unrolled.num_targets == len(shared.targets.ids_K)
    assert shared.num_segments == unrolled.num_segments == len(shared.addresses)
    for name in ("ids_K", "segments_K"):
        assert getattr(shared.targets, name).tolist() == getattr(unrolled.targets, name).tolist()
    weights = [[1.0] * shared.num_targets if b.targets.weights_K is None else b.targets.weights_K.tolist()
               for b in (shared, unrolled)]  # fmt: skip
    assert weights[0] == weights[1]
    # what predicts a target: the same token at the same position of its path
    for name in ("input_ids", "position_ids"):
        one, other = (b.model_inputs[name].flatten()[b.targets.positions_K] for b in (shared, unrolled))
        assert one.tolist() == other.tolist()


def test_the_last_token_of_a_prompt_predicts_the_first_of_both_continuations():
    batch = collate_trees([[PAIR], [pair([1], [2], [3])]], pad_token_id=PAD)
    assert batch.model_inputs["input_ids"].tolist() == [[10, 11, 12, 20, 21, 30, 31], [1, 2, 3, PAD, PAD, PAD, PAD]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4], [0, 1, 1, 0, 1, 2, 3]]
    assert "attention_mask" not in batch.model_inputs and batch.model_inputs["use_cache"] is False
    assert batch.targets.positions_K.tolist() == [2, 3, 2, 5, 7, 7]
    assert batch.targets.ids_K.tolist() == [20, 21, 30, 31, 2, 3]
    assert batch.targets.segments_K.tolist() == [0, 0, 1, 1, 2, 3]
    assert batch.segment_starts == ((3, 5), (1, 2))
    assert [branch.parent for branch in batch.branches[0]] == [-1, 0, 0]


def test_the_first_token_of_a_tree_is_no_target():
    sample = Sample(
        input_ids=np.array([1, 2], dtype=np.int32),
        target=np.array([True, True]),
        branches=(Branch(parent=-1, length=1), Branch(parent=0, length=1)),
    )
    assert collate_trees([[sample, sample]], pad_token_id=PAD).targets.positions_K.tolist() == [0, 2]


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_a_shared_batch_gives_no_labels(labels):
    batch = collate_trees([[PAIR]], pad_token_id=PAD)
    assert batch.labels_BT.numel() == 0
    with pytest.raises(ValueError, match="a position may have several labels"):
        batch.to_dict(labels=labels)


@settings(deadline=None)
@given(st.lists(st.lists(samples(), min_size=1, max_size=3), min_size=1, max_size=3))
def test_trees_and_packed_rows_unpack_to_the_padded_batch(rows):
    leaves = [[segment for sample in row for segment in sample.segments()] for row in rows]
    padded = collate_packs([Pack(segments=(leaf,)) for row in leaves for leaf in row], packed=False, pad_token_id=PAD)
    packed = collate_packs([Pack(segments=tuple(row)) for row in leaves], packed=True, pad_token_id=PAD)
    for found in (unpacked(b, pad_token_id=PAD) for b in (collate_trees(rows, pad_token_id=PAD), packed)):
        assert found.model_inputs.keys() == padded.model_inputs.keys()
        for name, value in padded.model_inputs.items():
            assert torch.equal(found.model_inputs[name], value)
        assert torch.equal(found.labels_BT, padded.labels_BT)
        assert (found.weights_BT is None) == (padded.weights_BT is None)
        assert found.weights_BT is None or torch.equal(found.weights_BT, padded.weights_BT)
        for name in ("positions_K", "ids_K", "segments_K"):
            assert torch.equal(getattr(found.targets, name), getattr(padded.targets, name))
        assert (found.branches, found.segment_starts) == (padded.branches, padded.segment_starts)
        assert found.num_segments == padded.num_segments == len(found.addresses)


def test_trees_cannot_be_padded_nor_go_to_varlen_kernels():
    for how in (
        CollateSettings(packed=False, pad_token_id=PAD),
        CollateSettings(packed=True, pad_token_id=PAD, varlen=True),
    ):
        with pytest.raises(AssertionError, match="trees share attention"):
            lay_out_trees([[PAIR]], how)


# --------------------------------------------------------------------------------------------- only some segments


def batches_of(rows):
    """The same segments shared, packed, packed for varlen kernels, and padded."""
    leaves = [[segment for sample in row for segment in sample.segments()] for row in rows]
    packs = [Pack(segments=tuple(row)) for row in leaves]
    single = [Pack(segments=(leaf,)) for row in leaves for leaf in row]
    return {
        "shared": collate_trees(rows, pad_token_id=PAD),
        "packed": collate_packs(packs, packed=True, pad_token_id=PAD),
        "varlen": collate_packs(packs, packed=True, pad_token_id=PAD, varlen=True),
        "padded": collate_packs(single, packed=False, pad_token_id=PAD),
    }, [leaf for row in leaves for leaf in row]


@settings(deadline=None)
@given(st.lists(st.lists(samples(), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_some_segments_of_a_batch_are_the_batch_of_these_segments(rows, data):
    batches, leaves = batches_of(rows)
    kept = data.draw(st.sets(st.integers(0, len(leaves) - 1), min_size=1))
    packs = [Pack(segments=(leaves[number],)) for number in sorted(kept)]
    expected = collate_packs(packs, packed=False, pad_token_id=PAD)
    any_order = data.draw(st.permutations(sorted(kept)))
    for layout, batch in batches.items():
        batch = replace(batch, sources=tuple(range(len(leaves))))
        narrowed = only_segments(batch, any_order, pad_token_id=PAD)
        assert narrowed.sources == tuple(sorted(kept)), layout
        assert narrowed.model_inputs.keys() == batch.model_inputs.keys(), layout
        if layout == "varlen":
            assert int(narrowed.model_inputs["cu_seq_lens_q"][-1]) == narrowed.model_inputs["input_ids"].numel()
        found = narrowed if layout == "padded" else unpacked(narrowed, pad_token_id=PAD)
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert torch.equal(found.model_inputs[name], expected.model_inputs[name]), layout
        for name in ("positions_K", "ids_K", "segments_K"):
            assert torch.equal(getattr(found.targets, name), getattr(expected.targets, name)), layout
        weights = [torch.ones(len(b.targets.ids_K)) if b.targets.weights_K is None else b.targets.weights_K
                   for b in (found, expected)]  # fmt: skip
        assert torch.equal(*weights), layout
        assert torch.equal(found.labels_BT, expected.labels_BT), layout
        if layout == "padded":
            weights_BT = [torch.ones(b.labels_BT.shape) if b.weights_BT is None else b.weights_BT
                          for b in (found, expected)]  # fmt: skip
            assert torch.equal(*weights_BT)
        assert (found.num_targets, found.num_segments) == (expected.num_targets, expected.num_segments)
        assert len(found.addresses) == len(kept)


def test_a_narrowed_batch_keeps_what_is_shared_and_forgets_the_rest():
    units = (Unit(segments=(0, 1), verdict=1.0, leaves=(7, -1)), Unit(segments=(2, 3), verdict=0.0, leaves=(9, -1)))
    batch = collate_trees([[PAIR], [pair([1], [2], [3])]], pad_token_id=PAD, units=units)
    narrowed = only_segments(batch, [3, 1, 2], pad_token_id=PAD)
    assert narrowed.model_inputs["input_ids"].tolist() == [[10, 11, 12, 30, 31], [1, 2, 3, PAD, PAD]]
    assert narrowed.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 1, 0, 1]]
    assert narrowed.targets.ids_K.tolist() == [30, 31, 2, 3] and narrowed.targets.positions_K.tolist() == [2, 3, 5, 5]
    assert [(unit.segments, unit.leaves) for unit in narrowed.units] == [((0,), (-1,)), ((1, 2), (9, -1))]
    alone = only_segments(batch, {2}, pad_token_id=PAD)
    assert alone.model_inputs["input_ids"].tolist() == [[1, 2]], "a row of which nothing is kept is gone"
    assert [unit.verdict for unit in alone.units] == [0.0]


def test_segments_of_a_batch_with_pictures_are_not_told_apart():
    batch = collate_trees([[PAIR]], pad_token_id=PAD)
    batch.model_inputs["pixel_values"] = torch.zeros(1, 3, 2, 2)
    with pytest.raises(AssertionError, match="of text"):
        only_segments(batch, {0}, pad_token_id=PAD)
