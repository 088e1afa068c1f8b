"""The report of a run: whole, honest about rows, escaped, and self-contained."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from rich.console import Console
from tiny_runs import make_config

from luthier.models.vocabulary import UNPADDED
from luthier.training.folder.artifacts import model_card
from luthier.training.report import (
    DataSummary,
    Ended,
    EvalRecord,
    GenerationRecord,
    GenerationRound,
    ModelSummary,
    RunResult,
    SourceSummary,
    StepRecord,
)
from luthier.training.report.plots import (
    Curve,
    chart,
    log_ticks,
    smoothed,
    smoothing_radius,
    spans_decades,
    sparkline,
    ticks,
)
from luthier.training.report.report import Report, duration, summary, write_report

SCRIPT = "<script>alert(1)</script>"
LEDGER = {
    "read": 10, "prepared": 7, "trained": 5, "not_yet_trained": 2,
    "dropped": {"too_long": 2}, "quarantined": {"invalid_json": 1}, "notes": {"held_out": 3},
    "examples": {"too_long": [f"{SCRIPT}:3 too_long"], "invalid_json": ["rows.jsonl:9 invalid_json"]},
}  # fmt: skip


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(
        step=number, epoch=number / 10, loss=loss, grad_norm=None if number == 1 else 1.0, learning_rate=1e-3,
        tokens=100, target_tokens=40, seconds=0.5, tokens_per_second=200.0, target_tokens_per_second=80.0,
    )  # fmt: skip


def generation(at: int, *equal: bool) -> GenerationRound:
    records = tuple(
        GenerationRecord(address=f"e.jsonl:{n}", prompt=SCRIPT, expected="yes", generated=f"no {SCRIPT}", equal=ok)
        for n, ok in enumerate(equal, start=1)
    )
    return GenerationRound(step=at, records=records, seconds=1.0)


@pytest.fixture
def result(tmp_path: Path) -> RunResult:
    return RunResult(
        output_dir=str(tmp_path / "run"), model_dir="model", adapter="full", ended=Ended.COMPLETED,
        started_at="2030-01-01T00:00:00+00:00", seconds=75.0, epochs=1.5, global_step=20, max_steps=20, world_size=1,
        steps=tuple(step(n, 4 / n) for n in range(1, 21)),
        evals=(EvalRecord(step=0, epoch=0, loss=3, perplexity=20.1, token_accuracy=0.1, num_targets=50, seconds=1),
               EvalRecord(step=20, epoch=1.5, loss=1, perplexity=2.72, token_accuracy=0.7, num_targets=50, seconds=1)),
        generations=(generation(0, False, False), generation(20, True, False)),
        train_data=DataSummary(segments=7, tokens=700, target_tokens=280, micro_batches=7, fill=0.9),
        model=ModelSummary(name=f"tiny {SCRIPT}", architecture="Tiny", parameters=10, trainable_parameters=10,
                           dtype="float32", precision="fp32", attn_implementation="sdpa", device="cpu"),
        peak_memory_bytes=2**30, ledger=LEDGER, versions={"luthier": "0"}, config={"model": {"name": SCRIPT}},
    )  # fmt: skip


def read_json(result: RunResult, **more: Any) -> dict[str, Any]:
    write_report(Report(result=result, **more))
    content: dict[str, Any] = json.loads((result.path / "report.json").read_text())
    return content


def test_report_json_sums_the_steps_and_keeps_the_identity_of_the_ledger(result: RunResult) -> None:
    told = read_json(result, plan={"total_steps": 20}, fingerprints={"encoder": "ab"})
    assert (told["steps"], told["tokens"], told["target_tokens"]) == (20, 2000, 800)
    assert told["tokens_per_second"] == 200
    assert told["losses"] == [4 / n for n in range(1, 21)]
    ledger = told["ledger"]
    assert ledger["read"] == ledger["prepared"] + ledger["dropped"] + ledger["quarantined"] == 10
    assert ledger["prepared"] == ledger["trained"] + ledger["not_yet_trained"] == 7
    assert ledger["reasons"] == {"dropped": {"too_long": 2}, "quarantined": {"invalid_json": 1}}
    assert told["eval"][-1]["perplexity"] == 2.72
    assert told["exact_match"] == [{"step": 0, "share": 0, "rows": 2}, {"step": 20, "share": 0.5, "rows": 2}]
    assert told["plan"] == {"total_steps": 20} and told["fingerprints"] == {"encoder": "ab"}
    assert "quickstart" not in told


def test_quickstart_reports_exact_match_before_and_after(result: RunResult) -> None:
    told = read_json(result, quickstart=True)
    assert told["quickstart"] == {"exact_match_before": 0.0, "exact_match_after": 0.5}


def test_quickstart_that_was_interrupted_claims_nothing(result: RunResult) -> None:
    told = read_json(replace(result, generations=result.generations[:1]), quickstart=True)
    assert told["quickstart"] == {"exact_match_before": None, "exact_match_after": None}


def test_a_loss_that_is_no_number_is_null_and_the_page_is_still_drawn(result: RunResult) -> None:
    steps = (*result.steps[:3], step(4, math.nan), step(5, math.inf))
    told = read_json(replace(result, steps=steps))
    assert told["losses"][3:] == [None, None]
    assert (result.path / "report.html").stat().st_size > 1000


def test_nothing_of_the_data_becomes_markup_on_the_page(result: RunResult) -> None:
    write_report(Report(result=result))
    page = (result.path / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 6  # model, prompt, answers, ledger, config


def test_wrong_answers_come_first_all_of_them_then_some_right_ones(result: RunResult) -> None:
    marks = [number % 40 != 7 for number in range(1, 281)]  # 7 of 280 are wrong, far apart
    write_report(Report(result=replace(result, generations=(generation(20, *marks),))))
    page = (result.path / "report.html").read_text()
    told = re.findall(r"<header><span>e\.jsonl:(\d+)</span><span class=\"(right|wrong)\">", page)
    assert told[:7] == [(str(number), "wrong") for number in range(7, 281, 40)]
    assert told[7:] == [(str(number), "right") for number in range(1, 14) if number != 7]
    assert "273 of 280 are exactly what was expected, 7 are not" in page


@pytest.mark.parametrize(
    ("losses", "axis"), [((4, 3, 2), "linear"), ((4, 1, 0.01), "logarithmic"), ((4, 0, 0), "linear")]
)
def test_the_loss_can_be_seen_on_both_axes_and_begins_with_the_one_that_its_range_asks_for(
    result: RunResult, losses: tuple[float, ...], axis: str
) -> None:
    steps = tuple(step(number, loss) for number, loss in enumerate(losses, start=1))
    write_report(Report(result=replace(result, steps=steps, evals=())))
    page = (result.path / "report.html").read_text()
    assert re.findall(r'id="axis-(\w+)" checked', page) == [axis]
    assert page.count('type="radio"') == 2


def test_steps_are_points_beside_the_smoothed_line(result: RunResult) -> None:
    steps = tuple(step(number, 4 / number + number % 3) for number in range(1, 101))
    write_report(Report(result=replace(result, steps=steps)))
    page = (result.path / "report.html").read_text()
    assert page.count('<circle class="raw"') == 2 * 100  # on each axis
    assert '<path class="main"' in page


def test_a_logarithmic_axis_gives_equal_ratios_equal_room_and_leaves_out_what_is_not_above_zero() -> None:
    curve = Curve(name="a", look="main", steps=[1, 2, 3, 4], values=[10, 1, 0.1, 0], dots=True)
    drawn = chart("a", [curve], log=True)
    assert drawn is not None
    heights = [y for _, y, _ in drawn.lines[0].dots]
    assert len(heights) == 3
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.02)
    assert chart("a", [Curve(name="a", look="main", steps=[1], values=[0])], log=True) is None
    assert spans_decades([curve]) is False and spans_decades([replace(curve, values=[10, 1, 0.1, 1])])


@pytest.mark.parametrize(("low", "high"), [(0.03, 4), (1e-9, 1e9), (2, 2.1), (1, 1), (5e-300, 1e300), (0.1, 10)])
def test_log_ticks_are_round_rising_and_cover_the_range(low: float, high: float) -> None:
    marks = log_ticks(low, high)
    assert marks[0] <= low and marks[-1] >= high
    assert marks == sorted(marks)
    assert all(f"{mark:e}"[0] in "125" for mark in marks)


def test_the_sample_is_embedded_as_it_is(result: RunResult) -> None:
    write_report(Report(result=result, sample=Markup("<mark>sample</mark>")))
    assert "<mark>sample</mark>" in (result.path / "report.html").read_text()


def test_the_page_needs_nothing_else(result: RunResult) -> None:
    write_report(Report(result=result))
    page = (result.path / "report.html").read_text()
    assert not re.search(r"https?://|<link|<script|@import|url\(|src=", page)
    assert page.count("<svg") == 5  # the loss twice: on a linear and on a logarithmic axis
    assert "prefers-color-scheme: dark" in page


def test_loss_png_is_a_picture(result: RunResult) -> None:
    files = write_report(Report(result=result))
    assert [file.name for file in files] == ["report.html", "report.json", "loss.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_is_reported_without_curves(result: RunResult) -> None:
    files = write_report(Report(result=replace(result, steps=(), evals=(), generations=())))
    assert [file.name for file in files] == ["report.html", "report.json"]
    assert "<svg" not in files[0].read_text()


def summary_text(report: Report) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(summary(report, [Path("run/report.html")]))
    return console.export_text()


def test_summary_says_what_became_of_loss_answers_and_rows(result: RunResult) -> None:
    text = summary_text(Report(result=result, quickstart=True))
    assert "4.000 → 0.200" in text
    assert "0% → 50%" in text
    assert "10 read = 5 trained + 2 not yet trained + 2 dropped + 1 quarantined" in text
    assert "0% exactly before training and 50% after it" in text
    assert "run/report.html" in text


def several(result: RunResult) -> RunResult:
    """The same run with two data sets; the second comes late and has a name to be careful with."""
    steps = tuple(
        replace(s, loss_by_source={"a.jsonl": s.loss, **({SCRIPT: 2 * s.loss} if s.step > 2 else {})})
        for s in result.steps
    )
    evals = tuple(replace(e, loss_by_source={"held [red]x": 1.25}) for e in result.evals)
    mixture = (
        SourceSummary(name="a.jsonl", rows=5, segments=6, tokens=1500, targets=600, share_of_tokens=0.75),
        SourceSummary(name=SCRIPT, rows=2, segments=2, tokens=500, targets=200, share_of_tokens=0.25),
    )
    return replace(result, steps=steps, evals=evals, mixture=mixture)


def test_several_data_sets_are_reported_one_by_one(result: RunResult) -> None:
    told = read_json(several(result))
    assert [source["name"] for source in told["mixture"]] == ["a.jsonl", SCRIPT]
    assert told["mixture"][0] == {
        "name": "a.jsonl", "rows": 5, "segments": 6, "tokens": 1500, "targets": 600, "share_of_tokens": 0.75,
    }  # fmt: skip
    assert told["curve"][4]["loss_by_source"] == {"a.jsonl": 4 / 5, SCRIPT: 8 / 5}
    page = (result.path / "report.html").read_text()
    assert page.count("<svg") == 7 and "<script" not in page
    assert "<h2>Data sets</h2>" in page and "75.0%" in page and "loss · held [red]x" in page
    text = summary_text(Report(result=several(result)))
    assert "75.0% of tokens  5 rows  loss 4.000 → 0.200" in text
    assert "25.0% of tokens  2 rows  loss 2.667 → 0.400" in text
    assert "1.250   held [red]x" in text


def test_one_data_set_is_not_listed(result: RunResult) -> None:
    one = replace(result, mixture=several(result).mixture[:1])
    write_report(Report(result=one))
    assert "Data sets" not in (result.path / "report.html").read_text()
    assert "data sets" not in summary_text(Report(result=one))


def compared(result: RunResult) -> RunResult:
    """The same run as one of DPO: pairs, rewards, and a first evaluation that judges nothing."""

    def measures(step: int) -> dict[str, float]:
        names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
        return dict(zip(names, (step / 10, -step / 10, step / 25, step / 5), strict=True))

    evals = tuple(
        replace(e, perplexity=None, token_accuracy=None, accuracy=e.step / 25, measures=measures(e.step))
        for e in result.evals
    )
    steps = tuple(replace(s, measures=measures(s.step)) for s in result.steps)
    return replace(result, steps=steps, evals=evals, config={"objective": {"name": "dpo"}})


def test_a_run_that_compares_shows_rewards_and_no_perplexity(result: RunResult) -> None:
    files = write_report(Report(result=compared(result)))
    page = files[0].read_text()
    assert page.count("<svg") == 5 + 3  # judged right, margin, both rewards
    assert all(words in page for words in ("loss per pair", "reward margin", "judged right", "80.0%"))
    assert "perplexity" not in page and "targets right" not in page and "per target" not in page
    (untrained,) = re.findall(r'<tr><td class="n">0</td>.*?</tr>', page)
    assert "0.000" in untrained and untrained.count('<td class="n"></td>') == 1  # its share is not told
    assert files[2].read_bytes().startswith(b"\x89PNG")
    text = summary_text(Report(result=compared(result)))
    assert "3.000 → 1.000   per pair" in text and "judged right    80.0%   of 50 held-out pairs" in text


def test_each_reward_of_a_chart_has_a_look_of_its_own_that_the_style_sheet_knows(result: RunResult) -> None:
    names = ["reward", *(f"reward/r{n}" for n in range(9))]
    steps = tuple(replace(s, measures={name: s.step / (n + 1) for n, name in enumerate(names)}) for s in result.steps)
    page = write_report(Report(result=replace(result, steps=steps)))[0].read_text()
    cards = re.findall(r"<h3>reward\b(.*?)</h3>", page, flags=re.S)
    shown = [re.findall(r'<i class="(\w+)"></i>(\w+)', card) for card in cards]
    assert sorted(name for card in shown for _, name in card) == sorted(["reward", *(f"r{n}" for n in range(9))])
    for looks in ([look for look, _ in card] for card in shown):
        assert len(set(looks)) == len(looks)
        assert all(f"{what}.{look} {{" in page for look in looks for what in ("path", "i", "circle"))


@pytest.mark.parametrize(
    ("objective", "packing", "told"),
    [
        ({"name": "dpo", "beta": 0.5}, "window", (
            "| objective | dpo, loss sigmoid, beta 0.5, sft_weight 0, ld_alpha 1, label_smoothing 0 |",
            "| reference | the model before training |",
            "| batch | 2 packs of pairs, each answer with its prompt up to 32 tokens |", "text-generation")),
        ({"name": "dpo", "loss": "simpo"}, "none", (
            "loss simpo, beta 2, sft_weight 0, gamma 1",
            "| batch | 2 pairs, each answer with its prompt up to 32 tokens |")),
        ({"name": "dpo", "reference": {"source": "none"}}, "none", ("| reference | none |",)),
        ({"name": "dpo", "reference": {"name_or_path": "a/b"}}, "none", ("| reference | `a/b` |",)),
        ({"name": "rm"}, "none", ("| objective | rm, loss bradley_terry, center_rewards 0 |", "text-classification")),
        ({"name": "sft"}, "none", ("loss cross_entropy", "| batch | 2 sequences of up to 32 tokens |")),
    ],
)  # fmt: skip
def test_the_card_names_the_loss_with_all_its_numbers_and_the_reference(
    result: RunResult, tmp_path: Path, objective: dict[str, Any], packing: str, told: tuple[str, ...]
) -> None:
    config = make_config(tmp_path, objective=objective, train__packing=packing, train__per_device_train_batch_size=2)
    card = model_card(replace(result, config={"objective": objective}), config)
    assert all(words in card for words in told), card
    assert ("| reference |" in card) == any("reference" in words for words in told)


def test_the_card_says_how_it_is_loaded_and_how_answers_were_drawn(result: RunResult, tmp_path: Path) -> None:
    drawn = make_config(tmp_path, generate={"do_sample": True})
    assert "greedy answers" in model_card(result, make_config(tmp_path)) and "greedy" not in model_card(result, drawn)
    for architecture, task in (
        ("Qwen3VLForConditionalGeneration", "image-text-to-text"),
        ("Qwen2AudioForConditionalGeneration", "any-to-any"),
        ("Qwen3ForCausalLM", "text-generation"),
    ):
        shown = replace(result, model=replace(result.model, architecture=architecture))
        assert f"pipeline_tag: {task}\n" in model_card(shown, drawn)
    judge = replace(result, model=replace(result.model, architecture="Qwen3ForSequenceClassification"))
    plain = make_config(tmp_path, model={"name_or_path": "a/b"}, objective={"name": "rm"}, adapter={"type": "lora"})
    assert "{'num_labels': 1}" in model_card(judge, plain), "PEFT alone makes a head of two numbers"
    unpadded = replace(judge, model=replace(judge.model, notes=(f"{UNPADDED}: so it is",)))
    assert "{'num_labels': 1, 'pad_token_id': None}" in model_card(unpadded, plain)


def test_a_run_of_targets_shows_perplexity_and_no_rewards(result: RunResult) -> None:
    page = write_report(Report(result=result))[0].read_text()
    assert "loss per target" in page and "perplexity" in page
    assert "judged right" not in page and "reward" not in page


def test_one_epoch_is_one_and_targets_that_are_compared_are_scored(result: RunResult, tmp_path: Path) -> None:
    for epochs, said in ((1.0, "1 epoch"), (2.0, "2 epochs"), (0.25423, "0.254 epochs")):
        shown = replace(result, epochs=epochs)
        card = model_card(shown, make_config(tmp_path))
        assert f"{said} in" in summary_text(Report(result=shown)) and f"({said})" in card
    page = write_report(Report(result=replace(result, epochs=1.0)))[0].read_text()
    assert "1 epoch in" in page and "targets learned" in page and "targets scored" not in page
    assert "targets scored" in write_report(Report(result=compared(result)))[0].read_text()


def test_an_interrupted_run_says_how_to_go_on(result: RunResult) -> None:
    text = summary_text(Report(result=replace(result, ended=Ended.INTERRUPTED, model_dir=None)))
    assert text.startswith("Interrupted") and "run the same command again" in text
    anew = replace(result, ended=Ended.INTERRUPTED, model_dir=None, config={"output": {"overwrite": True}})
    assert "output.overwrite=false" in summary_text(Report(result=anew))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.13, 3.9, [0, 1, 2, 3, 4]), (0, 1, [0, 0.25, 0.5, 0.75, 1]), (1e-5, 9e-5, [0, 2e-5, 4e-5, 6e-5, 8e-5, 1e-4])],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_chart_puts_values_where_its_ticks_say() -> None:
    drawn = chart("c", [Curve(name="a", look="main", steps=[0, 10], values=[0.0, 4.0], dots=True)])
    assert drawn is not None
    marks = {tick.label: tick.at for tick in drawn.y_ticks}
    assert [y for _, y, _ in drawn.lines[0].dots] == [marks["0"], marks["4"]]
    assert [x for x, _, _ in drawn.lines[0].dots] == [drawn.left, drawn.right]


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1.0], [1e-9, 2e-9], [1.0, math.nan]])
def test_any_values_can_be_drawn_inside_the_chart(values: list[float]) -> None:
    drawn = chart("c", [Curve(name="a", look="main", steps=list(range(len(values))), values=values, dots=True)])
    assert drawn is not None
    assert all(drawn.top <= y <= drawn.bottom for _, y, _ in drawn.lines[0].dots)


def test_nothing_but_not_a_number_is_no_chart() -> None:
    assert chart("c", [Curve(name="a", look="main", steps=[1], values=[math.nan])]) is None


def test_thinning_keeps_spikes() -> None:
    values = [1.0] * 10_000
    values[7_777] = 60.0
    drawn = chart("c", [Curve(name="a", look="main", steps=list(range(10_000)), values=values)])
    assert drawn is not None
    points = [float(point.split(",")[1]) for point in drawn.lines[0].path[1:].split("L")]
    assert len(points) <= 802
    assert min(points) == next(tick.at for tick in drawn.y_ticks if tick.label == "60")


def test_smoothing_does_not_lag_and_passes_over_not_a_number() -> None:
    line = [float(n) for n in range(50)]
    assert smoothed(line, 5) == pytest.approx(line)
    assert smoothed([4.0, 1.0, 4.0], 1) == [4.0, 3.0, 4.0]
    assert smoothed([4.0, math.nan, 2.0], 1) == [4.0, 3.0, 2.0]
    assert (smoothing_radius(10), smoothing_radius(400), smoothing_radius(10_000)) == (0, 10, 50)


def test_labels_of_small_numbers_are_exact() -> None:
    drawn = chart("c", [Curve(name="a", look="main", steps=[0, 1], values=[0.0, 1e-3])])
    assert drawn is not None
    assert [float(tick.label) for tick in drawn.y_ticks] == [0, 0.00025, 0.0005, 0.00075, 0.001]


def test_sparkline_spans_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2]) == "▁▅█"
    assert sparkline([]) == "" and len(sparkline(list(range(1000)), width=32)) == 32


def test_durations_read_naturally() -> None:
    assert [duration(s) for s in (5.25, 75.3, 3 * 3600 + 61)] == ["5.2 s", "1 min 15 s", "3 h 1 min"]
