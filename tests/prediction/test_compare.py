"""Two predictions are compared answer by answer, and a difference that may be chance is told as one."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luthier.__main__ import run as run_command
from luthier.errors import UserError
from luthier.metrics import texts as bootstrap
from luthier.metrics.texts import mean_of, paired
from luthier.prediction.comparing import compare_predictions as compare
from luthier.prediction.comparing import comparison_page, differing_words
from tests.conftest import refused

Answer = tuple[str, str | None, str]  # prompt, expected, generated


def prediction(folder: Path, answers: list[Answer], losses: list[float] | None = None, **more: Any) -> Path:
    """A folder as `luthier predict` leaves it, a row for each answer."""
    folder.mkdir()
    lines = [
        {
            "row": f"rows.jsonl:{n}",
            "turn": 1,
            "sample": 0,
            "prompt": asked,
            "expected": wanted,
            "generated": got,
            **more,
        }
        for n, (asked, wanted, got) in enumerate(answers, start=1)
    ]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "metrics.json").write_text("{}")
    rows = [{"row": f"rows.jsonl:{n}", "loss": loss, "targets": 3} for n, loss in enumerate(losses or [], start=1)]
    (folder / "losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def answers(*right: bool) -> list[Answer]:
    return [(f"question {n}", f"answer {n}", f"answer {n}" if one else f"no {n}") for n, one in enumerate(right)]


def test_the_page_says_so_where_a_filter_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = prediction(tmp_path / "a", answers(True, True))
    b = prediction(tmp_path / "b", answers(True, False))
    page = comparison_page(compare(a, b, metrics=["contains", "exact"]))
    assert re.findall(r'<p class="none (\S+)"', page) == ["none-0-better", "none-1-better"]
    alike = comparison_page(compare(a, a, metrics=["exact"]))
    assert re.findall(r'<p class="none (\S+)"', alike) == ["none-0-better", "none-0-worse", "none-different"]
    monkeypatch.setattr("luthier.prediction.comparing.MOST_SHOWN", 1)
    cut = comparison_page(compare(a, b, metrics=["exact"]))
    assert re.findall(r'<p class="none (\S+)">All answers on this page', cut) == ["none-same"]


def test_what_is_better_worse_and_equal_adds_up_to_the_difference(tmp_path: Path) -> None:
    a = prediction(tmp_path / "a", answers(True, False, False, True, False), [1.0, 2.0, 2.0, 1.0, 1.0])
    b = prediction(tmp_path / "b", answers(True, True, True, False, False), [1.0, 1.0, 2.0, 1.0, 1.0])
    found = compare(a, b, metrics=["exact", "chrf", "perplexity"])
    exact, chrf, perplexity = found.metrics
    assert (exact.a, exact.b, exact.better, exact.worse, exact.equal) == (0.4, 0.6, 2, 1, 2)
    assert exact.difference == pytest.approx((exact.better - exact.worse) / 5)
    assert chrf.better is None and chrf.b > chrf.a
    assert perplexity.b < perplexity.a and perplexity.lower_is_better
    assert found.num_different == 3 and [pair.verdicts["exact"] for pair in found.pairs] == [
        "equal", "better", "better", "worse", "equal"
    ]  # fmt: skip
    mirrored = compare(b, a, metrics=["exact"]).metrics[0]
    assert mirrored.difference == -exact.difference and mirrored.p == exact.p
    assert exact.interval is not None and mirrored.interval == pytest.approx((-exact.interval[1], -exact.interval[0]))


def test_losses_over_other_tokens_are_not_compared_and_it_is_said(tmp_path: Path) -> None:
    a = prediction(tmp_path / "a", answers(True, True), [1.0, 2.0])
    b = prediction(tmp_path / "b", answers(True, True), [1.0, 2.0])
    losses = (b / "losses.jsonl").read_text()
    assert not compare(a, b, metrics=["perplexity"]).not_compared
    for other in (
        losses.replace('"targets": 3', '"targets": 4', 1),
        losses.replace("rows.jsonl:2", "rows.jsonl:3"),
        "",
    ):
        (b / "losses.jsonl").write_text(other)
        found = compare(a, b, metrics=["perplexity", "exact"])
        assert [one.name for one in found.metrics] == ["exact"] and set(found.not_compared) == {"perplexity"}
        assert "perplexity is not compared" in comparison_page(found)
    (b / "losses.jsonl").unlink()
    assert set(compare(a, b).not_compared) == {"perplexity"} and not compare(a, b, metrics=["exact"]).not_compared


def test_a_metric_that_was_asked_for_and_says_nothing_is_named_and_one_row_has_no_interval(tmp_path: Path) -> None:
    silent: list[Answer] = [("q", "no number", "7")] * 3
    a = prediction(tmp_path / "a", [("q", "7", "8"), *silent])
    b = prediction(tmp_path / "b", [("q", "7", "7"), *silent])
    found = compare(a, b, metrics=["number", "json", "choice"])
    (number, _) = found.metrics
    assert number.name == "number" and number.interval is None and number.p == 1.0
    assert set(found.not_compared) == {"choice"} and not compare(a, b).not_compared.keys() & {"choice"}


def called(name: str | None) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": "{}"}}] if name else []
    return {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}


def test_a_call_that_nobody_wants_and_an_answer_that_cannot_be_read_are_worse(tmp_path: Path) -> None:
    """A row counts if one of the two calls a tool, or one is expected."""
    folders = [prediction(tmp_path / name, answers(*[True] * 5)) for name in "ab"]
    wanted = ["f", "f", None, None, None]
    made = [["f", "f", None, None, None], ["f", None, "f", None, "unread"]]
    for folder, calls in zip(folders, made, strict=True):
        lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        for line, call, want in zip(lines, calls, wanted, strict=True):
            line |= {"message": None if call == "unread" else called(call), "expected_message": called(want)}
        (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for metric in ("tool_calls", "tool_names"):
        found = compare(*folders, metrics=[metric])
        (one,) = found.metrics
        assert (one.a, one.b, one.better, one.worse, one.equal) == (1.0, 0.25, 0, 3, 1)
        assert [pair.verdicts[metric] for pair in found.pairs] == ["equal", "worse", "worse", "", "worse"]
        assert compare(*reversed(folders), metrics=[metric]).metrics[0].better == 3


def test_the_chance_of_few_rows_is_that_of_all_ways_to_swap_them() -> None:
    generator = np.random.default_rng(0)
    values_2N = generator.integers(2, size=(2, 8)).astype(float)
    a, b = (np.stack([row, np.ones(8)], axis=1) for row in values_2N)
    moved = values_2N[1] - values_2N[0]
    ways = [
        abs(sum(one * sign for one, sign in zip(moved, signs, strict=True))) for signs in product([-1, 1], repeat=8)
    ]
    expected = np.mean([way >= abs(moved.sum()) - 1e-9 for way in ways])
    assert paired(a, b, mean_of)[1] == paired(b, a, mean_of)[1] == pytest.approx(expected) and expected < 1


def test_models_that_are_alike_are_found_different_by_chance_about_5_times_in_100() -> None:
    generator, low = np.random.default_rng(1), 0
    for _ in range(100):
        a, b = (np.stack([generator.random(40), np.ones(40)], axis=1) for _ in range(2))
        low += paired(a, b, mean_of)[1] < 0.05
    assert 1 <= low <= 11
    a = np.stack([generator.random(40), np.ones(40)], axis=1)
    ends, p = paired(a, a + np.array([0.2, 0]), mean_of)
    assert p == 1 / (bootstrap.SWAPS + 1) and ends == pytest.approx((0.2, 0.2)), (
        "a difference in every row is none of chance"
    )


def test_swaps_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(0).random((20, 2))
    whole = bootstrap._moved(differences)
    monkeypatch.setattr(bootstrap, "AT_ONCE", 100)
    assert np.allclose(bootstrap._moved(differences), whole)


def test_other_questions_are_refused_and_named(tmp_path: Path) -> None:
    a = prediction(tmp_path / "a", answers(True, True, True))
    with refused(UserError, "rows.jsonl:3 turn 1"):
        compare(a, prediction(tmp_path / "fewer", answers(True, True)))
    changed = answers(True, True, True)
    changed[1] = ("question 1", "another answer", "answer 1")
    with refused(UserError, "expected", "rows.jsonl:2"):
        compare(a, prediction(tmp_path / "changed", changed))
    worded = [(f"<s>{asked}", wanted, got) for asked, wanted, got in answers(True, True, True)]
    b = prediction(tmp_path / "worded", worded)
    with refused(UserError, "prompt", "--any-prompt"):
        compare(a, b)
    assert compare(a, b, any_prompt=True).num_different == 0
    with refused(UserError, "samples"):
        compare(a, prediction(tmp_path / "second", answers(True, True, True), sample=1))
    with refused(UserError, "predictions.jsonl"):
        compare(a, tmp_path)
    empty = prediction(tmp_path / "empty", [])
    with refused(UserError, "predictions.jsonl"):
        compare(empty, empty)
    with (a / "predictions.jsonl").open("ab") as file:
        file.write(b'{"row": "rows.jsonl:4", "tu')
    with refused(UserError, "predictions.jsonl:4"):
        compare(a, a)


def test_a_question_that_one_has_not_answered_is_left_out_of_both(tmp_path: Path) -> None:
    a = prediction(tmp_path / "a", answers(True, True))
    b = prediction(tmp_path / "b", answers(False, True))
    lines = [json.loads(line) for line in (b / "predictions.jsonl").read_text().splitlines()]
    lines[0] = {"row": lines[0]["row"], "turn": 1, "refused": {"reason": "media_gone", "detail": "x"}}
    (b / "predictions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = compare(a, b, metrics=["exact"])
    assert found.left_out == 1 and len(found.pairs) == 1 and found.metrics[0].difference == 0


def test_rows_without_an_answer_are_left_out_where_answers_are_compared(tmp_path: Path) -> None:
    folder = prediction(tmp_path / "a", [*answers(True, False), ("question 2", None, "x")])
    exact, chrf = compare(folder, folder, metrics=["exact", "chrf"]).metrics
    assert (exact.a, exact.equal) == (0.5, 2) and chrf.difference == 0


@pytest.mark.parametrize(
    ("a", "b", "marked_a", "marked_b"),
    [
        ("a big cat", "a small cat", ["big"], ["small"]),
        ("同じ猫", "同じ犬", ["猫"], ["犬"]),
        ("", "new", [], ["new"]),
        ("हिन्दी 🇩🇪 👨‍👩‍👧", "हिन्दु 🇩🇰 👨‍👩‍👦", ["हिन्दी", "🇩🇪", "👨‍👩‍👧"], ["हिन्दु", "🇩🇰", "👨‍👩‍👦"]),
        ("ที่นี่", "ที่นั่น", ["นี่"], ["นั่น"]),
        ("same", "same", [], []),
        ("x " * 3000, "y", ["x " * 3000], ["y"]),
    ],
)
def test_words_that_differ_are_marked_and_no_letter_is_lost(
    a: str, b: str, marked_a: list[str], marked_b: list[str]
) -> None:
    of_a, of_b = differing_words(a, b)
    assert ("".join(text for text, _ in of_a), "".join(text for text, _ in of_b)) == (a, b)
    assert [text for text, differs in of_a if differs] == marked_a
    assert [text for text, differs in of_b if differs] == marked_b


def test_the_page_shows_texts_as_texts_and_needs_nothing_else(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>\u202e"
    a = prediction(tmp_path / "a", [(attack, attack, "right"), *answers(True, False)])
    b = prediction(tmp_path / "b", [(attack, attack, f"right {attack}"), *answers(False, True)])
    page = comparison_page(compare(a, b))
    assert "<script" not in page and "\u202e" not in page and "&lt;script&gt;" in page
    assert re.search(r"\nbody \{[^}]*overflow-wrap", page), "a long path or word makes no page wider than a phone"
    assert not re.search(r"https?://|src=|href=|@import|url\(", page)
    assert page.count("<article") == 3 and page.count("<mark>") >= 3
    assert 'class="different m0-worse' in page and 'class="different m0-better' in page


def test_the_command_writes_a_page_and_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = prediction(tmp_path / "a", answers(True, False)), prediction(tmp_path / "b", answers(True, True))
    page = tmp_path / "page.html"
    assert run_command(["compare", str(a), str(b), "--metrics", "exact", "--html", str(page), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    pattern = "regex:a name that is (much|far) too long for any column of a table that has numbers beside it"
    big = prediction(tmp_path / "big", answers(True, False), [9.0, 14.0])
    small = prediction(tmp_path / "small", answers(False, True), [1.0, 14.5])
    assert run_command(["compare", str(big), str(small), "--metrics", f"normalised,chrf,perplexity,{pattern}"]) == 0
    table = capsys.readouterr().out
    assert "…" not in table and all(name in table for name in ("normalised", "better", "worse", "equal", "interval"))
    assert told["metrics"]["exact"]["better"] == 1 and told["different"] == 1 and page.is_file()
    assert run_command(["compare", str(a), str(tmp_path)]) == 2
