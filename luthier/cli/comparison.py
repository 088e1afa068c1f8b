"""``luthier diff``: what changes between two run descriptions. ``luthier compare``: between two predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from luthier.cli import EXIT_UNTRUE, JsonTarget, Overrides, reporting, saying
from luthier.terminal import plain_table
from luthier.writing import counted, write_text

if TYPE_CHECKING:
    from luthier.check.diff.runs import EncodedSide, RunDiff
    from luthier.config.draft import Draft
    from luthier.prediction.comparing import PredictionComparison

ConfigA = Annotated[
    str, typer.Argument(metavar="A.yaml", help="The run description to start from.", show_default=False)
]
ConfigB = Annotated[
    str, typer.Argument(metavar="B.yaml", help="The one to compare; may be the same file.", show_default=False)
]
OnlyB = Annotated[
    list[str] | None,
    typer.Option("--b", metavar="KEY=VALUE", help="A value that wins over B's file only; may be repeated."),
]
SampleSize = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", min=1, help="Compare about N rows, chosen by content: always the same."),
]
RowsShown = Annotated[
    int, typer.Option("--rows", metavar="N", min=0, help="Show the first N rows of each kind of change.")
]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page that needs nothing else.")]


def diff(
    a: ConfigA,
    b: ConfigB,
    overrides: Overrides = None,
    only_b: OnlyB = None,
    sample: SampleSize = None,
    rows: RowsShown = 3,
    html: Page = None,
    json: JsonTarget = None,
) -> None:
    """Say which rows' tokens, targets or weights change from A to B, and where; use it before you change a run.

    Both sides are rendered and encoded now, and cut to their data.max_length; the store is neither read nor written.
    Overrides after the files count for both. The exit code is 0 if nothing changes and 3 if anything does.

    [dim]Example[/]   luthier diff old.yaml new.yaml
    [dim]Example[/]   luthier diff run.yaml run.yaml --b template.train_on=all --sample 1000
    """
    with reporting(json) as output:
        from luthier.config.loading import load_draft

        given_a, given_b = [*(overrides or ())], [*(overrides or ()), *(only_b or ())]
        draft_a, draft_b = load_draft(a, given_a), load_draft(b, given_b)
        from luthier.check.diff.runs import diff_runs
        from luthier.check.diff.terminal import diff_report

        side_a, side_b = _side(" ".join([a, *given_a]), draft_a), _side(" ".join([b, *given_b]), draft_b)
        with _progress(output.console, wanted=draft_a.config.tracking.progress) as on_progress:
            found = diff_runs(side_a, side_b, sample=sample, num_shown=rows, on_progress=on_progress)
        output.console.print(diff_report(found))
        if html is not None:
            from luthier.check.diff.terminal import diff_html

            write_text(html, diff_html(found))
            output.tell_place("page", html)
        output.emit(_as_json(found))
    if found.num_different:
        raise typer.Exit(EXIT_UNTRUE)


PredictionA = Annotated[
    Path, typer.Argument(metavar="A", help="A folder of luthier predict: RUN/predictions/eval.", show_default=False)
]
PredictionB = Annotated[Path, typer.Argument(metavar="B", help="The one to set beside it.", show_default=False)]
MetricNames = Annotated[
    list[str] | None,
    typer.Option("--metrics", metavar="NAMES", help="Metrics by name, with commas; all without it. Repeatable."),
]
AnyPrompt = Annotated[
    bool, typer.Option("--any-prompt", help="Let the prompts differ, as those of two templates do for the same rows.")
]


def compare(
    a: PredictionA,
    b: PredictionB,
    metrics: MetricNames = None,
    any_prompt: AnyPrompt = False,
    html: Page = None,
    json: JsonTarget = None,
) -> None:
    """Compare two predictions of the same rows: which is better, and whether that may be chance.

    Answers are paired by row, turn and sample. p is the chance of a difference at least as large if the two were alike.

    [dim]Example[/]   luthier compare output/base/predictions/eval output/run/predictions/eval --html compare.html
    """
    with reporting(json) as output:
        from luthier.metrics import names_in
        from luthier.prediction.comparing import compare_predictions, comparison_facts, comparison_page

        names = None if not metrics else [name for text in metrics for name in names_in(text)]
        found = compare_predictions(a, b, metrics=names, any_prompt=any_prompt)
        if found.metrics:
            output.console.print(_metric_table(found))
        for name, why in found.not_compared.items():
            output.console.print(f"[yellow]{name} is not compared: {escape(why)}[/]", highlight=False)
        told = f"{found.num_different:,} of {counted(len(found.pairs), 'answer differs', 'answers differ')}"
        questions = counted(found.left_out, "question was", "questions were")
        left_out = f"; {questions} answered by one of the two only, and left out"
        output.console.print(told + (left_out if found.left_out else ""), highlight=False)
        if html is not None:
            write_text(html, comparison_page(found))
            output.tell_place("page", html)
        output.emit(comparison_facts(found))


_COLUMNS = ("A", "B", "B - A", "interval", "p", "better", "worse", "equal")


def _metric_table(found: PredictionComparison) -> Table:
    table = plain_table("metric", numbers=_COLUMNS, gap=1)  # in 80 columns names are folded, and numbers whole
    for one in found.metrics:
        ends = "" if one.interval is None else f"{_short(one.interval[0])} to {_short(one.interval[1])}"
        counts = ["" if count is None else f"{count:,}" for count in (one.better, one.worse, one.equal)]
        values = (
            f"{one.a:.4g}",
            f"{one.b:.4g}",
            _short(one.difference),
            ends,
            f"{one.p:.3f}" if one.p >= 0.001 else "<.001",
        )
        table.add_row(escape(one.name), *values, *counts)
    return table


def _short(difference: float) -> str:
    """``+0.62``, ``-1,267``: two digits or more, and no power of ten where a reader would have to count."""
    if not difference:
        return "0"
    return f"{difference:+,.0f}" if 100 <= abs(difference) < 1e9 else f"{difference:+.2g}"


def _side(name: str, draft: Draft) -> EncodedSide:
    """One of the two runs, with its data; what is wrong with it is told with the lines of its own file."""
    from luthier.check.diff.runs import EncodedSide
    from luthier.encoding.encoder import Encoder
    from luthier.sources.origins import resolve_sources
    from luthier.sources.source import open_sources

    config = draft.config
    with draft.placing():
        encoder = Encoder.from_config(config)
        train, evaluation = resolve_sources(config.data)
        sources = open_sources([*train, *evaluation], seed=config.runtime.seed)
        return EncodedSide(name=name, config=config, encoder=encoder, sources=sources)


def _as_json(found: RunDiff) -> dict[str, object]:
    import msgspec

    told = msgspec.to_builtins(found, str_keys=True)
    assert isinstance(told, dict)
    return {**told, "rows": found.num_rows, "different": found.num_different}


@contextmanager
def _progress(console: Console, *, wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not wanted or not console.is_terminal:
        yield None
        return
    with saying(console, "comparing") as say:
        yield lambda rows, changed: say(f"{counted(rows, 'row')}, {changed:,} change")
