"""How good answers are: metrics by name, in an open table, and what they say of answers. N answers, S sums, R draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import comb
from typing import Any, SupportsFloat

import numpy as np

from luthier.errors import LuthierError, PluginError, UserError, install_hint
from luthier.metrics import texts
from luthier.metrics.texts import CorpusScore, OfRow, ScoreOf, Sums, interval, mean_of
from luthier.plugins import Table, failure_of

OfCorpus = Callable[[Sequence[str], Sequence[str]], CorpusScore]
MessageDict = Mapping[str, Any]  # an assistant's message in OpenAI's form
OfMessage = Callable[[MessageDict, MessageDict], float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLoss:
    """The mean cross-entropy of a row's own answers, in nats, over so many targets, each of which counts once."""

    row: str
    loss: float
    targets: int


JUDGE = "judge"
OfLosses = Callable[[Sequence[RowLoss]], CorpusScore]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One of four functions: ``of_row(expected, generated)`` gives a number for each answer, whose mean is told, or
    None where the row has no say; ``of_message(expected, generated)`` does so for answers read back as messages;
    ``of_corpus(all expected, all generated)`` gives one for all of them; ``of_losses`` one for the losses of the rows'
    own answers, for which nothing is generated. Or it is what a judge has said (``is_judged``), which stands with the
    answers.
    ``without_say``: where the row has no say for one of two answers that are compared, or for one of several samples,
    and has one for another, this is what the first one is worth; None: it does not count, and of two neither.
    ``with_argument`` makes the metric that a name with an argument means: ``regex:PATTERN``. ``package`` is what it
    needs beside Luthier, which ``extra`` of Luthier installs."""

    of_row: OfRow | None = None
    of_message: OfMessage | None = None
    of_corpus: OfCorpus | None = None
    of_losses: OfLosses | None = None
    is_judged: bool = False
    without_say: float | None = None
    with_argument: Callable[[str], Metric] | None = None
    package: str | None = None
    extra: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether what it needs is installed."""
        return self.package is None or find_spec(self.package) is not None

    @property
    def is_whole(self) -> bool:
        """Whether it can be measured without an argument."""
        functions = (self.of_row, self.of_message, self.of_corpus, self.of_losses)
        return self.is_judged or any(of is not None for of in functions)

    @property
    def is_of_rows(self) -> bool:
        """Whether it gives a number for each answer."""
        return self.is_judged or self.of_row is not None or self.of_message is not None


def _bleu_by(tokenize: str) -> Metric:
    texts.bleu(["a"], ["a"], tokenize)  # raises for a way that there is not
    return Metric(of_corpus=partial(texts.bleu, tokenize=tokenize))


def _perplexity(losses: Sequence[RowLoss]) -> CorpusScore:
    parts_N2 = np.array([(each.loss * each.targets, each.targets) for each in losses], dtype=np.float64)

    def score_of(sums_2: Sums) -> float:
        return math.exp(min(mean_of(sums_2), 700.0))  # a float ends at e^709

    sums_2 = parts_N2.sum(axis=0)
    signature = f"loss:{mean_of(sums_2):.9g}|targets:{int(sums_2[1])}"
    return CorpusScore(score=score_of(sums_2), signature=signature, parts_NS=parts_N2, score_of=score_of)


METRICS: Table[Metric] = Table(
    "metric",
    {
        "exact": Metric(of_row=texts.is_exact),
        "normalised": Metric(of_row=texts.is_alike),
        "contains": Metric(of_row=texts.is_contained),
        "number": Metric(of_row=texts.is_same_number),
        "choice": Metric(of_row=texts.is_same_choice),
        "regex": Metric(with_argument=lambda pattern: Metric(of_row=texts.by_pattern(pattern))),
        "json": Metric(of_row=texts.is_same_json),
        "tool_names": Metric(of_message=texts.calls_same_tools, without_say=1.0),  # no call, and none is wanted
        "tool_calls": Metric(of_message=texts.makes_same_calls, without_say=1.0),
        "rouge1": Metric(of_row=texts.rouge("rouge1"), package="rouge_score", extra="metrics"),
        "rouge2": Metric(of_row=texts.rouge("rouge2"), package="rouge_score", extra="metrics"),
        "rougeL": Metric(of_row=texts.rouge("rougeL"), package="rouge_score", extra="metrics"),
        "bleu": Metric(of_corpus=texts.bleu, with_argument=_bleu_by, package="sacrebleu", extra="metrics"),
        "chrf": Metric(of_corpus=texts.chrf, package="sacrebleu", extra="metrics"),
        "perplexity": Metric(of_losses=_perplexity),
        JUDGE: Metric(is_judged=True),
    },
)


def register_metric(name: str, metric: OfRow | Metric) -> None:
    """Add a metric of predictions: a function of (expected, generated) that gives a number, or a `Metric`.

    Raises `PluginError` where there is one of this name. What its function gives is looked at whenever it is called: a
    `PluginError` says so where that is no number.
    """
    METRICS.add(name, _guarded(name, metric if isinstance(metric, Metric) else Metric(of_row=metric)))


def _guarded(name: str, metric: Metric) -> Metric:
    """The same metric, whose functions raise `PluginError` where they give something else than they should."""
    if not isinstance(metric, Metric) or not (metric.is_whole or metric.with_argument):
        what = f"the metric {name!r} measures nothing: it has none of the functions"
        raise PluginError(what, hint="give it of_row, a function of (expected, generated) (docs/plugins.md)")
    each, whole = partial(_number, name), partial(_score, name)
    return replace(
        metric,
        of_row=metric.of_row and partial(each, metric.of_row),
        of_message=metric.of_message and partial(each, metric.of_message),
        of_corpus=metric.of_corpus and partial(whole, metric.of_corpus),
        of_losses=metric.of_losses and partial(whole, metric.of_losses),
        with_argument=metric.with_argument and partial(_with_argument, name, metric.with_argument),
    )


def _number(name: str, function: Callable[..., object], *arguments: object) -> float | None:
    found = _called(name, function, *arguments)
    if found is not None and not isinstance(found, SupportsFloat):
        what = f"the metric {name!r} of {METRICS.added_by(name)} gives {str(found)[:40]!r}, a {type(found).__name__}"
        raise PluginError(what, hint="return a number for each answer, or None where the row has no say")
    number = math.nan if found is None else float(found)
    return number if math.isfinite(number) else None


def _score(name: str, function: Callable[..., object], *arguments: object) -> CorpusScore:
    found = _called(name, function, *arguments)
    if not isinstance(found, CorpusScore):
        what = f"the metric {name!r} of {METRICS.added_by(name)} gives {str(found)[:40]!r}, a {type(found).__name__}"
        raise PluginError(what, hint="return a luthier.CorpusScore of all answers")
    if not math.isfinite(found.score):
        what = f"the metric {name!r} of {METRICS.added_by(name)} has the score {found.score}"
        raise PluginError(what, hint="give a finite number, also where no answer counts")
    return found


def _with_argument(name: str, function: Callable[[str], Metric], argument: str) -> Metric:
    return _guarded(name, function(argument))


def _called(name: str, function: Callable[..., object], *arguments: object) -> object:
    try:
        return function(*arguments)
    except (LuthierError, MemoryError):
        raise
    except Exception as error:
        raise failure_of(f"the metric {name!r} of {METRICS.added_by(name)}", error) from error


def names_in(text: str) -> list[str]:
    """Names with commas between them. What stands behind a colon is an argument, which goes to the end.

    ``"exact, regex:#### (a,b)" -> ["exact", "regex:#### (a,b)"]``
    """
    names: list[str] = []
    while text:
        name, _, rest = text.partition(",")
        if ":" in name:
            return [*names, text.lstrip()]
        names, text = [*names, name.strip()], rest
    return names


def chosen_metrics(names: Sequence[str] | None) -> tuple[dict[str, Metric], list[str]]:
    """The metrics of these names, or all that need no argument and whose packages are here; and the names of those
    whose packages are not.

    Raises `UserError` for a name that is unknown, that was asked for and lacks its package, or whose argument is
    missing or wrong.
    """
    if names is None:
        found = {name: metric for name, metric in METRICS.items() if metric.is_whole}
        here = {name: metric for name, metric in found.items() if metric.is_here}
        return here, [name for name in found if name not in here]
    return {name: _asked_for(name) for name in names}, []


def metrics_of_answers(names: Sequence[str]) -> dict[str, Metric]:
    """`chosen_metrics` of these names, for texts of answers alone. Raises `UserError` for a metric of losses or of
    messages too."""
    chosen, _ = chosen_metrics(names)
    for name, metric in chosen.items():
        if metric.of_losses is not None:
            hint = "leave it out: each evaluation tells it (eval.strategy), and so does luthier predict"
            raise UserError(f"the metric {name!r} measures losses, not answers", hint=hint)
        if metric.of_message is not None:
            hint = "leave it out here: luthier predict measures it"
            raise UserError(f"the metric {name} needs answers that can be parsed into messages", hint=hint)
    return chosen


def _asked_for(name: str) -> Metric:
    of, colon, argument = name.partition(":")
    metric = METRICS.named(of)
    if not metric.is_here:
        named = f"install it: {METRICS.added_by(of)}, which has this metric, names it"
        hint = named if metric.extra is None else install_hint(metric.extra)
        raise UserError(f"the metric {of} needs the package {metric.package!r}, which is not installed", hint=hint)
    if colon:
        if metric.with_argument is None:
            raise UserError(f"the metric {of} takes no argument, and {argument!r} stands behind it", hint=f"write {of}")
        return replace(metric.with_argument(argument), package=metric.package, extra=metric.extra)
    if not metric.is_whole:
        raise UserError(f"the metric {of} needs an argument", hint=f"write {of}:ARGUMENT (docs/predict.md)")
    return metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The answers to one question, a sample each, and the row that the question is of. ``expected`` is None where the
    row holds no answer. ``message`` and ``messages`` are the same read back, None where they cannot be. ``scores``:
    what a judge gave the samples, None where it gave nothing."""

    row: str
    expected: str | None
    generated: tuple[str, ...]
    message: MessageDict | None = None
    messages: tuple[MessageDict | None, ...] = ()
    scores: tuple[float | None, ...] = ()


def measured(
    metrics: Mapping[str, Metric], answers: Sequence[Answered], losses: Sequence[RowLoss] = ()
) -> dict[str, dict[str, object]]:
    """What each metric says of the answers, or of the losses; a metric that no row has a say in is left out.

    mean, score  over all samples of all questions; with ``interval``, its 95 % interval over rows
    counted      how many samples were measured, where it is not all of them
    best         the mean over questions of each question's best sample, where there are several
    pass@K       of a metric of right and wrong: the chance that one of K samples is right
    """
    told: dict[str, dict[str, object]] = {}
    for name, metric in metrics.items():
        if metric.of_losses is not None:
            found = _whole(metric.of_losses(losses), [each.row for each in losses]) if losses else {}
        else:
            found = _of_rows(metric, answers) if metric.is_of_rows else _of_all(metric, answers)
        if found:
            told[name] = found
    return told


def why_unmeasured(metric: Metric) -> str:
    """What to say of a metric that was asked for and is not among what `measured` gives."""
    if metric.of_losses is not None:
        return "there are no losses of the rows' own answers"
    return "no answer has a score" if metric.is_judged else "no row has an answer of the kind that it compares"


def _of_all(metric: Metric, answers: Sequence[Answered]) -> dict[str, object]:
    assert metric.of_corpus is not None, "a metric has one of the functions"
    if all(one.expected is None for one in answers):
        return {}
    return _whole(*_corpus(metric.of_corpus, answers))


def _corpus(of_corpus: OfCorpus, answers: Sequence[Answered]) -> tuple[CorpusScore, list[str]]:
    """The score of all samples, and the row of each."""
    compared = [(one.row, one.expected, one.generated) for one in answers if one.expected is not None]
    pairs = [(row, expected, sample) for row, expected, samples in compared for sample in samples]
    rows, expected, generated = (list(column) for column in zip(*pairs, strict=True))
    return of_corpus(expected, generated), rows


def _whole(found: CorpusScore, rows: Sequence[str]) -> dict[str, object]:
    told: dict[str, object] = {"score": found.score, "signature": found.signature}
    if found.parts_NS is not None and found.score_of is not None:
        told |= _ends(interval(found.parts_NS, rows, found.score_of))
    return told


def values_of(metric: Metric, answers: Sequence[Answered]) -> list[list[float]]:
    """The values of each question's samples; none where the row has no say. Where it has one for some of them, the
    others are worth ``without_say``."""
    found: list[list[float]] = []
    for row in _values(metric, answers):
        has_say = any(value is not None for value in row)
        whole = [metric.without_say if value is None and has_say else value for value in row]
        found.append([value for value in whole if value is not None])
    return found


def paired_values(
    metric: Metric, a: Sequence[Answered], b: Sequence[Answered]
) -> tuple[list[list[float]], list[list[float]]]:
    """The values of two models' answers to the same questions, as many of each for a question: a sample counts for both
    or for neither."""
    pairs = [
        [
            (metric.without_say if x is None else x, metric.without_say if y is None else y)
            for x, y in zip(of_a, of_b, strict=False)
            if x is not None or y is not None
        ]
        for of_a, of_b in zip(_values(metric, a), _values(metric, b), strict=True)
    ]
    whole = [[(x, y) for x, y in pair if x is not None and y is not None] for pair in pairs]
    return [[x for x, _ in pair] for pair in whole], [[y for _, y in pair] for pair in whole]


def _values(metric: Metric, answers: Sequence[Answered]) -> list[list[float | None]]:
    """Of each sample, None where the row has no say. An answer that cannot be read back as a message, beside one that
    can, is wrong."""
    values: list[list[float | None]] = []
    for one in answers:
        if metric.is_judged:
            values.append(list(one.scores))
        elif metric.of_row is not None and one.expected is not None:
            values.append([metric.of_row(one.expected, sample) for sample in one.generated])
        elif metric.of_message is not None and one.message is not None:
            values.append([0.0 if read is None else metric.of_message(one.message, read) for read in one.messages])
        else:
            values.append([])
    return values


def _of_rows(metric: Metric, answers: Sequence[Answered]) -> dict[str, object]:
    values = values_of(metric, answers)
    told, counted = told_of_values(values, [one.row for one in answers]), sum(map(len, values))
    if 0 < counted < sum(len(one.generated) for one in answers if metric.is_judged or one.expected is not None):
        told["counted"] = counted
    return told


def told_of_values(values: Sequence[Sequence[float]], rows: Sequence[str]) -> dict[str, object]:
    """What is told of a number for each sample of each question; nothing where there is none. See `measured`."""
    samples = [sample for row in values for sample in row]
    if not samples:
        return {}
    parts_N2, of = with_say(sums_and_counts(values), rows)
    told: dict[str, object] = {"mean": mean_of(parts_N2.sum(axis=0))}
    told |= _ends(interval(parts_N2, of, mean_of))
    several = [row for row in values if row]
    most = max(map(len, several))
    if most > 1:
        told["best"] = sum(map(max, several)) / len(several)
        if all(sample in (0.0, 1.0) for sample in samples):
            counts = sorted({most, *(2**power for power in range(most.bit_length()))})  # 10 -> 1, 2, 4, 8, 10
            told |= {f"pass@{k}": _pass_at(k, several) for k in counts}
    return told


def sums_and_counts(values: Sequence[Sequence[float]]) -> Sums:
    """Of the values of each question, float64[N, 2]."""
    return np.array([(sum(row), len(row)) for row in values], dtype=np.float64).reshape(-1, 2)


def with_say(parts_N2: Sums, rows: Sequence[str]) -> tuple[Sums, list[str]]:
    """What `sums_and_counts` gives of the questions that count, and their rows: the others say nothing, and where one
    row alone counts there is no interval."""
    counts_N = parts_N2[:, 1] > 0
    return parts_N2[counts_N], [row for row, does in zip(rows, counts_N, strict=True) if does]


def parts_of(
    metric: Metric, answers: Sequence[Answered], losses: Sequence[RowLoss] = ()
) -> tuple[Sums, list[str], ScoreOf] | None:
    """What each answer (or row) adds to a corpus metric's sums, float64[N, S], of which row it is, and the score of
    sums; None where nothing is measured, or where a score has no such parts."""
    if metric.of_losses is not None:
        found, rows = (metric.of_losses(losses), [each.row for each in losses]) if losses else (None, [])
    elif all(one.expected is None for one in answers):
        return None
    else:
        assert metric.of_corpus is not None, "a metric has one of the functions"
        found, rows = _corpus(metric.of_corpus, answers)
    if found is None or found.parts_NS is None or found.score_of is None:
        return None
    return found.parts_NS, rows, found.score_of


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that of ``k`` samples, drawn from ``samples`` of which some are right, one is right: the unbiased
    estimate of Chen et al. 2021 (arXiv 2107.03374), ``1 - C(n - c, k) / C(n, k)``."""
    return 1 - comb(samples - right, k) / comb(samples, k)


def _pass_at(k: int, several: Sequence[Sequence[float]]) -> float:
    enough = [row for row in several if len(row) >= k]
    return sum(pass_at(k, len(row), int(sum(row))) for row in enough) / len(enough)


def _ends(found: tuple[float, float] | None) -> dict[str, object]:
    return {} if found is None else {"interval": list(found)}
