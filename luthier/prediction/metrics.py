"""How good answers are: metrics as functions of what was expected and what was generated, in one open table."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from luthier.errors import UserError, install_hint
from luthier.plugins import Table

OfRow = Callable[[str, str], float]
OfCorpus = Callable[[Sequence[str], Sequence[str]], "CorpusScore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusScore:
    """A score of all answers together. ``signature`` says how it was computed, for others to compute the same."""

    score: float
    signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One of the two functions: ``of_row(expected, generated)`` gives a number for each answer, whose mean is told;
    ``of_corpus(all expected, all generated)`` one for all of them. ``package`` is what it needs beside Luthier, which
    ``extra`` of Luthier installs."""

    of_row: OfRow | None = None
    of_corpus: OfCorpus | None = None
    package: str | None = None
    extra: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether what it needs is installed."""
        return self.package is None or find_spec(self.package) is not None


def normalised(text: str) -> str:
    """``" The  Answer. " -> "the answer"``: Unicode NFKC, case folded, white space as one blank, no punctuation at the
    ends."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    inner = [at for at, letter in enumerate(words) if not unicodedata.category(letter).startswith(("P", "Z"))]
    return words[inner[0] : inner[-1] + 1] if inner else ""


def _exact(expected: str, generated: str) -> float:
    return float(expected == generated)


def _normalised(expected: str, generated: str) -> float:
    return float(normalised(expected) == normalised(generated))


def _contains(expected: str, generated: str) -> float:
    return float(normalised(expected) in normalised(generated))


def _bleu(expected: Sequence[str], generated: Sequence[str]) -> CorpusScore:
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(generated), [list(expected)]).score
    return CorpusScore(score=score, signature=str(metric.get_signature()))


def _chrf(expected: Sequence[str], generated: Sequence[str]) -> CorpusScore:
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    score = metric.corpus_score(list(generated), [list(expected)]).score
    return CorpusScore(score=score, signature=str(metric.get_signature()))


METRICS: Table[Metric] = Table(
    "metric",
    {
        "exact": Metric(of_row=_exact),
        "normalised": Metric(of_row=_normalised),
        "contains": Metric(of_row=_contains),
        "bleu": Metric(of_corpus=_bleu, package="sacrebleu", extra="metrics"),
        "chrf": Metric(of_corpus=_chrf, package="sacrebleu", extra="metrics"),
    },
)


def register_metric(name: str, metric: OfRow | Metric) -> None:
    """Add a metric of predictions: a function of (expected, generated) that gives a number, or a `Metric`.

    Raises `PluginError` where there is one of this name.
    """
    METRICS.add(name, metric if isinstance(metric, Metric) else Metric(of_row=metric))


def chosen_metrics(names: Sequence[str] | None) -> tuple[dict[str, Metric], list[str]]:
    """The metrics of these names, or all whose packages are here; and the names of those whose packages are not.

    Raises `UserError` for a name that is unknown, or that was asked for and lacks its package.
    """
    if names is None:
        found = dict(METRICS)
        return {name: one for name, one in found.items() if one.is_here}, [
            n for n, one in found.items() if not one.is_here
        ]
    chosen = {name: METRICS.named(name) for name in names}
    for name, one in chosen.items():
        if not one.is_here:
            hint = None if one.extra is None else install_hint(one.extra)
            raise UserError(f"the metric {name} needs the package {one.package!r}, which is not installed", hint=hint)
    return chosen, []


def measured(metrics: Mapping[str, Metric], answers: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, object]:
    """What each metric says of ``answers``: for each row (or turn) its samples as pairs (expected, generated).

    ``mean`` is over all samples; ``best`` the mean over rows of each row's best sample, where there are several.
    """
    told: dict[str, object] = {}
    pairs = [pair for samples in answers.values() for pair in samples]
    if not pairs:
        return told
    for name, metric in metrics.items():
        if metric.of_corpus is not None:
            score = metric.of_corpus([one for one, _ in pairs], [other for _, other in pairs])
            told[name] = {"score": score.score, "signature": score.signature}
            continue
        assert metric.of_row is not None, "a metric has one of the two functions"
        rows = [[metric.of_row(*pair) for pair in samples] for samples in answers.values()]
        values = [value for row in rows for value in row]
        told[name] = {"mean": sum(values) / len(values)}
        if any(len(row) > 1 for row in rows):
            told[name] = {"mean": sum(values) / len(values), "best": sum(map(max, rows)) / len(rows)}
    return told
