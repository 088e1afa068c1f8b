"""``luthier train``: a run from its config to its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from luthier import library
from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import ConfigFile, Overrides, listening, tell_preparation

if TYPE_CHECKING:
    from luthier.training.report.report import Report

MAX_TOKENS_SHOWN = 400  # of the sample in the terminal; `luthier show` has all


def train(config: ConfigFile, overrides: Overrides = None, json: JsonTarget = None) -> None:
    """Train as the config says; use it when `luthier show` and `luthier plan` look right.

    Prints the plan and one sample with its targets in green, trains, and
    leaves model, checkpoints, report.html, report.json and loss.png in
    output.dir. Ctrl-C finishes the step and saves a checkpoint; the same
    command goes on from there.

    [dim]Example[/]   luthier train run.yaml
    [dim]Example[/]   luthier train run.yaml train.max_steps=10 --json -
    [dim]Example[/]   torchrun --nproc-per-node 8 -m luthier train run.yaml
    """
    with reporting(json) as output:
        report = train_and_tell(config, overrides or (), output.console)
        if library.is_main_process():
            output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)


def train_and_tell(config: str, overrides: Sequence[str], console: Console, *, quickstart: bool = False) -> Report:
    """Train, and print what the run says of itself on the way."""

    def heard(event: object) -> None:
        _tell(event, console)

    with listening(console, heard) as listen:
        return library.train_and_report(config, overrides=overrides, on_event=listen, quickstart=quickstart)


def _tell(event: object, console: Console) -> None:
    from luthier.check.plan.costs import RunPlan
    from luthier.check.plan.terminal import plan_table
    from luthier.check.show.terminal import RowText
    from luthier.loader.settings import Loaded
    from luthier.training.report.report import summary

    match event:
        case Loaded():
            tell_preparation(event, console)
        case RunPlan():
            console.print()
            console.print(plan_table(event))
        case library.FirstSample():
            console.print()
            console.print("[bold]The first sample[/] [dim]as the model sees it; luthier show has the others[/]")
            for view in event.rows:
                console.print(RowText(row=view, max_tokens=MAX_TOKENS_SHOWN))
        case library.Reported():
            console.print()
            console.print(summary(event.report, list(event.files)))
