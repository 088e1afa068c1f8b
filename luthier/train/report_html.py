"""``report.html``: one page with its style, curves and data inside. Every text is escaped by the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from luthier.train.plots import Chart, Curve, chart, smoothed, smoothing_radius, spans_decades
from luthier.train.result import ACCURACIES, MARGINS, REWARDS, GenerationRound, RunResult

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


def report_page(result: RunResult, told: Mapping[str, Any], *, sample: Markup) -> str:
    """The page. ``told`` is the content of ``report.json``; ``sample`` is HTML that is safe to embed."""
    loader = PackageLoader("luthier.train")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["share"] = lambda number: f"{number:.1%}"
    environment.filters["short"] = lambda number: f"{number:.4g}"
    environment.filters["time"] = _time
    return environment.get_template("report.html.jinja").render(
        result=result,
        told=told,
        loss_charts=_loss_charts(result),
        starts_with_log=spans_decades(_loss_curves(result)),
        small_charts=[*_measure_charts(result), *_small_charts(result)],
        sources=_sources(result),
        source_charts=_source_charts(result),
        wrong=_answers(result.generations, equal=False),
        right=_answers(result.generations, equal=True),
        max_right=MAX_RIGHT,
        max_wrong=MAX_WRONG,
        sample=sample,
        config=json.dumps(told["config"], indent=2, ensure_ascii=False),
    )


def _time(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def _loss_charts(result: RunResult) -> dict[str, Chart]:
    """The losses on a linear axis, and on a logarithmic one where there is any value above 0."""
    curves = _loss_curves(result)
    charts = {
        name: chart("loss", curves, width=960, height=320, log=name == "logarithmic")
        for name in ("linear", "logarithmic")
    }
    return {name: drawn for name, drawn in charts.items() if drawn is not None}


def _loss_curves(result: RunResult) -> list[Curve]:
    steps = [step.step for step in result.steps]
    losses = [step.loss for step in result.steps]
    radius = smoothing_radius(len(losses))
    look = "raw" if radius else "main"  # nothing to smooth: the curve itself is the main one
    # beside a smoothed line the steps are dots: a line would lie behind it, unseen
    curves = [Curve(name=f"loss per {result.unit}", look=look, steps=steps, values=losses, dots=bool(radius))]
    if radius:
        curves.append(Curve(name="smoothed", look="main", steps=steps, values=smoothed(losses, radius)))
    if result.evals:
        evals = result.evals
        values = [one.loss for one in evals]
        curves.append(Curve(name="eval", look="eval", steps=[one.step for one in evals], values=values, dots=True))
    return curves


def _measure_charts(result: RunResult) -> list[Chart]:
    """What is measured beside the loss where answers are compared, in training and on held-out rows."""
    measured = {name for step in result.steps for name in step.measures}
    charts = []
    for title, first, second in MEASURE_CHARTS:
        curves = [_measured(result, first, "main", "chosen" if second else "training")]
        if second is None:
            judged = [one for one in result.evals if first in one.measures and one.judged is not None]
            values = [one.measures[first] for one in judged]
            curves.append(Curve(name="eval", look="eval", steps=[one.step for one in judged], values=values, dots=True))
        else:
            curves.append(_measured(result, second, "raw", "rejected"))
        if first in measured:
            charts.append(chart(title, [curve for curve in curves if curve.steps], width=380, height=190))
    return [one for one in charts if one is not None]


def _measured(result: RunResult, measure: str, look: str, name: str) -> Curve:
    steps = [step for step in result.steps if measure in step.measures]
    return Curve(
        name=name, look=look, steps=[step.step for step in steps], values=[step.measures[measure] for step in steps]
    )


def _small_charts(result: RunResult) -> list[Chart]:
    steps = [step.step for step in result.steps]
    measured = [step for step in result.steps if step.grad_norm is not None]
    norms = [step.grad_norm for step in measured if step.grad_norm is not None]
    curves = {
        "learning rate": Curve(name="", look="main", steps=steps, values=[step.learning_rate for step in result.steps]),
        "gradient norm": Curve(name="", look="main", steps=[step.step for step in measured], values=norms),
        "tokens a second": Curve(
            name="", look="main", steps=steps, values=[step.tokens_per_second for step in result.steps]
        ),
    }
    charts = [chart(title, [curve], width=380, height=190) for title, curve in curves.items()]
    return [one for one in charts if one is not None]


def _sources(result: RunResult) -> list[dict[str, Any]]:
    """A line of the table of data sets each; nothing where there is one."""
    if len(result.mixture) < 2:
        return []
    losses = result.source_losses
    return [{"took": source, "losses": losses.get(source.name)} for source in result.mixture]


def _source_charts(result: RunResult) -> list[Chart]:
    """The losses of the data sets with the most tokens."""
    largest = sorted(result.mixture, key=lambda source: -source.tokens)[:MAX_SOURCE_CHARTS]
    charts = []
    for name in (source.name for source in largest):
        of_step = {step.step: step.loss_by_source[name] for step in result.steps if name in step.loss_by_source}
        of_eval = {one.step: one.loss_by_source[name] for one in result.evals if name in one.loss_by_source}
        curves = [
            Curve(name="loss", look="main", steps=list(of_step), values=list(of_step.values())),
            Curve(name="eval", look="eval", steps=list(of_eval), values=list(of_eval.values()), dots=True),
        ]
        charts.append(chart(name, curves, width=380, height=190))
    return [one for one in charts if one is not None]


def _answers(rounds: tuple[GenerationRound, ...], *, equal: bool) -> list[dict[str, Any]]:
    """One entry per row of the last round that was answered right, or wrong, with the answer before training."""
    if not rounds:
        return []
    before = {record.address: record for record in rounds[0].records} if len(rounds) > 1 else {}
    chosen = [record for record in rounds[-1].records if record.equal is equal]
    return [{"after": record, "before": before.get(record.address)} for record in chosen]
