"""``luthier quickstart``: a whole run in a minute or two, with nothing to download."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from luthier.cli.output import JsonTarget, reporting
from luthier.cli.pipeline import read_config

OutputFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the results go.")]


def quickstart(
    out: OutputFolder = Path("luthier-quickstart"),
    json: JsonTarget = None,
) -> None:
    """Train a tiny model from nothing on generated data, offline; use it to see that everything works here.

    The model answers held-out rows before and after; the share of exact answers is printed and reported.

    [dim]Example[/]   luthier quickstart
    [dim]Example[/]   luthier quickstart --out /tmp/first-run --json -
    """
    with reporting(json) as output:
        with as_file(files("luthier.cli") / "quickstart.yaml") as config:
            run = read_config(str(config), [f"output.dir={out}", "output.overwrite=true"])
        from luthier.cli.training import run_and_report

        report = run_and_report(run, output.console, quickstart=True)
        output.emit(report.to_json())
    if report.result.exit_code:
        raise typer.Exit(report.result.exit_code)
