"""Steps of a run: integers only."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_runs import make_plan

from luthier.config.choices import Packing, Strategy
from luthier.config.schema import RunConfig, TrainConfig
from luthier.loader import plan as plans
from luthier.loader.plan import StreamPlan
from luthier.loader.reader import PlannedMicroBatch
from luthier.loader.settings import plan_of_run, train_settings, warmup_steps
from luthier.loader.stream_state import LoaderState
from luthier.packing import PlanSettings, SegmentTable
from luthier.packing.epoch import plan_epoch, source_counts
from luthier.packing.planner import EpochPlanner
from luthier.training.callbacks import Flow
from luthier.training.streams import FEW_STEPS, length_notes, ways_to_more_steps


def _schedule(
    count: int, *, step_size: int = 4, ranks: int = 1, epochs: float = 2, steps: int | None = None
) -> StreamPlan:
    settings = PlanSettings(
        packing=Packing.NONE, capacity=16, micro_batches_per_step=step_size, num_ranks=ranks, seed=3
    )
    return make_plan(SegmentTable.of_lengths(np.full(count, 8)), settings, num_epochs=epochs, max_steps=steps)


def _rows(planned: list[PlannedMicroBatch]) -> list[list[int]]:
    return [micro_batch.places["row"].tolist() for micro_batch in planned]


def test_epochs_follow_one_another_and_each_ends_with_a_smaller_step() -> None:
    schedule = _schedule(10)  # 4 + 4 + 2 micro-batches an epoch
    assert schedule.total_steps == 6 and schedule.is_exact
    steps = [schedule.step(step) for step in range(6)]
    assert [(step.epoch, len(step.micro_batches)) for step in steps if step] == [
        (0, 4), (0, 4), (0, 2), (1, 4), (1, 4), (1, 2)
    ]  # fmt: skip
    assert [schedule.ends_epoch(done) for done in range(1, 7)] == [False, False, True, False, False, True]
    assert schedule.step(6) is None
    blanks = [planned.is_blank for planned in schedule.micro_batches(0)]
    assert blanks == ([False] * 10 + [True] * 2) * 2


def test_every_micro_batch_of_an_epoch_is_in_exactly_one_slot() -> None:
    schedule = _schedule(10, epochs=3)
    rows = [row for (row,) in filter(None, _rows(list(schedule.micro_batches(0))))]
    assert [sorted(rows[first : first + 10]) for first in (0, 10, 20)] == [list(range(1, 11))] * 3
    of_plan = [[row[0] + 1 for row in batch.packs] for epoch in range(3) for batch in schedule.epoch(epoch)]
    assert [[row] for row in rows] == of_plan, "the plan of an epoch is what training has"


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps() -> None:
    assert _schedule(10, epochs=0.5).total_steps == 2
    assert _schedule(10, epochs=1.5).total_steps == 5
    assert _schedule(10, epochs=1.5).epoch_after(5) == pytest.approx(1 + 2 / 3)
    assert _schedule(10, epochs=1.5).is_over(5) and not _schedule(10, epochs=1.5).is_over(4)


def test_max_steps_overrides_epochs_in_both_directions() -> None:
    assert _schedule(10, epochs=1, steps=7).total_steps == 7
    assert _schedule(10, epochs=9, steps=2).total_steps == 2
    step = _schedule(10, epochs=1, steps=7).step(6)
    assert step is not None and step.epoch == 2


def test_epochs_of_fractional_sources_may_differ_in_length() -> None:
    rows = np.arange(9, dtype=np.int64)
    table = dataclasses.replace(SegmentTable.of_lengths(np.full(9, 8)), row_ids=rows, source_weights=(0.5,))
    settings = PlanSettings(packing=Packing.NONE, capacity=16, micro_batches_per_step=2, seed=3)
    schedule = make_plan(table, settings, num_epochs=3)
    assert schedule.total_steps == sum(schedule.epoch(epoch).num_steps for epoch in range(3))


def test_tokens_of_a_step_leave_dummies_out() -> None:
    one, two = _schedule(9, step_size=4), _schedule(9, step_size=4, ranks=2)
    assert len(two.epoch(0)) == 10  # nine and a dummy
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
    schedule = make_plan(table, settings, num_epochs=1, max_steps=steps)
    seen = {
        int(segment)
        for step in map(schedule.step, range(steps))
        if step
        for packs in step.micro_batches
        for pack in packs
        for segment in pack
    }
    assert schedule.trained_segments().tolist() == sorted(seen)
    assert schedule.trained_rows(steps).tolist() == sorted(seen)
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
    plans = [plan_epoch(table, settings, epoch=epoch) for epoch in range(4)]
    counts = [plan.num_steps for plan in plans]
    by_epochs = make_plan(table, settings, num_epochs=3)
    assert by_epochs.total_steps == sum(counts[:3])
    assert make_plan(table, settings, num_epochs=2.5).total_steps == sum(counts[:2]) + -(-counts[2] // 2)
    steps = [
        (epoch, [[list(pack) for pack in plan[number].packs] for number in plan.of_step(step)])
        for epoch, plan in enumerate(plans[:3])
        for step in range(plan.num_steps)
    ]
    found = [by_epochs.step(number) for number in range(by_epochs.total_steps)]
    assert [
        (step.epoch, [[pack.tolist() for pack in packs] for packs in step.micro_batches]) for step in found if step
    ] == steps
    counted = np.zeros((1, 4), dtype=np.int64)
    for done in range(by_epochs.total_steps + 1):
        more = by_epochs.source_counts(done)
        assert (more >= counted).all()
        counted = more
    whole = sum(source_counts(plan, table) for plan in plans[:3])
    assert np.array_equal(counted, whole)


@pytest.mark.parametrize(("packing", "weight", "tokens"), KINDS)
def test_a_million_steps_over_a_few_rows_are_not_planned_ahead(
    packing: Packing, weight: float, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    begin = EpochPlanner.__init__

    def counted(self: EpochPlanner, *given: Any, epoch: int, **named: Any) -> None:
        planned.append(epoch)
        begin(self, *given, epoch=epoch, **named)

    monkeypatch.setattr(EpochPlanner, "__init__", counted)
    table, settings = _mixed(packing, weight, tokens)
    schedule = make_plan(table, settings, num_epochs=1, max_steps=10**6)
    assert schedule.total_steps == schedule.horizon == 10**6 and schedule.is_exact
    assert max(planned) <= 1
    if weight != 0.5 and tokens is None and packing is not Packing.SPLIT:  # all epochs have as many steps
        many = make_plan(table, settings, num_epochs=100_000)
        assert many.total_steps == 100_000 * many.epoch(0).num_steps
        assert max(planned) <= 1


@pytest.mark.parametrize(("packing", "weight", "tokens"), KINDS)
def test_a_run_goes_on_at_any_step_with_the_plan_of_that_place(
    packing: Packing, weight: float, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, settings = _mixed(packing, weight, tokens)
    schedule = make_plan(table, settings, num_epochs=40)
    planned: list[int] = []
    begin = EpochPlanner.__init__
    for done in (1, 7, schedule.total_steps - 3, schedule.total_steps):
        whole = make_plan(table, settings, num_epochs=40)
        for step in range(done):
            whole.step(step)
        epoch, cursor, waiting, trail = whole.state_after(done)
        state = LoaderState(
            seed=3, epoch=epoch, step=done, cursor=cursor, waiting=waiting, trail=trail, settings={}, data="x"
        )
        planned.clear()
        with monkeypatch.context() as patched:
            patched.setattr(
                EpochPlanner,
                "__init__",
                lambda self, *a, epoch, **k: (planned.append(epoch), begin(self, *a, epoch=epoch, **k))[1],
            )
            later = make_plan(table, settings, num_epochs=40, state=LoaderState.from_json(state.to_json()))
            assert later.state_after(done) == (epoch, cursor, waiting, trail)
        assert min(planned) >= epoch - 1, "nothing of what came before is planned again"
        assert (later.horizon, later.is_exact, later.first_epoch()) == (whole.horizon, True, whole.first_epoch())
        for step in range(done, min(done + 9, schedule.total_steps)):
            one, other = whole.step(step), later.step(step)
            assert one is not None and other is not None
            assert [[p.tolist() for p in packs] for packs in one.micro_batches] == [
                [p.tolist() for p in packs] for packs in other.micro_batches
            ]
            assert whole.source_counts(step + 1).tolist() == later.source_counts(step + 1).tolist()
            assert whole.trained_rows(step + 1).tolist() == later.trained_rows(step + 1).tolist()
            assert whole.state_after(step + 1) == later.state_after(step + 1)
        assert later.is_over(schedule.total_steps) and later.step(schedule.total_steps) is None


def test_epochs_of_other_lengths_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where a step is a number of tokens, an epoch taken for another would be found out."""
    table, settings = _mixed(Packing.WINDOW, 0.5, 20)
    counts = [plan_epoch(table, settings, epoch=epoch).num_steps for epoch in range(30)]
    assert len(set(counts)) > 1
    assert make_plan(table, settings, num_epochs=30).total_steps == sum(counts)
    monkeypatch.setattr(plans.stream_state, "has_constant_steps", lambda *_: True)
    assert make_plan(table, settings, num_epochs=30).total_steps != sum(counts)


@pytest.mark.parametrize("kind", ["share of rows", "tokens"])
def test_so_many_epochs_that_nobody_can_count_them_are_estimated_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few epochs are counted one by one, however many there are, and the run has as many steps as they promise."""
    monkeypatch.setattr(plans, "MOST_EPOCHS_COUNTED", 20)
    lengths = 5 + np.arange(40) * 37 % 11
    table = SegmentTable.of_lengths(lengths)
    table = dataclasses.replace(table, source_weights=(0.5 if kind == "share of rows" else 1.0,))
    tokens = 50 if kind == "tokens" else None
    settings = PlanSettings(packing=Packing.WINDOW, capacity=32, seed=3, tokens_per_step=tokens)
    planned: list[int] = []
    begin = EpochPlanner.__init__
    monkeypatch.setattr(
        EpochPlanner,
        "__init__",
        lambda self, *a, epoch, **k: (planned.append(epoch), begin(self, *a, epoch=epoch, **k))[1],
    )
    counted = make_plan(table, settings, num_epochs=20).total_steps
    endless = make_plan(table, settings, num_epochs=1e9)
    assert endless.total_steps == counted * 10**9 // 20
    assert max(planned) < 20
    assert endless.epoch_after(1) < 1 and not endless.is_over(11)
    assert abs(make_plan(table, settings, num_epochs=21).total_steps - counted * 21 / 20) <= 1


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
        return plan_of_run(config, rows, num_ranks=ranks).count_steps()

    table, config = SegmentTable.of_lengths(TINY), config_of(changes)
    rows = make_plan(table, train_settings(config, num_ranks=ranks)).rows
    ways = ways_to_more_steps(config, rows, num_ranks=ranks)
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


@pytest.mark.parametrize(("share", "total", "due"), [
    (0.1, 10, list(range(1, 11))),
    (0.25, 10, [3, 5, 8, 10]),
    (0.5, 3, [2, 3]),
    (1 / 3, 9, [3, 6, 9]),
    (0.01, 4, [1, 2, 3, 4]),
    (0.999, 5, [5]),
])  # fmt: skip
def test_what_is_due_after_a_share_of_the_run_is_done_at_the_step_that_completes_it(
    share: float, total: int, due: list[int]
) -> None:
    flow: Any = Flow.__new__(Flow)
    flow.schedule = SimpleNamespace(progress=lambda step: step / total)
    assert [step for step in range(1, total + 1) if flow._due(Strategy.STEPS, share, step, step == total)] == due
