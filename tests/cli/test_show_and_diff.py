"""``luthier show`` and ``luthier diff`` as a user runs them: what they print, write, and exit with."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from luthier.__main__ import run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"Q {n}"}, {"role": "assistant", "content": f"Ja 🙂 {n}."}]}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: preset:tiny-qwen3\n"
        f"data: {{train: {tmp_path / 'rows.jsonl'}, eval_split: 1, store: {tmp_path / 'store'}, workers: 0}}\n"
        f"output: {{dir: {tmp_path / 'out'}}}\ntracking: {{progress: false}}\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("selection", [[], ["--pack", "1"], ["--batch", "1"], ["--split", "eval"]])
def test_every_token_that_is_shown_has_an_owner(
    config: Path, selection: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(config), *selection, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"] == [] and told["facts"]["model"] == "preset:tiny-qwen3"
    for row in told["rows"]:
        for token in row["tokens"]:
            assert token["owner"]["field"] in ("content", "template", "template (prompt)", "stop")
            if token["target"]:
                assert (token["owner"]["role"], token["owner"]["message"]) == ("assistant", 1)
                assert token["owner"]["field"] in ("content", "stop")


def test_show_prints_owners_and_writes_a_page(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(config), "--html", str(tmp_path / "row.html")]) == 0
    out = capsys.readouterr().out
    for owner in ("0 user · content", "1 assistant · template (prompt)", "1 assistant · content", "1 assistant · stop"):
        assert owner in out
    page = (tmp_path / "row.html").read_text(encoding="utf-8")
    assert "🙂" in page and "1 assistant · stop" in page and "the model&#39;s own" in page


def test_show_exits_with_three_if_the_store_holds_something_else(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(config)]) == 0
    monkeypatch.setattr("luthier.check.show.token_origins.sample_difference", lambda *_: "token 3 is another one")
    assert run(["show", str(config), "--json", "-"]) == 3
    out, err = capsys.readouterr()
    (finding,) = json.loads(out[out.index("{") :])["findings"]
    assert "token 3 is another one" in finding and "token 3 is another one" in " ".join(err.split())


def test_diff_exits_with_zero_if_nothing_changes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(config), str(config)]) == 0
    assert "Nothing changes" in capsys.readouterr().out


def test_diff_exits_with_three_if_something_changes_and_says_what(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "diff.html"
    options = ["--b", "template.train_stop=false", "--rows", "1", "--html", str(page), "--json", "-"]
    assert run(["diff", str(config), str(config), *options]) == 3
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["different"] == told["counts"]["only targets differ"] == told["rows"] == 4
    assert told["settings"] == [{"key": "template.train_stop", "a": "True", "b": "False"}]
    (row,) = told["shown"]
    place = row["first"]["a"]["at"]
    assert row["first"]["a"]["units"][place]["text"] == row["first"]["b"]["units"][place]["text"] == "<|im_end|>"
    assert (row["first"]["a"]["units"][place]["target"], row["first"]["b"]["units"][place]["target"]) == (True, False)
    assert "4 of 4 rows change" in err and "4 of 4 rows change" in page.read_text(encoding="utf-8")


def test_overrides_count_for_both_sides_and_b_for_one(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(config), str(config), "template.train_stop=false"]) == 0
    assert run(["diff", str(config), str(config), "template.train_on=all", "--b", "template.train_on=assistant"]) == 3
    assert "template.train_on" in capsys.readouterr().out


def test_a_sample_of_rows_is_compared(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(config), str(config), "--sample", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2


def test_a_mistake_in_either_file_exits_with_two(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(config), str(config.parent / "absent.yaml")]) == 2
    assert run(["diff", str(config), str(config), "--b", "template.nonsense=1"]) == 2
    err = capsys.readouterr().err
    assert "absent.yaml" in err and "nonsense" in err and "Traceback" not in err


CLOCK = (
    "Today is {{ strftime_now('%d %b %Y') }}. {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("command", ["plan", "show", "verify"])
def test_a_clock_in_the_template_is_told_with_its_date_and_the_way_to_fix_it(
    command: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clock.jinja").write_text(CLOCK, encoding="utf-8")
    told = []
    with_clock = f"template.chat_template={tmp_path / 'clock.jinja'}"
    for options in ([], [with_clock], [with_clock, "template.now=2020-02-29"]):
        assert run([command, str(config), *options, "--json", str(tmp_path / "told.json")]) == 0
        found = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
        notes = {"plan": [found.get("clock")], "show": [found.get("facts", {}).get("clock")]}
        (clock,) = [note for note in notes.get(command, found.get("warnings")) if note] or [None]
        told.append(clock)
        printed = " ".join(capsys.readouterr().out.split())
        assert clock is None or clock in printed
    without, today, fixed = told
    assert without is None
    assert "template.now" in today and datetime.now().date().isoformat()[:4] in today  # the year: midnight may pass
    assert "2020-02-29" in fixed
