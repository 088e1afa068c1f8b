"""`luthier.Loader`: one stream, whatever the ranks, the workers and the interruptions."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from stored_rows import make_rows

import luthier
from luthier.errors import CheckpointError, UserError
from luthier.loader.loader import Loader
from luthier.loader.stream_state import LoaderState, RowTrail
from luthier.preparation import PreparedSet
from luthier.records import Batch
from tests.conftest import children

OPTIONS: dict[str, Any] = {"max_length": 64, "seed": 3, "rank": 0, "world_size": 1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return make_rows(tmp_path_factory.mktemp("rows"), 87)


def make(rows: PreparedSet, **changes: Any) -> Loader:
    return luthier.Loader(rows, **{**OPTIONS, **changes})


def content(batch: Batch) -> tuple[Any, ...]:
    inputs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.model_inputs.items()}
    weights = None if batch.weights_BT is None else batch.weights_BT.tolist()
    return inputs, batch.labels_BT.tolist(), weights, batch.segment_starts, batch.addresses


def contents(batches: Any) -> list[tuple[Any, ...]]:
    return [content(batch) for batch in batches]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_an_epoch_holds_every_target_once(rows: PreparedSet, packing: str) -> None:
    loader = make(rows, packing=packing, batch_size=3)
    batches = list(loader)
    assert len(batches) == len(loader)
    learned = Counter(label for batch in batches for label in batch.labels_BT.flatten().tolist() if label != -100)
    expected = Counter(
        token
        for i in range(len(rows))
        for segment in rows[i].segments()
        for token in segment.input_ids[1:][segment.target[1:]].tolist()
    )
    assert learned == expected
    assert all(("attention_mask" in batch.model_inputs) == (packing == "none") for batch in batches)


def test_epochs_differ_and_can_be_asked_for(rows: PreparedSet) -> None:
    loader = make(rows)
    first, second = contents(loader), contents(loader)
    assert loader.epoch == 2 and first != second
    loader.set_epoch(0)
    assert contents(loader) == first
    assert contents(make(rows, seed=4)) != first


def test_a_loop_that_is_left_begins_anew(rows: PreparedSet) -> None:
    first, loader = contents(make(rows)), make(rows)
    steps = []
    for stop in (3, 1):
        with closing(iter(loader)) as batches:
            assert contents(itertools.islice(batches, stop)) == first[:stop]
        steps.append(loader.state_dict()["step"])
        make(rows).load_state_dict(loader.state_dict())  # refused if its trail were another loop's
    assert steps == [3, 1]
    assert contents(loader) == first and loader.epoch == 1


def test_saving_a_state_after_each_batch_or_step_passes_over_no_epoch(rows: PreparedSet) -> None:
    loader, plain = make(rows, gradient_accumulation_steps=2), make(rows, gradient_accumulation_steps=2)
    for epoch in range(4):
        given = []
        for batch in loader if epoch % 2 else (batch for step in loader.steps() for batch in step.batches):
            given.append(content(batch))
            assert loader.state_dict() == loader.state_dict() and loader.epoch == epoch
        assert given == contents(plain) and loader.epoch == epoch + 1


def test_an_epoch_whose_batches_were_all_taken_is_over_however_its_loop_is_left(rows: PreparedSet) -> None:
    loader, plain = make(rows), make(rows)
    expected = [contents(plain) for _ in range(3)]
    assert contents(itertools.islice(loader, len(loader))) == expected[0] and loader.epoch == 1
    held = iter(loader)
    assert [content(next(held)) for _ in range(len(loader))] == expected[1]
    assert contents(loader) == expected[2]
    held.close()
    assert loader.epoch == 3


@pytest.mark.parametrize("what", ["state", "epoch", "loop"])
def test_a_loop_whose_loader_is_moved_does_not_go_on(rows: PreparedSet, what: str) -> None:
    loader = make(rows)
    state = loader.state_dict()
    batches = iter(loader)
    next(batches), next(batches)
    if what == "state":
        loader.load_state_dict(state)
    elif what == "epoch":
        loader.set_epoch(3)
    else:
        next(iter(loader))
    with pytest.raises(UserError, match="another place"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_loop_goes_on_in_the_middle_of_an_epoch(rows: PreparedSet, num_workers: int, packing: str) -> None:
    whole = make(rows, packing=packing, batch_size=2)
    expected = [*contents(whole), *contents(whole)]
    per_epoch = len(expected) // 2
    # Workers take as long to start as the loop itself, and it is not they who find the place: one in each epoch.
    places = range(2 * per_epoch + 1) if num_workers == 0 else (per_epoch // 2, per_epoch + 1)
    for stop in places:
        loader = make(rows, packing=packing, batch_size=2)
        given = []
        while len(given) < stop:
            for batch in loader:
                given.append(content(batch))
                if len(given) == stop:
                    break
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) <= 4096
        resumed = make(rows, packing=packing, batch_size=2, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert resumed.epoch == stop // per_epoch and resumed.state_dict() == state
        while resumed.epoch < 2:
            given += contents(resumed)
        assert given == expected, stop
    assert not children()


def of_ranks(rows: PreparedSet, ranks: int, state: dict[str, Any] | None = None) -> list[list[tuple[Any, ...]]]:
    """The steps of the rest of the epoch: the micro-batches of all ranks, without blanks, in the global order."""
    loaders = [make(rows, rank=r, world_size=ranks, gradient_accumulation_steps=4 // ranks) for r in range(ranks)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    steps = []
    for parts in zip(*(loader.steps() for loader in loaders), strict=True):
        assert len({part.num_targets for part in parts}) == 1
        batches = [batch for turn in zip(*(part.batches for part in parts), strict=True) for batch in turn]
        assert sum(batch.num_targets for batch in batches) == parts[0].num_targets
        steps.append(contents(batch for batch in batches if batch.addresses))
    return steps


def test_a_step_holds_the_same_on_any_number_of_ranks(rows: PreparedSet) -> None:
    expected = of_ranks(rows, 1)
    assert len(expected) > 3 and len(expected[-1]) < 4  # the last one is smaller, and blanks fill it
    assert of_ranks(rows, 2) == expected
    assert of_ranks(rows, 4) == expected


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(rows: PreparedSet, before: int, after: int) -> None:
    expected = of_ranks(rows, 1)
    loaders = [make(rows, rank=r, world_size=before, gradient_accumulation_steps=4 // before) for r in range(before)]
    for loader in loaders:
        steps = loader.steps()
        next(steps), next(steps)
        steps.close()  # type: ignore[attr-defined]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    assert of_ranks(rows, after, states[0]) == expected[2:]


def test_ranks_that_cannot_share_the_rest_of_a_step_are_refused(rows: PreparedSet) -> None:
    loader = make(rows, gradient_accumulation_steps=4)
    batches = iter(loader)
    next(batches)
    batches.close()
    other = make(rows, world_size=2, gradient_accumulation_steps=2)
    with pytest.raises(CheckpointError, match="after 1 batch of all ranks, which 2 ranks cannot share out"):
        other.load_state_dict(loader.state_dict())
    same = make(rows, gradient_accumulation_steps=4)
    same.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="1 of its 4 batches"):
        list(same.steps())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed: 3 there, 4 here"),
        ({"max_length": 63}, "max_length: 64 there, 63 here"),
        ({"gradient_accumulation_steps": 2}, "batches per step .*: 1 there, 2 here"),
        ({"packing": "none"}, "packing: best_fit there, none here"),
    ],
)
def test_another_stream_is_refused(rows: PreparedSet, change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        make(rows, **change).load_state_dict(make(rows).state_dict())


def test_other_data_is_refused(rows: PreparedSet) -> None:
    reordered = rows.take(np.arange(len(rows))[::-1], ledger=rows.ledger)
    with pytest.raises(CheckpointError, match="identity of the data"):
        make(reordered).load_state_dict(make(rows).state_dict())


def test_a_plan_that_has_changed_is_noticed(rows: PreparedSet) -> None:
    loader = make(rows)
    steps = loader.steps()
    for _ in range(5):
        next(steps)
    state = loader.state_dict()
    saved = LoaderState.from_json(state)
    trail = RowTrail()
    for step in range(5):
        trail = trail.after(b"what another Luthier planned" if step == 3 else bytes(1))
    with pytest.raises(CheckpointError, match=r"steps 1 to 1 of epoch 0 differ, which begin with rows\.jsonl:\d+ here"):
        make(rows).load_state_dict(dataclasses.replace(saved, trail=trail).to_json())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank .*0 to 1 .*not 2"),
        ({"packing": "fifo"}, "packing .*best_fit.*'fifo'"),
        ({"overflow": "wrap"}, "overflow .*truncate.*'wrap'"),
        ({"packing": "none", "varlen": True}, "varlen is for packed rows"),
        ({"max_length": 1, "overflow": "drop"}, "no row is left at max_length=1"),
    ],
)
def test_options_that_cannot_be_are_refused(rows: PreparedSet, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(rows, **options)


def test_an_unknown_option_is_a_type_error(rows: PreparedSet) -> None:
    with pytest.raises(TypeError, match="max_len"):
        luthier.Loader(rows, max_len=3)


def test_what_max_length_costs_is_in_the_ledger(rows: PreparedSet) -> None:
    loader = make(rows, max_length=30)
    assert 0 < loader.ledger.lost < 87 == loader.ledger.read
    assert rows.ledger.lost == 0
