"""One stream, whatever the ranks and workers and wherever it begins."""

from __future__ import annotations

import itertools

import torch
from tiny_runs import make_plan, make_segments, make_table

from luthier.collation import CollateSettings
from luthier.config.choices import Packing
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.reader import BatchReader, SegmentsInMemory
from luthier.packing import PlanSettings
from luthier.records import Batch
from luthier.training.streams import EvalStream, TrainStream

SEGMENTS = make_segments(11)
HOW = CollateSettings(packed=True, pad_token_id=0)


def _stream(*, ranks: int = 1, rank: int = 0, step_size: int = 4, first_step: int = 0, seed: int = 5) -> TrainStream:
    settings = PlanSettings(
        packing=Packing.BEST_FIT, capacity=32, micro_batches_per_step=step_size, num_ranks=ranks, seed=seed
    )
    schedule = make_plan(make_table(SEGMENTS), settings, num_epochs=2)
    reader = BatchReader(SegmentsInMemory(SEGMENTS), HOW)
    return TrainStream(schedule=schedule, reader=reader, rank=rank, num_workers=0, first_step=first_step)


def _same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.model_inputs["input_ids"], other.model_inputs["input_ids"]) and torch.equal(
        one.labels_BT, other.labels_BT
    )


def _steps(stream: TrainStream) -> list[list[tuple[int, ...]]]:
    """The labels of each micro-batch that has targets, step by step."""
    batches = iter(stream)
    return [
        [
            tuple(b.labels_BT.flatten().tolist())
            for b in itertools.islice(batches, stream.schedule.turns(step))
            if b.num_targets
        ]
        for step in range(stream.schedule.total_steps)
    ]


def test_a_step_holds_the_same_micro_batches_on_one_two_and_four_ranks() -> None:
    one = [sorted(step) for step in _steps(_stream())]
    for ranks in (2, 4):
        several = [_steps(_stream(ranks=ranks, rank=rank)) for rank in range(ranks)]
        assert [sorted(itertools.chain(*steps)) for steps in zip(*several, strict=True)] == one


def test_another_seed_gives_another_stream() -> None:
    assert _steps(_stream()) != _steps(_stream(seed=6))


def test_a_stream_may_begin_at_any_step() -> None:
    whole = list(iter(_stream()))
    for step in range(_stream().schedule.total_steps):
        rest = list(iter(_stream(first_step=step)))
        assert len(rest) == len(whole) - 4 * step
        assert all(_same(one, other) for one, other in zip(whole[4 * step :], rest, strict=True))


def test_a_run_that_is_over_has_a_length_that_says_so() -> None:
    stream = _stream()
    assert len(_stream(first_step=stream.schedule.total_steps)) == 4 * stream.schedule.total_steps
    assert len(_stream(first_step=stream.schedule.total_steps - 1)) > 10**9
    for ranks in (2, 4):  # of which each has its share
        shared = _stream(ranks=ranks, first_step=stream.schedule.total_steps)
        assert len(shared) == 4 // ranks * stream.schedule.total_steps


def test_slots_of_a_smaller_step_are_blanks_without_targets() -> None:
    stream = _stream(step_size=8)
    batches = list(iter(stream))
    blanks = [batch for batch in batches if not batch.num_targets]
    assert len(batches) == 8 * stream.schedule.total_steps and blanks
    assert all(batch.model_inputs["input_ids"].shape == (1, 2) for batch in blanks)


def test_evaluation_shares_every_held_out_segment_once() -> None:
    settings = PlanSettings(packing=Packing.BEST_FIT, capacity=32, micro_batches_per_step=2, num_ranks=2)
    rows = NumberedRows.of_segments(SEGMENTS, make_table(SEGMENTS))
    shares = [EvalStream.of_rows(rows, settings, HOW, rank=rank) for rank in range(2)]
    assert len({len(share) for share in shares}) == 1
    seen = [a.row for share in shares for batch in share for a in batch.addresses if batch.num_targets]
    assert sorted(seen) == list(range(1, 12))
