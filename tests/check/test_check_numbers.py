"""Plans and statistics equal a naive recount."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from luthier.check.plan import RunPlan, longest_rows, loss_notes, plan_run
from luthier.check.plan.stats import Distribution, distribution, stats
from luthier.check.plan.terminal import histogram, plan_table, stats_table
from luthier.config.choices import MixtureBy
from luthier.config.inputs import MixtureConfig
from luthier.config.objective import ObjectiveConfig
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.settings import plan_of_run, train_settings
from luthier.packing import UnitKind
from luthier.packing.epoch import plan_epoch, realised_mixture, straggler_factor
from luthier.preparation import Prepared
from luthier.preparation.prepare import prepare
from luthier.preparation.segments import SegmentIndex

SHARES = MixtureConfig.model_validate({"by": "rows"})


def config_in(folder: Path, **changes: dict[str, object]) -> RunConfig:
    base: dict[str, dict[str, object]] = {
        "model": {"name_or_path": "preset:tiny-qwen3"},
        "data": {
            "train": [{"path": "preset:skills", "max_rows": 60}, {"path": "preset:skills", "split": "test"}],
            "eval_split": 20, "max_length": 64, "max_drop": 0.9, "store": str(folder / "store"), "workers": 0,
        },
        "train": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 2},
        "output": {"dir": str(folder / "out")},
    }  # fmt: skip
    for section, values in changes.items():
        base[section] = {**base.get(section, {}), **values}
    return RunConfig.model_validate(base)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Prepared]:
    config = config_in(tmp_path_factory.mktemp("numbers"))
    return config, prepare(config, Encoder.from_config(config))


def cut(config: RunConfig, prepared: Prepared) -> SegmentIndex:
    return SegmentIndex(prepared.train, max_length=config.data.max_length, overflow=config.data.overflow)


def made(config: RunConfig, prepared: Prepared) -> RunPlan:
    return plan_run(config, cut(config, prepared), None, total_steps=11)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_plan_equals_a_naive_recount(prepared: tuple[RunConfig, Prepared], packing: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, train={"packing": packing})
    index = cut(config, prepared[1])
    plan = made(config, prepared[1]).train
    segments = [index[number] for number in range(len(index))]
    assert plan.segments == len(segments)
    assert plan.tokens == sum(len(segment.input_ids) for segment in segments)
    assert plan.targets == sum(int(segment.target.sum()) for segment in segments)
    assert plan.rows == len({str(segment.address) for segment in segments})
    batches = [batch.packs for batch in plan_epoch(NumberedRows.of_index(index), train_settings(config), epoch=0)]
    packs = [pack for batch in batches for pack in batch]
    assert sorted(i for pack in packs for i in pack) == list(range(len(segments)))
    assert plan.epoch.packs == len(packs)
    assert plan.epoch.micro_batches == len(batches)
    assert plan.epoch.steps == -(-len(batches) // 2)
    widths = [[sum(len(segments[i]) for i in pack) for pack in batch] for batch in batches]
    slots = sum(max(batch) * len(batch) for batch in widths)
    assert plan.epoch.padding == pytest.approx(1 - plan.tokens / slots)
    assert plan.epoch.fill == pytest.approx(plan.tokens / (len(packs) * config.data.max_length))


def test_the_mixture_of_the_plan_is_that_of_the_rows_it_takes(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    index, plan = cut(config, data), made(config, data).train
    assert [source.name for source in plan.sources] == [source.name for source in data.train.sources]
    for number, source in enumerate(plan.sources):
        mine = index.source_ids == number
        assert source.taken.tokens == int(index.lengths[mine].sum())
        assert source.taken.rows == len(np.unique(index.row_ids[mine]))
        assert source.taken.share_of_tokens == pytest.approx(source.taken.tokens / plan.tokens)
    assert sum(source.taken.share_of_rows for source in plan.sources) == pytest.approx(1)


def test_a_plan_of_several_ranks_says_how_uneven_they_are(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    index = cut(config, data)
    settings = train_settings(config, num_ranks=2)
    epoch = plan_epoch(NumberedRows.of_index(index), settings, epoch=0)
    plan = plan_run(config, index, None, total_steps=11, num_ranks=2)
    assert plan.train.straggler_factor == straggler_factor(epoch, index.table(), settings, 2) > 1
    assert made(config, data).train.straggler_factor == 1


def test_a_plan_of_shares_is_that_of_the_schedule(prepared: tuple[RunConfig, Prepared]) -> None:
    config = prepared[0].model_copy(update={"data": prepared[0].data.model_copy(update={"mixture": SHARES})})
    index = cut(config, prepared[1])
    schedule = plan_of_run(config, NumberedRows.of_index(index), num_ranks=1)
    total_steps = schedule.count_steps()
    plan = plan_run(config, index, None, total_steps=total_steps, first_epoch=schedule.epoch(0))
    assert total_steps == schedule.epoch(0).num_steps + schedule.epoch(1).num_steps
    assert plan.train.epoch.steps == schedule.epoch(0).num_steps
    taken = [source.taken for source in plan.train.sources]
    assert taken == list(realised_mixture(schedule.epoch(0), index.table()))
    assert taken[0].share_of_rows == pytest.approx(0.5, abs=0.02)
    assert taken[0].share_of_rows != pytest.approx(made(config, prepared[1]).train.sources[0].taken.share_of_rows)


@pytest.mark.parametrize(("by", "weight", "share"), [("rows", 1, 1 / 3), ("rows", 2, 1 / 2), ("tokens", 1, 1 / 2)])
def test_a_plan_says_that_lost_rows_have_changed_a_share(tmp_path: Path, by: str, weight: int, share: float) -> None:
    """Of the second data set every second row is too long. Shares of tokens are of what is trained on."""
    texts = {"short": ["a b"] * 60, "mixed": ["a b", "a b " * 60] * 30}
    for name, answers in texts.items():
        rows = [{"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": a}]} for a in answers]
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": w} for name, w in zip(texts, (1, weight), strict=True)
    ]
    config = config_in(tmp_path, data={"train": sources, "eval_split": 0, "mixture": MixtureConfig(by=MixtureBy(by))})
    index = cut(config, prepare(config, Encoder.from_config(config)))
    schedule = plan_of_run(config, NumberedRows.of_index(index), num_ranks=1)
    plan = plan_run(config, index, None, total_steps=11, first_epoch=schedule.epoch(0))
    assert bool(loss_notes(schedule.order, plan)) == (by == "rows")
    assert plan.train.sources[1].taken.share_of_rows == pytest.approx(share, abs=0.02)


def test_plan_ledger_counts_rows_that_cutting_lost(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    ledger = made(config, data).train.ledger
    assert ledger["dropped"]["too_long"] > 0
    assert ledger["read"] == ledger["prepared"] + sum(ledger["dropped"].values()) + sum(ledger["quarantined"].values())
    assert ledger["prepared"] == made(config, data).train.rows


def test_longest_rows_are_distinct_and_descend(prepared: tuple[RunConfig, Prepared]) -> None:
    index = cut(*prepared)
    rows = longest_rows(index, 8)
    assert rows[0].tokens == index.lengths.max()
    assert [row.tokens for row in rows] == sorted((row.tokens for row in rows), reverse=True)
    assert len({row.address for row in rows}) == 8


def test_warm_up_is_a_share_below_one_and_a_number_from_one_on(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    assert made(config, data).warmup_steps == 0  # 0.03 of 11 steps is less than one: no first step at a rate of 0
    for given, steps in ((0.3, 4), (7, 7)):  # a share is rounded up, as transformers does
        changed = config.model_copy(update={"train": config.train.model_copy(update={"warmup_steps": given})})
        assert made(changed, data).warmup_steps == steps


def test_stats_equal_a_naive_recount_per_source(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    found = stats(data.train, split="train", max_length=config.data.max_length)
    per_source: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for row in range(len(data.train)):
        for segment in data.train[row].segments():
            per_source[int(data.train.source_ids[row])].append((len(segment), int(segment.target[1:].sum())))
    assert len(found.sources) == 2
    for number, source in enumerate(found.sources):
        lengths = [length for length, targets in per_source[number] if targets]
        assert source.segments == len(lengths)
        assert source.tokens == sum(lengths)
        assert source.targets == sum(targets for _, targets in per_source[number])
        assert source.over_max_length == sum(length > config.data.max_length for length in lengths)
        assert (source.lengths.minimum, source.lengths.maximum) == (min(lengths), max(lengths))
        assert sum(source.lengths.counts) == len(lengths)
    assert found.total.tokens == sum(source.tokens for source in found.sources)
    assert found.fitting[64] == pytest.approx(1 - found.total.over_max_length / found.total.segments)


@pytest.mark.parametrize("values", [[5], [1, 1, 1], list(range(100)), [3, 100_000], [7, 8]])
def test_a_histogram_counts_every_value_once_in_its_bin(values: list[int]) -> None:
    found: Distribution = distribution(np.array(values, dtype=np.int64))
    for low, high, count in zip(found.edges[:-1], found.edges[1:], found.counts, strict=True):
        assert count == sum(low <= value < high for value in values)
    assert sum(found.counts) == len(values)
    assert len(found.counts) <= 17
    assert all(value in values for value in found.percentiles.values())


def test_bins_without_a_value_share_a_line() -> None:
    said = StringIO()
    Console(file=said, width=80).print(histogram(distribution(np.array([0, 1, 1, 15], dtype=np.int64))))
    lines = [line.split() for line in said.getvalue().splitlines() if line.strip()]
    assert [(line[0], line[-1]) for line in lines] == [("0", "1"), ("1", "2"), ("2", "0"), ("15", "1")]


def test_percentiles_are_values_at_their_rank() -> None:
    assert distribution(np.arange(1, 101, dtype=np.int64)).percentiles == {50: 50, 90: 90, 95: 95, 99: 99}


def test_tables_print_in_eighty_columns(prepared: tuple[RunConfig, Prepared]) -> None:
    config, data = prepared
    plan = made(config, data)
    console = Console(width=80, record=True, file=StringIO())
    console.print(plan_table(plan))
    found = stats(data.train, split="train", max_length=64)
    moved = tuple(replace(row, address=f"/a/{'long ' * 12}/{row.address}") for row in found.longest)
    console.print(stats_table(replace(found, longest=moved)))
    text = console.export_text()
    assert "/a/long" not in text and all(row.address in text for row in found.longest)
    for number in (plan.train.tokens, plan.train.targets, plan.train.epoch.packs):
        assert f"{number:,}" in text
    assert "too_long" in text
    assert "Mixture of the first epoch" in text and "straggler factor" in text
    assert "←" in text
    console = Console(width=60, record=True, file=StringIO())
    console.print(stats_table(found))
    text = console.export_text()
    assert all(source.name in text for source in found.sources) and "…" not in text


def test_a_plan_counts_in_singular_and_plural_and_says_what_counts_once(
    prepared: tuple[RunConfig, Prepared],
) -> None:
    plan = made(*prepared)
    one = replace(plan, epochs=1.0, max_steps=None, rows_per_micro_batch=1, micro_batches_per_step=plan.num_ranks)
    shown = printed_plan(one)
    assert "(1 epoch," in shown and "1 row × 1 micro-batch" in shown and "micro-batches " in shown
    many = replace(one, epochs=2.0, rows_per_micro_batch=2, micro_batches_per_step=3 * plan.num_ranks)
    assert "(2 epochs," in printed_plan(many) and "2 rows × 3 micro-batches" in printed_plan(many)
    pairs = replace(one, units=UnitKind.PAIRS)
    assert "counts once" not in printed_plan(pairs)
    assert "a prompt that both share counts once" in printed_plan(replace(pairs, shares_prompts=True))


def printed_plan(plan: RunPlan) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(plan_table(plan))
    return console.export_text()


@pytest.mark.parametrize(
    ("overflow", "words", "is_told"), [("drop", 200, True), ("drop", 20, False), ("split", 200, False)]
)
def test_a_plan_says_that_rows_which_are_cut_lose_long_documents(
    tmp_path: Path, overflow: str, words: int, is_told: bool
) -> None:
    rows = ["a b c", "red " * 20, "red " * words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "eval_split": 0, "overflow": overflow}
    config = config_in(tmp_path, data=data, train={"packing": "split"}).model_copy(
        update={"objective": ObjectiveConfig(name="pt")}
    )
    index = cut(config, prepare(config, Encoder.from_config(config)))
    schedule = plan_of_run(config, NumberedRows.of_index(index), num_ranks=1)
    plan = plan_run(config, index, None, total_steps=1, first_epoch=schedule.epoch(0))
    assert bool(loss_notes(schedule.order, plan)) == is_told
