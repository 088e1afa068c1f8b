"""One stream, whatever the ranks and workers; and the state that names a place in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_runs import make_segments, make_table

from luthier.config.schema import Packing
from luthier.errors import CheckpointError
from luthier.packing import PlanSettings
from luthier.records import Batch
from luthier.train.loader import CollateSettings, EvalStream, LoaderState, TrainStream, make_loader
from luthier.train.schedule import Schedule

SEGMENTS = make_segments(11)
HOW = CollateSettings(packed=True, pad_token_id=0)


def _stream(*, ranks: int = 1, rank: int = 0, step_size: int = 4) -> TrainStream:
    settings = PlanSettings(
        packing=Packing.BEST_FIT, capacity=32, micro_batches_per_step=step_size, num_ranks=ranks, seed=5
    )
    schedule = Schedule(make_table(SEGMENTS), settings, num_epochs=2)
    return TrainStream(SEGMENTS, schedule, HOW, rank=rank)


def _same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.model_inputs["input_ids"], other.model_inputs["input_ids"]) and torch.equal(
        one.labels_BT, other.labels_BT
    )


def _step(streams: list[TrainStream], step: int) -> list[tuple[int, ...]]:
    batches = [stream[step * stream.accumulation + a] for stream in streams for a in range(stream.accumulation)]
    return sorted(tuple(batch.labels_BT.flatten().tolist()) for batch in batches if batch.num_targets)


def test_a_step_holds_the_same_micro_batches_on_one_two_and_four_ranks() -> None:
    one = [_stream()]
    for ranks in (2, 4):
        several = [_stream(ranks=ranks, rank=rank) for rank in range(ranks)]
        for step in range(one[0].schedule.total_steps):
            assert _step(several, step) == _step(one, step)


def test_another_seed_gives_another_stream() -> None:
    one = _stream()
    settings = dataclasses.replace(one.schedule.settings, seed=6)
    other = TrainStream(SEGMENTS, Schedule(make_table(SEGMENTS), settings, num_epochs=2), HOW, rank=0)
    assert not all(_same(one[k], other[k]) for k in range(4))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_stream(workers: int) -> None:
    stream = _stream()
    parallel = list(make_loader(stream, num_workers=workers))
    assert len(parallel) == len(stream)
    assert all(_same(batch, stream[k]) for k, batch in enumerate(parallel))


def test_slots_of_a_smaller_step_are_blanks_without_targets() -> None:
    stream = _stream(step_size=8)
    micro_batches = len(stream.schedule.plan(0))
    blanks = [stream[k] for k in range(micro_batches, stream.schedule.plan(0).num_steps * 8)]
    assert blanks and all(batch.num_targets == 0 for batch in blanks)
    assert all(batch.model_inputs["input_ids"].shape == (1, 2) for batch in blanks)


def test_evaluation_shares_every_held_out_segment_once() -> None:
    settings = PlanSettings(packing=Packing.BEST_FIT, capacity=32, micro_batches_per_step=2, num_ranks=2)
    shares = [EvalStream(SEGMENTS, make_table(SEGMENTS), settings, HOW, rank=rank) for rank in range(2)]
    seen = [a.row for share in shares for k in range(len(share)) for a in share[k].addresses if share[k].num_targets]
    assert sorted(seen) == list(range(1, 12))


STATE = LoaderState(
    seed=1, epoch=0, step=7, micro_batches_per_step=4, rows_per_micro_batch=1, max_length=32, packing="none", data="f"
)


def test_state_is_small_and_reads_back(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert LoaderState.load(tmp_path) == STATE
    assert (tmp_path / "loader_state.json").stat().st_size <= 4096


def test_state_accepts_another_place_in_the_same_stream() -> None:
    STATE.check(dataclasses.replace(STATE, step=0, epoch=3), Path("checkpoint-7"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 2}, "runtime.seed: 1 there, 2 here"),
        ({"data": "g"}, "fingerprint of the data: f there, g here"),
        ({"micro_batches_per_step": 8}, "micro-batches per step"),
        ({"packing": "best_fit"}, "train.packing: none there, best_fit here"),
    ],
)
def test_state_refuses_another_stream_and_says_what_differs(change: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        STATE.check(dataclasses.replace(STATE, **change), Path("checkpoint-7"))


def test_state_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loader_state.json").write_text('{"version": 99}')
    with pytest.raises(CheckpointError, match="version 99"):
        LoaderState.load(tmp_path)
