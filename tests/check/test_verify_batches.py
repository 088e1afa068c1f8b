"""Batches against the samples of their rows: right ones pass in every layout, and each spoilt one is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import luthier
from luthier.check.verify import Check, VerifyReport
from luthier.check.verify.batches import BatchJudge, BatchRules
from luthier.check.verify.run import Side, VerifyOptions, verify
from luthier.collation.collator import collate_packs
from luthier.config.schema import RunConfig
from luthier.library import Remark
from luthier.loader import reader
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.loader.reader import BatchReader, PlannedMicroBatch
from luthier.packing import UnitKind
from luthier.preparation import PreparedSet, segments
from luthier.records import Address, Batch, Branch, Pack, Sample, Segment, Targets

NUM_ROWS = 24
Spoil = Callable[[Batch], Batch]


def said(number: int) -> str:
    return f"It is {number}{' and so on' * (number % 5)}."


def chat(number: int) -> dict[str, Any]:
    """A talk of two answers, the second with a weight."""
    turns = [{"role": "user", "content": f"How much is {number}?"}, {"role": "assistant", "content": said(number)}]
    again = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes.", "weight": 0.5}]
    return {"messages": [*turns, *again]}


def pair(number: int) -> dict[str, Any]:
    answers = {side: [{"role": "assistant", "content": words}] for side, words in sides(number).items()}
    return {"prompt": [{"role": "user", "content": f"How much is {number}?"}], **answers}


def sides(number: int) -> dict[str, str]:
    return {"chosen": said(number), "rejected": f"Who knows {number}?"}


def verdict(number: int) -> dict[str, Any]:
    chosen, good = said(number), bool(number % 2)
    question, answer = {"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": chosen}
    return {"prompt": [question], "completion": [answer], "label": good}


def seen(number: int) -> dict[str, Any]:
    picture = ("wide.png", "tall.png", "square.png")[number % 3]
    turns = [{"role": "user", "content": f"<image>Who is {number}?"}, {"role": "assistant", "content": said(number)}]
    return {"messages": turns, "images": [picture]}


RUNS: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "packed": (chat, {}),
    "padded": (chat, {"train": {"packing": "none", "per_device_train_batch_size": 3}}),
    "window": (chat, {"train": {"packing": "window", "pad_to_multiple_of": 16}}),
    "freely cut": (chat, {"train": {"packing": "split"}, "data": {"max_length": 40, "overflow": "split"}}),
    "cut": (chat, {"data": {"max_length": 24, "overflow": "truncate"}}),
    "in windows": (chat, {"data": {"max_length": 24, "overflow": "split"}}),
    "trees": (pair, {"objective": "dpo"}),
    "pairs": (pair, {"objective": "dpo", "train": {"shared_prompts": False}}),
    "padded pairs": (pair, {"objective": "rm", "train": {"packing": "none", "per_device_train_batch_size": 2}}),
    "drawn answers": (verdict, {"objective": "kto"}),
    "padded drawn answers": (verdict, {"objective": "kto", "train": {"packing": "none"}}),
    "verdicts": (verdict, {"objective": {"name": "kto", "loss": "apo_zero_unpaired"}}),
    "pictures": (seen, {}),
    "padded pictures": (seen, {"train": {"packing": "none", "per_device_train_batch_size": 3}}),
}


@pytest.fixture
def config_of(tmp_path: Path, vl_folder: Path, media_folder: Path) -> Callable[..., RunConfig]:
    def made(kind: str, **more: Any) -> RunConfig:
        row, sections = RUNS[kind]
        path = (media_folder if row is seen else tmp_path) / "of_batches.jsonl"
        path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(NUM_ROWS)), encoding="utf-8")
        of_run = {"max_length": 160, **sections.get("data", {}), **more.pop("data", {})}
        data = {"train": str(path), "store": str(tmp_path / "store"), "workers": 0, **of_run}
        model = str(vl_folder) if row is seen else "preset:tiny-qwen3"
        output = {"dir": str(tmp_path / "out"), "overwrite": True}
        values = {**sections, "model": model, "data": data, "output": output, **more}
        return RunConfig.model_validate(values)

    return made


def judged(config: RunConfig, **options: Any) -> VerifyReport:
    return verify(
        config, VerifyOptions(**{"stored": True, "sample": 2, "num_decoded": 99, "num_batches": 99, **options})
    )


def batches_of(report: VerifyReport) -> tuple[int, int]:
    """Rows that were compared, and how many of them failed."""
    return next((one.rows_checked, one.rows_failed) for one in report.checks if one.check is Check.BATCHES)


@pytest.mark.parametrize("kind", RUNS)
def test_right_batches_pass_in_every_layout(kind: str, config_of: Callable[..., RunConfig]) -> None:
    report = judged(config_of(kind))
    assert report.ok, report.to_json()["checks"]["batches"]
    assert batches_of(report) == (NUM_ROWS, 0)


def test_batches_of_held_out_rows_are_compared(config_of: Callable[..., RunConfig]) -> None:
    config = config_of("packed")
    eval_too = config.model_copy(update={"data": config.data.model_copy(update={"eval": config.data.train})})
    assert batches_of(judged(eval_too, split=Side.EVAL)) == (NUM_ROWS, 0)


def test_no_batch_is_read_but_of_the_store_or_of_questions(config_of: Callable[..., RunConfig]) -> None:
    config = config_of("packed")
    assert batches_of(verify(config)) == (0, 0)
    assert batches_of(judged(config, num_batches=0)) == (0, 0), "an epoch is looked through, with nothing to say"
    questions = config_of("packed", objective="rl", rollout={"rewards": ["exact"]})
    assert batches_of(judged(questions)) == (0, 0)


# ------------------------------------------------------------------------------------------------- what is found


def told(batch: Batch, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    inputs = dict(batch.model_inputs)
    inputs[name] = change(inputs[name].clone())
    return replace(batch, model_inputs=inputs)


def learned(batch: Batch, **columns: torch.Tensor | None) -> Batch:
    return replace(batch, targets=replace(batch.targets, **columns))


def put(place: Any, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def without_last_target(batch: Batch) -> Batch:
    own = batch.targets
    weights = None if own.weights_K is None else own.weights_K[:-1]
    kept = Targets(
        positions_K=own.positions_K[:-1], ids_K=own.ids_K[:-1], segments_K=own.segments_K[:-1], weights_K=weights
    )
    return replace(batch, targets=kept, num_targets=batch.num_targets - 1)


def of_units(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    return replace(batch, units=tuple(change(unit) for unit in batch.units))


def as_counted_through(positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(positions.shape[-1]).expand_as(positions).clone()


FAULTS: dict[str, tuple[str, Spoil]] = {
    "labels that are not shifted": ("packed", lambda b: replace(b, labels_BT=b.labels_BT.roll(1, dims=1))),
    "padded labels that are not shifted": ("padded", lambda b: replace(b, labels_BT=b.labels_BT.roll(1, dims=1))),
    "a label that is lost": ("packed", lambda b: replace(b, labels_BT=b.labels_BT.fill_(-100))),
    "a label of padding": ("padded", lambda b: replace(b, labels_BT=put((slice(None), -1), 5)(b.labels_BT.clone()))),
    "targets one token late": ("packed", lambda b: learned(b, positions_K=b.targets.positions_K + 1)),
    "targets of trees one token late": ("trees", lambda b: learned(b, positions_K=b.targets.positions_K + 1)),
    "targets of other ids": ("pairs", lambda b: learned(b, ids_K=b.targets.ids_K + 1)),
    "drawn targets one token late": ("drawn answers", lambda b: learned(b, positions_K=b.targets.positions_K + 1)),
    "targets in another segment": ("pairs", lambda b: learned(b, segments_K=b.targets.segments_K ^ 1)),
    "a target that is lost": ("trees", without_last_target),
    "targets counted twice": ("packed", lambda b: replace(b, num_targets=2 * b.num_targets)),
    "weights that are lost": ("packed", lambda b: learned(replace(b, weights_BT=None), weights_K=None)),
    "weights of labels that are lost": ("padded", lambda b: replace(b, weights_BT=None)),
    "positions that go on": ("packed", lambda b: told(b, "position_ids", as_counted_through)),
    "positions of trees that go on": ("trees", lambda b: told(b, "position_ids", as_counted_through)),
    "positions one too high": ("padded", lambda b: told(b, "position_ids", lambda t: t + 1)),
    "positions of pictures that go on": ("pictures", lambda b: told(b, "position_ids", as_counted_through)),
    "text behind pictures one too far": (
        "padded pictures",
        lambda b: told(b, "position_ids", lambda t: torch.cat([t[..., :-4], t[..., -4:] + 1], dim=-1)),
    ),
    "padding as part of the last segment": ("window", lambda b: told(b, "position_ids", put((..., -1), 99))),
    "ids of padding": ("window", lambda b: told(b, "input_ids", put((..., -1), 7))),
    "another id": ("packed", lambda b: told(b, "input_ids", put((0, 3), 7))),
    "a mask that is too short": ("padded", lambda b: told(b, "attention_mask", put((..., 5), 0))),
    "a mask that shows padding": ("padded", lambda b: told(b, "attention_mask", put(..., 1))),
    "a mask in packed rows": (
        "packed",
        lambda b: replace(b, model_inputs={**b.model_inputs, "attention_mask": torch.ones_like(b.labels_BT)}),
    ),
    "chosen for rejected": ("pairs", lambda b: of_units(b, lambda u: replace(u, segments=u.segments[::-1]))),
    "chosen for rejected in trees": ("trees", lambda b: of_units(b, lambda u: replace(u, segments=u.segments[::-1]))),
    "pairs of different rows": (
        "padded pairs",
        lambda b: of_units(b, lambda u: replace(u, segments=tuple((n + 1) % b.num_segments for n in u.segments))),
    ),
    "a pair that is not compared": ("padded pairs", lambda b: replace(b, units=b.units[:-1])),
    "verdicts that change sides": ("verdicts", lambda b: of_units(b, lambda u: replace(u, verdict=1 - u.verdict))),
    "pictures in another order": ("pictures", lambda b: told(b, "pixel_values", lambda t: t.flip(0))),
    "grids in another order": ("padded pictures", lambda b: told(b, "image_grid_thw", lambda t: t.flip(-1))),
    "no labels": ("packed", lambda b: replace(b, labels_BT=b.labels_BT[:0, :0])),
    "positions on one axis": ("padded pictures", lambda b: told(b, "position_ids", lambda t: t[0])),
    "rows under another name": ("padded", lambda b: replace(b, addresses=b.addresses[::-1])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_spoilt_batch_is_found(
    fault: str, config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, spoil = FAULTS[fault]
    right = BatchReader.to_batch
    monkeypatch.setattr(BatchReader, "to_batch", lambda self, *rest: spoil(right(self, *rest)))
    report = judged(config_of(kind))
    assert not report.ok and batches_of(report)[1] > 0
    assert [one.check for one in report.checks if one.violations] == [Check.BATCHES]
    assert report.failed_rows[0].address.startswith(report.failed_rows[0].violations[0].address)


def test_training_says_that_its_first_batches_are_not_what_their_rows_say(
    config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"max_steps": 1, "learning_rate": 1e-4}
    model = {"name_or_path": "preset:tiny-qwen3", "random_init": True}
    config = config_of("packed", train=short, model=model)

    def remarks() -> list[str]:
        told: list[object] = []
        luthier.train(config, on_event=told.append)
        return [each.text for each in told if isinstance(each, Remark) and "first batches" in each.text]

    assert remarks() == []
    kind, spoil = FAULTS["targets one token late"]
    right = BatchReader.to_batch
    monkeypatch.setattr(BatchReader, "to_batch", lambda self, *rest: spoil(right(self, *rest)))
    (words,) = remarks()
    assert kind == "packed" and "of_batches.jsonl" in words and "luthier verify --stored" in words


@pytest.mark.parametrize("kind", ["packed", "freely cut", "trees", "drawn answers"])
@pytest.mark.parametrize("taken", [(0, 2), (0, 0, 1)], ids=["lost", "doubled"])
def test_a_micro_batch_that_is_lost_or_doubled_is_found(
    kind: str, taken: tuple[int, ...], config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StreamPlan.micro_batches

    def spoilt(self: StreamPlan, rank: int, **rest: Any) -> Iterator[PlannedMicroBatch]:
        planned = list(right(self, rank, **rest))
        yield from [*(planned[number] for number in taken), *planned[max(taken) + 1 :]]

    monkeypatch.setattr(StreamPlan, "micro_batches", spoilt)
    report = judged(config_of(kind))
    words = "never" if 1 not in taken else "2 times"
    found = next(one for one in report.checks if one.check is Check.BATCHES)
    assert (found.rows_failed > 0 and any(words in one.what for one in found.examples)) or kind == "freely cut"


def test_a_micro_batch_that_a_later_epoch_loses_is_found(
    config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StreamPlan.micro_batches

    def spoilt(self: StreamPlan, rank: int, **rest: Any) -> Iterator[PlannedMicroBatch]:
        planned = list(right(self, rank, **rest))
        yield from [*planned[:-2], planned[-1]]

    monkeypatch.setattr(StreamPlan, "micro_batches", spoilt)
    report = judged(config_of("packed", train={"num_train_epochs": 2}))
    found = next(one for one in report.checks if one.check is Check.BATCHES)
    assert found.rows_failed > 0 and all("epoch 2 takes its sequence 1 never" in one.what for one in found.examples)


@pytest.mark.parametrize("kind", ["packed", "pairs", "drawn answers"])
@pytest.mark.parametrize("change", ["a row is lost", "a row is there twice"])
def test_a_row_that_cutting_loses_or_doubles_is_found(
    kind: str, change: str, config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = segments.Leaves.of_rows

    def spoilt(prepared: PreparedSet) -> segments.Leaves:
        found = right(prepared)
        rows = {"a row is lost": found.row != 3, "a row is there twice": 1 + (found.row == 3)}[change]
        columns = {each.name: np.repeat(getattr(found, each.name), rows) for each in fields(found)}
        return segments.Leaves(**columns)

    monkeypatch.setattr(segments, "_check_rows", lambda *_: None)  # which sees that a pair is one
    monkeypatch.setattr(segments.Leaves, "of_rows", spoilt)
    report = judged(config_of(kind, data={"max_drop": 0.5}))
    found = next(one for one in report.checks if one.check is Check.BATCHES)
    assert found.rows_failed == 1 and "are left to train on" in found.examples[-1].what


def test_the_tokens_of_another_row_are_found(
    config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NumberedRows.places

    def spoilt(self: NumberedRows, segments: Any) -> Any:
        places = right(self, segments)
        places["sample"] = (places["sample"] + 1) % NUM_ROWS
        return places

    monkeypatch.setattr(NumberedRows, "places", spoilt)
    assert batches_of(judged(config_of("packed"))) == (NUM_ROWS, NUM_ROWS)


@pytest.mark.parametrize("kind", ["cut", "in windows"])
def test_an_answer_that_is_cut_does_not_teach_its_last_token(
    kind: str, config_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reader.take_window
    monkeypatch.setattr(reader, "take_window", lambda run, window: right(run, replace(window, open_end=False)))
    assert batches_of(judged(config_of(kind)))[1] > 0


def test_a_row_that_is_longer_than_it_may_be_is_found(config_of: Callable[..., RunConfig]) -> None:
    address, ids = Address(file="rows.jsonl", row=1), np.arange(5, dtype=np.int32)
    sample = Sample(input_ids=ids, target=ids > 2, branches=(Branch(parent=-1, length=5),), address=address)
    pack = Pack(segments=(Segment(input_ids=ids, target=ids > 2, address=address),))
    batch = collate_packs([pack], packed=True, pad_token_id=0, varlen=True)
    for length, faults in ((5, 0), (4, 1)):
        rules = BatchRules(packed=True, pad_token_id=0, max_length=length, units=UnitKind.NONE, cut_freely=False)
        assert len(list(BatchJudge(rules, lambda _: [sample]).faults(batch))) == faults
    bounds = told(batch, "cu_seq_lens_k", put(1, 4))
    rules = BatchRules(packed=True, pad_token_id=0, max_length=5, units=UnitKind.NONE, cut_freely=False)
    (fault,) = BatchJudge(rules, lambda _: [sample]).faults(bounds)
    assert "boundaries" in fault.what
