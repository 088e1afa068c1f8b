"""Losses of each data set, and what was trained on of each: they add up to the whole, and are what others compute."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_data, make_plan, make_segments, make_table
from transformers import AutoModelForCausalLM

from luthier.collation import CollateSettings
from luthier.config.choices import Packing
from luthier.loader.reader import BatchReader, SegmentsInMemory
from luthier.objectives import Measure
from luthier.objectives.loss_sums import token_loss_sum
from luthier.packing import PlanSettings
from luthier.records import Batch, Segment
from luthier.training.data import distinct_names
from luthier.training.losses import ACCURACY, LossSums, MicroLoss, by_source, tokens
from luthier.training.report import EvalRecord, RunResult, StepRecord
from luthier.training.report.events import Event, StepDone
from luthier.training.streams import TrainStream

Train = Callable[..., RunResult]
NAMES = ("source 1", "source 2", "source 3")
THREE = make_data(make_segments(17), make_segments(7, seed=8), weights=(1.0, 1.0, 1.0))


def _mean(record: StepRecord | EvalRecord) -> float:
    """Of the data sets' losses, weighted by their targets."""
    targets = record.targets_by_source
    return sum(record.loss_by_source[name] * targets[name] for name in targets) / sum(targets.values())


# ------------------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize(
    ("packing", "rows", "accumulation", "logging", "smoothing"),
    [("none", 3, 2, 1, 0.0), ("none", 1, 3, 2, 0.1), ("best_fit", 2, 2, 3, 0.0), ("window", 1, 2, 1, 0.1)],
)
def test_weighted_by_targets_the_losses_of_the_data_sets_are_the_loss(
    train: Train, packing: str, rows: int, accumulation: int, logging: int, smoothing: float
) -> None:
    result = train(
        THREE, train__packing=packing, train__per_device_train_batch_size=rows,
        train__gradient_accumulation_steps=accumulation, train__max_steps=7, tracking__logging_steps=logging,
        objective__label_smoothing=smoothing, eval__strategy="epoch",
    )  # fmt: skip
    for step in result.steps:
        assert _mean(step) == pytest.approx(step.loss, rel=1e-6)
        assert sum(step.targets_by_source.values()) == step.target_tokens
    for one in result.evals:
        assert _mean(one) == pytest.approx(one.loss, rel=1e-6)
        assert sum(one.targets_by_source.values()) == one.num_targets
        assert set(one.loss_by_source) == set(NAMES)
    assert set().union(*(step.loss_by_source for step in result.steps)) == set(NAMES)


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_the_loss_of_a_data_set_is_cross_entropy_per_target_of_its_segments(
    train: Train, tmp_path: Path, packing: str
) -> None:
    result = train(
        THREE, train__per_device_train_batch_size=17, train__max_steps=1, train__learning_rate=1e-30,
        train__packing=packing,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    sums, counts = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0)
    for segment, source in zip(THREE.train, THREE.rows.whole().source_ids, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(segment.input_ids.astype(np.int64))
            scores = torch.log_softmax(model(ids[None]).logits[0].double(), dim=-1)
        for at in np.flatnonzero(segment.target):
            sums[NAMES[source]] -= float(scores[at - 1, ids[at]])
            counts[NAMES[source]] += 1
    assert result.steps[0].targets_by_source == counts
    assert result.steps[0].loss_by_source == pytest.approx({n: sums[n] / counts[n] for n in NAMES}, rel=1e-5)
    assert len(set(sums.values())) == 3, "three data sets alike would prove nothing"


def test_weights_of_targets_scale_the_losses_of_their_data_set_alone(train: Train) -> None:
    def doubled(segment: Segment, number: int) -> Segment:
        weight = np.full(len(segment), 2.0 if number * 3 // len(THREE.train) == 1 else 1.0, np.float32)
        return Segment(input_ids=segment.input_ids, target=segment.target, weight=weight, address=segment.address)

    weighted = make_data([doubled(s, n) for n, s in enumerate(THREE.train)], weights=(1.0, 1.0, 1.0))
    how = {"train__per_device_train_batch_size": 17, "train__max_steps": 1}
    plain, found = train(THREE, folder="a", **how).steps[0], train(weighted, folder="b", **how).steps[0]
    expected = {name: loss * (2 if name == NAMES[1] else 1) for name, loss in plain.loss_by_source.items()}
    assert found.loss_by_source == pytest.approx(expected, rel=1e-5)
    assert found.targets_by_source == plain.targets_by_source
    assert _mean(found) == pytest.approx(found.loss, rel=1e-6)


def test_an_interval_counts_its_targets_and_not_its_steps(train: Train) -> None:
    each = train(THREE, folder="a", train__max_steps=6)
    three = train(THREE, folder="b", train__max_steps=6, tracking__logging_steps=3)
    for number, found in enumerate(three.steps):
        steps = each.steps[3 * number : 3 * number + 3]
        targets = [step.target_tokens for step in steps]
        mean = sum(s.loss * n for s, n in zip(steps, targets, strict=True)) / sum(targets)
        assert found.loss == pytest.approx(mean, rel=1e-6)
        assert len(set(targets)) > 1 and abs(mean - np.mean([s.loss for s in steps])) > 1e-5  # else they are the same


def test_one_data_set_is_not_told_apart(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[torch.Tensor | None] = []
    real = tokens.hidden_loss_sum

    def listening(*arguments: Any, **options: Any) -> Any:
        told.append(options["sources_K"])
        return real(*arguments, **options)

    monkeypatch.setattr(tokens, "hidden_loss_sum", listening)
    one = make_data(make_segments(17), make_segments(7, seed=8))
    result = train(one, folder="one", train__max_steps=2, eval__strategy="epoch")
    assert told and all(sources_K is None for sources_K in told)
    assert all(not r.loss_by_source for r in (*result.steps, *result.evals))
    assert "by_source" not in (tmp_path / "one" / "log.jsonl").read_text()
    assert [source.name for source in result.mixture] == ["source 1"]
    told.clear()
    several = train(THREE, folder="three", train__max_steps=2, eval__strategy="epoch")
    assert told and all(sources_K is not None for sources_K in told)  # control
    # nor does telling apart change anything
    assert [s.loss for s in several.steps] == [s.loss for s in result.steps]
    assert [s.grad_norm for s in several.steps] == [s.grad_norm for s in result.steps]
    assert [e.loss for e in several.evals] == [e.loss for e in result.evals]


def test_trackers_and_the_log_get_losses_by_name(train: Train, tmp_path: Path) -> None:
    train(THREE, train__max_steps=2, eval__strategy="epoch", output__save_strategy="epoch")
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    evals = [entry for entry in state["log_history"] if "eval_loss" in entry]
    logged = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == len(logged) == 2 and evals
    for entry, line in zip(steps, logged, strict=True):
        assert by_source(entry, "loss") == line["loss_by_source"] != {}
        assert by_source(entry, "targets") == line["targets_by_source"]
    assert by_source(evals[0], "eval_loss") == next(line["loss_by_source"] for line in lines if line["kind"] == "eval")
    assert set(by_source(evals[0], "eval_num_targets")) == set(NAMES)


def _micro_loss(by_source: torch.Tensor | None) -> MicroLoss:
    measures = {ACCURACY: Measure(total=torch.zeros(()), count=torch.tensor(2.0))}
    return MicroLoss(loss_sum=torch.tensor(2 * math.log(8)), num_units=2, measures=measures, by_source=by_source)


def test_a_data_set_without_targets_in_an_interval_has_no_loss() -> None:
    sums = LossSums(("a", "b"), (ACCURACY,), torch.device("cpu"))
    logits, labels = torch.zeros(4, 8), torch.tensor([1, 2, -100, -100])
    found_2S = token_loss_sum(logits, labels, sources_N=torch.tensor([0, 0, 1, 1]), num_sources=2).by_source
    sums.add(_micro_loss(found_2S))
    found = sums.drain(lambda tensor: tensor)
    assert found.loss_by_source == {"a": pytest.approx(math.log(8))} and found.targets_by_source == {"a": 2}
    assert found.loss == pytest.approx(math.log(8)) and found.measures == {ACCURACY: 0.0}
    drained = sums.drain(lambda tensor: tensor)
    assert drained.num_units == 0 and drained.measures == {} and drained.loss_by_source == {}


def test_a_loss_that_does_not_tell_data_sets_apart_is_refused() -> None:
    sums = LossSums(("a", "b"), (ACCURACY,), torch.device("cpu"))
    with pytest.raises(AssertionError, match="2 sources"):
        sums.add(_micro_loss(None))


def test_names_are_distinct() -> None:
    assert distinct_names(["a", "b", "a", "a"], 4) == ("a", "b", "a (2)", "a (3)")
    assert distinct_names(["a", "a", "a (2)"], 3) == ("a", "a (3)", "a (2)")
    assert distinct_names((), 2) == ("source 1", "source 2")


# ----------------------------------------------------------------------------------------------------------- mixture


def _all_targets(segments: list[Segment]) -> list[Segment]:
    return [Segment(input_ids=s.input_ids, target=np.ones(len(s), np.bool_), address=s.address) for s in segments]


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.5)])
def test_after_each_step_the_plan_counts_what_the_batches_held(packing: Packing, weights: tuple[float, ...]) -> None:
    segments = _all_targets(make_segments(23))
    settings = PlanSettings(packing=packing, capacity=32, micro_batches_per_step=3, seed=4)
    schedule = make_plan(make_table(segments, weights), settings, num_epochs=2.5)
    how = CollateSettings(packed=packing is not Packing.NONE, pad_token_id=0)
    reader = BatchReader(SegmentsInMemory(segments), how)
    batches = iter(TrainStream(schedule=schedule, reader=reader, rank=0, num_workers=0, first_step=0))
    counted = np.zeros((2, 3), dtype=np.int64)  # segments, tokens, targets
    for step in range(schedule.total_steps):
        for batch in itertools.islice(batches, schedule.turns(step)):
            counted += _counts(batch)
        assert schedule.source_counts(step + 1)[:, 1:].tolist() == counted.tolist()
    assert schedule.source_counts(0).tolist() == [[0] * 4] * 2


def _counts(batch: Batch) -> np.ndarray:
    """int64[2, 3]: segments, tokens, targets of two data sets. Tokens lie between the begins of segments, and padding,
    which has id 0 as no segment has, is at the end of a row."""
    ids_BT = np.asarray(batch.model_inputs["input_ids"])
    sources_S = np.array(batch.sources, dtype=np.int64)
    tokens_S = []
    for starts, ids in zip(batch.segment_starts, ids_BT, strict=True):
        tokens_S += np.diff([*starts, int((ids != 0).sum())]).tolist() if starts else []
    of_targets = sources_S[batch.targets.segments_K.numpy()] if len(sources_S) else sources_S
    return np.stack(
        [
            np.bincount(sources_S, minlength=2),
            np.bincount(sources_S, weights=np.array(tokens_S), minlength=2).astype(np.int64),
            np.bincount(of_targets, minlength=2),
        ],
        axis=1,
    )


def test_the_result_says_what_was_trained_on_and_a_resumed_one_says_the_same(train: Train, tmp_path: Path) -> None:
    data = make_data(make_segments(16), weights=(1.0, 2.5))
    how = {
        "train__max_steps": None, "train__num_train_epochs": 2, "train__gradient_accumulation_steps": 2,
        "output__save_strategy": "steps", "output__save_steps": 3,
    }  # fmt: skip
    whole = train(data, folder="whole", **how)
    one, two = whole.mixture
    assert (one.name, one.rows, one.segments) == ("source 1", 16, 16)
    assert (two.name, two.rows, two.segments) == ("source 2", 40, 40)  # eight rows, two and a half times, twice
    assert one.share_of_tokens + two.share_of_tokens == pytest.approx(1)
    assert one.share_of_tokens == one.tokens / sum(step.tokens for step in whole.steps)
    for source in whole.mixture:
        logged = sum(step.targets_by_source.get(source.name, 0) for step in whole.steps)
        assert source.targets == logged
    assert RunResult.load(whole.output_dir).mixture == whole.mixture

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 8:
            raise Stop

    with pytest.raises(Stop):
        train(data, folder="halted", on_event=stop, **how)
    resumed = train(data, folder="halted", **how)
    assert resumed.resumed_from == "checkpoint-6" and resumed.mixture == whole.mixture
    assert [s.loss_by_source for s in resumed.steps] == [s.loss_by_source for s in whole.steps]
    few = train(data, folder="few", **{**how, "train__max_steps": 5})
    assert sum(source.tokens for source in few.mixture) == sum(step.tokens for step in few.steps)
    assert few.mixture != whole.mixture
