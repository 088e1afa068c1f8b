"""The answers that a run drew, in its report and under ``luthier rollouts``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tiny_rollouts import losses
from tiny_runs import make_data, make_segments
from typer.testing import CliRunner

from luthier.__main__ import app
from luthier.errors import UserError
from luthier.metrics import METRICS, Metric
from luthier.training.report import RunResult
from luthier.training.report.drawn_answers import (
    answers_of_run,
    chosen_groups,
    groups_page,
    groups_text,
    logged_steps,
    read_groups,
)
from luthier.training.report.report import Report, summary, write_report

LINE = {"row": "rows.jsonl:7", "prompt": "Which?", "expected": "this", "finish": "stop", "ids": [5, 6, 2]}


def write(run: Path, step: int, *answers: dict[str, object], rank: int = 0) -> None:
    folder = run / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**LINE, "sample": number, **answer}) for number, answer in enumerate(answers)]
    (folder / f"{step:06d}{f'.rank{rank}' if rank else ''}.jsonl").write_text("".join(f"{line}\n" for line in lines))


GOOD = {"generated": "this", "reward": 1.0, "advantage": 0.7, "logprob": -9.0, "rewards": {"exact": 1.0}}
BAD = {"generated": "<b>that</b>", "reward": 0.0, "advantage": -0.7, "logprob": -1.0, "rewards": {"exact": 0.0}}
NONE = {"generated": "?", "reward": None, "logprob": -1.0, "rewards": {"exact": None}}


def test_groups_are_read_of_all_processes_and_the_best_answer_comes_first(tmp_path: Path) -> None:
    write(tmp_path, 1, BAD, BAD)
    write(tmp_path, 2, NONE, BAD, GOOD)
    write(tmp_path, 2, {**GOOD, "row": "rows.jsonl:8"}, rank=1)
    assert logged_steps(tmp_path) == [1, 2]
    first, second = chosen_groups(tmp_path)
    assert [answer.generated for answer in first.answers] == ["this", "<b>that</b>", "?"] and first.mean == 0.5
    assert second.first.row == "rows.jsonl:8"
    assert [group.step for group in chosen_groups(tmp_path, row=7)] == [1, 2]
    assert len(chosen_groups(tmp_path, step=1)) == 1
    for wrong in ({"step": 3}, {"row": 9}):
        with pytest.raises(UserError):
            chosen_groups(tmp_path, **wrong)
    write(tmp_path, 4)
    for wrong in ({"step": 4}, {}):
        with pytest.raises(UserError, match="step 4"):
            chosen_groups(tmp_path, **wrong)
    with pytest.raises(UserError):
        chosen_groups(tmp_path / "nothing")


def test_a_damaged_file_is_told_by_its_line(tmp_path: Path) -> None:
    write(tmp_path, 1, GOOD)
    path = tmp_path / "rollouts" / "000001.jsonl"
    path.write_text(path.read_text() + "{")
    with pytest.raises(UserError) as caught:
        read_groups(tmp_path, 1)
    assert "000001.jsonl:2" in caught.value.message
    assert answers_of_run(tmp_path) is None


def test_the_terminal_and_the_page_say_the_same_and_the_page_escapes_it(tmp_path: Path) -> None:
    write(tmp_path, 1, BAD, GOOD)
    groups = chosen_groups(tmp_path)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(groups_text(groups))
    page = groups_page(groups, title="run")
    for words in ("Which?", "advantage +0.70", "-9.0 nats", "3 tokens · stop", "mean reward 0.5"):
        assert words in captured.get() and words in page, words
    assert "<b>that" not in page and "&lt;b&gt;that" in page


def test_answers_that_are_alike_stand_once_with_their_number(tmp_path: Path) -> None:
    sure = {**GOOD, "logprob": -0.01}
    write(tmp_path, 1, BAD, sure, BAD, sure, sure, {**sure, "finish": "length"})
    (group,) = chosen_groups(tmp_path)
    assert [[one.sample for one in alike] for alike in group.alike] == [[1, 3, 4], [5], [0, 2]]
    page = groups_page([group], title="run")
    assert "#1 and 2 like it" in page and "#5 ·" in page and page.count("&lt;b&gt;that") == 1
    assert "-0.0" not in page


def test_the_report_chooses_the_best_the_worst_and_the_most_surprising_of_the_last_steps(tmp_path: Path) -> None:
    for step in range(1, 31):
        write(tmp_path, step, *([BAD, GOOD] if step == 29 else [GOOD, GOOD] if step == 30 else [BAD, BAD]))
    found = answers_of_run(tmp_path)
    assert found is not None and found.steps == (28, 30)
    assert {what: group.step for what, group in found.chosen.items()} == {
        "best": 30,
        "worst": 28,
        "most surprising": 29,
    }
    assert len(found.points) == 6


def test_a_run_leaves_curves_and_answers_in_its_report(
    train: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._rows, "vowels", Metric(of_row=lambda _, text: float(sum(map(text.count, "aeiou")))))
    rollout = {"prompts_per_step": 4, "answers": 4, "max_new_tokens": 6, "min_finished": 0.0}
    run = train(
        make_data(make_segments(12)),
        objective="rl",
        rollout={**rollout, "rewards": ["vowels", {"metric": "exact", "weight": 2}]},
        data__max_length=64,
    )
    page = write_report(Report(result=run))[0].read_text()
    first, last = run.steps[0].measures["reward"], run.steps[-1].measures["reward"]
    assert (
        f"<span>reward</span><strong>{last:.4g}</strong><small>from {first:.4g}" in page and "<title>tokens 6:" in page
    )
    console = Console(width=120)
    with console.capture() as captured:
        console.print(summary(Report(result=run), []))
    assert f"{first:.4g} → {last:.4g}" in captured.get()
    assert min(losses(run)) < 0 and "logarithmic axis" not in page
    titles = ("reward", "finished", "tokens of an answer", "entropy", "gap of sampler and trainer")
    for title in titles:
        assert f'aria-label="{title}"' in page, title
    assert '<i class="raw"></i>exact' in page and "reward over tokens of the answer" in page
    assert "best · step 4" in page and "worst · step 4" in page
    shown = CliRunner().invoke(app, ["rollouts", str(run.path), "--step", "2", "--json", "-"])
    groups = json.loads(shown.stdout)["groups"]
    assert shown.exit_code == 0 and len(groups) == 4 and {group["step"] for group in groups} == {2}
    description = run.path.parent / "again.json"
    description.write_text(
        json.dumps({"model": "x/y", "data": {"train": ["preset:skills"]}, "output": {"dir": str(run.path)}})
    )
    for named, chosen in ((str(run.path), ["--row", "2"]), (str(description), [])):
        again = CliRunner().invoke(app, ["show", named, "--rollouts", *chosen, "--json", "-"])
        assert again.exit_code == 0 and json.loads(again.stdout)["groups"], again.output
    for group in groups:
        told = [answer["advantage"] for answer in group["answers"]]
        assert sum(told) == pytest.approx(0, abs=1e-6) and told == sorted(told, reverse=True)
