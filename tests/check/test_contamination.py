"""Held-out rows whose content stands in the training data are named, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import luthier
from luthier.__main__ import run as run_command
from luthier.check.plan import stats as stats_module

LONG = "a recipe for bread: take one pound of flour, half a pint of water and some salt, knead it well and let it rest"


def row(asked: str, answered: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


TRAIN = [
    row("What is the capital of France?", "Paris."),
    row("Name a river in Peru", "The Amazon."),
    row("Write down " + LONG, "for an hour, then bake it until it is brown"),
    row("Which way is up, my friend?", "North"),
    row("東京はどこの国の首都ですか", "日本です"),
    *(row(f"Count to {n}, please", f"{n}") for n in range(40)),
]
PLANTED = {
    "exact": (row("What is the capital of France?", "Paris."), 1),
    "normalised": (row("name a RIVER, in peru!", "the amazon"), 2),
    "alike": (row("Please write down " + LONG, "for an hour, then bake it until it is brown and hot"), 3),
    "question": (row("Which way is up, my friend?", "South"), 4),
}
CLEAN = [
    row("What is the capital of Spain?", "Madrid."),
    row(
        "Write down a recipe for soup: take one onion, half a pint of water and some salt, cook it and let it rest",
        "ok",
    ),
    row("大阪はどこの国の町ですか", "日本です"),
]


def found_in(tmp_path: Path, held_out: list[dict[str, Any]], **more: Any) -> Any:
    for name, rows in (("train", TRAIN), ("eval", held_out)):
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
        "store": str(tmp_path / "store"),
    }
    run = {"model": "preset:tiny-qwen3", "data": data, "output": {"dir": str(tmp_path / "run")}, **more}
    return luthier.stats(run).contamination


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_row_is_found_beside_its_training_row(tmp_path: Path, kind: str) -> None:
    planted, number = PLANTED[kind]
    found = found_in(tmp_path, [*CLEAN, planted])
    assert found.counts == {kind: 1} and found.rows == 4 and found.train_rows == len(TRAIN)
    (one,) = found.found
    assert (one.row.rpartition(":")[2], one.train_row.rpartition(":")[2], one.kind) == ("4", str(number), kind)
    assert one.share == 1 or (kind == "alike" and 0.8 <= one.share < 1)


def test_rows_that_share_less_are_not_named(tmp_path: Path) -> None:
    found = found_in(tmp_path, CLEAN)
    assert found.counts == {} and found.found == () and "none of 3" in found.sentence


def test_what_many_training_rows_share_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system prompt of many words is in all rows of both sides; a bound that lets it count finds them all."""
    system = " ".join(f"word{n}" for n in range(40))
    template = {"default_system": system}
    assert found_in(tmp_path, CLEAN, template=template).counts == {}
    monkeypatch.setattr(stats_module, "MOST_ROWS", 10_000)
    assert found_in(tmp_path, CLEAN, template=template).counts["alike"] >= 1


def test_how_many_training_rows_were_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "MOST_TOKENS", 60)
    found = found_in(tmp_path, [PLANTED["exact"][0]])
    assert found.train_rows < found.of_train_rows == len(TRAIN) and str(found.train_rows) in found.sentence


def test_the_command_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found_in(tmp_path, [PLANTED["exact"][0]])
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")} | {"store": str(tmp_path / "store")}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": "preset:tiny-qwen3", "data": data, "output": {"dir": str(tmp_path / "run")}}))
    assert run_command(["stats", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["contamination"]["counts"] == {"exact": 1}


def test_a_question_at_the_end_of_a_row_is_found_where_training_answers_it(tmp_path: Path) -> None:
    """And what stands in training stays found where a row that is asked ends with a question."""
    talk = [*row("Name a red thing", "a mat")["messages"], *row("and a green one", "a frog")["messages"]]
    other = [*row("Who sat down?", "a cat")["messages"], {"role": "user", "content": "and where?"}]
    files = {"train": [*TRAIN, {"messages": talk}, {"messages": other}]}
    files["asked"] = [
        {"messages": messages}
        for messages in (
            talk,
            other,
            talk[:3],
            talk[:1],
            [{**talk[0], "content": "name a RED thing!"}],
            [{**talk[0], "content": "Name a red"}],
            [*row("Name a blue thing", "a mat")["messages"], talk[2]],
        )
    ]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    data = {"train": str(tmp_path / "train.jsonl"), "store": str(tmp_path / "store")}
    run = {
        "model": {"name_or_path": "preset:tiny-qwen3", "random_init": True},
        "data": data,
        "train": {"enabled": False},
        "generate": {"max_new_tokens": 1},
        "output": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    luthier.prepare({**run, "train": {}})
    options = luthier.PredictOptions(data=tmp_path / "asked.jsonl", out=tmp_path / "out")
    found = luthier.predict(tmp_path / "run.yaml", options).metrics["contamination"]
    kinds = {one["row"].rpartition(":")[2]: one["kind"] for one in found["found"]}
    assert kinds.keys() == {"1", "2", "3", "4", "5"} and kinds["1"] == kinds["2"] == "exact", kinds
