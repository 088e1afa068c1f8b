"""`luthier.collate` and `Batch.to_dict`: samples to the keyword arguments of a model, and the same loss either way."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import luthier
from luthier.errors import UserError
from luthier.records import Batch, Branch, Sample, Segment
from tests.conftest import refused

VOCABULARY = 64


def make_sample(length: int, *, seed: int = 0, tail: int = 0, weight: float | None = None) -> Sample:
    """A prompt and an answer; with ``tail``, a second answer to the same prompt, so many tokens long."""
    rng = np.random.default_rng(seed)
    total = length + tail
    branches = [Branch(parent=-1, length=length // 2), Branch(parent=0, length=length - length // 2)]
    if tail:
        branches.append(Branch(parent=0, length=tail))
    target = np.arange(total) >= length // 2
    return Sample(
        input_ids=rng.integers(3, VOCABULARY, total, dtype=np.int32),
        target=target,
        weight=None if weight is None else np.where(target, weight, 1).astype(np.float32),
        branches=tuple(branches),
    )


SAMPLES = [make_sample(9), make_sample(6, seed=1, tail=4), make_sample(14, seed=2)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


def our_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    logits = model(**batch.model_inputs).logits
    weights = None if batch.weights_BT is None else batch.weights_BT.flatten()
    return luthier.token_loss_sum(logits.flatten(0, 1), batch.labels_BT.flatten(), weights).loss_sum


def test_packed_puts_every_leaf_of_every_tree_in_one_row() -> None:
    batch = luthier.collate(SAMPLES)
    assert batch.model_inputs["input_ids"].shape == (1, 9 + 6 + 7 + 14)
    assert batch.segment_starts == ((0, 9, 15, 22),)
    assert batch.num_targets == 5 + 3 + 4 + 7
    ids = batch.model_inputs["input_ids"][0]
    assert ids[15:18].tolist() == ids[9:12].tolist() == SAMPLES[1].input_ids[:3].tolist()  # the prompt, twice
    assert "attention_mask" not in batch.model_inputs


def test_a_capacity_cuts_rows_by_best_fit() -> None:
    batch = luthier.collate(SAMPLES, capacity=20, pad_to_multiple_of=8)
    assert batch.model_inputs["input_ids"].shape == (2, 24)
    assert sorted(map(len, batch.segment_starts)) == [2, 2]
    with pytest.raises(UserError, match="14"):
        luthier.collate(SAMPLES, capacity=13)


def test_padded_gives_each_leaf_a_row() -> None:
    batch = luthier.collate(SAMPLES, layout="padded", pad_token_id=2)
    assert batch.model_inputs["attention_mask"].sum(dim=1).tolist() == [9, 6, 7, 14]
    assert batch.model_inputs["input_ids"][1, 6:].tolist() == [2] * 8


def test_segments_are_taken_as_they_are() -> None:
    segments: list[Sample | Segment] = [segment for sample in SAMPLES for segment in sample.segments()]
    assert torch.equal(luthier.collate(segments).labels_BT, luthier.collate(SAMPLES).labels_BT)
    empty = Segment(input_ids=np.zeros(0, np.int32), target=np.zeros(0, np.bool_))
    assert luthier.collate([empty, *segments]).segment_starts == luthier.collate(segments).segment_starts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"samples": []}, "no token"),
        ({"samples": SAMPLES, "layout": "flat"}, "'packed' or 'padded', not 'flat'"),
        ({"samples": SAMPLES, "layout": "padded", "varlen": True}, "for layout='packed'"),
        ({"samples": SAMPLES, "layout": "padded", "capacity": 64}, "for layout='packed'"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        luthier.collate(**arguments)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_loss_inside_a_model_equals_ours(model: LlamaForCausalLM, layout: Literal["packed", "padded"]) -> None:
    batch = luthier.collate(SAMPLES, layout=layout)
    inside = model(**batch.to_dict(labels="unshifted"))
    torch.testing.assert_close(inside.loss, our_loss(model, batch) / batch.num_targets)
    summed = model(**batch.to_dict(labels="unshifted"), num_items_in_batch=torch.tensor(7)).loss
    torch.testing.assert_close(summed, our_loss(model, batch) / 7)


def test_both_layouts_have_the_same_loss(model: LlamaForCausalLM) -> None:
    losses = [our_loss(model, luthier.collate(SAMPLES, layout=layout)) for layout in ("packed", "padded")]
    torch.testing.assert_close(losses[0], losses[1])


def test_control_shifted_labels_are_another_loss_inside_a_model(model: LlamaForCausalLM) -> None:
    batch = luthier.collate(SAMPLES)
    inside = model(**batch.to_dict(labels="shifted")).loss
    assert abs(inside - our_loss(model, batch) / batch.num_targets) > 1e-2


def test_unshifted_labels_are_the_ids_of_the_targets_themselves() -> None:
    batch = luthier.collate(SAMPLES)
    labels = batch.to_dict(labels="unshifted")["labels"]
    expected = np.concatenate([segment.target for sample in SAMPLES for segment in sample.segments()])
    assert torch.equal(labels != -100, torch.from_numpy(expected)[None])
    assert torch.equal(labels[labels != -100], batch.model_inputs["input_ids"][labels != -100])


def test_weights_go_with_shifted_labels_and_with_no_others() -> None:
    batch = luthier.collate([make_sample(8, weight=0.5)])
    assert batch.to_dict(labels="shifted")["weights"].tolist() == [[1, 1, 1, 0.5, 0.5, 0.5, 0.5, 1]]
    with pytest.raises(ValueError, match="take labels='shifted'"):
        batch.to_dict(labels="unshifted")
    with refused(ValueError, "'shifted'", "'unshifted'", "'none'"):
        batch.to_dict(labels="none")  # type: ignore[arg-type]
