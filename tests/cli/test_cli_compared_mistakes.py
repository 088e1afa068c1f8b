"""What the commands say of pairs and feedback that cannot be trained as the run wants: why, where, and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from luthier.__main__ import app
from luthier.errors import UserError

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def write_run(folder: Path, rows: list[dict[str, Any]], name: str, **data: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = data.pop("eval", None)
    if held_out is not None:
        (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
        data["eval"] = str(folder / "held_out.jsonl")
    path = folder / "run.json"
    run = {
        "model": "preset:tiny-qwen3",
        "objective": name,
        "data": {"train": str(folder / "rows.jsonl"), "max_drop": 100, "store": str(folder / "store"), **data},
        "output": {"dir": str(folder / "out")},
    }
    path.write_text(json.dumps(run))
    return path


def fault_of(command: str, path: Path) -> UserError:
    result = runner.invoke(app, [command, str(path)])
    assert isinstance(result.exception, UserError), result.output
    return result.exception


def judged(number: int, label: Any = True) -> dict[str, Any]:
    return {"prompt": f"q {number}", "completion": f"a {number}", "label": label}


def test_where_no_row_is_left_the_reason_and_an_example_are_told(tmp_path: Path) -> None:
    answers = [{"prompt": f"q {n}", "completion": f"a {n}"} for n in range(3)]
    fault = fault_of("stats", write_run(tmp_path, answers, "dpo"))
    assert "3 are lost: 3 objective" in fault.message
    assert "rows.jsonl:1 objective: a row of kind conversation" in fault.message and "chosen and rejected" in str(fault)


def test_labels_that_may_be_classes_are_told_how_to_be_verdicts(tmp_path: Path) -> None:
    rows = [judged(n, n % 2) for n in range(4)]
    assert "format: feedback" in fault_of("stats", write_run(tmp_path, rows, "kto")).message
    path = write_run(tmp_path, rows, "kto", train={"path": str(tmp_path / "rows.jsonl"), "format": "feedback"})
    assert "4 prepared" in runner.invoke(app, ["stats", str(path)]).output


def test_the_only_row_of_a_side_is_named_where_a_kl_needs_others(tmp_path: Path) -> None:
    path = write_run(tmp_path, [judged(n) for n in range(4)], "kto", eval=[judged(9)])
    fault = fault_of("plan", path)
    assert "held_out.jsonl:1: the only row" in fault.message and "apo_zero_unpaired" in str(fault)
    path = write_run(tmp_path, [judged(n) for n in range(4)], "kto", eval=[judged(8), judged(9)])
    assert runner.invoke(app, ["plan", str(path)]).exit_code == 0


def test_a_cut_prompt_is_shown_with_the_system_message_that_stays(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a long story " * 30},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What now?"},
    ]
    rows = [{"prompt": prompt, "chosen": "Run.", "rejected": "Sleep."}]
    path = write_run(tmp_path, rows, "dpo", max_length=48, overflow="truncate")
    runner.invoke(app, ["show", str(path), "--pack", "1", "--json", str(tmp_path / "shown.json")])
    (row,) = json.loads((tmp_path / "shown.json").read_text())["rows"]
    chosen = row["segments"][0]
    newline = 1  # which the template writes behind the answer's end: it is not learned, and cut off
    tail = chosen["run_tokens"] - newline - chosen["start"]
    assert chosen["head"] > 0 and chosen["head"] + tail == chosen["num_tokens"]
    assert row["tokens"][chosen["num_tokens"] - 1]["target"], "the answer's end"


def test_names_of_data_sets_stay_whole_in_80_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "q " * 3000, "chosen": f"a {n} " * 3000, "rejected": "b"} for n in range(20)]
    result = runner.invoke(app, ["stats", str(write_run(tmp_path, rows, "dpo", max_length=4096))])
    assert any(line.split()[:2] == ["rows.jsonl", "20"] for line in result.output.splitlines()), result.output
