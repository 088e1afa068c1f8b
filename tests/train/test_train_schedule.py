"""Steps of a run: integers only."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import yaml

from luthier.config.schema import Packing, RunConfig, TrainConfig
from luthier.loader.run_settings import train_settings, warmup_steps
from luthier.packing import PlanSettings, SegmentTable, plan_epoch
from luthier.train import schedule as schedules
from luthier.train.run_stream import trained_segments
from luthier.train.schedule import FEW_STEPS, Schedule, length_notes, ways_to_more_steps


def _schedule(
    count: int, *, step_size: int = 4, ranks: int = 1, epochs: float = 2, steps: int | None = None
) -> Schedule:
    settings = PlanSettings(
        packing=Packing.NONE, capacity=16, micro_batches_per_step=step_size, num_ranks=ranks, seed=3
    )
    table = SegmentTable.of_lengths(np.full(count, 8))
    return Schedule(table, settings, num_epochs=epochs, max_steps=steps)


def test_epochs_follow_one_another_and_each_ends_with_a_smaller_step() -> None:
    schedule = _schedule(10)  # 4 + 4 + 2 micro-batches an epoch
    assert schedule.total_steps == 6
    assert [schedule.locate(step) for step in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [schedule.ends_epoch(done) for done in range(1, 7)] == [False, False, True, False, False, True]
    assert [schedule.micro_batch(2, slot) for slot in range(4)] == [(0, 8), (0, 9), None, None]


def test_every_micro_batch_of_an_epoch_is_in_exactly_one_slot() -> None:
    schedule = _schedule(10, epochs=3)
    found = [schedule.micro_batch(step, slot) for step in range(schedule.total_steps) for slot in range(4)]
    assert [place for place in found if place] == [(epoch, index) for epoch in range(3) for index in range(10)]


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps() -> None:
    assert _schedule(10, epochs=0.5).total_steps == 2
    assert _schedule(10, epochs=1.5).total_steps == 5
    assert _schedule(10, epochs=1.5).epoch_after(5) == pytest.approx(1 + 2 / 3)


def test_max_steps_overrides_epochs_in_both_directions() -> None:
    assert _schedule(10, epochs=1, steps=7).total_steps == 7
    assert _schedule(10, epochs=9, steps=2).total_steps == 2
    assert _schedule(10, epochs=1, steps=7).locate(6) == (2, 0)


def test_epochs_of_fractional_sources_may_differ_in_length() -> None:
    rows = np.arange(9, dtype=np.int64)
    table = dataclasses.replace(SegmentTable.of_lengths(np.full(9, 8)), row_ids=rows, source_weights=(0.5,))
    settings = PlanSettings(packing=Packing.NONE, capacity=16, micro_batches_per_step=2, seed=3)
    schedule = Schedule(table, settings, num_epochs=3)
    assert schedule.total_steps == sum(schedule.plan(epoch).num_steps for epoch in range(3))


def test_tokens_of_a_step_leave_dummies_out() -> None:
    one, two = _schedule(9, step_size=4), _schedule(9, step_size=4, ranks=2)
    assert len(two.plan(0)) == 10  # nine and a dummy
    for step in range(3):
        assert one.num_tokens(step) == two.num_tokens(step) == (32 if step < 2 else 8)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("weight", [1.0, 0.5, 2.0])
def test_the_segments_of_a_run_are_those_of_its_steps(steps: int, weight: float, ranks: int) -> None:
    """Counted step by step: within an epoch, over its end, with a source of which an epoch sees a part."""
    rows = np.arange(11, dtype=np.int64)
    table = dataclasses.replace(SegmentTable.of_lengths(np.full(11, 8)), row_ids=rows, source_weights=(weight,))
    settings = PlanSettings(packing=Packing.NONE, capacity=16, micro_batches_per_step=2, num_ranks=ranks, seed=3)
    schedule = Schedule(table, settings, num_epochs=1, max_steps=steps)
    seen = set()
    for step in range(steps):
        for slot in range(2):
            place = schedule.micro_batch(step, slot)
            if place is not None and place[1] < len(schedule.plan(place[0]).planned):
                micro_batch = schedule.plan(place[0])[place[1]]
                seen |= {int(segment) for pack in micro_batch.packs for segment in pack}
    assert trained_segments(schedule, 11).tolist() == sorted(seen)
    assert steps > 4 or len(seen) < 11, "control: few steps see a part of the rows"


MIXED = np.array([3, 9, 14, 5, 8, 2, 11, 7, 6, 13])
KINDS = [(packing, weight, tokens) for packing in Packing for weight in (1.0, 0.5, 2.0) for tokens in (None, 40)]


def _mixed(packing: Packing, weight: float, tokens: int | None) -> tuple[SegmentTable, PlanSettings]:
    table = dataclasses.replace(SegmentTable.of_lengths(MIXED), source_weights=(weight,))
    return table, PlanSettings(packing=packing, capacity=16, micro_batches_per_step=2, seed=3, tokens_per_step=tokens)


@pytest.mark.parametrize(("packing", "weight", "tokens"), KINDS)
def test_steps_that_are_planned_when_they_are_needed_are_those_of_all_epochs_in_a_row(
    packing: Packing, weight: float, tokens: int | None
) -> None:
    table, settings = _mixed(packing, weight, tokens)
    counts = [plan_epoch(table, settings, epoch=epoch).num_steps for epoch in range(4)]
    places = [(epoch, step) for epoch, count in enumerate(counts) for step in range(count)]
    by_epochs = Schedule(table, settings, num_epochs=3)
    assert by_epochs.total_steps == sum(counts[:3])
    assert Schedule(table, settings, num_epochs=2.5).total_steps == sum(counts[:2]) + -(-counts[2] // 2)
    for step in (len(places) - 1, 0, *range(len(places))):  # also where a resumed run jumps to
        assert Schedule(table, settings, num_epochs=1, max_steps=10**6).locate(step) == places[step]
    assert [by_epochs.locate(step) for step in range(sum(counts[:3]))] == places[: sum(counts[:3])]
    one_by_one, at_once = by_epochs, Schedule(table, settings, num_epochs=3)
    for done in range(by_epochs.total_steps + 1):
        one_by_one.source_counts(done)
    for done in (by_epochs.total_steps, 1, counts[0] + 1):
        assert np.array_equal(at_once.source_counts(done), one_by_one.source_counts(done))


@pytest.mark.parametrize(("packing", "weight", "tokens"), KINDS)
def test_a_million_steps_over_a_few_rows_are_not_planned_ahead(
    packing: Packing, weight: float, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counted(*given: object, epoch: int, **named: object) -> object:
        planned.append(epoch)
        return plan_epoch(*given, epoch=epoch, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(schedules, "plan_epoch", counted)
    table, settings = _mixed(packing, weight, tokens)
    schedule = Schedule(table, settings, num_epochs=1, max_steps=10**6)
    assert schedule.total_steps == schedule.horizon == 10**6 and schedule.is_exact
    assert schedule.locate(0) == (0, 0) and planned == [0]
    if weight != 0.5 and tokens is None and packing is not Packing.SPLIT:  # all epochs have as many steps
        epoch, _ = schedule.locate(999_999)
        schedule.plan(epoch)
        schedule.source_counts(10**6)
        assert set(planned) == {0, epoch}
        assert Schedule(table, settings, num_epochs=100_000).total_steps == 100_000 * schedule.plan(0).num_steps


def test_epochs_of_other_lengths_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where a step is a number of tokens, an epoch taken for another would be found out."""
    table, settings = _mixed(Packing.WINDOW, 0.5, 20)
    counts = [plan_epoch(table, settings, epoch=epoch).num_steps for epoch in range(30)]
    assert len(set(counts)) > 1
    monkeypatch.setattr(Schedule, "_is_constant", lambda self, first: True)
    assert Schedule(table, settings, num_epochs=30).total_steps != sum(counts)


@pytest.mark.parametrize("kind", ["share of rows", "tokens"])
def test_so_many_epochs_that_nobody_can_count_them_are_estimated_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few epochs are counted one by one, however many there are, and the run has as many steps as they promise."""
    monkeypatch.setattr(schedules, "MOST_EPOCHS_COUNTED", 20)
    lengths = 5 + np.arange(40) * 37 % 11
    table = SegmentTable.of_lengths(lengths)
    table = dataclasses.replace(table, source_weights=(0.5 if kind == "share of rows" else 1.0,))
    tokens = 50 if kind == "tokens" else None
    settings = PlanSettings(packing=Packing.WINDOW, capacity=32, seed=3, tokens_per_step=tokens)
    planned: list[int] = []
    real = schedules.plan_epoch
    monkeypatch.setattr(
        schedules, "plan_epoch", lambda *a, epoch, **k: (planned.append(epoch), real(*a, epoch=epoch, **k))[1]
    )
    counted = Schedule(table, settings, num_epochs=20).total_steps
    endless = Schedule(table, settings, num_epochs=1e9)
    assert endless.total_steps == counted * 10**9 // 20
    assert max(planned) < 20
    assert endless.locate(0) == (0, 0) and not endless.is_last(counted)
    assert abs(Schedule(table, settings, num_epochs=21).total_steps - counted * 21 / 20) <= 1


TINY = np.random.default_rng(0).integers(20, 120, size=60)
CHANGES: list[dict[str, object]] = [
    {"packing": packing, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated, **length}
    for packing in ("window", "best_fit", "none", "split")
    for rows in (1, 16)
    for accumulated in (1, 8)
    for length in ({}, {"num_train_epochs": 0.5}, {"max_steps": 7}, {"max_steps": 500})
] + [{"packing": packing, "tokens_per_step": 5000} for packing in ("window", "none")]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_way_to_more_steps_gives_enough_of_them(changes: dict[str, object], ranks: int) -> None:
    def config_of(changes: dict[str, object]) -> RunConfig:
        sections = {"model": "preset:tiny-qwen3", "data": {"train": ["preset:skills"]}, "objective": {"name": "pt"}}
        return RunConfig.model_validate({**sections, "train": changes})

    def total(config: RunConfig) -> int:
        lengths = {"num_epochs": config.train.num_train_epochs, "max_steps": config.train.max_steps}
        return Schedule(table, train_settings(config, num_ranks=ranks), **lengths).total_steps

    table, config = SegmentTable.of_lengths(TINY), config_of(changes)
    ways = ways_to_more_steps(config, table, num_ranks=ranks)
    assert bool(ways) == (total(config) < FEW_STEPS)
    for way in ways:
        settings = dict(part.removeprefix("train.").split(": ") for part in way.split(" and "))
        assert total(config_of({**changes, **{key: yaml.safe_load(value) for key, value in settings.items()}})) >= 20


@pytest.mark.parametrize(
    ("warmup", "total", "steps"), [(0.03, 3, 0), (0.03, 33, 0), (0.03, 34, 2), (5, 3, 5), (0, 9, 0)]
)
def test_a_share_of_warmup_below_one_step_is_none(warmup: float, total: int, steps: int) -> None:
    """The first step of a warm-up has the rate 0, which would be the only step of a run of one."""
    assert warmup_steps(TrainConfig(warmup_steps=warmup), total) == steps


def test_what_a_short_run_will_not_do_is_told() -> None:
    asked = {
        "eval": {"strategy": "steps", "steps": 50, "early_stopping_patience": 2},
        "output": {"save_strategy": "steps", "save_steps": 50},
        "tracking": {"logging_steps": 50},
        "train": {"gradient_accumulation_steps": 50},
    }
    data = {"train": ["preset:skills"], "eval_split": 2}
    config = RunConfig.model_validate({"model": {"name_or_path": "preset:tiny-qwen3"}, "data": data, **asked})
    keys = ["eval.steps", "output.save_steps", "tracking.logging_steps", "eval.early_stopping_patience",
            "train.gradient_accumulation_steps"]  # fmt: skip
    assert [note.split()[0].rstrip(":") for note in length_notes(config, 20, 4)] == keys
    assert length_notes(config, 500, 50) == ()
