"""``quarantine.jsonl`` lists every row that a run loses, those that it loses after encoding among them."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import luthier
from luthier.__main__ import app
from luthier.config.choices import Overflow
from luthier.errors import BudgetError, RowDropped
from luthier.preparation import PreparedSet, Quarantine
from luthier.preparation.segments import SegmentIndex
from luthier.presets import dataset_rows

ROWS = 60
LONG, BROKEN = (5, 17, 31, 32, 48), (9, 40)  # counted from 1
REPEATED = 20


@pytest.fixture
def described(tmp_path: Path) -> dict[str, Any]:
    lines = [json.dumps(row) for row, _ in zip(dataset_rows("skills", "train"), range(ROWS), strict=False)]
    for line in LONG:
        turns = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": f"Yes {line}."}]
        lines[line - 1] = json.dumps({"messages": turns})
    for line in BROKEN:
        lines[line - 1] = "{"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "model": {"name_or_path": "preset:tiny-qwen3"},
        "data": {
            "train": str(rows), "max_length": 256, "overflow": "drop", "max_drop": 0.5,
            "store": str(tmp_path / "store"), "workers": 0,
        },
        "train": {"num_train_epochs": 1, "packing": "window", "gradient_accumulation_steps": 2},
        "output": {"dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 2},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "threads": 1},
    }  # fmt: skip


def listed(folder: Path, name: str = "quarantine.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def numbers(lines: list[dict[str, Any]], reason: str) -> list[int]:
    return sorted(int(line["address"].rpartition(":")[2]) for line in lines if line["reason"] == reason)


def reasons(ledger: dict[str, Any]) -> Counter[str]:
    return Counter(ledger["dropped"]) + Counter(ledger["quarantined"])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_run_lists_each_row_that_it_lost_once_with_its_place_and_a_way_out(
    described: dict[str, Any], tmp_path: Path, when: str
) -> None:
    described["data"]["prepare"] = when
    result = luthier.train(described)
    out = tmp_path / "out"
    lines = listed(out)
    assert numbers(lines, "too_long") == list(LONG) and numbers(lines, "truncated_json") == list(BROKEN)
    assert Counter(line["reason"] for line in lines) == reasons(result.ledger)
    for line in lines:
        assert line["address"].startswith("rows.jsonl:") or line["address"].startswith(str(tmp_path))
        assert line["hint"] and line["split"] == "train"
        assert (line["fate"] == "dropped") == (line["reason"] == "too_long")
    assert {line["hint"] for line in lines if line["reason"] == "too_long"} == {
        "raise data.max_length, or choose another data.overflow"
    }
    cold = (out / "quarantine.jsonl").read_bytes()
    luthier.train(described)  # finished: nothing is trained, and nothing is listed twice
    assert (out / "quarantine.jsonl").read_bytes() == cold
    shutil.rmtree(out)
    luthier.train(described)  # from a store that has it all
    assert (out / "quarantine.jsonl").read_bytes() == cold
    luthier.plan(described)
    assert (out / "quarantine.jsonl").read_bytes() == cold
    assert sorted(map(str, listed(out, "quarantine.preview.jsonl"))) == sorted(map(str, lines))
    assert not [path for path in out.iterdir() if path.name.startswith(".quarantine")]


class FailingAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("the machine is gone")


def test_a_run_that_fails_leaves_no_less_than_was_listed_and_goes_on_to_list_all(
    described: dict[str, Any], tmp_path: Path
) -> None:
    described["data"]["prepare"] = "meanwhile"
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="gone"):
        luthier.train(described, callbacks=[FailingAt(3)])
    assert listed(out)
    (out / "quarantine.jsonl").write_text("of before\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="gone"):
        luthier.train(described, callbacks=[FailingAt(3)])  # goes on from step 2
    resumed = luthier.train(described)
    assert resumed.resumed_from == "checkpoint-2"
    lines = listed(out)
    assert numbers(lines, "too_long") == list(LONG) and numbers(lines, "truncated_json") == list(BROKEN)
    assert Counter(line["reason"] for line in lines) == reasons(resumed.ledger)
    assert not [path for path in out.iterdir() if path.name.startswith(".quarantine")]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_rows_of_both_sides_and_those_that_are_evaluated_on_are_listed(
    described: dict[str, Any], tmp_path: Path, when: str
) -> None:
    rows = Path(described["data"]["train"])
    lines = rows.read_text(encoding="utf-8").splitlines()
    rows.write_text("\n".join([*lines, *lines[:REPEATED]]) + "\n", encoding="utf-8")
    described["data"] |= {"prepare": when, "eval_split": 12}
    result = luthier.train(described)
    found = listed(tmp_path / "out")
    same = numbers(found, "same_as_held_out")
    assert same and len(same) == (result.ledger["dropped"] | result.ledger["notes"]).get("same_as_held_out")
    assert set(numbers(found, "too_long")) <= {*LONG, *(line + ROWS for line in LONG)}
    assert len({line["address"] for line in found}) == len(found), "none twice"
    assert {line["split"] for line in found if line["reason"] == "too_long"} <= {"train", "eval"}
    trained = result.ledger["trained"]
    held_out = result.eval_data.segments if result.eval_data else 0
    assert trained + held_out + len(found) == ROWS + REPEATED


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_figures_of_rows_that_are_told_add_up(
    described: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    rows = Path(described["data"]["train"])
    lines = rows.read_text(encoding="utf-8").splitlines()
    rows.write_text("\n".join([*lines, *lines[:REPEATED]]) + "\n", encoding="utf-8")
    described["data"] |= {"prepare": when, "eval_split": 12}
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(described), encoding="utf-8")
    app(["train", str(run)], standalone_mode=False)
    told = " ".join(capsys.readouterr().out.split())
    (read, trained, dropped, quarantined, held_out), *_ = re.findall(
        r"([\d,]+) read = ([\d,]+) trained \+ (\d+) dropped \+ (\d+) quarantined, and (\d+) more are held out", told
    )
    assert int(read) == int(trained) + int(dropped) + int(quarantined) and int(held_out) == 12
    if when == "before":
        (whole, train, held_out, same, cut), *_ = re.findall(
            r"Prepared (\d+) rows in \S+ s: (\d+) to train on, (\d+) to evaluate on, (\d+) left out as the same are "
            r"evaluated on, (\d+) lost to data.max_length", told
        )  # fmt: skip
        assert int(whole) == int(train) + int(held_out) + int(same) + int(cut) == ROWS + REPEATED - 3
        assert train == trained
        assert f", and 12 more are held out; {same} more are left out, as the same row is held out" in told


def test_where_all_rows_are_trained_on_one_figure_is_told(
    described: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described["data"]["train"] = [{"path": described["data"]["train"], "slice": ":4"}]
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(described), encoding="utf-8")
    app(["prepare", str(run)], standalone_mode=False)
    told = capsys.readouterr().out
    assert re.search(r"Prepared 4 rows in \S+ s   4 encoded", told) and "held out" not in told


@pytest.mark.parametrize(("overflow", "lost"), [("truncate", 0), ("split", 0), ("drop", len(LONG))])
def test_rows_that_are_cut_are_not_lost(described: dict[str, Any], tmp_path: Path, overflow: str, lost: int) -> None:
    rows = Path(described["data"]["train"])
    lines = rows.read_text(encoding="utf-8").splitlines()
    for line in LONG:  # the beginning is learned, so something of it stays
        turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": f"{line} " * 400}]
        lines[line - 1] = json.dumps({"messages": turns})
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    described["data"]["overflow"] = overflow
    prepared = luthier.prepare(described)
    assert prepared.quarantine == tmp_path / "out" / "quarantine.jsonl"
    found = listed(tmp_path / "out")
    assert len(numbers(found, "too_long")) == lost and len(found) == lost + len(BROKEN)


def test_what_is_cut_away_is_listed_also_where_all_could_be_encoded(described: dict[str, Any], tmp_path: Path) -> None:
    described["data"]["train"] = [{"path": described["data"]["train"], "slice": ":8"}]
    prepared = luthier.prepare(described)
    assert prepared.quarantine is not None and numbers(listed(tmp_path / "out"), "too_long") == [5]
    described["data"]["max_length"] = 4096
    assert luthier.prepare(described).quarantine is None, "a list of an earlier preparation goes away"
    assert not (tmp_path / "out" / "quarantine.jsonl").exists()


def test_a_loader_lists_what_it_cuts_away(described: dict[str, Any], tmp_path: Path) -> None:
    loader = luthier.Loader(described)
    assert Counter(line["reason"] for line in listed(tmp_path / "out")) == loader.ledger.dropped + Counter(
        loader.ledger.quarantined
    )


def test_verify_leaves_the_list_as_it_is(described: dict[str, Any], tmp_path: Path) -> None:
    luthier.prepare(described)
    before = (tmp_path / "out" / "quarantine.jsonl").read_bytes()
    luthier.verify(described, luthier.VerifyOptions(stored=True))
    assert (tmp_path / "out" / "quarantine.jsonl").read_bytes() == before


def test_a_budget_that_is_spent_leaves_the_list_of_what_was_found(described: dict[str, Any], tmp_path: Path) -> None:
    described["data"] |= {"prepare": "meanwhile", "max_drop": 1}
    with pytest.raises(BudgetError):
        luthier.train(described)
    assert len(numbers(listed(tmp_path / "out"), "too_long")) >= 1


def test_a_list_that_is_given_up_leaves_the_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "quarantine.jsonl").write_text("of before\n", encoding="utf-8")
    listing = Quarantine(tmp_path / "quarantine.jsonl")
    listing.add(RowDropped("too_long", "of one row"), split="train")
    listing.discard()
    listing.add(RowDropped("too_long", "of another row"), split="train")
    listing.close()
    assert [path.name for path in tmp_path.iterdir()] == ["quarantine.jsonl"]
    assert (tmp_path / "quarantine.jsonl").read_text(encoding="utf-8") == "of before\n"


def test_very_many_lost_rows_are_listed_one_at_a_time(described: dict[str, Any], tmp_path: Path) -> None:
    one = luthier.prepare(described).train
    row = next(number for number in range(len(one)) if one.row_numbers[number] == LONG[0])
    many = 30_000
    rows: PreparedSet = one.take(np.full(many, row), ledger=type(one.ledger)(read=many, prepared=many))
    index = SegmentIndex(rows, max_length=256, overflow=Overflow.DROP)
    assert len(index.lost_rows) == many
    listing = Quarantine(tmp_path / "many.jsonl")
    tracemalloc.start()
    listing.add_all(index.losses(), split="train")
    listing.close()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "many.jsonl").read_bytes().count(b"\n") == many
    assert most < 100 * many, "a hundred bytes a row: numbers, and no errors or lines"
