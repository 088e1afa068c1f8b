"""The commands that look at data, on pairs and on feedback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from luthier.__main__ import app
from luthier.errors import BudgetError, UserError

runner = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"})
PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First, " + "a long story. " * 12},
    {"role": "assistant", "content": "I see."},
    {"role": "user", "content": "What now?"},
]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("compared")
    pairs = [{"prompt": PROMPT, "chosen": say(f"good {n}"), "rejected": say(f"bad {n}")} for n in range(8)]
    pairs[1]["margin"] = 0.5
    pairs += [{"prompt": "q", "chosen": "a", "rejected": "a"}, {"messages": [*PROMPT, *say("no pair")]}]
    pairs += [{"prompt": "q", "chosen": "x " * 200, "rejected": "y"}]
    feedback = [{"prompt": PROMPT, "completion": say(f"a {n}"), "label": n % 2 == 0} for n in range(8)]
    found = {}
    for name, rows in (("dpo", pairs), ("kto", feedback)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = folder / f"{name}.json"
        found[name].write_text(
            json.dumps(
                {
                    "model": "preset:tiny-qwen3",
                    "objective": name,
                    "data": {
                        "train": str(data), "max_length": 64, "overflow": "truncate", "max_drop": 3,
                        "store": str(folder / "store"),
                    },
                    "output": {"dir": str(folder / name)},
                    "tracking": {"progress": False},
                }
            )
        )  # fmt: skip
    return found


def run(*words: object) -> str:
    result = runner.invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_prepare_says_what_became_of_every_pair(files: dict[str, Path]) -> None:
    shown = run("prepare", files["dpo"])
    assert "11 rows read = 8 prepared + 1 dropped + 2 quarantined" in shown
    assert "dropped: too_long" in shown and "note: 8 prompt_truncated" in shown
    assert "1 quarantined: no_difference" in shown and "1 quarantined: missing_column" in shown


def test_an_objective_that_cannot_use_the_rows_says_which_one_can(files: dict[str, Path]) -> None:
    for name, objective, way_out in (
        ("dpo", "kto", "train it with objective dpo or rm"),
        ("kto", "sft", "objective kto"),
    ):
        result = runner.invoke(app, ["prepare", str(files[name]), f"objective={objective}"])
        assert isinstance(result.exception, BudgetError) and way_out in str(result.exception)


def test_plan_packs_pairs_and_draws_answers_for_feedback(files: dict[str, Path]) -> None:
    shown = run("plan", files["dpo"])
    assert "packed, 128 tokens each" in shown and "the two continuations of each row" in shown
    shown = run("plan", files["kto"])
    assert "another row's answer to that prompt" in shown and "rows 8 " in shown


def test_show_names_continuations_and_verdicts(files: dict[str, Path]) -> None:
    shown = run("show", files["dpo"], "--row", 1)
    assert "the chosen one of two answers to a prompt" in shown and "the rejected one" in shown
    assert "cut by data.max_length" in shown and "renders the history differently" not in shown
    assert "0 system" in shown and "3 user" in shown and "1 user" not in shown
    assert "margin" not in shown and shown_margin(files["dpo"]) == "answers to a prompt, margin 0.5"
    shown = run("show", files["kto"], "--batch", 1)
    assert "the answer to a prompt, desirable" in shown or "the answer to a prompt, undesirable" in shown
    assert "with another row's answer" in shown and "owners are not known" not in shown
    shown = run("show", files["dpo"], "--pack", 2, "train.packing=none")
    assert shown.count("the chosen one") == shown.count("the rejected one") > 0


def shown_margin(file: Path) -> str:
    """Of the row that has one."""
    found = re.search(r"answers to a prompt, margin [0-9.]+", run("show", file, "--row", 2))
    return "" if found is None else found[0]


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_verify_proves_every_row_and_stats_count_it(files: dict[str, Path], name: str) -> None:
    shown = run("verify", files[name], "--stored")
    assert "8 rows rendered" in shown or "9 rows rendered" in shown
    assert "✗" not in shown
    assert "segments that fit" in run("stats", files[name])


def test_what_cannot_be_compared_is_refused_with_the_way_out(files: dict[str, Path]) -> None:
    for setting, hint in (("data.overflow=split", "truncate"), ("train.packing=split", "best_fit")):
        result = runner.invoke(app, ["plan", str(files["dpo"]), setting])
        assert isinstance(result.exception, UserError) and hint in str(result.exception), result.output
