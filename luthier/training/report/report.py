"""What a person and a program want to know of a run when it is over.

output.dir/
  report.json   all numbers           report.html   a page that needs nothing else
  loss.png      the curve, to paste somewhere
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from luthier.ledger import rows_beside
from luthier.terminal import facts_table, plain_table
from luthier.training.report import (
    ACCURACIES,
    LOSS_PNG,
    MARGINS,
    REPORT_HTML,
    REPORT_JSON,
    REWARDS,
    Ended,
    GenerationRound,
    RunResult,
    plots,
)
from luthier.training.report.drawn_answers import AnswersOfRun, answers_of_run, numbers_of, page_templates
from luthier.writing import counted, to_json, write_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run's result with what was known before it began.

    plan          `check.plan.RunPlan` in JSON types
    fingerprints  of what decides the data: encoder, tokenizer
    sample        the first sample in colour, HTML that is safe to embed
    quickstart    whether this was ``luthier quickstart``, whose JSON says how exact the answers were
    """

    result: RunResult
    plan: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    sample: Markup = field(default_factory=Markup)
    quickstart: bool = False

    def to_json(self) -> dict[str, Any]:
        """The content of ``report.json``. ``ledger`` holds numbers: read = prepared + dropped + quarantined, prepared =
        trained + not yet trained. ``answers``: sampled = trained + no_signal + dropped, of those that the run drew."""
        result = self.result
        told: dict[str, object] = {
            "ended": result.ended.value,
            "started_at": result.started_at,
            "seconds": result.seconds,
            "steps": result.global_step,
            "max_steps": result.max_steps,
            "epochs": result.epochs,
            "tokens": sum(step.tokens for step in result.steps),
            "target_tokens": sum(step.target_tokens for step in result.steps),
            "tokens_per_second": tokens_per_second(result),
            "losses": [step.loss for step in result.steps],
            "final_loss": result.final_loss,
            "curve": [asdict(step) for step in result.steps],
            "eval": [asdict(one) for one in result.evals],
            "exact_match": [
                {"step": one.step, "share": one.exact_match, "rows": len(one.records)} for one in result.generations
            ],
            "answer_metrics": [{"step": one.step, **one.metrics} for one in result.generations if one.metrics],
            "generations": [asdict(one) for one in result.generations],
            "best_checkpoint": result.best_checkpoint,
            "best_metric": result.best_metric,
            "ledger": ledger_numbers(result.ledger),
            "answers": result.answers,
            "mixture": [asdict(source) for source in result.mixture],
            "plan": dict(self.plan),
            "model": asdict(result.model),
            "adapter": result.adapter,
            "peak_memory_bytes": result.peak_memory_bytes,
            "world_size": result.world_size,
            "resumed_from": result.resumed_from,
            "set_aside": list(result.set_aside),
            "fingerprints": dict(self.fingerprints),
            "versions": result.versions,
            "config": result.config,
            "files": {"output_dir": result.output_dir, "model_dir": result.model_dir, "merged_dir": result.merged_dir},
        }
        if self.quickstart:
            told["quickstart"] = exact_match_change(result)
        return told


def exact_match_change(result: RunResult) -> dict[str, float | None]:
    """Share of held-out rows answered exactly by the first and by the last round; None without two rounds."""
    rounds = result.generations
    return {
        "exact_match_before": rounds[0].exact_match if len(rounds) > 1 else None,
        "exact_match_after": rounds[-1].exact_match if len(rounds) > 1 else None,
    }


def ledger_numbers(ledger: Mapping[str, Any]) -> dict[str, object]:
    """`Ledger.to_json` with totals in place of the counts per reason, which move to ``reasons``."""
    dropped, quarantined = ledger.get("dropped", {}), ledger.get("quarantined", {})
    return {
        "read": ledger.get("read", 0),
        "prepared": ledger.get("prepared", 0),
        "trained": ledger.get("trained", 0),
        "not_yet_trained": ledger.get("not_yet_trained", 0),
        "dropped": sum(dropped.values()),
        "quarantined": sum(quarantined.values()),
        "reasons": {"dropped": dict(dropped), "quarantined": dict(quarantined)},
        "notes": dict(ledger.get("notes", {})),
        "examples": dict(ledger.get("examples", {})),
    }


def tokens_per_second(result: RunResult) -> float | None:
    """Tokens without padding, over the time that steps took; None if there was no step."""
    seconds = sum(step.seconds for step in result.steps)
    return sum(step.tokens for step in result.steps) / seconds if seconds else None


def write_report(report: Report) -> list[Path]:
    """Write the three files into the run's folder and name them, the page first."""
    folder = report.result.path
    folder.mkdir(parents=True, exist_ok=True)
    told = report.to_json()
    page, numbers, picture = folder / REPORT_HTML, folder / REPORT_JSON, folder / LOSS_PNG
    write_text(numbers, to_json(told) + "\n")
    write_text(page, report_page(report.result, told, sample=report.sample))
    written = [page, numbers]
    if report.result.steps:
        plots.save_loss_png(report.result, picture)
        written.append(picture)
    return written


def summary(report: Report, files: list[Path]) -> Group:
    """The end of a run in a terminal: what became of loss, answers and rows, and where everything is."""
    result = report.result
    epochs = counted(float(f"{result.epochs:.3g}"), "epoch")
    head = Text.assemble(
        (_HEADLINES[result.ended], "bold green" if result.ended is not Ended.INTERRUPTED else "bold yellow"),
        (f"  {result.model.name}", "bold"),
        (f"   {counted(result.global_step, 'step')}, {epochs} in {duration(result.seconds)}", "dim"),
    )
    parts: list[RenderableType] = [head, Padding(facts_table(_facts(report)), (1, 0, 1, 2))]
    if report.quickstart:
        parts.append(Padding(_quickstart_words(result), (0, 0, 1, 2)))
    names = [*files, *([result.path / result.model_dir] if result.model_dir is not None else [])]
    parts.extend(Padding(Text(str(name), style="cyan"), (0, 0, 0, 2)) for name in names)
    return Group(*parts)


_HEADLINES = {
    Ended.COMPLETED: "Trained",
    Ended.EARLY_STOPPED: "Stopped early",
    Ended.INTERRUPTED: "Interrupted",
}


def duration(seconds: float) -> str:
    """``75.3 -> "1 min 15 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _facts(report: Report) -> list[tuple[str, RenderableType]]:
    result = report.result
    facts: list[tuple[str, RenderableType]] = []
    means, losses = _mean_rewards(result), [step.loss for step in result.steps]
    if means is not None:
        told = Text.assemble(f"{means[0]:.4g} → ", (f"{means[1]:.4g}", "bold"))
        told.append(f"   {plots.sparkline(_rewards(result))}", "cyan").append("   means of a tenth of the steps", "dim")
        facts.append(("reward", told))
    elif losses:
        curve = (f"   {plots.sparkline(losses)}", "cyan")
        facts.append(("loss", Text.assemble(f"{losses[0]:.3f} → ", (f"{losses[-1]:.3f}", "bold"), curve)))
    if result.evals:
        first, last = result.evals[0], result.evals[-1]
        before = "" if first is last else f"{first.loss:.3f} → "
        words = f"   {last.words}" if last.judged is None else f"   per {result.unit}"
        each = "".join(f"\n{loss:.3f}   {name}" for name, loss in last.loss_by_source.items())
        facts.append(("eval loss", Text.assemble(before, (f"{last.loss:.3f}", "bold"), (words, "dim"), each)))
        if last.judged is not None:
            facts.append(("judged right", _judged(result)))
    if result.generations:
        facts.append(("exact answers", _exact(result.generations)))
        facts += [(name, _change(name, result.generations)) for name in result.generations[-1].scores]
    speed = tokens_per_second(result)
    if speed is not None:
        tokens = sum(step.tokens for step in result.steps)
        targets = sum(step.target_tokens for step in result.steps)
        facts.append(("tokens", f"{tokens:,}, of which {counted(targets, 'target')}   {speed:,.0f} a second"))
    facts.append(("rows", _rows(ledger_numbers(result.ledger))))
    if result.answers:
        facts.append(("answers", _sampled(result.answers)))
    if len(result.mixture) > 1:
        facts.append(("data sets", _data_sets(result)))
    if result.resumed_from is not None:
        facts.append(("resumed from", result.resumed_from))
    if result.set_aside:
        facts.append(("set aside", f"{', '.join(result.set_aside)}: checkpoints that could not be used"))
    if result.ended is Ended.INTERRUPTED:
        begins_anew = result.config.get("output", {}).get("overwrite", False)
        again = "run it again with output.overwrite=false" if begins_anew else "run the same command again"
        facts.append(
            ("to go on", again if not report.quickstart else "the quickstart begins anew when it is run again")
        )
    return facts


def _judged(result: RunResult) -> Text:
    first, last = result.evals[0], result.evals[-1]
    assert last.judged is not None
    before = "" if first is last or first.judged is None else f"{first.judged:.1%} → "
    rows = f"   of {last.num_targets:,} held-out {result.unit}s"
    return Text.assemble(before, (f"{last.judged:.1%}", "bold"), (rows, "dim"))


def _exact(rounds: tuple[GenerationRound, ...]) -> Text:
    last = rounds[-1]
    before = "" if len(rounds) == 1 else f"{rounds[0].exact_match:.0%} → "
    rows = f"   of {counted(len(last.records), 'held-out row')}, answered exactly"
    return Text.assemble(before, (f"{last.exact_match:.0%}", "bold"), (rows, "dim"))


def _change(name: str, rounds: tuple[GenerationRound, ...]) -> Text:
    """A metric of answers before and after, with the interval after: ``0.12 → 0.34   0.30 to 0.38``."""
    first, last = rounds[0], rounds[-1]
    before = f"{first.scores[name]:.4g} → " if len(rounds) > 1 and name in first.scores else ""
    ends = last.metrics[name].get("interval")
    told = "" if ends is None else f"   {ends[0]:.4g} to {ends[1]:.4g} (95 %)"
    return Text.assemble(before, (f"{last.scores[name]:.4g}", "bold"), (told, "dim"))


def _rows(ledger: Mapping[str, Any]) -> Text:
    dropped, quarantined, waiting = ledger["dropped"], ledger["quarantined"], ledger["not_yet_trained"]
    return Text.assemble(
        f"{ledger['read']:,} read = {ledger['trained']:,} trained + ",
        (f"{waiting:,} not yet trained + " if waiting else "", "yellow"),
        (f"{dropped:,} dropped", "yellow" if dropped else ""), " + ",
        (f"{quarantined:,} quarantined", "red" if quarantined else ""), (rows_beside(ledger["notes"]), "dim"),
    )  # fmt: skip


def _sampled(told: Mapping[str, Any]) -> Text:
    dropped, lost, waiting = sum(told["dropped"].values()), told["steps_without_counts"], told["waiting"]
    reasons = "".join(f"\n{count:,}   {reason}" for reason, count in told["dropped"].items())
    return Text.assemble(
        f"{told['sampled']:,} sampled = {told['trained']:,} trained + {told['no_signal']:,} no signal + ",
        (f"{dropped:,} dropped", "yellow" if dropped else ""), (reasons, "dim"),
        (f"\n{waiting:,}   drawn for steps that did not come" if waiting else "", "dim"),
        (f"\n{counted(lost, 'step')} without counts: files are missing in rollouts/" if lost else "", "red"),
    )  # fmt: skip


def _data_sets(result: RunResult) -> Table:
    """What was trained on, and how well it is known: a line for each data set."""
    losses = result.source_losses
    table = plain_table("", *(Column(no_wrap=True) for _ in range(3)), gap=2)
    for source in result.mixture:
        first, last = losses.get(source.name, (None, None))
        loss = "" if first is None else Text.assemble(f"loss {first:.3f} → ", (f"{last:.3f}", "bold"))
        share = Text.assemble((f"{source.share_of_tokens:.1%}", "bold"), " of tokens")
        table.add_row(Text(source.name), share, counted(source.rows, "row"), loss)
    return table


def _quickstart_words(result: RunResult) -> Text:
    change = exact_match_change(result)
    before, after = change["exact_match_before"], change["exact_match_after"]
    if before is None or after is None:
        return Text("The run ended before the answers could be compared.")
    count = len(result.generations[-1].records)
    return Text.assemble(
        f"Of {counted(count, 'question')} it had never seen, the model answered ", (f"{before:.0%}", "bold"),
        " exactly before training and ", (f"{after:.0%}", "bold green"), " after it.",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------
# ``report.html``: one page with its style, curves and data inside. Every text is escaped by the template.


MAX_RIGHT, MAX_WRONG = 12, 300  # answers on the page; report.json has all
MAX_SOURCE_CHARTS = 12
# Title, measure, and the one beside it; where there is none, held-out rows are.
MEASURE_CHARTS = (
    ("judged right", ACCURACIES, None),
    ("reward margin", MARGINS, None),
    ("reward", *REWARDS),
    ("log-probability", "logps/chosen", "logps/rejected"),
    ("KL estimate", "kl", None),
)
# Classes of the page's style sheet: of curves in one chart, which has no more.
LOOKS = ("main", "raw", "eval", "green", "violet", "teal", "grey")
# Of answers that the run drew: title and measures, each a curve.
DRAWN_CHARTS = (
    ("reward", ("reward",)),
    ("finished", ("finished",)),
    ("tokens of an answer", ("answer_tokens",)),
    ("entropy", ("entropy",)),
    ("gap of sampler and trainer", ("gap", "gap_p99")),
)


def report_page(result: RunResult, told: Mapping[str, object], *, sample: Markup) -> str:
    """The page. ``told`` is the content of ``report.json``; ``sample`` is HTML that is safe to embed."""
    environment = page_templates()
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["counted"] = counted
    environment.filters["share"] = lambda number: f"{number:.1%}"
    environment.filters["short"] = lambda number: f"{number:.4g}"
    environment.filters["time"] = duration
    drawn = answers_of_run(result.path) if _rewards(result) else None
    return environment.get_template("report.html.jinja").render(
        result=result,
        told=told,
        loss_charts=_loss_charts(result),
        starts_with_log=plots.spans_decades(_loss_curves(result)),
        small_charts=[*_drawn_charts(result), *_measure_charts(result), *_small_charts(result)],
        drawn=drawn,
        mean_rewards=_mean_rewards(result),
        reward_over_length=None if drawn is None else _reward_over_length(drawn),
        numbers_of=numbers_of,
        sources=_sources(result),
        source_charts=list(_source_charts(result)),
        wrong=_answers(result.generations, equal=False),
        right=_answers(result.generations, equal=True),
        max_right=MAX_RIGHT,
        max_wrong=MAX_WRONG,
        sample=sample,
        config=json.dumps(told["config"], indent=2, ensure_ascii=False),
    )


def _loss_charts(result: RunResult) -> dict[str, plots.Chart]:
    """The losses on a linear axis, and on a logarithmic one where some are above 0 and none is below."""
    curves = _loss_curves(result)
    has_negative = any(value < 0 for curve in curves for value in curve.values)
    charts = {
        name: plots.chart("loss", curves, width=960, height=320, log=name == "logarithmic")
        for name in ("linear", *(() if has_negative else ("logarithmic",)))
    }
    return {name: drawn for name, drawn in charts.items() if drawn is not None}


def _loss_curves(result: RunResult) -> list[plots.Curve]:
    steps, losses = [step.step for step in result.steps], [step.loss for step in result.steps]
    radius = plots.smoothing_radius(len(losses))
    look = "raw" if radius else "main"  # nothing to smooth: the curve itself is the main one
    # beside a smoothed line the steps are dots: a line would lie behind it, unseen
    curves = [_curve(f"loss per {result.unit}", look, zip(steps, losses, strict=True), dots=bool(radius))]
    if radius:
        curves.append(_curve("smoothed", "main", zip(steps, plots.smoothed(losses, radius), strict=True)))
    if result.evals:
        curves.append(_curve("eval", "eval", ((one.step, one.loss) for one in result.evals), dots=True))
    return curves


def _curve(name: str, look: str, points: Iterable[tuple[float, float]], *, dots: bool = False) -> plots.Curve:
    pairs = list(points)
    return plots.Curve(name=name, look=look, steps=[x for x, _ in pairs], values=[y for _, y in pairs], dots=dots)


def _small(title: str, curves: Sequence[plots.Curve], *, log: bool = False) -> Iterator[plots.Chart]:
    """A small chart, if there is something to draw."""
    if (drawn := plots.chart(title, curves, log=log)) is not None:
        yield drawn


def _measure_charts(result: RunResult) -> Iterator[plots.Chart]:
    """What is measured beside the loss where answers are compared, in training and on held-out rows."""
    for title, first, second in MEASURE_CHARTS:
        curve = _measured(result, first, "main", "chosen" if second else "training")
        if second is None:
            judged = [one for one in result.evals if first in one.measures and one.judged is not None]
            beside = _curve("eval", "eval", ((one.step, one.measures[first]) for one in judged), dots=True)
        else:
            beside = _measured(result, second, "raw", "rejected")
        if curve.steps:
            yield from _small(title, [curve, *([beside] if beside.steps else [])])


def _drawn_charts(result: RunResult) -> Iterator[plots.Chart]:
    """What is measured of answers that the run drew; of rewards the sum, and each where there are several."""
    if not _rewards(result):
        return
    names = {name for step in result.steps for name in step.measures}
    each = sorted(name for name in names if name.startswith("reward/"))
    for title, measures in DRAWN_CHARTS:
        shown = [*measures, *(each if title == "reward" and len(each) > 1 else [])]
        for start in range(0, len(shown), len(LOOKS)):
            some = zip(shown[start : start + len(LOOKS)], LOOKS, strict=False)
            curves = [_measured(result, name, look, name.rpartition("/")[2]) for name, look in some]
            curves = [curve for curve in curves if curve.steps]
            yield from _small(title, curves, log=title.startswith("gap") and plots.spans_decades(curves))


def _reward_over_length(drawn: AnswersOfRun) -> plots.Chart | None:
    curve = _curve("", "point", drawn.points, dots=True)
    return plots.chart("reward over tokens of the answer", [curve], over="tokens")


def _rewards(result: RunResult) -> list[float]:
    return [step.measures["reward"] for step in result.steps if "reward" in step.measures]


def _mean_rewards(result: RunResult) -> tuple[float, float] | None:
    """Of the first and the last tenth of the steps. The losses of ``rl`` are around 0 however much is learned."""
    rewards = _rewards(result)
    part = max(1, round(len(rewards) / 10))
    return (fmean(rewards[:part]), fmean(rewards[-part:])) if rewards else None


def _measured(result: RunResult, measure: str, look: str, name: str) -> plots.Curve:
    return _curve(name, look, ((s.step, s.measures[measure]) for s in result.steps if measure in s.measures))


def _small_charts(result: RunResult) -> Iterator[plots.Chart]:
    of_step = {
        "learning rate": [(step.step, step.learning_rate) for step in result.steps],
        "gradient norm": [(step.step, step.grad_norm) for step in result.steps if step.grad_norm is not None],
        "tokens a second": [(step.step, step.tokens_per_second) for step in result.steps],
    }
    for title, points in of_step.items():
        yield from _small(title, [_curve("", "main", points)])


def _sources(result: RunResult) -> list[dict[str, object]]:
    """A line of the table of data sets each; nothing where there is one."""
    if len(result.mixture) < 2:
        return []
    losses = result.source_losses
    return [{"took": source, "losses": losses.get(source.name)} for source in result.mixture]


def _source_charts(result: RunResult) -> Iterator[plots.Chart]:
    """The losses of the data sets with the most tokens."""
    for source in sorted(result.mixture, key=lambda source: -source.tokens)[:MAX_SOURCE_CHARTS]:
        of_step, of_eval = (
            [(each.step, each.loss_by_source[source.name]) for each in told if source.name in each.loss_by_source]
            for told in (result.steps, result.evals)
        )
        curves = [_curve("loss", "main", of_step), _curve("eval", "eval", of_eval, dots=True)]
        yield from _small(source.name, curves)


def _answers(rounds: tuple[GenerationRound, ...], *, equal: bool) -> list[dict[str, object]]:
    """One entry per row of the last round that was answered right, or wrong, with the answer before training."""
    if not rounds:
        return []
    before = {record.address: record for record in rounds[0].records} if len(rounds) > 1 else {}
    chosen = [record for record in rounds[-1].records if record.equal is equal]
    return [{"after": record, "before": before.get(record.address)} for record in chosen]
