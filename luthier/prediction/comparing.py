"""Two predictions of the same questions, answer by answer: how much better one is, and whether that may be chance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import regex

from luthier.check.show.html import render
from luthier.errors import UserError
from luthier.metrics import (
    JUDGE,
    RowLoss,
    chosen_metrics,
    paired_values,
    parts_of,
    sums_and_counts,
    why_unmeasured,
    with_say,
)
from luthier.metrics.texts import ScoreOf, Sums, is_unspaced, mean_of, paired, sums_by_row
from luthier.prediction.model_scores import (
    AnswerPlace,
    Judgements,
    answers_in,
    kept_judgements,
    kept_losses,
    place_of,
    read_lines,
)
from luthier.prediction.predicting import METRICS_FILE, PREDICTIONS_FILE
from luthier.writing import counted, printable

MOST_NAMED = 3  # of the questions that differ
MOST_SHOWN = 2000  # pairs on a page, which a browser still opens at once
PERPLEXITY = "perplexity"
_RANK = {"worse": 0, "better": 1, "equal": 2, "": 2}
MOST_WORDS = 2000  # of two answers whose differing words are marked
_WORD = regex.compile(r"\s+|\w+|\X")  # \X: a character as it is seen, with the marks on it


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """A metric of both. ``difference`` is B's score minus A's, ``interval`` its 95 % interval, and ``p`` the chance of
    one at least as large if both were alike. ``better``, ``worse`` and ``equal`` count questions by B's answers beside
    A's; they are None for a score of all answers together."""

    name: str
    a: float
    b: float
    difference: float
    interval: tuple[float, float] | None
    p: float
    better: int | None = None
    worse: int | None = None
    equal: int | None = None
    lower_is_better: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPair:
    """Both answers to a question. ``verdicts``: by metric, whether B's is ``better``, ``worse`` or ``equal``."""

    row: str
    turn: int
    sample: int
    prompt: str
    expected: str | None
    a: str
    b: str
    verdicts: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether both answered alike."""
        return self.a == self.b


@dataclass(frozen=True, kw_only=True)
class PredictionComparison:
    """Two predictions beside each other. ``left_out``: questions that one of them has not answered.
    ``not_compared``: metrics that both have, or that were asked for, and that cannot be compared, with the reason."""

    a: str
    b: str
    metrics: tuple[MetricComparison, ...]
    pairs: tuple[AnswerPair, ...]
    left_out: int
    not_compared: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def num_different(self) -> int:
        """Pairs of answers that are not the same."""
        return sum(not pair.is_same for pair in self.pairs)


AnswerLine = Mapping[str, Any]


def compare_predictions(
    a: str | Path, b: str | Path, *, metrics: Sequence[str] | None = None, any_prompt: bool = False
) -> PredictionComparison:
    """Compare two folders of `predict`, paired by row, turn and sample; what ``luthier compare`` does.

    ``metrics`` as in `PredictOptions`. ``any_prompt`` lets prompts differ, as those of two templates do.

    Raises `UserError` where a folder holds no finished prediction, or where the two are of different questions.
    """
    folders = Path(a).expanduser(), Path(b).expanduser()
    chosen, _ = chosen_metrics(metrics)
    lines_a, lines_b = (_lines(folder) for folder in folders)
    _check_questions(lines_a, lines_b, any_prompt=any_prompt)
    refused = {place[:2] for lines in (lines_a, lines_b) for place, line in lines.items() if "refused" in line}
    both = [place for place in lines_a if place[:2] not in refused]
    not_compared: dict[str, str] = {}
    is_asked = metrics is not None and JUDGE in metrics
    judged_a, judged_b = _judged_alike(folders, both, not_compared, is_asked=is_asked)
    answers_a = answers_in([lines_a[place] for place in both], judged_a)
    answers_b = answers_in([lines_b[place] for place in both], judged_b)
    losses_a, losses_b = _same_rows(folders, {row for row, _ in refused}, not_compared)
    verdicts: dict[str, list[str]] = {}
    found: list[MetricComparison] = []
    for name, metric in chosen.items():
        if metric.is_of_rows:
            values = paired_values(metric, answers_a, answers_b)
            if not any(values[0]):
                if metrics is not None:
                    not_compared.setdefault(name, why_unmeasured(metric))
                continue
            rows = [one.row for one in answers_a]
            of_a, of_b = ((*with_say(sums_and_counts(each), rows), mean_of) for each in values)
            # Of each question; a row without a say is neither.
            pairs = zip(*values, strict=True)
            verdicts[name] = [_verdict(fmean(one), fmean(other)) if one and other else "" for one, other in pairs]
            better, worse, equal = (verdicts[name].count(what) for what in ("better", "worse", "equal"))
            told = replace(_compared(name, of_a, of_b), better=better, worse=worse, equal=equal)
        else:
            whole_a, whole_b = parts_of(metric, answers_a, losses_a), parts_of(metric, answers_b, losses_b)
            if whole_a is None or whole_b is None:
                if metrics is not None:
                    not_compared.setdefault(name, why_unmeasured(metric))
                continue
            told = replace(_compared(name, whole_a, whole_b), lower_is_better=metric.of_losses is not None)
        found.append(told)
    questions = dict.fromkeys(place[:2] for place in both)
    of_question = {place: {name: each[n] for name, each in verdicts.items()} for n, place in enumerate(questions)}
    return PredictionComparison(
        a=str(a),
        b=str(b),
        metrics=tuple(found),
        pairs=tuple(_pair(place, lines_a[place], lines_b[place], of_question.get(place[:2], {})) for place in both),
        left_out=len(refused),
        not_compared={name: why for name, why in not_compared.items() if name in chosen},
    )


def _lines(folder: Path) -> dict[AnswerPlace, AnswerLine]:
    hint = "name a folder that luthier predict has finished, as RUN/predictions/eval"
    if not (folder / PREDICTIONS_FILE).is_file() or not (folder / METRICS_FILE).is_file():
        raise UserError(f"{folder} holds no finished prediction: there is no {PREDICTIONS_FILE} in it", hint=hint)
    found: dict[AnswerPlace, AnswerLine] = {place_of(line): line for line in read_lines(folder / PREDICTIONS_FILE)}
    if not found:
        raise UserError(f"{folder / PREDICTIONS_FILE} holds no answer", hint=hint)
    return found


def _check_questions(
    a: Mapping[AnswerPlace, AnswerLine], b: Mapping[AnswerPlace, AnswerLine], *, any_prompt: bool
) -> None:
    """Raise `UserError` unless both are of the same questions; a question that one has refused is the other's, too."""
    asked_a, asked_b = ({place[:2] for place in lines} for lines in (a, b))
    if alone := sorted(asked_a ^ asked_b):
        what = (
            f"{len(alone)} of {counted(len(asked_a | asked_b), 'question is', 'questions are')} in "
            f"one prediction only: {_named(alone)}"
        )
        raise UserError(what, hint="predict both on the same rows (--data FILE, --turns)")
    samples_a, samples_b = (max(place[2] for place in lines) + 1 for lines in (a, b))
    if samples_a != samples_b:
        what = f"A has {counted(samples_a, 'sample')} of a question and B has {samples_b}"
        raise UserError(what, hint="predict both alike (--samples)")
    for what in ("expected",) if any_prompt else ("expected", "prompt"):
        shared = [place for place in a.keys() & b.keys() if "refused" not in a[place] and "refused" not in b[place]]
        if other := sorted({place[:2] for place in shared if a[place][what] != b[place][what]}):
            hint = "predict both on the same rows"
            if what == "prompt":
                hint += "; where the rows are the same and the templates differ, --any-prompt compares the answers"
            told = (
                f"the {what} of {len(other)} of {counted(len(asked_a), 'question')} is another in "
                f"B than in A: {_named(other)}"
            )
            raise UserError(told, hint=hint)


def _named(places: Sequence[tuple[str, int]]) -> str:
    told = ", ".join(f"{row} turn {turn}" for row, turn in places[:MOST_NAMED])
    return told + (" …" if len(places) > MOST_NAMED else "")


def _same_rows(
    folders: tuple[Path, Path], refused: set[str], not_compared: dict[str, str]
) -> tuple[list[RowLoss], list[RowLoss]]:
    """Losses of both, of rows that both have answered. None, and the reason in ``not_compared``, where they are not of
    the same rows with the same number of targets: a mean over other tokens is another measure."""
    both = [kept_losses(folder) for folder in folders]
    a, b = ([each for each in losses or () if each.row not in refused] for losses in both)
    differing = [x.row for x, y in zip(a, b, strict=False) if x.targets != y.targets]
    if both.count(None):
        lacking = " and ".join(name for name, losses in zip("AB", both, strict=True) if losses is None)
        why = f"{lacking} has no losses of the rows' own answers"
    elif [each.row for each in a] != [each.row for each in b]:
        why = "the losses are of other rows in B than in A"
    elif differing:
        why = f"{counted(len(differing), 'row has', 'rows have')} another number of tokens in B than in A, the "
        why += f"first: {differing[0]}; bleu, chrf or a metric of answers compares models of two tokenizers"
    else:
        return a, b
    not_compared[PERPLEXITY] = why
    return [], []


def _judged_alike(
    folders: tuple[Path, Path], places: Collection[AnswerPlace], not_compared: dict[str, str], *, is_asked: bool
) -> tuple[Judgements, Judgements]:
    """What a judge said of the answers of both, or nothing where it was not the same judge, or was not asked about all
    of them. Raises `UserError` where its scores are asked for and are not there."""
    (by_a, of_a), (by_b, of_b) = (kept_judgements(folder) for folder in folders)
    told = list(zip(folders, (by_a, by_b), (of_a, of_b), strict=True))
    if lacking := " and ".join(str(folder) for folder, by, _ in told if by is None):
        what = f"{lacking} has no scores of a judge"
    elif by_a != by_b:
        what = "the two were judged by other settings of judge"
    elif lacking := " and ".join(str(folder) for folder, _, said in told if not said.keys() >= set(places)):
        what = f"the judge was stopped before it was asked about all answers of {lacking}"
    else:
        return of_a, of_b
    if is_asked:
        raise UserError(what, hint="predict both again with the same judge.url, judge.prompt and scale")
    if by_a is not None and by_b is not None:
        not_compared[JUDGE] = what
    return {}, {}


def _compared(
    name: str, of_a: tuple[Sums, list[str], ScoreOf], of_b: tuple[Sums, list[str], ScoreOf]
) -> MetricComparison:
    """By what each answer adds to the sums of both, as `parts_of` tells it."""
    score_of = of_a[2]
    sums_a, sums_b = sums_by_row(*of_a[:2]), sums_by_row(*of_b[:2])
    ends, p = paired(sums_a, sums_b, score_of)
    score_a, score_b = score_of(sums_a.sum(axis=0)), score_of(sums_b.sum(axis=0))
    return MetricComparison(
        name=name,
        a=score_a,
        b=score_b,
        difference=score_b - score_a,
        interval=ends,
        p=p,
    )


def _verdict(a: float, b: float) -> str:
    return "equal" if a == b else "better" if b > a else "worse"


def _pair(place: AnswerPlace, a: AnswerLine, b: AnswerLine, verdicts: Mapping[str, str]) -> AnswerPair:
    return AnswerPair(
        row=place[0],
        turn=place[1],
        sample=place[2],
        prompt=a["prompt"],
        expected=a["expected"],
        a=a["generated"],
        b=b["generated"],
        verdicts=verdicts,
    )


def differing_words(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts in pieces, and whether each piece is not in the other text.

    ``("a big cat", "a small cat") -> [("a ", False), ("big", True), (" cat", False)], …``
    """
    of_a, of_b = _words(a), _words(b)
    if len(of_a) + len(of_b) > MOST_WORDS:
        return [(a, a != b)], [(b, a != b)]
    pieces_a, pieces_b = list[tuple[str, bool]](), list[tuple[str, bool]]()
    for kind, start_a, end_a, start_b, end_b in SequenceMatcher(None, of_a, of_b, autojunk=False).get_opcodes():
        if start_a < end_a:
            pieces_a.append(("".join(of_a[start_a:end_a]), kind != "equal"))
        if start_b < end_b:
            pieces_b.append(("".join(of_b[start_b:end_b]), kind != "equal"))
    return pieces_a, pieces_b


def _words(text: str) -> list[str]:
    """Words, blanks and single characters, which together are the text; letters alone where a script has no blanks."""
    words = _WORD.findall(text)
    return [each for word in words for each in (regex.findall(r"\X", word) if any(map(is_unspaced, word)) else [word])]


def comparison_page(found: PredictionComparison) -> str:
    """One page that needs nothing else: the table, and both answers side by side, differing words marked."""
    judged = [one for one in found.metrics if one.better is not None]
    names = [one.name for one in judged]
    # those of which the first metrics say most come first, and of those that are left out the fewest differ
    shown = sorted(found.pairs, key=_shown_first)[:MOST_SHOWN]
    looks = [_looks(pair, names) for pair in shown]
    return render(
        "compare.html.jinja",
        found=found,
        judged=judged,
        shown=[
            (pair, *differing_words(printable(pair.a), printable(pair.b)), look)
            for pair, look in zip(shown, looks, strict=True)
        ],
        filled={one for look in looks for one in look.split()},
    )


def _shown_first(pair: AnswerPair) -> tuple[bool, int]:
    """Where a page cannot show all pairs, those that differ come first, and of these those that B has got worse."""
    return pair.is_same, min((_RANK[verdict] for verdict in pair.verdicts.values()), default=_RANK["equal"])


def _looks(pair: AnswerPair, names: Sequence[str]) -> str:
    """Classes that the page's filters go by: ``different m0-better m1-equal``."""
    told = [f"m{names.index(name)}-{verdict}" for name, verdict in pair.verdicts.items() if verdict]
    return " ".join(["same" if pair.is_same else "different", *told])


def comparison_facts(found: PredictionComparison) -> dict[str, object]:
    """The table and the counts in JSON types, without the answers."""
    return {
        "a": found.a,
        "b": found.b,
        "answers": len(found.pairs),
        "different": found.num_different,
        "left_out": found.left_out,
        "not_compared": dict(found.not_compared),
        "metrics": {one.name: msgspec.to_builtins(one) for one in found.metrics},
    }
