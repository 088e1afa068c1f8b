"""Curves: as SVG for the page, as a PNG, as a line of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from luthier.training.report import ACCURACIES, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 800  # of a curve on the page: more than a screen has pixels to show it
_LOG_FROM = 20  # from this ratio of the largest value to the smallest on, the page begins with a logarithmic axis
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A named series over optimizer steps; ``look`` is a class of the page's style sheet."""

    name: str
    look: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A mark of an axis: where (in SVG units) and what it says."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve in SVG units. ``path`` is the ``d`` of a path, ``dots`` are circles."""

    name: str
    look: str
    path: str
    dots: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Everything a template needs to draw a chart of ``width`` x ``height`` units."""

    title: str
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]


def chart(
    title: str, curves: Sequence[Curve], *, width: int = 380, height: int = 190, log: bool = False, over: str = "step"
) -> Chart | None:
    """Lay curves out on common axes; values that are no numbers are left out. None if nothing is left.

    ``log``: a tenth of a value is as far below it everywhere; values that are not above 0 are left out. ``over``:
    what the horizontal axis counts; points are joined by a line where it is steps.
    """
    finite = [_finite_part(curve, above=0.0 if log else -math.inf) for curve in curves]
    points = [point for curve in finite for point in zip(curve.steps, curve.values, strict=True)]
    if not points:
        return None
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])
    y_marks = log_ticks(y_low, y_high) if log else ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_marks[0]), max(y_high, y_marks[-1])
    left, right, top, bottom = 62, 14, 12, 26

    def x_of(step: float) -> float:
        return round(left + (step - x_low) / (x_high - x_low) * (width - left - right), 2)

    def y_of(value: float) -> float:
        share = math.log(value / y_low) / math.log(y_high / y_low) if log else (value - y_low) / (y_high - y_low)
        return round(height - bottom - share * (height - top - bottom), 2)

    lines = []
    for curve in finite:
        thin = _thinned(curve)
        at = [(x_of(step), y_of(value)) for step, value in zip(thin.steps, thin.values, strict=True)]
        dots = tuple(
            (x, y, f"{over} {step:g}: {value:.4g}")
            for (x, y), step, value in zip(at, thin.steps, thin.values, strict=True)
            if curve.dots or len(at) == 1
        )
        path = "M" + "L".join(f"{x:g},{y:g}" for x, y in at) if over == "step" and len(at) > 1 else ""
        lines.append(Line(name=curve.name, look=curve.look, path=path, dots=dots))
    x_marks = [mark for mark in ticks(x_low, x_high, 7) if x_low <= mark <= x_high and mark.is_integer()]
    return Chart(
        title=title, width=width, height=height, left=left, right=width - right, top=top, bottom=height - bottom,
        x_ticks=tuple(Tick(at=x_of(mark), label=f"{mark:g}") for mark in x_marks),
        y_ticks=tuple(Tick(at=y_of(v), label=_number(v)) for v in y_marks),
        lines=tuple(lines),
    )  # fmt: skip


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that cover ``low … high``: ``(0.13, 3.9) -> [0, 1, 2, 3, 4]``."""
    raw = (high - low) / max(1, count - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * magnitude for nice in (1, 2, 2.5, 5, 10) if nice * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover ``low … high``, both above 0: ``(0.03, 4) -> [0.02, 0.05, 0.1, … 2, 5]``; over more than
    three powers of ten these alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]
    inner = [mark for mark in marks if low < mark < high]
    return [max(mark for mark in marks if mark <= low), *inner, min(mark for mark in marks if mark >= high)]


def spans_decades(curves: Sequence[Curve]) -> bool:
    """Whether the values of curves differ so much that their small ones are one line at the bottom of a linear axis."""
    values = [value for curve in curves for value in _finite_part(curve).values]
    return bool(values) and min(values) > 0 and max(values) > _LOG_FROM * min(values)


def smoothed(values: Sequence[float], radius: int) -> list[float]:
    """The mean of ``radius`` neighbours on each side, fewer at the ends: unlike a running average it does not lag.

    ``([4, 1, 4], 1) -> [4, 3, 4]``. Not-a-numbers are passed over; where there is nothing else, they stay.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    result = []
    for index, value in enumerate(values):
        reach = min(radius, index, len(values) - 1 - index)
        low, high = index - reach, index + reach + 1
        count = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / count if count else value)
    return result


def smoothing_radius(count: int) -> int:
    """A fortieth of the curve, at most 50 points; 0 means that there is nothing to smooth."""
    return min(50, count // 40)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Values as a line of blocks, the mean of each of ``width`` stretches: ``[0, 1, 2] -> "▁▅█"``."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    bounds = [len(finite) * n // count for n in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((mean - low) * scale + 0.5)] for mean in means)


def save_loss_png(result: RunResult, path: Path) -> None:
    """The loss curve with its smoothing and the evaluations, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    judged = [step for step in result.steps if ACCURACIES in step.measures]
    figure = Figure(figsize=(12 if judged else 8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if judged else 1, squeeze=False)[0]
    _plot(axes[0], [(step.step, step.loss) for step in result.steps], [(one.step, one.loss) for one in result.evals])
    axes[0].set(ylabel=f"loss per {result.unit}")
    if judged:
        held_out = [(one.step, one.judged) for one in result.evals if one.judged is not None]
        _plot(axes[1], [(step.step, step.measures[ACCURACIES]) for step in judged], held_out)
        axes[1].set(ylabel=f"share of {result.unit}s judged right", ylim=(-0.02, 1.02))
    figure.suptitle(result.model.name, parse_math=False)
    figure.savefig(path)


def _plot(axes: Axes, training: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> None:
    steps, values = [step for step, _ in training], [value for _, value in training]
    marker = "." if len(steps) == 1 else ""
    radius = smoothing_radius(len(values))
    colour, width = ("#9db7e8", 1) if radius else ("#2456b8", 2)  # nothing to smooth: the curve itself is the main one
    axes.plot(steps, values, color=colour, linewidth=width, label="training", marker=marker)
    if radius:
        axes.plot(steps, smoothed(values, radius), color="#2456b8", linewidth=2, label="smoothed")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#c4690a", markersize=5, label="held-out")
    axes.set(xlabel="step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _finite_part(curve: Curve, above: float = -math.inf) -> Curve:
    pairs = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v) and v > above]
    return replace(curve, steps=[s for s, _ in pairs], values=[v for _, v in pairs])


def _thinned(curve: Curve) -> Curve:
    if len(curve.steps) <= MAX_POINTS:
        return curve
    # the highest and the lowest of each stretch: spikes stay visible
    keep = {0, len(curve.steps) - 1}
    stretch = len(curve.steps) * 2 / MAX_POINTS
    for number in range(MAX_POINTS // 2):
        inside = range(round(number * stretch), min(round((number + 1) * stretch), len(curve.steps)))
        if inside:
            keep |= {min(inside, key=curve.values.__getitem__), max(inside, key=curve.values.__getitem__)}
    chosen = sorted(keep)
    return replace(curve, steps=[curve.steps[i] for i in chosen], values=[curve.values[i] for i in chosen])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low < high:
        return low, high
    return (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)


def _number(value: float) -> str:
    """``0.00002 -> "2e-5"``."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")
