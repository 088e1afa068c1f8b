"""``luthier predict``, ``eval`` and ``serve``: a trained run answers rows, tasks and whoever asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from luthier.cli import JsonTarget, Output, Overrides, reporting
from luthier.errors import UserError
from luthier.writing import JsonObject, counted, to_json, write_text

if TYPE_CHECKING:
    from luthier.serve.running import Listening

RunFolder = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The output.dir of a trained run, a checkpoint in it, or a run description.",
        show_default=False,
    ),
]
Data = Annotated[str | None, typer.Option(metavar="FILE", help="Rows to answer. Without it, the run's held-out rows.")]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="Where answers go; RUN/predictions/NAME without it.")]
NumSamples = Annotated[int, typer.Option(metavar="K", min=1, help="Answers to each row; needs generate.do_sample.")]
Metrics = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Metrics by name, with commas; all installed without it. Repeatable."),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="A server of this model (vLLM, SGLang, llama.cpp, luthier serve) answers; token: $LUTHIER_SERVER_TOKEN.",
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="With --engine: the server's name of this model or adapter."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace another prediction that is in the folder.")]
SECONDS_BETWEEN = 2.0  # between two lines of progress


class WhichTurns(StrEnum):
    """Which questions of a row are asked."""

    LAST = "last"
    EVERY = "every"


TurnsChoice = Annotated[WhichTurns, typer.Option(help="One question of each row, the last; or every one.")]


def predict(  # noqa: PLR0913
    run: RunFolder,
    overrides: Overrides = None,
    data: Data = None,
    out: Out = None,
    samples: NumSamples = 1,
    turns: TurnsChoice = WhichTurns.LAST,
    metrics: Metrics = None,
    engine: EngineUrl = None,
    model: ServedModel = None,
    overwrite: Overwrite = False,
    json: JsonTarget = None,
) -> None:
    """Have a trained run answer held-out rows, and measure the answers.

    Model or adapter, tokenizer, template and stop tokens are those that the run
    left behind; the section generate says how it answers. Answers are kept as
    they come: the same command goes on where it was stopped.

    [dim]Example[/]   luthier predict output/quickstart
    [dim]Example[/]   luthier predict output/quickstart --data questions.jsonl generate.max_new_tokens=64
    """
    with reporting(json) as output:
        import msgspec

        from luthier.check.plan.stats import Contamination
        from luthier.config.loading import is_description, load_draft

        if not Path(run).expanduser().exists():  # told before torch is loaded
            hint = "name the output.dir of a run, a checkpoint in it, or a run description"
            raise UserError(f"there is no {run}", hint=hint)

        from luthier.metrics import names_in
        from luthier.prediction.predicting import PredictOptions
        from luthier.prediction.predicting import predict as predict_rows

        console = output.console

        told_at = monotonic()

        def progressed(done: int, total: int) -> None:
            nonlocal told_at
            if done == total or monotonic() - told_at > SECONDS_BETWEEN:
                told_at = monotonic()
                console.print(f"[dim]answered[/] {done:,} of {total:,}")

        if is_description(run):
            translation = load_draft(run, overrides or ()).translation
            for line in () if translation is None else translation.summary:
                console.print(f"[yellow]{escape(line)}[/]", highlight=False)
        options = PredictOptions(
            data=data,
            out=out,
            samples=samples,
            turns=turns.value,
            metrics=None if not metrics else [name for text in metrics for name in names_in(text)],
            overwrite=overwrite,
            model=model,
        )
        found = predict_rows(run, options, overrides=overrides or (), engine=engine, on_progress=progressed)
        console.print(_summary(found.metrics), highlight=False)
        if found.metrics["metrics"]:
            console.print(metric_table(found.metrics["metrics"]))
        if (held := found.metrics["contamination"]) is not None and held["found"]:
            line = msgspec.convert(held, Contamination).sentence
            console.print(f"[yellow]{escape(line)}[/] (metrics.json names them)", highlight=False)
        for remark in found.metrics["remarks"]:
            console.print(f"[yellow]{escape(remark)}[/]", highlight=False)
        for reason, count in found.metrics["unjudged"].items():
            line = f"{counted(count, 'answer has', 'answers have')} no score of the judge: {reason}"
            console.print(f"[yellow]{escape(line)}[/]", highlight=False)
        for name, why in found.metrics["not_measured"].items():
            console.print(f"[yellow]{escape(name)} is not measured: {escape(why)}[/]", highlight=False)
        if found.metrics["not_installed"]:
            names = ", ".join(found.metrics["not_installed"])
            console.print(f"[yellow]not measured, as their packages are not installed: {names}[/]")
        output.tell_place("answers", found.predictions)
        output.emit({"folder": str(found.folder), **found.metrics})


Tasks = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Tasks of lm-eval, or YAML files of some, with commas.", show_default=False),
]
Limit = Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N rows of each task.")]
Fewshot = Annotated[int | None, typer.Option(metavar="N", min=0, help="Examples before each question.")]
Plain = Annotated[bool, typer.Option("--plain", help="Ask in plain text, without the run's chat template.")]
Results = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")]


def evaluate(
    run: RunFolder,
    tasks: Tasks,
    overrides: Overrides = None,
    limit: Limit = None,
    fewshot: Fewshot = None,
    plain: Plain = False,
    output: Results = None,
    json: JsonTarget = None,
) -> None:
    """Evaluate a run or a model on tasks of lm-evaluation-harness.

    Questions are asked with the run's own template, weights and stop tokens. A task in a
    YAML file with local data needs no network.

    [dim]Example[/]   luthier eval output/quickstart --tasks my_task.yaml --limit 100 --output results.json
    """
    with reporting(json) as told:
        from luthier.prediction import TaskOptions, evaluate_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        options = TaskOptions(tasks=names, limit=limit, num_fewshot=fewshot, chat=not plain)
        found = evaluate_tasks(run, options, overrides=overrides or ())
        table = Table("task", "metric", "value", "standard error", box=None)
        for task, values in found["results"].items():
            for key, value in values.items():
                name, _, way = key.partition(",")
                if isinstance(value, float) and not name.endswith("_stderr"):
                    error = values.get(f"{name}_stderr,{way}")
                    spread = f"{error:.4g}" if isinstance(error, float) else ""
                    table.add_row(escape(task), escape(f"{name} ({way})"), f"{value:.4g}", spread)
        told.console.print(table)
        if found["cut_prompts"]:
            cut = counted(found["cut_prompts"], "prompt was", "prompts were")
            told.console.print(f"{cut} longer than the model reads, and lost the beginning")
        if output is not None:
            write_text(output, to_json(found) + "\n")
            told.tell_place("results", output)
        told.emit(found)


def _summary(metrics: Mapping[str, Any]) -> str:
    """``9 answers to 9 questions written, 8 of them compared; not answered: 1 unknown_role``"""
    lost = [f"{count:,} {reason}" for reason, count in {**metrics["refused"], **metrics["lost_rows"]}.items()]
    told = (
        f"{counted(metrics['answers'], 'answer')} to {counted(metrics['asked'], 'question')} "
        f"written, {metrics['compared']:,} compared"
    )
    return told + (f"; not answered: {', '.join(lost)}" if lost else "")


def metric_table(measured: dict[str, JsonObject]) -> Table:
    """``counted`` is there where not all answers count for a metric."""
    some_count = any("counted" in values for values in measured.values())
    table = Table("metric", "value", "95 % interval", *(["counted"] if some_count else []), box=None)
    for name, values in measured.items():
        for what, value in values.items():
            if isinstance(value, float):
                is_main = what in ("mean", "score")
                ends = values.get("interval") if is_main else None
                shown = "" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"
                of = f"{values['counted']:,}" if is_main and "counted" in values else ""
                named = name if is_main else f"{name} ({_WORDS.get(what, what)})"
                table.add_row(escape(named), f"{value:.4g}", shown, *([of] if some_count else []))
    return table


_WORDS = {"best": "best of samples"}


# ------------------------------------------- ``luthier serve``: a trained run behind HTTP, as OpenAI's interface has it


WhatAnswers = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's output.dir, a checkpoint in it, a model, or a run description.", show_default=False
    ),
]
Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network (needs a token).")
]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 is any that is free.")]
TokenEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="What clients call the model; its folder's name if left.")
]


Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=RUN", help="A further run with an adapter on the same base, by a name of its own."),
]


AcceptWeights = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder from which a training run may load new weights."),
]


def serve(  # noqa: PLR0913
    run: WhatAnswers,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = None,
    name: Name = None,
    adapter: Adapters = None,
    accept_weights: AcceptWeights = None,
    json: JsonTarget = None,
) -> None:
    """Serve a trained run, or a model, over HTTP with the routes and fields of OpenAI's API.

    Histories are made as training made them: model or adapter, tokenizer, template
    and stop tokens are those that the run left behind. It ends with Ctrl-C.

    [dim]Example[/]   luthier serve output/quickstart
    [dim]Example[/]   luthier serve output/quickstart --port 9000 --token-env MY_TOKEN serve.max_requests=8
    """
    with reporting(json) as output:
        from luthier.serve.running import ServeOptions, token_of
        from luthier.serve.running import serve as serve_run

        options = ServeOptions(
            host=host,
            port=port,
            token=token_of(token_env),
            name=name,
            adapters=_by_name(adapter or ()),
            accept_weights=accept_weights,
        )
        serve_run(run, options, overrides=overrides or (), on_ready=lambda ready: _tell(ready, output))


def _by_name(adapters: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in adapters:
        name, equals, folder = text.partition("=")
        if not name or not equals or not folder or name in found:
            raise UserError(f"--adapter {text}: a name and a run's folder are needed, as NAME=RUN, each name once")
        found[name] = folder
    return found


def _tell(ready: Listening, output: Output) -> None:
    told = output.console.print
    told(
        f"[bold]serving[/] {escape(', '.join(ready.names))} [bold]at[/] {ready.url}/v1", highlight=False, soft_wrap=True
    )
    if ready.made:
        told(f"[bold]token[/] {ready.token} [dim](of this server alone; --token-env names one of your own)[/]",
             highlight=False, soft_wrap=True)  # fmt: skip
    output.emit({"url": ready.url, "token": ready.token if ready.made else None, "models": list(ready.names)})
