"""What is compared arrives together: cut alike, from the right rows, whatever reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_rows import compared_sample, random_rows, stored

import luthier
from luthier.config.choices import Overflow
from luthier.errors import CheckpointError, UserError
from luthier.packing import UnitKind, draw_partners
from luthier.preparation import PreparedSet
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch
from tests.conftest import refused

MAX_LENGTH, PADDING = 48, 999_999
OPTIONS: dict[str, Any] = {
    "max_length": MAX_LENGTH,
    "overflow": "truncate",
    "seed": 5,
    "rank": 0,
    "world_size": 1,
    "pad_token_id": PADDING,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return random_rows(tmp_path_factory.mktemp("pairs"), 60, continuations=2)


@pytest.fixture(scope="module")
def feedback(tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return random_rows(tmp_path_factory.mktemp("feedback"), 60, continuations=1)


def make(rows: PreparedSet, **changes: Any) -> luthier.Loader:
    return luthier.Loader(rows, **{**OPTIONS, **changes})


def segments(batch: Batch) -> list[list[int]]:
    """The ids of each segment of an unrolled batch."""
    found = []
    for row, starts in enumerate(batch.segment_starts):
        ids = batch.model_inputs["input_ids"][row].tolist()
        ends = [*starts[1:], len(ids)]
        found += [[i for i in ids[start:end] if i != PADDING] for start, end in zip(starts, ends, strict=True)]
    return found


def targets(batch: Batch) -> list[list[int]]:
    """The target ids of each segment."""
    found: list[list[int]] = [[] for _ in range(batch.num_segments)]
    for segment, token in zip(batch.targets.segments_K.tolist(), batch.targets.ids_K.tolist(), strict=True):
        found[segment].append(token)
    return found


def test_what_was_prepared_to_be_compared_is_no_stream_of_answers_to_learn(
    pairs: PreparedSet, feedback: PreparedSet
) -> None:
    for rows in (pairs, feedback):
        with pytest.raises(UserError):
            make(rows)


def test_pairs_whose_prompt_is_cut_lose_the_same_messages_and_no_token_of_an_answer(tmp_path: Path) -> None:
    rows = stored(
        tmp_path,
        [
            compared_sample(0, 20, [10, 5], turns=(3, 8, 15)),
            compared_sample(1, 20, [4, 5], turns=(3, 8, 15)),
            compared_sample(2, 20, [21, 5], turns=(3, 8, 15)),
            compared_sample(3, 20, [18, 18], turns=(3,)),
        ],
    )
    index = SegmentIndex(rows, max_length=25, overflow=Overflow.TRUNCATE, units=UnitKind.PAIRS)
    assert index.row_ids.tolist() == [0, 0, 1, 1] and index.lost_rows.tolist() == [2, 3]
    assert index.lengths.tolist() == [25, 20, 24, 25] and index.prompt_lengths.tolist() == [15, 15, 20, 20]
    chosen, rejected = index[0], index[1]
    assert chosen.input_ids.tolist() == [0, 1, 2, *range(8, 20), *range(300, 310)]
    assert rejected.input_ids.tolist() == [0, 1, 2, *range(8, 20), *range(600, 605)]
    assert chosen.input_ids[chosen.target].tolist() == list(range(300, 310)), "the stop token is there and is learned"
    assert index.ledger.notes == {"prompt_truncated": 1} and index.ledger.dropped == {"too_long": 2}
    index.ledger.check(max_drop=0.9)


@pytest.mark.parametrize("overflow", [Overflow.DROP, Overflow.TRUNCATE, Overflow.KEEP_ANSWER])
def test_answers_that_are_judged_at_their_last_token_keep_it(tmp_path: Path, overflow: Overflow) -> None:
    """Else one answer of a pair would be judged at its stop token, and the other behind it."""
    ended = [compared_sample(0, 20, [10, 6], turns=(3, 8, 15)), compared_sample(1, 20, [6, 5], turns=(3, 8, 15))]
    for one in ended:
        one.target[[*np.cumsum([branch.length for branch in one.branches])[1:] - 1]] = False
    rows = stored(tmp_path, ended)
    for units in (UnitKind.PAIRS, UnitKind.REWARDS):
        index = SegmentIndex(rows, max_length=25, overflow=overflow, units=units)
        ends = [bool(index[number].target[-1]) for number in range(len(index))]
        assert any(ends) == (units is UnitKind.PAIRS) and ends.count(False) == (
            1 if units is UnitKind.PAIRS else len(ends)
        )
    assert len(index) == (0 if overflow is Overflow.DROP else 4)


def test_other_policies_drop_stop_or_refuse(tmp_path: Path) -> None:
    rows = stored(tmp_path, [compared_sample(n, 20, [10 if n else 4, 5], turns=(3, 8)) for n in range(3)])

    def index(overflow: Overflow, max_length: int = 25, units: UnitKind = UnitKind.PAIRS) -> SegmentIndex:
        return SegmentIndex(rows, max_length=max_length, overflow=overflow, units=units)

    assert len(index(Overflow.DROP)) == 2 and index(Overflow.DROP).ledger.dropped == {"too_long": 2}
    assert len(index(Overflow.DROP, max_length=30)) == 6
    with refused(UserError, "rows.jsonl:2", "30"):
        index(Overflow.ERROR)
    with pytest.raises(UserError, match="never cut"):
        index(Overflow.SPLIT)
    with pytest.raises(UserError, match="units are feedback"):
        index(Overflow.DROP, units=UnitKind.FEEDBACK)


def test_a_pair_is_lost_as_a_whole_where_one_side_has_nothing_to_learn(tmp_path: Path) -> None:
    bare = compared_sample(0, 20, [10, 5])
    bare.target[30:] = False
    rows = stored(tmp_path, [bare, compared_sample(1, 20, [10, 5])])
    index = SegmentIndex(rows, max_length=99, overflow=Overflow.DROP, units=UnitKind.PAIRS)
    assert index.row_ids.tolist() == [1, 1] and index.ledger.dropped == {"no_target_left": 1}


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_batch_names_its_pairs_with_their_verdicts_and_leaves(pairs: PreparedSet, packing: str) -> None:
    seen = []
    for step in make(pairs, units="pairs", packing=packing, batch_size=2, gradient_accumulation_steps=3).steps():
        assert step.num_units == sum(len(batch.units) for batch in step.batches)
        for batch in step.batches:
            of_segment = targets(batch)
            assert batch.num_segments == 2 * len(batch.units) or not batch.num_targets, "a blank has no unit"
            assert packing != "none" or len(batch.units) in (0, 1, 2)
            for unit in batch.units:
                chosen, rejected = (of_segment[number] for number in unit.segments)
                row = chosen[0] // 1000
                assert chosen == [1000 * row + 300 + n for n in range(len(chosen))]
                assert rejected == [1000 * row + 600 + n for n in range(len(rejected))]
                assert unit.verdict == row % 2 and unit.leaves == (2 * row, 2 * row + 1)
                assert batch.addresses[unit.segments[0]].row == row + 1
                seen.append(row)
    lost = set(range(60)) - set(seen)
    assert len(seen) == len(set(seen)) > 40
    limits = pairs.store.root_lengths[sorted(lost)]
    assert (limits > 0).all(), "only rows that do not fit are lost"


def test_another_rows_answer_follows_the_prompt_as_the_epochs_partners_say(feedback: PreparedSet) -> None:
    index = SegmentIndex(feedback, max_length=MAX_LENGTH, overflow=Overflow.TRUNCATE, units=UnitKind.FEEDBACK_KL)
    kept = index.row_ids[::2].tolist()
    loader = make(feedback, units="feedback_kl", packing="none")
    for epoch in range(2):
        partners = draw_partners(len(kept), seed=5, epoch=epoch)
        count = 0
        for batch in loader:
            ids = segments(batch)
            for unit in batch.units:
                own, drawn = (ids[number] for number in unit.segments)
                row = own[0] // 1000
                place = kept.index(row)
                other = kept[int(partners[place])]
                prompt = int(index.prompt_lengths[2 * place])
                assert drawn[:prompt] == own[:prompt] and other != row
                assert drawn[prompt:] == [1000 * other + 300 + n for n in range(len(drawn) - prompt)]
                completion = int(index.lengths[2 * kept.index(other)] - index.prompt_lengths[2 * kept.index(other)])
                assert len(drawn) == min(MAX_LENGTH, prompt + completion)
                assert targets(batch)[unit.segments[1]] == drawn[prompt:], "its first token is measured too"
                assert unit.leaves == (row, -1) and unit.verdict == row % 2
                count += 1
        assert count == len(kept)


def test_feedback_without_kl_has_one_segment_a_unit(feedback: PreparedSet) -> None:
    units = [unit for batch in make(feedback, units="feedback") for unit in batch.units]
    assert all(len(unit.segments) == len(unit.leaves) == 1 for unit in units) and len(units) > 40


def content(batch: Batch) -> tuple[Any, ...]:
    inputs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.model_inputs.items()}
    listed = (batch.targets.positions_K.tolist(), batch.targets.ids_K.tolist(), batch.targets.segments_K.tolist())
    return inputs, listed, batch.units, batch.segment_starts, batch.addresses


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("units", ["pairs", "feedback_kl"])
def test_workers_ranks_and_interruptions_change_nothing(
    pairs: PreparedSet, feedback: PreparedSet, units: str, shared: bool
) -> None:
    rows = pairs if units == "pairs" else feedback
    options = {"units": units, "shared": shared, "gradient_accumulation_steps": 2}
    alone = [content(batch) for batch in make(rows, **options)]
    assert [content(batch) for batch in make(rows, num_workers=1, **options)] == alone
    halves = [
        [content(batch) for batch in make(rows, **{**options, "gradient_accumulation_steps": 1}, rank=r, world_size=2)]
        for r in (0, 1)
    ]
    assert [batch for both in zip(*halves, strict=True) for batch in both] == alone
    loader = make(rows, **options)
    steps = loader.steps()
    begun = [content(batch) for _ in range(3) for batch in next(steps).batches]
    state = loader.state_dict()
    steps.close()  # type: ignore[attr-defined]
    resumed = make(rows, **options)
    resumed.load_state_dict(state)
    assert begun + [content(batch) for batch in resumed] == alone
    with pytest.raises(CheckpointError, match="units"):
        make(rows, packing="best_fit", units="none").load_state_dict(state)


def by_unit(batches: Iterable[Batch]) -> dict[int, tuple[float, list[list[int]]]]:
    """Verdict and targets of each unit, by its first leaf."""
    return {
        unit.leaves[0]: (unit.verdict, [targets(batch)[segment] for segment in unit.segments])
        for batch in batches
        for unit in batch.units
    }


@pytest.mark.parametrize("units", ["pairs", "feedback_kl"])
def test_shared_batches_have_the_prompt_once_and_the_same_targets(
    pairs: PreparedSet, feedback: PreparedSet, units: str
) -> None:
    rows = pairs if units == "pairs" else feedback
    plain, shared = list(make(rows, units=units)), list(make(rows, units=units, shared=True))
    assert by_unit(plain) == by_unit(shared)
    assert len(shared) < len(plain), "what is held once leaves room for others"
    tokens = {False: sum(len(segment) for batch in plain for segment in segments(batch)), True: 0}
    for once in shared:
        ids_N = once.model_inputs["input_ids"].reshape(-1)
        before = {int(token): int(ids_N[place]) for place, token in zip(
            once.targets.positions_K, once.targets.ids_K, strict=True)}  # fmt: skip
        for batch in plain:
            for segment in segments(batch):
                learned = [(first, second) for first, second in itertools.pairwise(segment) if second in before]
                for first, second in learned:
                    # the first token of a drawn answer follows another prompt in its own row
                    assert units == "feedback_kl" or before[second] == first
        tokens[True] += sum(branch.length for row in once.branches for branch in row)
    assert tokens[True] < 0.8 * tokens[False]


def test_options_that_cannot_be_are_refused(pairs: PreparedSet, feedback: PreparedSet) -> None:
    with pytest.raises(UserError, match=r"units .*feedback_kl.*'both'"):
        make(pairs, units="both")
    with pytest.raises(UserError, match=r"^shared "):
        make(feedback, units="feedback", shared=True)
    with pytest.raises(UserError, match=r"^shared "):
        make(pairs, units="pairs", shared=True, packing="none")
    with pytest.raises(UserError, match="units are pairs"):
        make(feedback, units="pairs")


def test_without_units_a_store_of_pairs_is_two_rows_of_their_own(pairs: PreparedSet) -> None:
    plain = SegmentIndex(pairs, max_length=999, overflow=Overflow.DROP)
    assert len(plain) == 120 and not plain.prompt_lengths.any()
    assert all(batch.units == () for batch in make(pairs, units="none"))
    assert np.array_equal(plain[0].input_ids, pairs[0].segments()[0].input_ids)
