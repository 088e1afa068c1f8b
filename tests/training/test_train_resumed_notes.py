"""What a resumed run says of its model is true of what trains then: a checkpoint's weights, not the first ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import luthier
from luthier.training.report.events import Note


class Gone(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("the machine is gone")


def told_of_the_model(run: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a run says that begins and fails, and what it says when it goes on from step 2."""
    first, again = list[str](), list[str]()

    def hears(said: list[str]) -> Any:
        return lambda event: said.append(event.text) if isinstance(event, Note) else None

    with pytest.raises(RuntimeError, match="gone"):
        luthier.train(run, callbacks=[Gone()], on_event=hears(first))
    assert luthier.train(run, on_event=hears(again)).resumed_from == "checkpoint-2"
    return [line for line in first if line.startswith("model:")], [line for line in again if line.startswith("model:")]


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "model": {"name_or_path": "preset:tiny-qwen3", "add_tokens": ["<|one|>", "<|two|>"]},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "store": str(tmp_path / "store")},
        "train": {"max_steps": 4, "warmup_steps": 0},
        "output": {"dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 2},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
    }


def test_weights_that_a_checkpoint_replaces_are_told_as_those_of_the_beginning(run: dict[str, Any]) -> None:
    first, again = told_of_the_model(run)
    assert "model: random weights, seed 42" in first
    assert "model: random weights, seed 42" not in again
    assert "model: when the run began, random weights, seed 42; now the weights of checkpoint-2" in again
    others = [line for line in first if "random" not in line]
    assert others and set(others) <= set(again), "what is true at every start is told as it was"


def test_an_adapter_goes_on_over_a_base_of_random_weights(run: dict[str, Any]) -> None:
    run["adapter"] = {"type": "lora", "r": 2, "target_modules": "all-linear"}
    del run["model"]["add_tokens"]
    first, again = told_of_the_model(run)
    assert "model: random weights, seed 42" in first
    assert "model: random weights, seed 42; the adapter's are those of checkpoint-2" in again


def test_a_new_reward_head_and_new_rows_of_an_embedding_are_told_as_those_of_the_beginning(
    run: dict[str, Any], tmp_path: Path
) -> None:
    plain = {**run, "model": "preset:tiny-qwen3", "output": {"dir": str(tmp_path / "plain")}}
    trained = luthier.train(plain, overrides=["train.max_steps=1"])
    rows = [{"prompt": f"{n}?", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run["model"]["name_or_path"] = str(trained.path / "model")
    run["model"]["add_tokens"] = [f"<|new {n}|>" for n in range(3000)]
    run["objective"] = {"name": "rm"}
    first, again = told_of_the_model(run)
    for begins in ("a new reward head, seed 42", "embedding resized from"):
        (before,) = (line for line in first if begins in line)
        (after,) = (line for line in again if begins in line)
        assert after == f"model: when the run began, {before.removeprefix('model: ')}; now the weights of checkpoint-2"


def test_other_held_out_rows_than_before_are_told(run: dict[str, Any], tmp_path: Path) -> None:
    held_out, told = tmp_path / "held_out.jsonl", list[list[str]]()
    run["data"]["eval"] = str(held_out)
    rows = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").replace("?", "!").splitlines(keepends=True)
    for some, steps in ((rows, 2), (rows, 4), (rows[:3], 6)):
        held_out.write_text("".join(some), encoding="utf-8")
        told.append([])
        hears = told[-1].append
        run["train"]["max_steps"] = steps
        luthier.train(run, on_event=lambda event, hears=hears: hears(event.text) if isinstance(event, Note) else None)
    others = [[line for line in lines if line.startswith("the held-out rows are not those of")] for lines in told]
    assert [len(lines) for lines in others] == [0, 0, 1]
